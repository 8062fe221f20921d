"""Eviction and prefetch against brute force: their limit cases are the known algorithms."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import Victims, choose_loads, choose_write_backs
from odc.memory.manager import popularity
from odc.memory.pager import Tuning
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.plan import Limits, Plan, Prefetcher, ReplayPrefetcher
from odc.memory.replay import Link, SimResult, Workload, oracle_factory, simulate
from odc.memory.stations import OrderLibrary, Visit
from odc.memory.victims import Belady, CostAware, EvictionPolicy, Lru
from tests.memory.workloads import dense, experts, references, with_evaluation

FAST = Link(1e15, latency_ns=0, frame_move_ns=0)
DEMAND = Tuning(max_items=0, early_write_back=False)  # plans order evictions and load nothing
POLICIES: list[EvictionPolicy] = [Lru(), CostAware(), Belady()]


class KnownFuture:
    """Knows a whole reference string: keep values are 1 / visits until the next use."""

    def __init__(self, order: Sequence[int], num_pages: int) -> None:
        self.order, self.num_pages, self.position = list(order), num_pages, -1

    def advance(self, visit: Visit) -> bool:
        self.position += 1
        return True

    def next_use(self, page: int, start: int) -> float:
        rest = self.order[start:]
        return start + rest.index(page) if page in rest else 1e6

    def plan(self, current: Visit | None, remaining: list[int]) -> Plan | None:
        at = self.position
        keep, after = (
            np.array([1 / (self.next_use(p, s) - at + 1) for p in range(self.num_pages)])
            for s in (at, at + 1)
        )
        wish = np.array(self.order[at + 1 : at + 9], np.int64)
        return Plan(keep, after, wish, np.arange(1, len(wish) + 1))

    def observe(self, visit: Visit, tokens: int) -> None:
        pass

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        pass


def known(order: Sequence[int]) -> Callable[..., Prefetcher]:
    return lambda library, weight, limits: KnownFuture(order, len(weight))


def replay(library: OrderLibrary, weight: np.ndarray, limits: Limits) -> Prefetcher:
    return ReplayPrefetcher(library, weight, limits=limits)


def lru_misses(order: Sequence[int], room: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for group in order:
        if group in cache:
            cache.move_to_end(group)
            continue
        misses += 1
        if len(cache) == room:
            cache.popitem(last=False)
        cache[group] = None
    return misses


def fewest_misses(order: Sequence[int], room: int) -> int:
    """L. A. Belady's MIN."""
    cache: set[int] = set()
    misses = 0
    for at, group in enumerate(order):
        if group in cache:
            continue
        misses += 1
        if len(cache) == room:
            rest = order[at + 1 :]
            cache.remove(max(cache, key=lambda g: rest.index(g) if g in rest else len(order)))
        cache.add(group)
    return misses


def random_order(seed: int, num_groups: int = 12, length: int = 300) -> list[int]:
    rng = random.Random(seed)
    weights = [1 / (1 + g) for g in range(num_groups)] if seed % 2 else None
    order = rng.choices(range(num_groups), weights, k=length)
    return [g for at, g in enumerate(order) if at == 0 or order[at - 1] != g]


def total_misses(workload: Workload, room: int, eviction: EvictionPolicy, **options: object) -> int:
    result = simulate(
        workload,
        budget_bytes=room * FRAME_BYTES,
        link=FAST,
        eviction=eviction,
        **options,  # type: ignore[arg-type]
    )
    return sum(result.misses)


