"""Layer-major accumulation: all micro-batches of a step pass a block while its pages are there.

    chain = odc.layer_major(model)
    for step in range(steps):
        losses = chain.step([batch(step, micro) for micro in range(k)])
        opt.step()
        opt.zero_grad()

Micro-major order, the usual one, reads every parameter once a micro-batch in forward and once in
backward; layer-major order reads it once a step in each. Only what passes between blocks is kept:
in backward a block is run again, as under activation checkpointing, with the random numbers of its
forward. Gradients are added in the order of the micro-batches, so that they are those of
micro-major order to the last bit. The exception is what several parts use (tied weights, a tensor
that all blocks read): such sums are formed part by part, and rounded accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from odc.errors import ConfigError
from odc.fsdp.decoder_chain import DecoderChain, is_decoder
from odc.fsdp.paged_module import PagedModule
from odc.fsdp.runtime import num_tokens
from odc.fsdp.sweep import EMBEDDING, Sweep
from odc.memory.events import Phase


class Chain(Protocol):
    """A model as embedding, blocks and loss. A state is tensors in (nested) containers.

    No part may change a tensor of its state in place.

    Attributes:
        blocks: the modules of the blocks, in order.
    """

    blocks: Sequence[nn.Module]

    def embed(self, batch: Any) -> Any:
        """The state in front of block 0."""

    def block(self, index: int, state: Any) -> Any:
        """The state behind a block. What all blocks read is handed on as it is."""

    def loss(self, state: Any, batch: Any) -> Tensor:
        """The scalar loss of a micro-batch, from the state behind the last block."""


@dataclass
class _State:
    """A state between two parts.

    Attributes:
        leaves: what it consists of.
        wants: for each leaf, whether its gradient is needed.
        spec: how the leaves are put together.
    """

    leaves: list[Any]
    wants: list[bool]
    spec: TreeSpec

    @staticmethod
    def of(value: Any, wants: Callable[[Any], bool]) -> _State:
        leaves, spec = tree_flatten(value)
        return _State(leaves, [isinstance(x, Tensor) and wants(x) for x in leaves], spec)

    @property
    def value(self) -> Any:
        return tree_unflatten(self.leaves, self.spec)

    def cut(self) -> _State:
        """The same values with no past: a gradient ends here."""
        pairs = zip(self.leaves, self.wants, strict=True)
        leaves = [x.detach().requires_grad_() if want else x for x, want in pairs]
        return _State(leaves, self.wants, self.spec)

    def take_gradients(self) -> list[Tensor | None]:
        """Of each leaf, after a backward that ended here."""
        pairs = zip(self.leaves, self.wants, strict=True)
        return [x.grad if want else None for x, want in pairs]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Go on backward from here with the gradients of the leaves."""
        pairs = zip(self.leaves, gradients, strict=True)
        ends = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [g for _, g in ends])


@dataclass
class _Run:
    """A micro-batch on its way.

    Attributes:
        batch: the micro-batch.
        embedded: the state that the embedding made, with its graph.
        states: in front of each block, and behind the last.
        random: states of the random numbers in front of each block.
        gradients: of the leaves of the state that backward has reached.
    """

    batch: Any
    embedded: _State
    states: list[_State]
    random: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


