"""Planned eviction, loads ahead and whole runs: the limit cases are the known algorithms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import Space, choose_load, choose_write_backs
from odc.memory.manager import popularity
from odc.memory.next_k import NextKPrefetcher
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Tuning
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay import (
    Link,
    SimResult,
    Workload,
    budget_for,
    link_for,
    oracle_factory,
    simulate,
)
from odc.memory.scores import ReplayScorer
from odc.memory.stations import Visit
from odc.memory.victims import (
    Belady,
    CostAware,
    EvictionPolicy,
    Fifo,
    Gdsf,
    Lfu,
    Lru,
    Mru,
    VictimQueue,
)
from tests.memory.passes import put
from tests.memory.reference_policies import (
    fewest_misses,
    lru_misses,
    random_order,
    total_misses,
)
from tests.memory.workloads import (
    dense,
    experts,
    references,
    updated_in_step,
    with_evaluation,
)

# Plans order evictions and load nothing; no schedule, which would save time and not misses.
DEMAND = Tuning(max_items=0, early_write_back=False, rehearse="")
POLICIES: list[Callable[[], EvictionPolicy]] = [Lru, Mru, Fifo, Lfu, Gdsf, CostAware, Belady]
PLANNED = [Belady, CostAware]


class KnownFuture:
    """Knows a whole reference string: the time of a use is its place in the string."""

    scheduled = False
    utilization = 0.0

    def __init__(self, order: Sequence[int], table: PageTable) -> None:
        self.order, self.table, self.position = list(order), table, -1
        self.until = np.array([self._after(page, -1) for page in range(len(table.pages))])
        self.version = 0

    def _after(self, page: int, position: int) -> float:
        rest = self.order[position + 1 :]
        return float(position + 1 + rest.index(page)) if page in rest else 1e6

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        self.position += 1

    def next_use(self, page: int) -> float:
        return self._after(page, self.position)

    def wanted(self) -> Iterator[tuple[int, int]]:
        self.table.left.clear()
        for page in self.order[self.position + 1 : self.position + 9]:
            if self.table.is_absent[page]:
                yield page, 0

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Knows all there is to know."""


def known(order: Sequence[int]) -> Callable[[OrderLibrary, Limits], Prefetcher]:
    return lambda library, limits: KnownFuture(order, library.stations.table)


