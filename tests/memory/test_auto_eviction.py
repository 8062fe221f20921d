"""Eviction that chooses: the plan's order where it is good, the best simple one where it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from odc.memory.auto_eviction import PLAN, Auto
from odc.memory.events import Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.ghosts import FrequencyGhost, Ghost, PlanGhost, RecencyGhost
from odc.memory.manager import popularity
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Tuning
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay import Link, SimResult, Workload, budget_for, link_for, simulate, synthetic
from odc.memory.replay.workload import Bundle, RecordedVisit
from odc.memory.victims import CostAware, EvictionPolicy, Lfu, Lru, Mru
from tests.memory.reference_policies import fewest_misses, lru_misses, random_order, total_misses
from tests.memory.test_policies import KnownFuture
from tests.memory.workloads import COMPUTE_NS, P, dense, experts, page_columns, references

NUM_GROUPS, ROOM = 24, 12
FIXED: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "mru": Mru, "lfu": Lfu}
DEMAND = Tuning(max_items=0, early_write_back=False, rehearse="")


def passes_of(orders: Sequence[Sequence[int]], contexts: Sequence[int] | None = None) -> Workload:
    """A step and a pass for each order of single-page groups."""
    visits = []
    for step, order in enumerate(orders):
        ctx = contexts[step] if contexts is not None else 0
        first = len(visits)
        for g in order:
            bundle = Bundle(g, [(P, Op.READ, 0)], COMPUTE_NS)
            visits.append(RecordedVisit(step, 0, Phase.FORWARD, ctx, 1, [bundle]))
        visits[first].begins_pass = True
    return Workload(page_columns([(g, P, 0, -1, -1) for g in range(NUM_GROUPS)]), visits, [])


def loops(count: int) -> list[list[int]]:
    return [list(range(NUM_GROUPS))] * count


def skewed(count: int, seed: int = 0) -> list[list[int]]:
    """Some far oftener than others, in an order that is new in every pass."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, NUM_GROUPS + 1)
    return [rng.choice(NUM_GROUPS, 60, p=weight / weight.sum()).tolist() for _ in range(count)]


def wandering(count: int, seed: int = 0) -> list[list[int]]:
    """A few that are used again and again, others in the next pass, and never those of before."""
    rng = np.random.default_rng(seed)
    firsts = [7 * step for step in range(count)]
    return [((first + rng.integers(0, 10, 60)) % NUM_GROUPS).tolist() for first in firsts]


class Backwards(KnownFuture):
    """Knows the future, and says the opposite."""

    def __init__(self, order: Sequence[int], table: PageTable) -> None:
        super().__init__(order, table)
        self.until = 1e7 - self.until

    def next_use(self, page: int) -> float:
        return 1e7 - super().next_use(page)

    def wanted(self) -> object:  # type: ignore[override]
        self.table.left.clear()
        return iter(())


def backwards(workload: Workload) -> Callable[[OrderLibrary, Limits], Prefetcher]:
    order = [v.bundles[0].group for v in workload.visits]
    return lambda library, limits: Backwards(order, library.stations.table)


def run(workload: Workload, eviction: EvictionPolicy, prefetch: object = None) -> SimResult:
    """Without the gate, which would go without what a plan costs altogether."""
    return simulate(
        workload,
        budget_bytes=ROOM * FRAME_BYTES,
        link=Link(100e6),
        eviction=eviction,
        prefetch=prefetch,  # type: ignore[arg-type]
        tuning=Tuning(gate=False),
    )


def elapsed(result: SimResult) -> float:
    return result.compute_s + result.stall_s


# -- ghosts ----------------------------------------------------------------------------------------


def ghost_table(frames: Sequence[int]) -> PageTable:
    table = PageTable(16 * FRAME_BYTES)
    for group, count in enumerate(frames):
        table.add_group(GroupSpec(f"g{group}", count * FRAME_BYTES, 0, False), {})
    table.seal()
    return table


def misses_of(ghost: Ghost, order: Sequence[int], room: int) -> int:
    for time, page in enumerate(order, start=1):
        ghost.access(page, room, True)
        ghost.release(page, time)
    return round(ghost.cost)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("room", [2, 5, 9])
def test_ghosts_miss_as_often_as_the_caches_they_stand_for(seed: int, room: int) -> None:
    order = random_order(seed)
    table = ghost_table([1] * 12)
    ones = [1.0] * 12
    assert misses_of(RecencyGhost(table, ones, False), order, room) == lru_misses(order, room)
    for ghost, policy in (
        (RecencyGhost(table, ones, True), Mru()),
        (FrequencyGhost(table, ones), Lfu()),
    ):
        found = total_misses(references(order, 12), room, policy, prefetch=None, tuning=DEMAND)
        assert misses_of(ghost, order, room) == found


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_s_ghost_with_a_true_plan_misses_least(seed: int) -> None:
    order = random_order(seed)
    table = ghost_table([1] * 12)
    future = KnownFuture(order, table)
    ghost = PlanGhost(table, [1.0] * 12, future.until)
    for position, page in enumerate(order):
        ghost.access(page, 5, True)
        future.position = position
        future.until[page] = future.next_use(page)
        ghost.release(page, position)
    assert round(ghost.cost) == fewest_misses(order, 5)