class LayerMajor:
    """Runs steps of a paged model in layer-major order. Made by ``odc.layer_major``."""

    def __init__(self, model: PagedModule, chain: Chain) -> None:
        self._runtime = model._odc_runtime
        self._chain = chain
        self._trains = [any(p.requires_grad for p in b.parameters()) for b in chain.blocks]
        self._sweep = Sweep(self._runtime, chain.blocks)

    def step(
        self,
        micro_batches: Sequence[Any],
        on_loss: Callable[[float], None] | None = None,
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches of a step; ``opt.step()`` comes after it.

        The loss of each is divided by their number, so that the gradients are those of the mean.

        Args:
            micro_batches: what the model takes, at least one.
            on_loss: called with each loss, divided, before its backward and before any update.

        Returns:
            The losses, divided, as scalars without a graph: their sum is the loss of the step.

        Raises:
            ValueError: there is none, or with ``update="backward"`` another number of them than
                ``accumulate``.
        """
        runtime, blocks = self._runtime, range(len(self._chain.blocks))
        self._check(len(micro_batches))
        with runtime.sweeping(self._sweep, len(micro_batches), num_tokens(micro_batches)):
            runs = self._embed(micro_batches)
            for index in blocks:
                self._forward(index, runs)
            losses = self._loss(runs, on_loss)
            for index in reversed(blocks):
                self._backward(index, runs)
            with self._sweep.part(EMBEDDING, Phase.BACKWARD):
                for run in self._through(runs):
                    run.embedded.backward(run.gradients)
        return losses

    def _check(self, count: int) -> None:
        runtime = self._runtime
        if count < 1:
            raise ValueError("micro_batches must hold at least one, got none")
        if runtime.update_in_backward and runtime.micro + count != runtime.accumulate:
            raise ValueError(
                f"micro_batches must be accumulate={runtime.accumulate} with update='backward', "
                f"got {count} after {runtime.micro} of this step; pass accumulate={count} to "
                "odc.paged, or call opt.step() and opt.zero_grad() after every step"
            )

    def _through(self, runs: list[_Run]) -> Iterator[_Run]:
        for micro, run in enumerate(runs):
            self._sweep.begin_micro(micro)
            yield run

    def _embed(self, batches: Sequence[Any]) -> list[_Run]:
        """The graph of the embedding is kept: it is small, and tells what needs a gradient."""
        runs = []
        with self._sweep.part(EMBEDDING, Phase.FORWARD), torch.enable_grad():
            for micro, batch in enumerate(batches):
                self._sweep.begin_micro(micro)
                state = _State.of(self._chain.embed(batch), lambda leaf: leaf.requires_grad)
                runs.append(_Run(batch, state, [state.cut()]))
        return runs

    def _forward(self, index: int, runs: list[_Run]) -> None:
        with self._sweep.part(index, Phase.FORWARD), torch.no_grad():
            for run in self._through(runs):
                before = run.states[-1]
                run.random.append(torch.get_rng_state())
                after = self._chain.block(index, before.value)
                run.states.append(_State.of(after, self._wants(index, before)))

    def _wants(self, index: int, before: _State) -> Callable[[Tensor], bool]:
        """What behind a block needs a gradient: what was handed on as before, the rest if any."""
        known = {id(x): want for x, want in zip(before.leaves, before.wants, strict=True)}
        made = self._trains[index] or any(before.wants)
        return lambda leaf: known.get(id(leaf), made and leaf.is_floating_point())

    def _loss(self, runs: list[_Run], on_loss: Callable[[float], None] | None) -> list[Tensor]:
        losses = []
        with self._sweep.part(self._sweep.loss, Phase.FORWARD), torch.enable_grad():
            for run in self._through(runs):
                state = run.states.pop().cut()
                loss = self._chain.loss(state.value, run.batch) / len(runs)
                if on_loss is not None:
                    on_loss(loss.item())
                loss.backward()
                losses.append(loss.detach())
                run.gradients = state.take_gradients()
        return losses

    def _backward(self, index: int, runs: list[_Run]) -> None:
        if not any(gradient is not None for run in runs for gradient in run.gradients):
            return  # nothing in front of here is trained
        with self._sweep.part(index, Phase.RECOMPUTE), torch.enable_grad():
            for run in self._through(runs):
                before = run.states.pop().cut()
                with _random(run.random.pop()):
                    made = self._chain.block(index, before.value)
                after = _State.of(made, lambda leaf: leaf.requires_grad)
                after.backward(run.gradients)
                run.gradients = before.take_gradients()


class _random:  # noqa: N801
    """Random numbers go on from ``state`` inside, and outside as if nothing had been drawn."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self._outside)


def layer_major(model: nn.Module, chain: Chain | None = None) -> LayerMajor:
    """Train a paged model in layer-major order.

    Args:
        model: as ``odc.paged`` returned it.
        chain: the model as embedding, blocks and loss. Without it: what ``model.as_chain()``
            returns, where the model has that, else a decoder of the Llama family of transformers.

    Raises:
        ConfigError: the model is not paged, or no chain of blocks.
    """
    if not isinstance(model, PagedModule):
        raise ConfigError(
            f"layer_major takes a model that odc.paged returned, got {type(model).__name__}; "
            "sharded models (several ranks) accumulate in micro-major order"
        )
    if chain is None:
        make = getattr(model, "as_chain", None)
        if make is not None:
            chain = make()
        elif is_decoder(model):
            chain = DecoderChain(model)
        else:
            raise ConfigError(
                f"{type(model).__mro__[2].__name__} is not known as a chain of blocks; pass "
                "chain= with blocks, embed(batch), block(index, state) and loss(state, batch), or "
                "accumulate in micro-major order"
            )
    return LayerMajor(model, chain)
