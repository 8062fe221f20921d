"""Cross-entropy of an output head without its logits.

The logits of N tokens over V words are the largest tensor of a training step, and cross-entropy
needs three of their size. Here they exist a block at a time: ``chunk`` tokens by ``vocab_chunk``
words. The forward keeps the logarithm of each token's sum of exponentials (online, block by block)
and nothing else; backward computes each block again, which costs one more matrix product of the
head, and adds up its gradients in float32.

The head's own gradient is as large as the head. Where the weight lies in pages it is written into
its gradient's page, a strip of ``vocab_chunk`` rows at a time, and exists nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from odc.errors import ConfigError
from odc.fsdp.activations import Around, wrap_forward
from odc.fsdp.lora import LoraLinear
from odc.fsdp.parameter import PagedParameter

VOCAB_CHUNK = 8192  # with 1024 tokens a block of 32 MiB in float32


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Linear,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = 1024,
    vocab_chunk: int = VOCAB_CHUNK,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` (+ ``bias``) against targets, in float32.

    It is ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` to within rounding,
    in memory that depends neither on the number of tokens nor on the vocabulary, but for the
    gradients of ``hidden`` and ``weight`` themselves.

    Args:
        hidden: (..., D) what the head is given.
        weight: (V, D), or the head itself: a module of a paged model must be called for its pages
            to be there, which this does.
        targets: (...) ids from 0 to V - 1, as many as ``hidden`` has rows.
        bias: (V,); of a module its own is taken.
        chunk: tokens of a block.
        vocab_chunk: words of a block.
        ignore_index: targets of this value do not count.

    Returns:
        () float32; NaN if no target counts.

    Raises:
        ConfigError: ``chunk`` or ``vocab_chunk`` is below 1.
        ValueError: shapes do not fit, or a target is outside the vocabulary.
    """
    for name, value in (("chunk", chunk), ("vocab_chunk", vocab_chunk)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    if isinstance(weight, LoraLinear):
        raise ConfigError(
            "the head has an adapter, and a loss in chunks reads its weight alone; name other "
            "targets for the adapter, or compute the loss whole (activations.loss_chunk=null)"
        )
    if isinstance(weight, nn.Module):
        options = {"chunk": chunk, "vocab_chunk": vocab_chunk, "ignore_index": ignore_index}
        with loss_in_head(weight, targets, **options):
            return weight(hidden)  # type: ignore[no-any-return]
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    _check(rows, weight, flat, ignore_index)
    args = (rows, weight, bias, flat, chunk, vocab_chunk, ignore_index)
    return _ChunkedCrossEntropy.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


@contextmanager
def loss_in_head(
    head: nn.Module,
    targets: Tensor,
    *,
    chunk: int = 1024,
    vocab_chunk: int = VOCAB_CHUNK,
    ignore_index: int = -100,
) -> Iterator[None]:
    """Inside, an output head answers with the loss, a scalar, in place of its logits.

    For models that call their head themselves; hooks of the head run as ever.

    Args:
        head: a linear layer, whose first argument is what ``chunked_cross_entropy`` calls hidden.
        targets, chunk, vocab_chunk, ignore_index: as of ``chunked_cross_entropy``.
    """
    before = head.__dict__.get("forward")

    def loss(
        module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        weight, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(weight, Tensor), "a linear layer has one"
        return chunked_cross_entropy(
            args[0],
            weight,
            targets,
            bias,
            chunk=chunk,
            vocab_chunk=vocab_chunk,
            ignore_index=ignore_index,
        )

    around: Around = loss
    wrap_forward(head, around)
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def _check(rows: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> None:
    if weight.dim() != 2 or rows.shape[1] != weight.shape[1]:
        raise ValueError(
            f"weight must be (vocabulary, {rows.shape[1]}) as hidden is (..., {rows.shape[1]}), "
            f"got {tuple(weight.shape)}"
        )
    if len(targets) != len(rows):
        raise ValueError(f"targets must be {len(rows)}, one a row of hidden, got {len(targets)}")
    wrong = ((targets < 0) | (targets >= weight.shape[0])) & (targets != ignore_index)
    if bool(wrong.any()):
        raise ValueError(
            f"targets must be from 0 to {weight.shape[0] - 1}, or {ignore_index} to be left out; "
            f"got {int(targets[wrong][0])}"
        )


def _spans(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _block(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: slice) -> Tensor:
    """Logits of some tokens over some words, (chunk, vocab_chunk) float32."""
    return F.linear(hidden, weight[words], None if bias is None else bias[words]).float()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """See ``chunked_cross_entropy``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        vocab_chunk: int,
        ignore_index: int,
    ) -> Tensor:
        log_sums = hidden.new_empty(len(hidden), dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows in _spans(len(hidden), chunk):
            chosen, highest, added = _online(hidden[rows], weight, bias, targets[rows], vocab_chunk)
            log_sums[rows] = highest + added.log()
            counts = targets[rows] != ignore_index
            total += torch.where(counts, log_sums[rows] - chosen, 0.0).sum()
        count = (targets != ignore_index).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, count)
        ctx.pages = _page_of(weight), _page_of(bias)
        ctx.chunks = chunk, vocab_chunk, ignore_index
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, log_sums, count = ctx.saved_tensors
        chunk, vocab_chunk, ignore_index = ctx.chunks
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale = grad / count * (targets != ignore_index)  # (N,) what a token's loss counts
        to_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        to_weight = _Target(weight, ctx.pages[0]) if needs_weight else None
        to_bias = _Target(bias, ctx.pages[1]) if needs_bias else None
        for words in _spans(len(weight), vocab_chunk):
            strip = weight[words]
            of_strip = torch.zeros_like(strip, dtype=torch.float32) if needs_weight else None
            of_bias = hidden.new_zeros(len(strip), dtype=torch.float32) if needs_bias else None
            for rows in _spans(len(hidden), chunk):
                block = _block(hidden[rows], weight, bias, words)
                block = _to_gradient(block, targets[rows], log_sums[rows], scale[rows], words)
                if of_bias is not None:
                    of_bias += block.sum(dim=0)
                block = block.to(hidden.dtype)
                if to_hidden is not None:
                    _add_product(to_hidden[rows], block, strip)
                if of_strip is not None:
                    _add_product(of_strip, block.T, hidden[rows])
            if to_weight is not None and of_strip is not None:
                to_weight.put(words, of_strip)
            if to_bias is not None and of_bias is not None:
                to_bias.put(words, of_bias)
        found = None if to_hidden is None else to_hidden.to(hidden.dtype)
        left = [None if target is None else target.end() for target in (to_weight, to_bias)]
        return found, *left, None, None, None, None


def _online(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, vocab_chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The targets' and the highest logits, and the sums of exponentials below them, (chunk,)."""
    chosen = hidden.new_zeros(len(hidden), dtype=torch.float32)
    highest = torch.full_like(chosen, float("-inf"))
    added = torch.zeros_like(chosen)
    for words in _spans(len(weight), vocab_chunk):
        block = _block(hidden, weight, bias, words)
        inside = (targets >= words.start) & (targets < words.stop)
        at = (targets - words.start).clamp(0, block.shape[1] - 1)
        chosen += block.gather(1, at[:, None])[:, 0] * inside
        higher = torch.maximum(highest, block.amax(dim=1))
        added = added * (highest - higher).exp() + block.sub_(higher[:, None]).exp_().sum(dim=1)
        highest = higher
    return chosen, highest, added


def _to_gradient(
    block: Tensor, targets: Tensor, log_sums: Tensor, scale: Tensor, words: slice
) -> Tensor:
    """Logits to their gradients, in place: softmax, less one at the target, times ``scale``."""
    block.sub_(log_sums[:, None]).exp_()
    inside = (targets >= words.start) & (targets < words.stop)
    at = (targets - words.start).clamp(0, block.shape[1] - 1)
    block.scatter_add_(1, at[:, None], -inside[:, None].to(block.dtype))
    return block.mul_(scale[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, where ``total`` is float32 and they may be less precise."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


def _page_of(parameter: Tensor | None) -> PagedParameter | None:
    """None for what has no page for a gradient, or shows it as ``.grad``."""
    if not isinstance(parameter, PagedParameter) or parameter._group.runtime is None:
        return None
    group = parameter._group
    return None if group.plain_grad or not group.trainable else parameter


class _Target:
    """Where a parameter's gradient goes: its page, or a tensor that autograd is given."""

    def __init__(self, parameter: Tensor, paged: PagedParameter | None) -> None:
        self._handed = paged is None
        if paged is None:
            self._view, self._has_content = torch.empty_like(parameter), False
        else:
            runtime = paged._group.runtime
            assert runtime is not None
            self._view, self._has_content = runtime.gradient_page(paged._group, paged._index)

    def put(self, rows: slice, gradient: Tensor) -> None:
        """A strip of the gradient is final."""
        if self._has_content:
            self._view[rows].add_(gradient)
        else:
            self._view[rows].copy_(gradient)

    def end(self) -> Tensor | None:
        """The gradient for autograd, or None where it lies in its page."""
        return self._view if self._handed else None