def test_ghosts_hold_frames_and_what_is_in_use_stays() -> None:
    table = ghost_table([4, 3, 2, 1])
    ghost = RecencyGhost(table, [4.0, 3.0, 2.0, 1.0], False)
    ghost.access(0, 8, True)  # held
    ghost.access(1, 8, True)
    ghost.release(1, 1)
    ghost.access(2, 8, True)  # 4 + 3 + 2 > 8: 1 goes, though 0 is older
    ghost.release(2, 2)
    assert ghost.cost == 9.0
    ghost.access(0, 8, True)
    ghost.access(2, 8, True)
    assert ghost.cost == 9.0
    ghost.drop(0)
    ghost.access(0, 8, False)
    assert ghost.cost == 9.0, "what is made fresh is not loaded"
    ghost.access(1, 8, True)
    assert ghost.cost == 12.0


# -- the choice ------------------------------------------------------------------------------------

WRONG = {"loop": (loops, "mru"), "skewed": (skewed, "lfu"), "wandering": (wandering, "lru")}


@pytest.mark.parametrize("name", WRONG)
def test_with_a_plan_that_is_wrong_it_is_as_good_as_the_best_simple_order(name: str) -> None:
    make, expected = WRONG[name]
    workload = passes_of(make(60))
    prefetch = backwards(workload)
    fixed = {n: elapsed(run(workload, p(), prefetch).after(12)) for n, p in FIXED.items()}
    assert min(fixed, key=lambda n: fixed[n]) == expected
    auto = Auto()
    found = elapsed(run(workload, auto, prefetch).after(12))
    assert found <= 1.02 * fixed[expected]
    assert elapsed(run(workload, CostAware(), prefetch).after(12)) > 1.05 * found
    assert auto.chosen == expected


def test_each_context_has_its_own_order() -> None:
    """A loop and random passes in turn, under a plan that is wrong for both."""
    orders, contexts = [], []
    for loop, random in zip(loops(40), skewed(40), strict=True):
        orders += [loop, loop, random, random]
        contexts += [0, 0, 2, 2]
    workload = passes_of(orders, contexts)
    prefetch = backwards(workload)
    auto = Auto()
    found = elapsed(run(workload, auto, prefetch).after(24))
    fixed = [elapsed(run(workload, make(), prefetch).after(24)) for make in FIXED.values()]
    assert found <= 1.02 * min(fixed)
    assert {ctx: context.chosen for ctx, context in auto._contexts.items()} == {0: "mru", 2: "lfu"}


def test_without_a_prefetcher_it_chooses_among_the_simple_orders() -> None:
    workload = passes_of(loops(30))
    auto = Auto()
    found = run(workload, auto).after(12)
    assert auto.chosen == "mru"
    assert sum(found.bytes_in) <= 1.02 * sum(run(workload, Mru()).after(12).bytes_in)
    assert sum(found.bytes_in) < 0.6 * sum(run(workload, CostAware()).after(12).bytes_in)


@pytest.mark.parametrize("name", ["W1", "W1a", "W1r", "W2", "W2s", "W3", "W4", "W5p30", "W5b"])
def test_where_the_order_is_known_it_is_the_plan_s_to_the_nanosecond(name: str) -> None:
    workload = synthetic(name)
    setting = {"budget_bytes": budget_for(workload, 0.5), "link": link_for(workload, 2.0)}
    auto = Auto()
    found = simulate(workload, eviction=auto, prefetch=popularity, **setting)  # type: ignore[arg-type]
    planned = simulate(workload, eviction=CostAware(), prefetch=popularity, **setting)  # type: ignore[arg-type]
    assert {c.chosen for c in auto._contexts.values()} == {PLAN}
    assert found.passes == planned.passes


@pytest.mark.parametrize(
    "workload", [dense(10, 20), experts(3, 8, 2, 40)], ids=["dense", "experts"]
)
def test_it_is_never_much_worse_than_the_plan(workload: Workload) -> None:
    found, planned = (
        simulate(
            workload,
            budget_bytes=20 * FRAME_BYTES,
            link=Link(100e6),
            eviction=eviction,
            prefetch=popularity,
        )
        for eviction in (Auto(), CostAware())
    )
    assert elapsed(found) <= 1.02 * elapsed(planned)


def test_orders_that_are_as_good_do_not_take_turns() -> None:
    """On a loop MRU and a true plan have equally many misses, one more each in turn."""
    workload = passes_of([list(range(NUM_GROUPS))] * 80)
    chosen: list[str] = []

    class Noted(Auto):
        def begin_pass(self, ctx: int) -> None:
            super().begin_pass(ctx)
            chosen.append(self.chosen)

    run(workload, Noted(), popularity)
    assert set(chosen) == {PLAN}


def test_a_schedule_is_followed_only_where_the_plan_s_order_is_in_charge() -> None:
    workload = synthetic("W1", steps=12)
    scheduled: list[bool] = []

    class Stubborn(Auto):
        """LRU from the seventh pass on."""

        def begin_pass(self, ctx: int) -> None:
            super().begin_pass(ctx)
            if self._contexts[ctx].passes > 6:
                self.chosen = "lru"

        def accessed(  # type: ignore[override]
            self, pages: object, created: object, capacity: int
        ) -> None:
            super().accessed(pages, created, capacity)  # type: ignore[arg-type]
            assert self._prefetcher is not None
            scheduled.append(self._prefetcher.scheduled)

    simulate(
        workload,
        budget_bytes=budget_for(workload, 0.5),
        link=link_for(workload, 2.0),
        eviction=Stubborn(),
        prefetch=popularity,
    )
    by_pass = [set(scheduled[at : at + 48]) for at in range(0, len(scheduled), 48)]
    assert by_pass[5] == {True} and all(told == {False} for told in by_pass[6:])