# -- eviction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("room", [2, 5, 9])
def test_lru_misses_as_often_as_an_lru_written_anew(seed: int, room: int) -> None:
    order = random_order(seed)
    assert total_misses(references(order, 12), room, Lru()) == lru_misses(order, room)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_any_knowledge_every_order_is_lru(policy: EvictionPolicy) -> None:
    order = random_order(1)
    assert total_misses(references(order, 12), 5, policy) == lru_misses(order, 5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("room", [2, 5, 9])
@pytest.mark.parametrize("policy", [Belady(), CostAware()], ids=["belady", "cost_aware"])
def test_with_the_future_known_misses_are_the_fewest_possible(
    seed: int, room: int, policy: EvictionPolicy
) -> None:
    order = random_order(seed)
    options = {"prefetch": known(order), "tuning": DEMAND}
    assert total_misses(references(order, 12), room, policy, **options) == fewest_misses(
        order, room
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_beats_belady_on_demand(seed: int) -> None:
    half = random_order(seed)
    order = half + half[::-1][1:]
    workload = references(order, 12)
    workload.visits[len(half)].begins_pass = True  # a recorded order exists for the second half
    best = total_misses(workload, 4, Belady(), prefetch=known(order), tuning=DEMAND)
    for policy in POLICIES:
        for prefetch in (None, replay):
            assert best <= total_misses(workload, 4, policy, prefetch=prefetch, tuning=DEMAND)


def test_victims_go_by_keep_value_then_by_last_use() -> None:
    pages = np.array([0, 1, 2, 3, 4])
    last_use = np.array([5, 1, 9, 2, 7])
    keep = np.array([1.0, 1.0, 0.5, 2.0, 0.5])
    dirty = np.array([True, False, True, False, False])
    order = lambda policy, weight: policy.order(pages, last_use, keep, dirty, weight).tolist()  # noqa: E731
    assert order(Lru(), 0.0) == [1, 3, 0, 4, 2]
    assert order(Belady(), 1.0) == order(CostAware(), 0.0) == [4, 2, 1, 0, 3]
    # a busy out-link doubles what a dirty page is worth: 0 ties with 3, 2 with 1
    assert order(CostAware(), 1.0) == [4, 1, 2, 3, 0]


# -- loads -----------------------------------------------------------------------------------------


def table_of(frames: Sequence[int], resident: Sequence[bool]) -> PageTable:
    table = PageTable(64 * FRAME_BYTES)
    for group, count in enumerate(frames):
        table.add_group(GroupSpec(f"g{group}", count * FRAME_BYTES, 0, False), {})
    table.seal()
    for page, here in enumerate(resident):
        if here:
            table.set_state(page, PageState.RESIDENT)
            table.evictable[page] = True
    return table


@pytest.mark.parametrize("seed", range(50))
def test_what_is_needed_sooner_is_never_evicted_for_what_is_fetched(seed: int) -> None:
    rng = random.Random(seed)
    frames = [rng.choice((1, 1, 2, 3)) for _ in range(20)]
    table = table_of(frames, [rng.random() < 0.5 for _ in range(20)])
    future = KnownFuture([rng.randrange(20) for _ in range(40)], 20)
    future.position = start = rng.randrange(20)
    plan = future.plan(None, [])
    assert plan is not None
    wanted = np.array([p for p in dict.fromkeys(plan.wish.tolist()) if table.absent[p]], np.int64)
    evictable = np.flatnonzero(table.evictable)
    ordered = Belady().order(evictable, table.last_use, plan.keep, table.dirty, 0.0)
    free = rng.randrange(3)
    loads = choose_loads(table, wanted, plan.keep, Victims(ordered, table), free, 10**9, None)
    victims = [v for load in loads for v in load.victims]
    assert len(set(victims)) == len(victims)
    for load in loads:
        free += sum(frames[v] for v in load.victims) - frames[load.page]
        assert free >= 0
        assert all(
            future.next_use(v, start) > future.next_use(load.page, start) for v in load.victims
        )


def test_loads_stop_at_the_bytes_in_flight_and_at_the_items_allowed() -> None:
    table = table_of([1] * 6, [False] * 6)
    keep, wanted = np.ones(6), np.arange(6)

    def chosen(room_bytes: int, room_items: int | None) -> list[int]:
        nobody = Victims(np.zeros(0, np.int64), table)
        loads = choose_loads(table, wanted, keep, nobody, 6, room_bytes, room_items)
        return [load.page for load in loads]

    assert chosen(3 * FRAME_BYTES, None) == [0, 1, 2]
    assert chosen(10**9, 2) == [0, 1]
    assert chosen(0, None) == []


def test_only_dirty_pages_that_must_go_soon_are_written_early() -> None:
    table = table_of([1] * 6, [True] * 6)
    table.dirty[[0, 2, 3, 5]] = True
    ordered = np.array([3, 1, 2, 0, 5, 4])
    assert choose_write_backs(table, ordered, {2}, 4) == [3, 0]


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


def test_knowledge_turns_waits_into_overlap() -> None:
    workload = experts(4, 16, 3, 30)
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
    near = run(dense(12, 5), 0.5, popularity, limits=Limits(page_prefetch=0))
    far = run(dense(12, 5), 0.5, popularity)
    assert sum(near.misses[2:]) > sum(far.misses[2:]) == 0


@pytest.mark.parametrize("prefetch", [None, popularity])
def test_evaluating_and_saving_between_steps_count_for_no_step(prefetch: object) -> None:
    plain = run(dense(8, 5), 0.5, prefetch)
    evaluated = run(with_evaluation(dense(8, 5), 8), 0.5, prefetch)
    assert evaluated.steps == plain.steps
    assert evaluated.compute_ns == plain.compute_ns
    assert evaluated.accesses == plain.accesses
    # Less is resident after an evaluation than after a step; more than one pass is never loaded.
    assert sum(evaluated.bytes_in) <= sum(plain.bytes_in) + 5 * 8 * FRAME_BYTES
