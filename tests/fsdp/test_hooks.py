"""Modules as people write them: what they return, share, change in place or read from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.pair import assert_equal_values, paged_pair, plain_pair, train
from tests.fsdp.plain_loop import VOCAB

WIDTH, INNER = 128, 640
UPDATES = ("step", "backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class InPlace(Block):
    """Changes its input, and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(self.up(x * 0.5).relu())
        return x


@dataclass
class Answer:
    x: Tensor
    note: str = "a dataclass"


class Wrapped(Block):
    """Returns its tensor in a dataclass."""

    def forward(self, x: Tensor | Answer) -> Answer:  # type: ignore[override]
        return Answer(super().forward(x.x if isinstance(x, Answer) else x))


class Carries(Block):
    """Hands a second input through, as layers do with a table of positions."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, table = x if isinstance(x, tuple) else (x, x)
        return super().forward(x) + 0.1 * table, table


class Detached(Block):
    """Reads a weight in a way that gives it no gradient, before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.up.weight.detach()[:WIDTH]).tanh() + x
        return super().forward(x)


class Unused(Block):
    """Has a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Recurrent(nn.Module):
    """Its LSTM keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Attentive(nn.Module):
    """Its attention reads the weight of a linear layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.attention(x, x, x, need_weights=False)[0])


class Two(Block):
    """Its second output is used much later than its first."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, total = x if isinstance(x, tuple) else (x, x.new_zeros(()))
        y = super().forward(x)
        return y, total + y.square().mean()


class Aside(Block):
    """Leaves a loss of its own on the module, as routers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.up(x).square().mean()
        return super().forward(x)


class Plain:
    """No container that torch knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxed(Block):
    """Returns its tensor in an object of a class of its own."""

    def forward(self, x: Tensor | Plain) -> Plain:  # type: ignore[override]
        return Plain(super().forward(x.x if isinstance(x, Plain) else x))


KINDS = (Aside, Boxed, InPlace, Wrapped, Carries, Detached, Unused, Recurrent, Attentive, Two)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        for layer in self.layers:
            x = layer(x)
        more = x[1] if isinstance(x, tuple) and x[1].dim() == 0 else 0.0
        more = more + sum(getattr(layer, "aside", 0.0) for layer in self.layers)
        x = x.x if isinstance(x, Answer | Plain) else x[0] if isinstance(x, tuple) else x
        return nn.functional.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten()) + more

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)


class ReadsEmbedding(Model):
    """Computes its logits with the embedding's weight, without calling a module."""

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.embed.weight.T + self.head(x)


class HeadFirst(Model):
    """Its head owns what the embedding uses as well."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        embed = self.embed
        del self.embed
        self.embed = embed
        self.embed.weight = self.head.weight
        self._modules = {name: self._modules[name] for name in ("head", "layers", "embed")}


class Reentrant(Model):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make(kind: type[nn.Module], model: type[Model] = Model) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return model(kind)


def assert_trains_alike(kind: type[nn.Module], model: type[Model], **options: object) -> None:
    plain, plain_optimizer = plain_pair(make(kind, model))
    expected = train(plain, plain_optimizer, range(6))
    with paged_pair(make(kind, model), **options) as (paged, optimizer):
        assert_equal_values(train(paged, optimizer, range(6)), expected)
        weights = paged.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value), name
        assert not any(
            pins
            for page, pins in enumerate(paged.memory.table.pins)
            if not paged.memory.table.groups[paged.memory.table.pages[page].group].pinned
        )


@pytest.mark.parametrize("kind, update", list(zip(KINDS, UPDATES * 5, strict=True)))
def test_a_module_as_people_write_it_trains_as_in_plain_pytorch(kind, update):
    assert_trains_alike(kind, Model, budget=12, update=update)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("model", [ReadsEmbedding, HeadFirst])
def test_a_parameter_that_two_modules_use_trains_as_in_plain_pytorch(model, update):
    assert_trains_alike(Block, model, budget=12, update=update)


def test_a_parameter_read_from_elsewhere_is_pinned_with_the_reader_from_then_on():
    with paged_pair(make(Block, ReadsEmbedding)) as (model, optimizer):
        train(model, optimizer, range(2))
        root = model._odc_runtime.units[-1]
        assert [g.spec.name for g in root.groups.tied] == ["embed"]


def test_reentrant_checkpointing_names_the_argument_to_change():
    with (
        paged_pair(make(Block, Reentrant)) as (model, optimizer),
        pytest.raises(RuntimeError, match="use_reentrant=False"),
    ):
        train(model, optimizer, range(1))


def test_frozen_layers_do_not_pile_up_in_backward():
    """Each of them waits for its input's gradient: the one before it must not begin first."""
    model = make(Block)
    model.layers.requires_grad_(False)
    pinned: list[int] = []
    with paged_pair(model, 8, update="backward") as (paged, optimizer):
        for unit in paged._odc_runtime.units:
            enter = unit._enter

            def watched(*arguments, enter=enter):
                enter(*arguments)
                pinned.append(sum(g._pins > 0 for g in paged._odc_runtime.groups))

            unit._enter = watched
        train(paged, optimizer, range(2))
    assert max(pinned) == 1
