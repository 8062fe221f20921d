"""Cross-entropy in blocks against ``F.cross_entropy`` of all logits, and its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import odc
from tests.fsdp import models
from tests.fsdp.pair import paged_pair, plain_pair
from tests.fsdp.test_activations import batch, train

MIB = 1024 * 1024


def inputs(dtype: torch.dtype, tokens: int = 50, words: int = 300) -> tuple[Tensor, ...]:
    """hidden (tokens, 32), weight (words, 32), bias (words,), targets (tokens,), two left out."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, 32, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(words, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, words, (tokens,), generator=generator)
    targets[3] = targets[tokens // 2] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "vocab_chunk"), [(16, 64), (50, 300), (7, 1000), (1, 299)])
def test_loss_and_gradients_are_those_of_all_logits(dtype, chunk, vocab_chunk):
    hidden, weight, bias, targets = inputs(dtype)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    expected = F.cross_entropy(F.linear(*exact), targets)
    expected.backward()
    plain = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)
    plain_grads = torch.autograd.grad(3 * plain, (hidden, weight, bias))
    loss = odc.chunked_cross_entropy(
        hidden, weight, targets, bias, chunk=chunk, vocab_chunk=vocab_chunk
    )
    grads = torch.autograd.grad(3 * loss, (hidden, weight, bias))
    torch.testing.assert_close(loss, plain, rtol=2e-6, atol=0)
    for ours, theirs, best in zip(grads, plain_grads, exact, strict=True):
        assert ours.dtype == dtype
        scale = best.grad.abs().max()
        error = (ours / 3 - best.grad).abs().max() / scale
        allowed = (theirs / 3 - best.grad).abs().max() / scale
        assert error <= 2 * allowed + 1e-6, (error, allowed)


def test_a_frozen_weight_gets_no_gradient_and_nothing_is_kept_without_one():
    hidden, weight, _, targets = inputs(torch.float32)
    weight.requires_grad_(False)
    odc.chunked_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not odc.chunked_cross_entropy(hidden, weight, targets).requires_grad


def test_targets_that_all_are_left_out_give_nan_as_in_torch():
    hidden, weight, _, targets = inputs(torch.float32)
    assert odc.chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()


def test_bad_input_is_refused_with_what_was_expected():
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(odc.ConfigError, match="chunk must be a whole number of at least 1, got 0"):
        odc.chunked_cross_entropy(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match=r"weight must be \(vocabulary, 32\)"):
        odc.chunked_cross_entropy(hidden, weight[:, :8], targets)
    with pytest.raises(ValueError, match="targets must be 50, one a row of hidden, got 49"):
        odc.chunked_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="from 0 to 299, or -100 to be left out; got 300"):
        odc.chunked_cross_entropy(hidden, weight, targets.clone().fill_(300))


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that operations made and that are alive together."""

    def __init__(self, known: list[Tensor], is_page: Callable[[int], bool]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._is_page = is_page
        self._seen = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or self._is_page(storage.data_ptr()):
            return

        def died(_, key=key, size=size):
            self.now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_of(words: int, paged: bool) -> int:
    """Peak of the loss and its backward, less a gradient of the weight that autograd is given."""
    head = nn.Linear(64, words, bias=False)
    hidden = torch.randn(512, 64, requires_grad=True)
    targets = torch.randint(0, words, (512,))
    model: nn.Module = nn.Sequential(head)
    if paged:
        model, _ = odc.paged(model, page_budget="64MB")
    known = [hidden, targets] if paged else [hidden, targets, head.weight]
    with LiveBytes(known, model.memory.owns if paged else lambda address: False) as live:
        options = {"chunk": 128, "vocab_chunk": 512}
        odc.chunked_cross_entropy(hidden, model[0], targets, **options).backward()
    if paged:
        model.close()
        return live.peak
    assert live.peak >= words * 64 * 4
    return live.peak - words * 64 * 4


@pytest.mark.parametrize("paged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_peak_does_not_depend_on_the_vocabulary(paged):
    small, middle, large = (peak_of(words, paged) for words in (1000, 8000, 64000))
    assert small == middle == large
    assert large < 512 * 64000 * 4 / 50  # the logits alone


# -- in a paged model --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {"update": "backward", "activations": "checkpoint"}),
        ("tied", {"update": "step", "activations": "offload"}),
        ("tied", {"update": "backward"}),
        ("moe", {"update": "backward", "where": "home"}),
    ],
)
def test_a_paged_head_learns_as_a_plain_one(name, options):
    plain, plain_optimizer = plain_pair(models.build(name))
    expected = train(plain, plain_optimizer, range(4))
    chunked = models.build(name)
    chunked.loss_chunk = 48
    with paged_pair(chunked, 14, **options) as (model, optimizer):
        found = train(model, optimizer, range(4))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["dense", "tied"])
def test_gradients_in_pages_are_those_of_autograd(name):
    plain = models.build(name)
    chunked = models.build(name)
    chunked.loss_chunk = 48
    with paged_pair(chunked, 14, accumulate=2) as (model, optimizer):
        for micro in range(2):
            for one in (plain, model):
                one(*batch(micro)).backward()
        gradient = optimizer.gradient(model.head.weight)
        expected = plain.head.weight.grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        optimizer.step()


def test_two_losses_of_one_head_are_added_before_the_update():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32)])
            self.head = nn.Linear(32, 300, bias=False)
            self.chunked = False

        def loss(self, x: Tensor, targets: Tensor) -> Tensor:
            if self.chunked:
                return odc.chunked_cross_entropy(x, self.head, targets, chunk=8)
            return F.cross_entropy(self.head(x), targets)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            y = self.layers[0](x)
            return self.loss(y, targets) + self.loss(y.flip(0), targets)

    hidden, _, _, targets = inputs(torch.float32)
    results = []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = Twice()
        made, optimizer = odc.paged(model, lr=1e-2, page_budget="8MB", update="backward")
        made.chunked = chunked
        losses = []
        for _ in range(3):
            loss = made(hidden.detach(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append(torch.stack(losses))
        made.close()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)