def replay(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return OrderPrefetcher(library, ReplayScorer(library.stations.members), limits)


# -- eviction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Lru, *PLANNED])
@pytest.mark.parametrize("prefetch", [None, replay, popularity])
@pytest.mark.parametrize("seed", range(3))
def test_without_any_knowledge_every_order_is_lru(
    policy: Callable[[], EvictionPolicy], prefetch: object, seed: int
) -> None:
    """No prefetcher, or one that has recorded no order yet."""
    order = random_order(seed)
    found = total_misses(references(order, 12), 5, policy(), prefetch=prefetch, tuning=DEMAND)
    assert found == lru_misses(order, 5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("room", [2, 5, 9])
@pytest.mark.parametrize("policy", PLANNED)
def test_with_the_future_known_misses_are_the_fewest_possible(
    seed: int, room: int, policy: Callable[[], EvictionPolicy]
) -> None:
    order = random_order(seed)
    options = {"prefetch": known(order), "tuning": DEMAND}
    assert total_misses(references(order, 12), room, policy(), **options) == fewest_misses(
        order, room
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("room", [3, 6])
def test_a_recorded_order_gives_the_fewest_misses_too(seed: int, room: int) -> None:
    """The string again and again: from the second pass on the plan's choice is Belady's."""
    half = random_order(seed, length=100)
    order = [*half, *(half[::-1][1:])]
    workload = references(order * 6, 12)
    for at in range(6):
        workload.visits[at * len(order)].begins_pass = True
    found = total_misses(workload, room, CostAware(), prefetch=replay, tuning=DEMAND)
    assert found <= lru_misses(order, room) + fewest_misses(order * 5, room)


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_beats_belady_on_demand(seed: int) -> None:
    half = random_order(seed, length=150)
    order = half + half[::-1][1:]
    workload = references(order, 12)
    workload.visits[len(half)].begins_pass = True  # a recorded order exists for the second half
    best = total_misses(workload, 4, Belady(), prefetch=known(order), tuning=DEMAND)
    for policy in POLICIES:
        for prefetch in (None, replay):
            assert best <= total_misses(workload, 4, policy(), prefetch=prefetch, tuning=DEMAND)


# -- loads -----------------------------------------------------------------------------------------


def table_of(frames: Sequence[int], resident: Sequence[bool]) -> PageTable:
    table = PageTable(64 * FRAME_BYTES)
    for group, count in enumerate(frames):
        table.add_group(GroupSpec(f"g{group}", count * FRAME_BYTES, 0, False), {})
    table.seal()
    for page, here in enumerate(resident):
        if here:
            put(table, page, PageState.RESIDENT)
    return table


@pytest.mark.parametrize("seed", range(50))
def test_what_is_needed_sooner_is_never_evicted_for_what_is_fetched(seed: int) -> None:
    rng = random.Random(seed)
    frames = [rng.choice((1, 1, 2, 3)) for _ in range(20)]
    table = table_of(frames, [rng.random() < 0.5 for _ in range(20)])
    future = KnownFuture([rng.randrange(20) for _ in range(40)], table)
    future.position = rng.randrange(20)
    future.until[:] = [future.next_use(page) for page in range(20)]
    queue = VictimQueue(table, future.until)
    free = rng.randrange(3)
    space = Space(free, reserve=rng.randrange(3))
    for page, _ in future.wanted():
        victims = choose_load(table, page, queue, future.until, float(future.until[page]), space)
        if victims is None:
            break
        free += sum(frames[v] for v in victims) - frames[page]
        assert free == space.frames >= 0
        assert all(table.is_evictable[v] for v in victims)
        assert all(future.until[v] > future.until[page] for v in victims)
        for victim in victims:
            put(table, victim, PageState.HOME)
        put(table, page, PageState.LOADING)


def test_what_is_reserved_is_filled_only_as_far_as_there_are_victims_for_it() -> None:
    table = table_of([1] * 6, [True, True, False, False, False, False])
    until = np.array([9.0, 3.0, 5.0, 6.0, 7.0, 8.0])
    queue = VictimQueue(table, until)
    space = Space(frames=2, reserve=1)
    assert choose_load(table, 2, queue, until, 5.0, space) == []
    assert space.frames == 1
    assert choose_load(table, 3, queue, until, 6.0, space) == [], "page 0 can make room again"
    assert space.frames == 0
    assert choose_load(table, 4, queue, until, 7.0, space) is None, "page 1 is needed sooner"


def test_loads_stop_at_the_items_allowed() -> None:
    table = table_of([1] * 6, [False] * 6)
    nobody, until = VictimQueue(table, np.zeros(6)), np.ones(6)

    def chosen(items: int | None) -> list[int]:
        space = Space(6, items)
        found = (choose_load(table, p, nobody, until, 1.0, space) for p in range(6))
        return [page for page, victims in enumerate(found) if victims is not None]

    assert chosen(None) == [0, 1, 2, 3, 4, 5]
    assert chosen(2) == [0, 1]
    assert chosen(0) == []


def test_only_dirty_pages_that_must_go_soon_are_written_early() -> None:
    table = table_of([1] * 6, [True] * 6)
    table.dirty[[0, 2, 3, 5]] = True
    ordered = [3, 1, 2, 0, 5, 4]
    assert choose_write_backs(table, ordered, {2}, 4, 9) == [3, 0]
    assert choose_write_backs(table, ordered, {2}, 4, 1) == [3]
    assert choose_write_backs(table, ordered, (), 9, 9) == [3, 2, 0, 5]
    assert choose_write_backs(table, ordered, (), 0, 9) == []


# -- whole runs ------------------------------------------------------------------------------------


def run(workload: Workload, share: float, prefetch: object, **options: object) -> SimResult:
    budget = int(workload.table().num_frames.sum() * share) * FRAME_BYTES
    link = Link(FRAME_BYTES * 1000.0, latency_ns=0, frame_move_ns=0)  # 2 ms a page of 20 ms
    return simulate(
        workload,
        budget_bytes=budget,
        link=options.pop("link", link),  # type: ignore[arg-type]
        eviction=CostAware(),
        prefetch=prefetch,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("prefetch", [None, replay, popularity])
def test_a_simulation_repeats_to_the_nanosecond(prefetch: object) -> None:
    workload = experts(3, 8, 2, 6)
    assert run(workload, 0.3, prefetch) == run(workload, 0.3, prefetch)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_a_static_model_never_waits_once_its_order_is_known(share: float) -> None:
    """The first step records the order; from the next on every page is there when needed."""
    result = run(dense(12, 6), share, popularity)
    assert sum(result.misses[:1]) > 0
    assert result.misses[2:] == [0] * 4
    assert sum(result.stall_ns[2:]) == 0


def test_demand_paging_waits_in_every_step() -> None:
    result = run(dense(12, 6), 0.5, None)
    assert all(misses > 0 for misses in result.misses)


@pytest.mark.parametrize("r", [0.5, 1.0])
def test_the_members_of_an_update_are_there_when_it_comes_to_them(r: float) -> None:
    """More experts than fit are updated one after the other, in the optimizer's step."""
    workload = updated_in_step(experts(2, 16, 10, 10), 16)
    result = simulate(
        workload,
        budget_bytes=budget_for(workload, 0.5),
        link=link_for(workload, r),
        eviction=CostAware(),
        prefetch=oracle_factory(workload),
    ).after(3)
    updated = 2 * 10 * 3 * len(result.steps)  # parameters and two moments each
    assert sum(result.misses) < 0.05 * updated


def test_knowledge_turns_waits_into_overlap() -> None:
    workload = experts(4, 16, 3, 20)
    stalls = {
        name: run(workload, 0.3, prefetch).after(5).stall_s
        for name, prefetch in (
            ("none", None),
            ("popularity", popularity),
            ("oracle", oracle_factory(workload)),
        )
    }
    assert stalls["oracle"] < 0.1 * stalls["none"]
    assert stalls["popularity"] < 0.2 * stalls["none"]


def test_without_early_write_back_evictions_wait_for_writes() -> None:
    slow = Link(FRAME_BYTES * 120.0, latency_ns=0, frame_move_ns=0)
    workload = dense(12, 6)
    early = run(workload, 0.4, popularity, link=slow)
    late = run(workload, 0.4, popularity, link=slow, tuning=Tuning(early_write_back=False))
    assert early.after(2).stall_s <= late.after(2).stall_s


@pytest.mark.parametrize("prefetch", [None, replay, popularity])
def test_bytes_are_those_of_the_pages_that_moved(prefetch: object) -> None:
    """What a step brings in fits what it needs: no page is loaded twice for one use."""
    result = run(dense(8, 5), 0.5, prefetch)
    uses = 8 * (1 + 1 + 2) + 8  # parameters forward, backward and update, two moments
    assert all(b <= uses * FRAME_BYTES for b in result.bytes_in[1:])
    assert all(b % FRAME_BYTES == 0 for b in [*result.bytes_in, *result.bytes_out])


def test_page_prefetch_limits_how_far_ahead_pages_are_loaded() -> None:
    near = run(dense(12, 5), 0.2, popularity, limits=Limits(page_prefetch=0))
    far = run(dense(12, 5), 0.2, popularity)
    assert sum(near.misses[2:]) > sum(far.misses[2:]) == 0
    assert sum(near.stall_ns[2:]) > sum(far.stall_ns[2:]) == 0


def test_next_k_loads_ahead_without_any_order() -> None:
    """A forward goes through the pages in address order: nearly all of them are there."""

    def next_k(library: OrderLibrary, limits: Limits) -> Prefetcher:
        return NextKPrefetcher(library, k=3)

    workload = references([*range(20)] * 3, 20)
    plain, ahead = (run(workload, 0.4, prefetch) for prefetch in (None, next_k))
    assert sum(plain.misses) == 60 and sum(ahead.misses) <= 6


@pytest.mark.parametrize("prefetch", [None, popularity])
def test_evaluating_and_saving_between_steps_count_for_no_step(prefetch: object) -> None:
    plain = run(dense(8, 5), 0.5, prefetch)
    evaluated = run(with_evaluation(dense(8, 5), 8), 0.5, prefetch)
    assert evaluated.steps == plain.steps
    assert evaluated.compute_ns == plain.compute_ns
    assert evaluated.accesses == plain.accesses
    # Less is resident after an evaluation than after a step; more than one pass is never loaded.
    assert sum(evaluated.bytes_in) <= sum(plain.bytes_in) + 5 * 8 * FRAME_BYTES
