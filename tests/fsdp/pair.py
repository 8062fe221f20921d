"""Runs one script on a plain model and on a paged one, and compares what is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import odc
from tests.fsdp import models
from tests.fsdp.plain_loop import LR, Loop, batch, moments_by_name

MIB = 1024 * 1024
Script = Callable[[nn.Module, torch.optim.Optimizer], Any]


def loss_of(model: nn.Module, step: int, micro: int = 0) -> Tensor:
    """The loss of one of the loop's batches."""
    return model(*batch(Loop(), step, micro))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """The simplest loop."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def plain_pair(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=LR, fused=True)


@contextmanager
def paged_pair(model: nn.Module | str = "dense", budget: int | None = 12, **options: Any):  # type: ignore[no-untyped-def]
    """A paged model and its optimizer; ``budget`` in MiB."""
    if isinstance(model, str):
        model = models.build(model)
    if budget is not None:
        options["page_budget"] = budget * MIB
    made, optimizer = odc.paged(model, torch.optim.AdamW, lr=LR, **options)
    try:
        yield made, optimizer
        made.memory.transfers.check()
    finally:
        made.close()


def assert_same(script: Script, name: str = "dense", **options: Any) -> None:
    """The script returns and leaves the same, to the last bit."""
    plain, plain_optimizer = plain_pair(models.build(name))
    expected = script(plain, plain_optimizer)
    with paged_pair(name, **options) as (paged, optimizer):
        found = script(paged, optimizer)
        assert_equal_values(found, expected)
        weights = paged.state_dict()
        for key, value in plain.state_dict().items():
            assert torch.equal(weights[key], value), key
        ours = moments_by_name(paged, optimizer.state_dict())
        theirs = moments_by_name(plain, plain_optimizer.state_dict())
        assert ours.keys() == theirs.keys()
        for key, state in theirs.items():
            assert_equal_values(list(ours[key].values()), list(state.values()))


def assert_equal_values(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_equal_values(ours, theirs)
    else:
        assert found == expected
