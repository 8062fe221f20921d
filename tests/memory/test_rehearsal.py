"""When a schedule is looked for and followed, and that a cycle then takes what was rehearsed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from odc.memory.cycle import Cycle, Rates
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import MemoryManager, popularity
from odc.memory.pager import Tuning
from odc.memory.pages import GroupSpec
from odc.memory.replay import Workload, budget_for, link_for, synthetic
from odc.memory.replay.drive import Drive
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape
from odc.memory.schedule import Schedule, search
from odc.memory.victims import CostAware, Lru
from tests.memory.workloads import in_turn

TRAINED, FROZEN = 16, 5  # frames, of 32 and 8 or 16


def drive_of(workload: Workload, frames: int, r: float, **options: object) -> Drive:
    return virtual_drive(
        workload,
        budget_bytes=frames * FRAME_BYTES,
        link=link_for(workload, r),
        eviction=CostAware(),
        prefetch=popularity,
        **options,  # type: ignore[arg-type]
    )


def follows(drive: Drive) -> bool:
    """Whether the pass that runs has a schedule."""
    prefetcher = drive.pager.prefetcher
    assert prefetcher is not None
    return prefetcher.scheduled


def followed(drive: Drive) -> str:
    """Pass by pass, each a step: s with a schedule; books and budget are right after each."""
    flags = []
    transfers = drive.pager.transfers
    for step in drive.workload.steps:
        drive.run(step + 1)
        flags.append("s" if follows(drive) else ".")
        transfers.check()
        assert transfers.used_bytes <= transfers.num_frames * FRAME_BYTES
    return "".join(flags)


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["A", "E", "AB", "AR", "T", "TE", "TTTE", "TEER", "AEEB"])
def test_passes_that_recur_are_scheduled_and_wait_for_nothing_that_could_be_loaded(
    pattern: str,
) -> None:
    """One to four contexts in turn, some of them twice; from the fourth round on."""
    rounds = 8
    frames = TRAINED if "T" in pattern else FROZEN
    drive = drive_of(in_turn(pattern * rounds), frames, 1.0)
    flags = followed(drive)
    settled = 3 * len(pattern)
    assert flags[settled:] == "s" * (rounds * len(pattern) - settled)
    passes = drive.result.passes[-2 * len(pattern) :]
    assert [p.misses for p in passes] == [0] * len(passes)
    assert sum(p.stall_ns for p in passes) <= 0.03 * sum(p.compute_ns for p in passes)


@pytest.mark.parametrize("seed", range(3))
def test_passes_that_follow_in_no_order_and_write_nothing_get_no_schedule(seed: int) -> None:
    """But for what looks like a cycle for a pass."""
    pattern = "".join(random.Random(seed).choices("AER", k=50))
    flags = followed(drive_of(in_turn(pattern), FROZEN, 1.0))
    assert flags[20:].count("s") <= 8


def test_a_training_pass_out_of_turn_is_scheduled_for_itself() -> None:
    """From what is resident: its dirty pages are the ones that cost."""
    pattern = "TTTTTTERTTTTTT"
    flags = followed(drive_of(in_turn(pattern), TRAINED, 1.0))
    assert flags[2:] == "".join("s" if letter == "T" else "." for letter in pattern[2:])


@pytest.mark.parametrize("policy", [Lru, CostAware])
def test_without_planned_eviction_or_with_rehearsals_off_there_is_no_schedule(
    policy: Callable[[], Lru],
) -> None:
    tuning = Tuning(rehearse="" if policy is CostAware else "now")
    workload = in_turn("T" * 5)
    drive = virtual_drive(
        workload,
        budget_bytes=TRAINED * FRAME_BYTES,
        link=link_for(workload, 1.0),
        eviction=policy(),
        prefetch=popularity,
        tuning=tuning,
    )
    assert followed(drive) == "....."


def test_another_capacity_gets_another_schedule() -> None:
    """As when activations need more: the schedule of the old capacity would not fit."""
    drive = drive_of(in_turn("A" * 12), 6, 2.0)
    drive.run(6)
    assert follows(drive)
    stalls = drive.result.passes[-1].stall_ns
    transfers = drive.pager.transfers
    drive.pager.room.make(2)
    while transfers.free < 2:
        transfers.wait_any()
    transfers.free -= 2
    transfers.num_frames -= 2
    for step in range(7, 13):
        drive.run(step)
        assert transfers.used_bytes <= 4 * FRAME_BYTES
        transfers.check()
    assert follows(drive)
    assert drive.result.passes[-1].stall_ns > stalls


# -- what it takes ---------------------------------------------------------------------------------


def rehearsed(drive: Drive, contexts: tuple[int, ...]) -> Schedule | None:
    """The schedule of a cycle, searched for anew from the recorded orders."""
    pager = drive.pager
    orders = [pager.library.orders[ctx] for ctx in contexts]
    transfers = pager.transfers
    load = transfers.bytes_per_ns
    rates = Rates(1 / load, 1 / (transfers.bytes_out_per_ns or load))
    return search(Cycle(pager.table, orders, transfers.num_frames, rates))


def steady_ns(drive: Drive) -> int:
    """What the last step took."""
    drive.run()
    last = drive.result.passes[-1].step
    return sum(p.elapsed_ns for p in drive.result.passes if p.step == last)


@pytest.mark.parametrize(
    ("name", "r"), [("W1", 1.0), ("W1", 2.0), ("W1", 4.0), ("W1r", 2.0), ("W1a", 2.0)]
)
def test_a_cycle_of_clean_pages_takes_to_the_nanosecond_what_was_rehearsed(
    name: str, r: float
) -> None:
    """One pass, or four micro-steps."""
    workload = synthetic(name, steps=6 if name == "W1" else 5)
    drive = drive_of(workload, budget_for(workload, 0.25) // FRAME_BYTES, r)
    found = steady_ns(drive)
    schedule = rehearsed(drive, (0, 2, 4, 6) if name == "W1a" else (0,))
    assert schedule is not None
    assert found == pytest.approx(schedule.cycle_ns, rel=1e-9)
    assert follows(drive)


def test_two_micro_steps_take_what_was_rehearsed_for_both() -> None:
    workload = in_turn("AB" * 6, 16)
    drive = drive_of(workload, 6, 2.0)
    drive.run()
    schedule = rehearsed(drive, (0, 2))
    assert schedule is not None and len(schedule.leaves) == 2
    elapsed = sum(p.elapsed_ns for p in drive.result.passes[-2:])
    assert elapsed == pytest.approx(schedule.cycle_ns, rel=1e-9)
    loads = sum(p.bytes_in for p in drive.result.passes[-2:]) / FRAME_BYTES
    assert loads == schedule.loads


@pytest.mark.parametrize(("name", "r"), [("W2", 1.0), ("W2", 2.0), ("W2s", 2.0)])
def test_a_cycle_with_writes_takes_nearly_what_was_rehearsed(name: str, r: float) -> None:
    workload = synthetic(name, steps=7)
    drive = drive_of(workload, budget_for(workload, 0.5) // FRAME_BYTES, r)
    found = steady_ns(drive)
    schedule = rehearsed(drive, (0,))
    assert schedule is not None
    assert found == pytest.approx(schedule.cycle_ns, rel=0.04)


@pytest.mark.parametrize("name", ["W2", "W2s"])
def test_a_schedule_saves_time_where_the_link_is_busy(name: str) -> None:
    workload = synthetic(name, steps=6)
    frames = budget_for(workload, 0.5) // FRAME_BYTES
    plain = steady_ns(drive_of(workload, frames, 2.0, tuning=Tuning(rehearse="")))
    scheduled = steady_ns(drive_of(workload, frames, 2.0))
    assert scheduled < 0.99 * plain


# -- aside -----------------------------------------------------------------------------------------


class Later:
    """An executor whose work is done when the test says so."""

    def __init__(self, *_: object) -> None:
        self.waiting: list[tuple[Future[object], Callable[..., object], tuple[object, ...]]] = []

    def submit(self, work: Callable[..., object], *args: object) -> Future[object]:
        self.waiting.append((Future(), work, args))
        return self.waiting[-1][0]

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, work, args in waiting:
            future.set_result(work(*args))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    made = Later()
    monkeypatch.setattr("odc.memory.rehearsal.ThreadPoolExecutor", lambda *_: made)
    return made


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_a_pass_whose_times_have_changed_loads_no_more_than_others(name: str) -> None:
    """What was loaded ahead for it under the schedule stays, though its order is compiled anew."""
    workload = synthetic(name, steps=12, shape=Shape(layers=14))
    for visit in workload.visits:
        longer = 1 + 0.4 * (visit.step >= 6)
        for bundle in visit.bundles:
            bundle.rows = [(kind, op, int(ns * longer)) for kind, op, ns in bundle.rows]
            bundle.after_ns = int(bundle.after_ns * longer)
    drive = drive_of(workload, budget_for(workload, 0.5) // FRAME_BYTES, 1.0)
    drive.run(6)
    order = drive.pager.library.orders[0]
    compiled = order.compiled
    passes = drive.run().passes
    assert order.compiled > compiled and follows(drive)
    assert {p.bytes_in for p in passes[4:]} == {passes[4].bytes_in}


def test_parameters_that_are_released_before_their_update_stay_for_it() -> None:
    """A backward reads them, lets them go and then updates them part by part: one load of each."""
    cycle = synthetic("W2", steps=1, shape=Shape(layers=12, page_bytes=2 * FRAME_BYTES))
    drive = drive_of(cycle, budget_for(cycle, 0.4) // FRAME_BYTES, 0.5)
    pager, table = drive.pager, drive.pager.table
    groups = range(len(table.groups))
    loads = []
    for _ in range(8):
        pager.begin_pass(0)
        for group in groups:
            pager.access(group, [(Kind.PARAMETER, Op.READ)], Phase.FORWARD)
            drive.body.compute(group, 10_000_000)
            pager.release(group, Kind.PARAMETER)
        for group in reversed(groups):
            pager.access(group, [(Kind.PARAMETER, Op.READ)], Phase.BACKWARD)
            pager.access(group, [(Kind.GRADIENT, Op.CREATE)], Phase.BACKWARD)
            drive.body.compute(group, 20_000_000)
            pager.release(group, Kind.PARAMETER)
            for part in range(table.parts(group)):
                needs = [(Kind.PARAMETER, Op.WRITE), (Kind.MOMENT, Op.WRITE)]
                pager.access(group, needs, Phase.BACKWARD, part)
                pager.release(group, Kind.PARAMETER, part)
                pager.release(group, Kind.MOMENT, part)
            pager.drop(group, Kind.GRADIENT)
        pager.end_update()
        taken = pager.take()
        loads.append((taken.misses, taken.bytes_in))
    assert follows(drive)
    assert [misses for misses, _ in loads[-3:]] == [0] * 3
    every = 2 * 12 * table.pages[0].num_bytes * table.parts(0)  # each once in either direction
    assert loads[-1][1] <= every + sum(p.home_bytes for p in table.pages if p.kind == Kind.MOMENT)


def test_aside_passes_go_on_without_a_schedule_until_one_is_found(later: Later) -> None:
    drive = drive_of(in_turn("A" * 9), FROZEN, 2.0, tuning=Tuning(rehearse="aside"))
    drive.run(5)
    assert not follows(drive) and len(later.waiting) == 1, "one search at a time"
    later.finish()
    drive.run()
    assert follows(drive)
    at_once = drive_of(in_turn("A" * 9), FROZEN, 2.0)
    assert drive.result.passes[-1] == at_once.run().passes[-1]


def test_aside_the_schedule_of_an_order_that_has_changed_is_not_followed(later: Later) -> None:
    """A ninth layer joins for good: while its order is searched, the old places mean nothing."""
    joins = 6
    workload = in_turn("A" * 80, 9)
    workload.visits = [v for v in workload.visits if v.step >= joins or v.bundles[0].group < 8]
    drive = drive_of(workload, FROZEN, 2.0, tuning=Tuning(rehearse="aside"))
    drive.run(joins - 1)
    later.finish()
    drive.run(joins)
    assert follows(drive)
    order = drive.pager.library.orders[0]
    step = joins
    while not later.waiting:
        step += 1
        drive.run(step)
    assert order.is_certain and len(order.entries) == 18
    drive.run(step + 3)
    assert not follows(drive)
    later.finish()
    drive.run(step + 4)
    assert follows(drive)


def test_a_closed_manager_leaves_no_thread_that_rehearses() -> None:
    others = set(threading.enumerate())  # of managers that nobody has closed
    manager = MemoryManager(page_budget=5 * FRAME_BYTES, tuning=Tuning(rehearse="aside"))
    for group in range(8):
        manager.add_group(GroupSpec(f"g{group}", FRAME_BYTES, 0, False))
    manager.seal([], {})
    for _ in range(6):
        manager.begin_pass(0)
        for group in range(8):
            manager.access(group, [(Kind.PARAMETER, Op.READ)], Phase.FORWARD)
            manager.release(group, Kind.PARAMETER)
    own = set(threading.enumerate()) - others
    assert any(t.name.startswith("odc-rehearsal") for t in own)
    manager.close()
    assert not own & set(threading.enumerate())
