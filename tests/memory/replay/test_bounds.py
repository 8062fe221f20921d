"""No schedule beats a bound: brute force on tiny runs, known optima, and the shipped scheduler."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from odc.errors import BudgetError, OdcError
from odc.memory.frames import FRAME_BYTES
from odc.memory.plan import OrderPrefetcher
from odc.memory.replay import (
    Accesses,
    Link,
    Residency,
    Workload,
    best_found,
    fluid_bound,
    oracle_factory,
    simulate,
    window_bound,
)
from odc.memory.replay.paging import Paging
from odc.memory.scores import ReplayScorer
from odc.memory.victims import CostAware, Lru
from tests.memory.replay.brute import TICK_NS, Brute
from tests.memory.replay.fluid_fixtures import stored
from tests.memory.replay.runs import Tiny, accesses_of, bandwidth, passes, tiny
from tests.memory.workloads import COMPUTE_NS, dense, experts, with_evaluation

EXACT = 1 + 1e-9
FAST_SEEDS = 150
ALL_SEEDS = 1000


def best_possible_s(run: Tiny) -> float:
    brute = Brute(
        run.accesses, run.capacity, run.load_ticks, run.store_ticks, run.half_duplex, run.initial
    )
    return brute.ticks() * TICK_NS / 1e9


def check_tiny(seeds: range) -> None:
    """Bounds are below the optimum, what is found is not, and the exact search meets it."""
    for seed in seeds:
        run = tiny(seed)
        accesses, rates = run.accesses, run.rates
        rest = (*rates, run.half_duplex, run.initial)
        best = best_possible_s(run)
        window = window_bound(accesses, run.capacity * FRAME_BYTES, *rest)
        fluid = fluid_bound(accesses, run.capacity, *rest)
        searched = best_found(accesses, run.capacity, *rest, moves=60, search_tiny=False)
        exact = best_found(accesses, run.capacity, *rest, moves=0)
        assert window.elapsed_s <= best * EXACT, f"{seed=} {window=} {best=}"
        assert fluid.elapsed_s <= best * EXACT, f"{seed=} {fluid=} {best=}"
        assert searched.elapsed_s * EXACT >= best, f"{seed=} {searched=} {best=}"
        assert exact.elapsed_s == pytest.approx(best, rel=1e-9), f"{seed=} {exact=} {best=}"
        assert exact.certificate.optimal


def test_no_bound_is_above_the_optimum_of_a_tiny_run() -> None:
    check_tiny(range(FAST_SEEDS))


@pytest.mark.slow
def test_no_bound_is_above_the_optimum_of_a_thousand_tiny_runs() -> None:
    check_tiny(range(FAST_SEEDS, ALL_SEEDS))


# -- known optima ----------------------------------------------------------------------------------


def test_pages_that_fit_are_loaded_once_and_wait_only_for_the_link() -> None:
    run = passes("forward", 4, 3)
    rate = bandwidth(2.0)  # 2 ms a page, 1 ms a computation: the last page comes after 8 ms
    expected = (4 * 2 + 1 + 8) * 1e-3
    assert window_bound(run, 4 * FRAME_BYTES, rate, rate).elapsed_s == pytest.approx(expected)
    assert fluid_bound(run, 4, rate, rate).elapsed_s == pytest.approx(expected)


def test_two_pages_that_take_turns_in_one_frame_wait_for_every_load_and_store() -> None:
    holds = [(i % 2, i, i, True, False, True, False) for i in range(6)]
    run = accesses_of([1_000_000] * 6, holds, [1, 1])
    rate = bandwidth(3.0)
    # all but the first load wait for a store; the last store is nobody's stall
    best = best_found(run, 1, rate, rate)
    assert best.elapsed_s == pytest.approx((6 * 1 + 6 * 3 + 5 * 3) * 1e-3)
    assert best.bytes_in == 6 * FRAME_BYTES and best.bytes_out == 5 * FRAME_BYTES
    for half_duplex in (False, True):
        fluid = fluid_bound(run, 1, rate, rate, half_duplex).elapsed_s
        window = window_bound(run, FRAME_BYTES, rate, rate, half_duplex).elapsed_s
        assert window <= fluid * EXACT <= best.elapsed_s * EXACT**2
    # On one line the fluid program leaves nothing out here.
    assert fluid == pytest.approx(best.elapsed_s)


def test_created_and_dead_pages_move_nothing() -> None:
    holds = [(i, i, i, True, True, True, True) for i in range(5)]
    run = accesses_of([1_000_000] * 5, holds, [1] * 5)
    rate = bandwidth(100.0)
    for elapsed_s in (
        window_bound(run, FRAME_BYTES, rate, rate, True).elapsed_s,
        fluid_bound(run, 1, rate, rate, True).elapsed_s,
        best_found(run, 1, rate, rate, True).elapsed_s,
    ):
        assert elapsed_s == pytest.approx(5e-3)


def test_dirty_pages_that_are_there_must_leave_before_others_come() -> None:
    run = accesses_of([1_000_000], [(1, 0, 0, True, False, False, False)], [1, 1])
    rate = bandwidth(2.0)
    there = Residency(np.array([True, False]), np.array([True, False]))
    clean = Residency(np.array([True, False]), np.zeros(2, bool))
    for initial, expected in ((there, 5e-3), (clean, 3e-3), (None, 3e-3)):
        best = best_found(run, 1, rate, rate, initial=initial)
        assert best.elapsed_s == pytest.approx(expected)
        assert fluid_bound(run, 1, rate, rate, False, initial).elapsed_s <= expected * EXACT
    # on one line even a bound that knows no order sees both transfers
    window = window_bound(run, FRAME_BYTES, rate, rate, True, there)
    assert window.elapsed_s == pytest.approx(5e-3)


def test_an_unknown_start_is_no_worse_than_any_known_one() -> None:
    run = passes("dirty", 6, 2)
    rate = bandwidth(2.0)
    unknown = Residency.unknown(6)
    for bound in (
        lambda initial: window_bound(run, 3 * FRAME_BYTES, rate, rate, False, initial).elapsed_s,
        lambda initial: fluid_bound(run, 3, rate, rate, False, initial).elapsed_s,
    ):
        free = bound(unknown)
        assert free < bound(None)
        for pages in ([0, 1, 2], [3, 4, 5], [0, 5]):
            there = np.isin(np.arange(6), pages)
            assert free <= bound(Residency(there, np.zeros(6, bool))) * EXACT


@pytest.mark.parametrize("at", [0, 7, 44])
def test_the_linear_program_solves_to_what_is_stored(at: int) -> None:
    fixture = stored()[at]
    fluid = fluid_bound(
        fixture.accesses, fixture.capacity, fixture.rate, fixture.rate, fixture.half_duplex
    )
    assert fluid.elapsed_s == pytest.approx(fixture.fluid_s, rel=1e-6)
    assert fluid.compute_s == pytest.approx(fixture.compute_s)


def test_the_window_bound_is_below_the_linear_program_on_every_fixture() -> None:
    for fixture in stored():
        window = window_bound(
            fixture.accesses,
            fixture.capacity * FRAME_BYTES,
            fixture.rate,
            fixture.rate,
            fixture.half_duplex,
        )
        assert fixture.compute_s < window.elapsed_s <= fixture.fluid_s * EXACT
        assert window.elapsed_s >= 0.9 * fixture.fluid_s, fixture


# -- repeated loads --------------------------------------------------------------------------------


def belady_loads(order: list[int], room: int) -> int:
    cache: set[int] = set()
    loads = 0
    for at, page in enumerate(order):
        if page in cache:
            continue
        loads += 1
        rest = order[at + 1 :]
        cache.add(page)
        if len(cache) > room:
            others = cache - {page}
            cache.remove(max(others, key=lambda p: rest.index(p) if p in rest else len(order)))
    return loads


@pytest.mark.parametrize("seed", range(5))
def test_paging_loads_what_belady_loads_up_to_every_access(seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = rng.integers(0, 8, 60).tolist()
    run = accesses_of(
        [1] * 60, [(p, i, i, True, *[False] * 3) for i, p in enumerate(order)], [1] * 8
    )
    found = Paging(run, 3 * FRAME_BYTES).least_loads(0) / FRAME_BYTES
    assert found.tolist() == [belady_loads(order[: i + 1], 3) for i in range(60)]
    later = Paging(run, 3 * FRAME_BYTES).least_loads(20) / FRAME_BYTES
    assert later[-1] == belady_loads(order[20:], 3)


# -- the shipped scheduler -------------------------------------------------------------------------

RUNS: dict[str, Workload] = {
    "dense": dense(6, 3),
    "experts": experts(3, 6, 2, 4),
    "evaluation": with_evaluation(dense(5, 3), 5),
}


def replay(library, limits):  # type: ignore[no-untyped-def]
    return OrderPrefetcher(library, ReplayScorer(library.stations.members), limits)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("ratio", [0.3, 2.0])
def test_no_policy_beats_the_window_bound_whole_or_step_by_step(name: str, ratio: float) -> None:
    workload = RUNS[name]
    accesses = Accesses.from_workload(workload)
    frames = int(0.4 * accesses.page_frames.sum())
    rate = FRAME_BYTES / (ratio * COMPUTE_NS / 1e9)
    link = Link(rate, latency_ns=0, frame_move_ns=0)
    unknown = Residency.unknown(accesses.num_pages)
    for eviction, prefetch in (
        (Lru(), None),
        (CostAware(), replay),
        (CostAware(), oracle_factory(workload)),
    ):
        result = simulate(
            workload,
            budget_bytes=frames * FRAME_BYTES,
            link=link,
            eviction=eviction,
            prefetch=prefetch,
        )
        for step, compute_ns, stall_ns in zip(
            result.steps, result.compute_ns, result.stall_ns, strict=True
        ):
            own = accesses.steps(range(step, step + 1))
            own = own.part(0, int(np.flatnonzero(own.step == step)[-1]) + 1)
            start = None if step == 0 else unknown
            bound = window_bound(own, frames * FRAME_BYTES, rate, rate, False, start)
            # the virtual clock cuts every transfer to whole ns
            assert bound.elapsed_s <= (compute_ns + stall_ns) / 1e9 + 1e-6, (step, bound)


def test_the_window_bound_holds_for_every_order_of_a_set() -> None:
    """Windows begin and end between visits; members in recorded order are one schedule of many."""
    rng = np.random.default_rng(0)
    rate = FRAME_BYTES / (2.0 * COMPUTE_NS / 1e9)
    workload = experts(2, 5, 3, 2)
    accesses = Accesses.from_workload(workload)
    tighter = 0
    for frames in (6, 8, 12):
        bound = window_bound(accesses, frames * FRAME_BYTES, rate, rate).elapsed_s
        fixed = replace(accesses, fixed=np.ones_like(accesses.fixed))
        tighter += window_bound(fixed, frames * FRAME_BYTES, rate, rate).elapsed_s > bound
        for _ in range(6):
            visits = [
                replace(v, bundles=[v.bundles[i] for i in rng.permutation(len(v.bundles))])
                for v in workload.visits
            ]
            shuffled = Accesses.from_workload(replace(workload, visits=visits))
            found = best_found(shuffled, frames, rate, rate, moves=40)
            assert bound <= found.elapsed_s * EXACT
    assert tighter  # an order that were taken for granted would say more


# -- errors ----------------------------------------------------------------------------------------


def test_errors_say_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    run = passes("forward", 4, 2, frames=2)
    with pytest.raises(BudgetError, match=r"access 0 needs 2 frames.*use at least 4194304 bytes"):
        window_bound(run, FRAME_BYTES, 1e9, 1e9)
    full = Residency(np.ones(4, bool), np.zeros(4, bool))
    with pytest.raises(BudgetError, match="8 frames are resident at the start"):
        fluid_bound(run, 3, 1e9, 1e9, initial=full)
    with pytest.raises(OdcError, match="at most 400 accesses.*use window_bound"):
        fluid_bound(passes("forward", 40, 11), 20, 1e9, 1e9)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(OdcError, match="needs scipy, which comes with scikit-learn"):
        fluid_bound(run, 4, 1e9, 1e9)
