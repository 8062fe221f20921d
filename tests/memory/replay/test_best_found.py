"""The offline schedule: feasible, near the bounds, ahead of every policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from odc.errors import OdcError
from odc.memory.frames import FRAME_BYTES
from odc.memory.plan import OrderPrefetcher
from odc.memory.replay import Accesses, Link, Residency, best_found, oracle_factory, simulate
from odc.memory.replay import schedule as schedule_module
from odc.memory.replay.accesses import Moving
from odc.memory.replay.best_found import SLICE_BYTES, greedy_plans
from odc.memory.replay.instance import Choices, Instance, Plan
from odc.memory.replay.schedule import decode
from odc.memory.scores import ReplayScorer
from odc.memory.victims import CostAware
from tests.memory.replay.fluid_fixtures import Fixture, stored
from tests.memory.replay.runs import accesses_of, bandwidth, passes, tiny
from tests.memory.replay.whole_pages import least_elapsed
from tests.memory.workloads import COMPUTE_NS, dense, experts

EXACT = 1 + 1e-9


def found_s(fixture: Fixture, moves: int) -> float:
    rate = fixture.rate
    found = best_found(
        fixture.accesses, fixture.capacity, rate, rate, fixture.half_duplex, moves=moves
    )
    return found.elapsed_s


# -- against the bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind, worst", [("palindrome", 1.0), ("forward", 1.042)])
def test_clean_passes_come_near_the_linear_program(kind: str, worst: float) -> None:
    """Forward only, the program moves parts of pages: see the test below for whole ones."""
    for fixture in stored():
        if fixture.kind == kind:
            ratio = found_s(fixture, 0) / fixture.fluid_s
            assert 1 / EXACT <= ratio <= worst * EXACT, fixture


@pytest.mark.parametrize(
    "num_pages, capacity, ratio, repeats",
    [(12, 3, 2, 4), (12, 6, 2, 4), (12, 6, 3, 4), (12, 9, 3, 4), (8, 4, 2, 5)],
)
def test_clean_passes_are_optimal_for_pages_that_move_whole(
    num_pages: int, capacity: int, ratio: int, repeats: int
) -> None:
    rate = bandwidth(ratio)
    for kind in ("forward", "palindrome"):
        run = passes(kind, num_pages, repeats)
        best = least_elapsed(run.page.tolist(), capacity, ratio) * 1e-3
        found = best_found(run, capacity, rate, rate, moves=0)
        assert found.elapsed_s == pytest.approx(best, rel=1e-6), kind


@pytest.mark.slow
def test_forward_passes_over_24_pages_are_optimal_for_pages_that_move_whole() -> None:
    for fixture in stored():
        if fixture.kind == "forward" and fixture.ratio in (2.0, 3.0):
            order = fixture.accesses.page.tolist()
            best = least_elapsed(order, fixture.capacity, int(fixture.ratio)) * 1e-3
            assert found_s(fixture, 0) == pytest.approx(best, rel=1e-6)


def test_dirty_passes_stay_within_what_was_measured_of_the_linear_program() -> None:
    ratios = [
        found_s(fixture, 100) / fixture.fluid_s
        for fixture in stored()
        if fixture.kind in ("dirty", "optimizer") and fixture.ratio == 3.0
    ]
    assert min(ratios) >= 1 / EXACT
    assert max(ratios) <= 1.06 and np.mean(ratios) <= 1.04, ratios


def test_a_schedule_that_meets_the_window_bound_is_known_to_be_optimal() -> None:
    rate = bandwidth(1.0)
    easy = best_found(passes("palindrome", 24, 3), 12, rate, rate)
    assert easy.certificate.optimal and easy.certificate.moves == 0
    slow = bandwidth(3.0)
    hard = best_found(passes("dirty", 24, 3), 12, slow, slow, moves=50)
    assert not hard.certificate.optimal and hard.certificate.moves == 50
    assert hard.elapsed_s <= hard.certificate.greedy_s


# -- against the shipped scheduler -----------------------------------------------------------------


def replay(library, limits):  # type: ignore[no-untyped-def]
    return OrderPrefetcher(library, ReplayScorer(library.stations.members), limits)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("share", [0.35, 0.7])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0])
def test_no_policy_beats_it_on_dense_steps(frames: int, share: float, ratio: float) -> None:
    workload = dense(6, 3)
    workload.pages["bytes"] = workload.pages["bytes"] * frames
    accesses = Accesses.from_workload(workload)
    capacity = int(share * accesses.page_frames.sum())
    rate = frames * FRAME_BYTES / (ratio * COMPUTE_NS / 1e9)
    best = best_found(accesses, capacity, rate, rate)
    assert sum(best.step_s.values()) == pytest.approx(best.elapsed_s)
    for prefetch in (replay, oracle_factory(workload)):
        result = simulate(
            workload,
            budget_bytes=capacity * FRAME_BYTES,
            link=Link(rate, latency_ns=0, frame_move_ns=0),
            eviction=CostAware(),
            prefetch=prefetch,
        )
        assert best.elapsed_s <= (result.compute_s + result.stall_s) * (1 + 1e-6)


def test_no_policy_beats_it_on_experts_in_recorded_order() -> None:
    """Sets of one member each: the pager has no order to choose."""
    workload = experts(4, 6, 1, 5)
    accesses = Accesses.from_workload(workload)
    rate = FRAME_BYTES / (2.0 * COMPUTE_NS / 1e9)
    capacity = int(0.4 * accesses.page_frames.sum())
    best = best_found(accesses, capacity, rate, rate)
    result = simulate(
        workload,
        budget_bytes=capacity * FRAME_BYTES,
        link=Link(rate, latency_ns=0, frame_move_ns=0),
        eviction=CostAware(),
        prefetch=oracle_factory(workload),
    )
    assert best.elapsed_s <= (result.compute_s + result.stall_s) * (1 + 1e-6)


# -- the decoder -----------------------------------------------------------------------------------


class Watched(schedule_module._Run):
    """Checks after every event that frames, lines and pins are what the model allows."""

    def watch(self) -> None:
        instance = self.instance
        taken = sum(
            f
            for f, s in zip(instance.frames, self.state, strict=True)
            if s != schedule_module._ABSENT
        )
        if self.out_page >= 0 and self.out_dead:
            taken += instance.frames[self.out_page]
        assert taken + self.free == instance.capacity and self.free >= 0
        pinned = self.access - 1 if self.compute_end < np.inf else -1
        for hold, page in enumerate(instance.page):
            first, last = instance.first[hold], int(instance.accesses.last[hold])
            through = bool(instance.accesses.through[hold]) and instance.compute[last] > 0
            computing = first <= pinned and (pinned < last or (pinned == last and through))
            waiting = first < self.access <= last
            if computing or waiting:
                assert self.state[page] == schedule_module._RESIDENT, (hold, self.access)
                assert self.gap[page] == -1
        if instance.half_duplex:
            assert self.in_end == np.inf or self.out_end == np.inf

    def _computed(self) -> None:
        super()._computed()
        self.watch()

    def _arrived(self) -> None:
        super()._arrived()
        self.watch()

    def _stored(self) -> None:
        super()._stored()
        self.watch()


@pytest.mark.parametrize("half_duplex", [False, True])
def test_schedules_keep_to_frames_lines_and_pins_whatever_the_choices(half_duplex: bool) -> None:
    rng = np.random.default_rng(1)
    ended = 0
    runs = [tiny(seed, 8, 30) for seed in range(25)]
    for run in runs:
        instance = Instance(
            run.accesses, run.capacity, run.rates, half_duplex, run.initial, FRAME_BYTES
        )
        for plan in [*greedy_plans(instance), Plan(window=3)]:
            choices = Choices.none(instance)
            for _ in range(2):  # the plan as it is, then with random exceptions
                schedule = Watched(instance, plan, choices, np.inf).run()
                ended += schedule.elapsed_s < np.inf
                gaps = len(instance.page_of)
                choices.keep = rng.choice(3, gaps, p=[0.6, 0.1, 0.3]).tolist()
                choices.clean = rng.integers(0, 3, gaps).tolist()
                choices.order = (np.array(choices.order) + rng.integers(-9, 9)).tolist()
    assert ended > 0.8 * 2 * len(runs) * (len(greedy_plans(instance)) + 1)


def test_a_greedy_plan_always_ends() -> None:
    for seed in range(200):
        run = tiny(seed, 8, 30)
        for half_duplex in (False, True):
            instance = Instance(
                run.accesses, run.capacity, run.rates, half_duplex, run.initial, SLICE_BYTES
            )
            for plan in greedy_plans(instance):
                elapsed_s = decode(instance, plan, Choices.none(instance)).elapsed_s
                assert instance.remaining[0] <= elapsed_s * EXACT < np.inf, (seed, plan)


def test_a_needed_page_overtakes_a_long_load_at_the_end_of_a_slice() -> None:
    holds = [(p, p, p, True, False, False, False) for p in (0, 1, 2)]
    run = accesses_of([1_000_000] * 3, holds, [1, 1, 16])
    rate = bandwidth(1.0)  # 1 ms a frame, so 4 ms a slice of 8 MiB
    start = Residency(np.array([True, False, False]), np.zeros(3, bool))
    waits = {}
    for slice_frames in (4, 16):
        instance = Instance(run, 18, (rate, rate), False, start, slice_frames * FRAME_BYTES)
        choices = Choices.none(instance)
        choices.order = [0, 4, 2]  # the long load first, though it is needed last
        waits[slice_frames] = decode(instance, Plan(), choices)
    assert waits[4].stall_s == pytest.approx([0.0, 4e-3, 11e-3])
    assert waits[16].stall_s == pytest.approx([0.0, 16e-3, 0.0])
    assert waits[4].elapsed_s < waits[16].elapsed_s


def test_a_schedule_is_broken_off_when_it_cannot_become_better() -> None:
    run = passes("dirty", 12, 3)
    rate = bandwidth(2.0)
    instance = Instance(run, 6, (rate, rate), False, Residency.cold(12), SLICE_BYTES)
    whole = decode(instance, Plan(), Choices.none(instance))
    cut = decode(instance, Plan(), Choices.none(instance), whole.elapsed_s * 0.9)
    assert cut.elapsed_s == np.inf
    assert len(cut.stall_s) < len(whole.stall_s) == run.num_accesses


def test_the_same_seed_finds_the_same_schedule() -> None:
    run = passes("dirty", 12, 3)
    rate = bandwidth(2.0)
    first, second = (best_found(run, 6, rate, rate, moves=60, seed=3) for _ in range(2))
    assert first == second


def test_times_of_passes_add_up_and_later_passes_are_no_cold_ones() -> None:
    rate = bandwidth(2.0)
    best = best_found(passes("palindrome", 8, 4), 6, rate, rate)
    assert len(best.pass_s) == 4
    assert sum(best.pass_s) == pytest.approx(best.elapsed_s)
    assert max(best.pass_s[1:]) < best.pass_s[0]


def test_a_schedule_needs_a_known_start() -> None:
    run = replace(passes("forward", 4, 1))
    with pytest.raises(OdcError, match=r"known residency.*Residency\.cold"):
        best_found(run, 2, 1e9, 1e9, initial=Residency.unknown(4))


def test_what_moves_at_the_start_is_waited_for() -> None:
    """A load that runs holds up the next one, and a dirty page's frames until it is stored."""
    accesses = passes("forward", 3, 1)
    rate = bandwidth(1.0)
    there = np.array([True, False, False])
    nothing = np.zeros(3, bool)
    page_ns = int(accesses.page_bytes[0] / rate * 1e9)

    def elapsed_s(start: Residency, frames: int = 3) -> float:
        return best_found(accesses, frames, rate, rate, initial=start).elapsed_s

    before = elapsed_s(Residency(there, nothing))
    coming = elapsed_s(Residency(there, nothing, loading=Moving(0, page_ns)))
    assert coming - before == pytest.approx(page_ns / 1e9)
    others = passes("forward", 4, 1).part(0, 3)  # three pages of four
    useless = Residency(np.array([True, False, False, True]), np.zeros(4, bool))
    plain = best_found(others, 4, rate, rate, initial=useless).elapsed_s
    useless = replace(useless, loading=Moving(3, page_ns))
    busy = best_found(others, 4, rate, rate, initial=useless).elapsed_s
    assert busy - plain == pytest.approx(page_ns / 1e9), "nobody needs it, and it goes on"
    full = np.array([False, False, True])
    leaves = elapsed_s(Residency(full, nothing), 1)
    held = elapsed_s(Residency(full, nothing, storing=Moving(2, page_ns // 2)), 1)
    assert held - leaves == pytest.approx(page_ns / 2e9)
