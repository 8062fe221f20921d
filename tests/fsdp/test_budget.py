"""A budget that is too small is refused with one that works, and that one works to the end."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import odc
from odc.sizes import parse_size
from tests.fsdp import models
from tests.fsdp.paged_loop import MIB, PagedRun, Paging, smallest_budget
from tests.fsdp.pair import assert_equal_values, paged_pair, plain_pair, train
from tests.fsdp.plain_loop import Loop, assert_equal, train_plainly
from tests.fsdp.test_hooks import KINDS, Block, HeadFirst, make

UPDATES = ("step", "backward")


FEW = ("dense, checkpoint of two", "moe, checkpointed", "tied", "adapters", "all sizes")


def cases():
    """Models x page sizes x updates; in the fast tier some, so that each value occurs."""
    every = itertools.product(models.NAMES, (2 * MIB, 256 * MIB), UPDATES)
    for name, page_size, update in every:
        fast = name in FEW and (update == "step") == (page_size == 2 * MIB)
        marks = () if fast else (pytest.mark.slow,)
        yield pytest.param(name, page_size, update, marks=marks)


@pytest.mark.parametrize("name, page_size, update", list(cases()))
def test_the_smallest_budget_that_is_accepted_trains(name, page_size, update):
    loop = Loop(steps=3)
    model = models.build(name)
    memory = odc.memory.manager.MemoryManager(page_budget=2 * MIB, page_size=page_size)
    least = named_budget(model, memory=memory)
    run = PagedRun(models.build(name), loop, Paging(least, update=update, page_size=page_size))
    found = run.train()
    assert run.model.memory.pool.num_bytes == least
    run.close()
    assert_equal(found, train_plainly(models.build(name), loop))
    with pytest.raises(odc.BudgetError):
        PagedRun(models.build(name), loop, Paging(least - 2 * MIB, page_size=page_size))


def named_budget(model: nn.Module, **options: object) -> int:
    with pytest.raises(odc.BudgetError) as caught:
        odc.paged(model, torch.optim.AdamW, **options)
    words = str(caught.value)
    assert any(name in words for name, _ in model.named_modules() if name), words
    return parse_size(words.split("at least ")[1].split(",")[0])


@pytest.mark.parametrize("kind, update", list(zip(KINDS, UPDATES * 5, strict=True)))
def test_the_smallest_budget_trains_modules_as_people_write_them(kind, update):
    least = smallest_budget(make(kind))
    with paged_pair(make(kind), least // MIB, update=update) as (model, optimizer):
        train(model, optimizer, range(3))
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())


def test_the_smallest_budget_trains_a_head_that_owns_the_embedding():
    least = smallest_budget(make(Block, HeadFirst))
    for update in UPDATES:
        with paged_pair(make(Block, HeadFirst), least // MIB, update=update) as (model, optimizer):
            train(model, optimizer, range(3))


def test_clipping_fits_the_smallest_budget_too():
    for name in ("dense", "moe, checkpointed", "adapters"):
        least = smallest_budget(models.build(name))
        loop = Loop(steps=3, max_grad_norm=0.5)
        run = PagedRun(models.build(name), loop, Paging(least))
        assert_equal(run.train(), train_plainly(models.build(name), loop))
        run.close()


def test_a_total_is_kept_by_measuring_the_rest_after_every_step():
    plain, plain_optimizer = plain_pair(models.build("dense"))
    expected = train(plain, plain_optimizer, range(6))
    with paged_pair("dense", None, total_mem="96MB") as (model, optimizer):
        measured = []
        rebalance = model.memory.rebalance
        model.memory.rebalance = lambda: measured.append(rebalance())
        found = train(model, optimizer, range(6))
        assert len(measured) == 6
        assert_equal_values(found, expected)
        assert model.memory.pool.num_bytes + max(measured) <= 96 * MIB


def test_a_total_that_is_too_small_names_one_that_would_do():
    with pytest.raises(odc.BudgetError, match=r"^total_mem: .*layers.*at least.*\(page_size\)"):
        odc.paged(models.build("dense"), torch.optim.AdamW, total_mem="2MB")


def test_what_is_asked_for_at_once_must_fit():
    with (
        paged_pair("moe", 14) as (model, _),
        pytest.raises(odc.BudgetError, match="page_budget"),
        model.resident(),
    ):
        pass
