"""Paged training equals a plain PyTorch loop to the last bit, whatever is paged and however.

Every case trains 20 steps of two micro-batches under a learning-rate schedule and compares all
losses, gradient norms, weights and moments. Every step of every case evicts, reloads and writes
back at least one page.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.fsdp import models
from tests.fsdp.paged_loop import MIB, POLICIES, PagedRun, Paging
from tests.fsdp.plain_loop import Loop, Result, assert_equal, train_plainly


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def plain(name: str, loop: Loop, dtype: torch.dtype = torch.float32) -> Result:
    return train_plainly(models.build(name, dtype), loop)


def check(name: str, loop: Loop, paging: Paging, dtype: torch.dtype = torch.float32) -> PagedRun:
    expected = plain(name, loop, dtype)
    future = None
    if paging.policy == "belady+oracle":
        recorded = PagedRun(models.build(name, dtype), loop, Paging(budget=64 * MIB))
        recorded.paging = Paging(budget=None)
        recorded.train()
        recorded.close()
        future = recorded.watch.needs
    run = PagedRun(models.build(name, dtype), loop, paging, future)
    try:
        assert_equal(run.train(), expected)
    finally:
        run.close()
    if name.startswith("moe") and "popularity" in paging.policy:
        assert run.reordered, "the free order of experts was never anything but ascending"
    return run


UPDATES = ("step", "backward")

# MiB; the state of the models is 22 to 106 MiB
BUDGETS = {
    "moe": 14,
    "moe, checkpointed": 14,
    "moe, checkpoint of two": 14,
    "frozen in front": 10,
    "frozen in front, checkpointed": 10,
    "frozen in the middle": 10,
    "frozen in the middle, checkpointed": 10,
    "adapters": 6,
    "called twice": 10,
    "all sizes": 26,
}


def paging(name: str, **options: object) -> Paging:
    return Paging(budget=BUDGETS.get(name, 12) * MIB, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_trains_as_in_plain_pytorch(name, update):
    check(name, Loop(), paging(name, update=update))


@pytest.mark.parametrize("policy", [*POLICIES, "belady+oracle"])
@pytest.mark.parametrize("name", ["dense", "moe, checkpointed"])
def test_no_policy_changes_a_bit(name, policy):
    check(name, Loop(), paging(name, policy=policy, update="backward"))


@pytest.mark.parametrize("name, update", [("dense", "backward"), ("moe, checkpointed", "step")])
def test_a_home_on_disk_changes_no_bit(name, update):
    check(name, Loop(), paging(name, home="disk", update=update))
