"""After an exception in a forward or a backward training goes on from the state before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from odc.errors import PageIOError
from odc.memory.events import Phase
from tests.fsdp.pair import assert_same, loss_of, paged_pair, train

UPDATES = ("step", "backward")


class Trap:
    """Raises where it is set, once."""

    def __init__(self, layer: nn.Module) -> None:
        self.where = ""
        layer.register_forward_hook(self._forward)

    def _forward(self, module, args, output):
        if self.where == "forward":
            self.where = ""
            raise KeyError("trap")
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(self._backward)

    def _backward(self, grad):
        if self.where == "backward":
            self.where = ""
            raise KeyError("trap")


def spring(model, trap, where, step):
    trap.where = where
    with pytest.raises(KeyError, match="trap"):
        loss_of(model, step).backward()


@pytest.mark.parametrize("name", ["dense", "moe, checkpointed", "frozen in the middle", "tied"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_pass_that_is_thrown_away_leaves_no_trace(name, where):
    def script(model, optimizer):
        trap = Trap(model.layers[1])
        losses = train(model, optimizer, range(2))
        optimizer.zero_grad()
        spring(model, trap, where, 2)
        return losses + train(model, optimizer, range(2, 5))

    assert_same(script, name, budget=14)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_a_failed_backward_count_as_in_plain_pytorch(where):
    def script(model, optimizer):
        trap = Trap(model.layers[1])
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        spring(model, trap, where, 2)
        loss_of(model, 3).backward()
        optimizer.step()
        return train(model, optimizer, range(4, 6))

    assert_same(script)


def test_a_failed_forward_does_not_hurt_updates_in_backward():
    def script(model, optimizer):
        trap = Trap(model.layers[1])
        losses = train(model, optimizer, range(2))
        spring(model, trap, "forward", 2)
        return losses + train(model, optimizer, range(2, 5))

    assert_same(script, update="backward")


def test_a_failed_backward_that_has_updated_cannot_be_thrown_away():
    with paged_pair(update="backward") as (model, optimizer):
        trap = Trap(model.layers[1])
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        spring(model, trap, "backward", 2)
        with pytest.raises(RuntimeError, match="update='step'"):
            optimizer.zero_grad()


def test_a_state_from_before_repairs_a_backward_that_failed_half_way():
    with paged_pair(update="backward") as (model, optimizer):
        trap = Trap(model.layers[1])
        train(model, optimizer, range(2))
        weights, state = model.state_dict(), optimizer.state_dict()
        expected = train(model, optimizer, range(2, 4))
        optimizer.zero_grad()
        spring(model, trap, "backward", 2)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        found = train(model, optimizer, range(2, 4))
        assert all(map(torch.equal, found, expected))


def test_pins_of_a_failed_pass_are_given_back():
    with paged_pair() as (model, optimizer):
        trap = Trap(model.layers[1])
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        before = list(model.memory.table.pins)
        for where in ("forward", "backward"):
            spring(model, trap, where, 1)
            optimizer.zero_grad()
            assert model.memory.table.pins == before


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_without_gradients_are_skipped_where_torch_skips_them(update):
    def script(model, optimizer):
        generator = torch.Generator().manual_seed(9)
        for _ in range(6):
            tokens = torch.randint(0, 384, (1, 2), generator=generator)
            optimizer.zero_grad()
            model(tokens[:, :1], tokens[:, 1:]).backward()
            optimizer.step()
        return sorted(
            (number, state["step"].item())
            for number, state in optimizer.state_dict()["state"].items()
        )

    assert_same(script, "moe, checkpointed", budget=14, update=update)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_home_that_fails_once_leaves_no_trace(phase):
    """The first access of a phase fails: in forward that of the root."""

    def script(model, optimizer):
        losses = train(model, optimizer, range(2))
        optimizer.zero_grad()
        memory = getattr(model, "memory", None)
        if memory is not None:
            fail_once(memory, phase)
            with pytest.raises(PageIOError):
                loss_of(model, 2).backward()
        return losses + train(model, optimizer, range(2, 5))

    assert_same(script, budget=14)


def fail_once(memory, phase):
    access = memory.access

    def failing(group, needs, now, part=None):
        if now == phase:
            memory.access = access
            raise PageIOError("trap", page=0)
        access(group, needs, now, part)

    memory.access = failing
