"""Paged training equals a plain PyTorch loop to the last bit, whatever is paged and however.

Every case trains 8 steps of two micro-batches under a learning-rate schedule, 20 in the slow tier,
and compares all losses, gradient norms, weights and moments. Every step of every case evicts,
reloads and writes back at least one page.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from odc.memory.events import Tier
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
LONG = 20


@pytest.fixture(params=[8, pytest.param(LONG, marks=pytest.mark.slow)])
def steps(request):
    """By then every order has been recorded, learned and followed again and again."""
    return request.param


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


EVERY_POLICY = (*POLICIES, "belady+oracle")
CHECKPOINTED_EXPERTS = "moe, checkpointed"


# One of a kind: the others differ from these by one more property.
FAST = (
    "dense",
    CHECKPOINTED_EXPERTS,
    "tied, checkpointed",
    "frozen in the middle, checkpointed",
    "called twice",
    "all sizes",
)


def models_and_updates():
    """Every model; in the fast tier some, with one of the two updates."""
    assert set(FAST) <= set(models.NAMES)
    for name in models.NAMES:
        for update in UPDATES:
            fast = name in FAST and update == UPDATES[FAST.index(name) % 2]
            yield pytest.param(name, update, marks=() if fast else (pytest.mark.slow,))


@pytest.mark.parametrize("name, update", list(models_and_updates()))
def test_every_model_trains_as_in_plain_pytorch(name, update, steps):
    check(name, Loop(steps), paging(name, update=update))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_no_policy_changes_a_bit(policy, steps):
    check("dense", Loop(steps), paging("dense", policy=policy, update="backward"))


@pytest.mark.parametrize(
    "policy", ["cost_aware+random", pytest.param("belady+oracle", marks=pytest.mark.slow)]
)
def test_no_policy_changes_a_bit_where_the_order_of_experts_is_free(policy, steps):
    check(CHECKPOINTED_EXPERTS, Loop(steps), paging(CHECKPOINTED_EXPERTS, policy=policy))


@pytest.mark.parametrize(
    "name, update",
    [("dense", "backward"), pytest.param(CHECKPOINTED_EXPERTS, "step", marks=pytest.mark.slow)],
)
def test_a_home_on_disk_changes_no_bit(name, update, steps):
    check(name, Loop(steps), paging(name, home="disk", update=update))


@pytest.mark.parametrize(
    "name, update, host_mem", [("dense", "step", 16 * MIB), ("moe", "backward", 40 * MIB)]
)
def test_a_home_of_two_tiers_changes_no_bit(name, update, host_mem, steps):
    """Half of the state lives on disk and half in host memory, and the trace knows which."""
    run = check(name, Loop(steps), paging(name, home="host+disk", host_mem=host_mem, update=update))
    moved = run.moved()
    assert set(moved) == {Tier.HOST, Tier.DISK}
    assert all(num_bytes > 20 * MIB for way in moved.values() for num_bytes in way)
    watch = run.watch
    assert moved == {tier: (watch.loaded[tier], watch.stored[tier]) for tier in moved}


@pytest.mark.parametrize(
    "name", ["tied, checkpointed", pytest.param(CHECKPOINTED_EXPERTS, marks=pytest.mark.slow)]
)
def test_clipping_by_the_global_norm_is_torch_s(name, steps):
    check(name, Loop(steps, max_grad_norm=0.3), paging(name))


def test_groups_with_rates_and_decays_of_their_own_are_followed(steps):
    check("moe", Loop(steps, decay_groups=True), paging("moe", update="backward"))


def test_bfloat16_trains_as_in_plain_pytorch(steps):
    check("all sizes", Loop(steps), Paging(18 * MIB, update="backward"), torch.bfloat16)


def test_evaluation_and_generation_between_steps_change_nothing(steps):
    check("moe", Loop(steps, evaluate=True), paging("moe", update="backward"))


@pytest.mark.parametrize(
    "name, update, order",
    [("moe", "step", "one backward"), ("called twice", "backward", "two backwards")],
)
def test_two_forwards_may_come_before_a_backward(name, update, order, steps):
    check(name, Loop(steps, forwards_first=order), paging(name, update=update))


@pytest.mark.parametrize("update", ["backward", pytest.param("step", marks=pytest.mark.slow)])
def test_groups_larger_than_a_page_are_walked_page_by_page(update, steps):
    check("all sizes", Loop(steps), Paging(20 * MIB, update=update, page_size=2 * MIB))


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("name", models.NAMES)
def test_the_cross_product_trains_as_in_plain_pytorch(name, policy, home, update):
    clip = 0.3 if update == "step" else None
    loop = Loop(LONG, max_grad_norm=clip, decay_groups=True, evaluate=home == "disk")
    page_size = (2 if home == "disk" else 256) * MIB
    check(name, loop, paging(name, policy=policy, home=home, update=update, page_size=page_size))
