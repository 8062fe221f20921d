"""The queue of victims against a sort of all pages, and each policy against one written anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import take_victims
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.victims import EvictionPolicy, Fifo, Gdsf, Lfu, Lru, Mru, VictimQueue
from tests.memory.passes import put
from tests.memory.reference_policies import (
    fewest_misses,
    fifo_misses,
    gdsf_misses,
    lfu_misses,
    lru_misses,
    mru_misses,
    random_order,
    total_misses,
)
from tests.memory.workloads import references

LEAST = 128  # frames of the largest page there can be, 256 MiB


def table_of(frames: Sequence[int]) -> PageTable:
    table = PageTable(64 * FRAME_BYTES)
    for group, count in enumerate(frames):
        table.add_group(GroupSpec(f"g{group}", count * FRAME_BYTES, 0, False), {})
    table.seal()
    return table


# -- the queue -------------------------------------------------------------------------------------


class SortedAnew:
    """What the queue stands for: all evictable pages, sorted each time."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table = table_of([1] * num_pages)
        self.scores = np.array([self.rng.random() for _ in range(num_pages)])
        self.queue = VictimQueue(self.table, self.scores)

    def order(self) -> list[int]:
        pages = np.flatnonzero(self.table.evictable).tolist()
        return sorted(pages, key=lambda page: (-self.scores[page], -page))

    def check(self) -> None:
        """The queue gives the front of the order, as long as any page can need."""
        expected, found = self.order(), list(self.queue.first())
        assert len(found) >= min(len(expected), LEAST)
        assert len(set(found)) == len(found) and all(self.table.is_evictable[p] for p in found)
        assert self.scores[found].tolist() == self.scores[expected[: len(found)]].tolist()

    # -- what happens to pages -------------------------------------------------------------------

    def release(self, page: int) -> None:
        put(self.table, page, PageState.RESIDENT)
        self.rescore(page)

    def rescore(self, page: int) -> None:
        self.scores[page] = self.rng.choice((self.rng.random(), self.rng.randrange(4) / 4))
        self.queue.push(page, float(self.scores[page]))

    def pin(self, page: int) -> None:
        self.table.is_evictable[page] = 0

    def evict(self) -> None:
        for page in list(self.queue.first())[: self.rng.randrange(8)]:
            put(self.table, page, PageState.HOME)

    def rescore_all(self) -> None:
        self.scores[:] = np.random.default_rng(self.rng.randrange(1000)).random(len(self.scores))
        self.queue.invalidate()

    def change(self, many: int) -> None:
        """Several pages come, are pinned, are scored anew or go."""
        pages = range(len(self.scores))
        act = self.rng.choice((self.release, self.release, self.pin, self.rescore))
        for page in self.rng.choices(pages, k=self.rng.randrange(many)):
            if act != self.rescore or self.table.is_evictable[page]:
                act(page)
        if self.rng.random() < 0.3:
            self.evict()
        if self.rng.random() < 0.02:
            self.rescore_all()


@pytest.mark.parametrize("num_pages", [20, 300, 1500])
@pytest.mark.parametrize("seed", range(4))
def test_victims_come_as_if_all_pages_were_sorted_each_time(num_pages: int, seed: int) -> None:
    world = SortedAnew(num_pages, seed)
    for _ in range(200):
        world.change(many=max(num_pages // 20, 4))
        world.check()


def test_the_queue_is_right_whatever_happens_between_two_looks() -> None:
    """Thousands of changes that nobody looked at."""
    world = SortedAnew(2000, seed=0)
    for _ in range(15):
        for _ in range(150):
            world.change(many=30)
        world.check()


def test_when_all_of_the_front_is_pinned_the_pages_behind_it_come() -> None:
    world = SortedAnew(1500, seed=0)
    for page in range(1500):
        world.release(page)
    world.check()
    for page in world.order()[4:400]:  # the first four stay, so that the front looks alive
        world.pin(page)
    world.check()


def test_a_page_of_the_largest_size_finds_its_victims() -> None:
    world = SortedAnew(1500, seed=1)
    for page in range(1500):
        world.release(page)
    world.check()
    for page in world.order()[1:380]:
        world.pin(page)
    chosen = take_victims(world.table, world.queue, LEAST)
    assert chosen is not None
    assert world.scores[chosen].tolist() == world.scores[world.order()[:LEAST]].tolist()


def test_looking_at_victims_takes_none_out() -> None:
    world = SortedAnew(50, seed=0)
    for page in range(50):
        world.release(page)
    assert list(world.queue.first()) == list(world.queue.first()) == world.order()
    assert take_victims(world.table, world.queue, 51) is None
    assert list(world.queue.first()) == world.order(), "of equal scores the last page first"


# -- which of them go ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_the_fewest_from_the_front_that_free_enough(seed: int) -> None:
    rng = random.Random(seed)
    frames = [rng.choice((1, 1, 2, 3)) for _ in range(30)]
    table = table_of(frames)
    until = np.array([rng.random() for _ in frames])
    queue = VictimQueue(table, until)
    for page in range(30):
        if rng.random() < 0.7:
            put(table, page, PageState.RESIDENT)
        table.is_dirty[page] = rng.random() < 0.5
    later_than, needed = rng.random(), rng.randrange(1, 25)
    may_go = sorted(np.flatnonzero(table.evictable).tolist(), key=lambda p: -until[p])
    may_go = [page for page in may_go if until[page] > later_than]
    clean_first = sorted(may_go, key=lambda page: table.is_dirty[page])
    for order, is_clean_first in ((may_go, False), (clean_first, True)):
        chosen = take_victims(table, queue, needed, until, later_than, is_clean_first)
        if sum(frames[p] for p in may_go) < needed:
            assert chosen is None
            continue
        assert chosen is not None and chosen == order[: len(chosen)]
        assert sum(frames[p] for p in chosen) >= needed > sum(frames[p] for p in chosen[:-1])


# -- policies, each written anew -------------------------------------------------------------------

REFERENCES: dict[str, tuple[Callable[[], EvictionPolicy], Callable[[Sequence[int], int], int]]] = {
    "lru": (Lru, lru_misses),
    "mru": (Mru, mru_misses),
    "fifo": (Fifo, fifo_misses),
    "lfu": (lambda: Lfu(40.0), lambda order, room: lfu_misses(order, room, 40.0)),
    "lfu for ever": (lambda: Lfu(1e4), lambda order, room: lfu_misses(order, room, 1e4)),
    "gdsf": (Gdsf, gdsf_misses),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("room", [2, 5, 9])
@pytest.mark.parametrize("seed", range(4))
def test_a_policy_misses_as_often_as_one_written_anew(name: str, room: int, seed: int) -> None:
    order = random_order(seed)
    policy, reference = REFERENCES[name]
    assert total_misses(references(order, 12), room, policy()) == reference(order, room)


@pytest.mark.parametrize("room", [2, 5, 9])
def test_policies_differ_on_the_strings_that_they_are_compared_on(room: int) -> None:
    """Else the comparison would prove nothing."""
    order = random_order(1)
    assert len({reference(order, room) for _, reference in REFERENCES.values()}) >= 5


@pytest.mark.parametrize("room", [2, 5, 9])
def test_in_a_plain_loop_the_most_recently_used_goes_first_for_the_fewest_misses(
    room: int,
) -> None:
    order = list(range(12)) * 20
    assert total_misses(references(order, 12), room, Mru()) == fewest_misses(order, room)
    assert total_misses(references(order, 12), room, Lru()) == len(order)
