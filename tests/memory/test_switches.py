"""What a switch of contexts costs: the first pass of a visit, and those behind it."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

from odc.memory.cycle import Cycle
from odc.memory.decode import decode
from odc.memory.manager import popularity
from odc.memory.replay import Workload, budget_for, link_for, synthetic
from odc.memory.replay.drive import Drive
from odc.memory.replay.first_passes import first_passes
from odc.memory.replay.results import PassResult
from odc.memory.replay.simulate import Link, virtual_drive
from odc.memory.replay.synthetic import find
from odc.memory.replay.workload import RecordedVisit
from odc.memory.rules import Belady
from odc.memory.schedule import Schedule, search
from odc.memory.timely import Timely
from odc.memory.victims import CostAware

MIXED = synthetic("W4")
WARM_UP = find("W4").warm_up
CELLS = [(share, r) for share in (0.25, 0.5, 0.75) for r in (0.5, 1.0, 1.5, 2.0, 3.0)]


def cells(fast: tuple[float, float]) -> list[object]:
    slow = pytest.mark.slow
    return [pytest.param(*cell, marks=() if cell == fast else slow) for cell in CELLS]


def drive_of(workload: Workload, budget: int, link: Link) -> Drive:
    return virtual_drive(
        workload, budget_bytes=budget, link=link, eviction=CostAware(), prefetch=popularity
    )


@pytest.mark.parametrize(("share", "r"), cells(fast=(0.5, 3.0)))
def test_the_first_pass_of_a_visit_is_nearly_the_best_from_what_it_finds(
    share: float, r: float
) -> None:
    budget, link = budget_for(MIXED, share), link_for(MIXED, r)
    found = first_passes(drive_of(MIXED, budget, link), link.bandwidth_in, WARM_UP, moves=20)
    assert len(found) == 20
    assert max(one.ratio for one in found) <= 1.05
    assert fmean(one.ratio for one in found) <= 1.02


def alone(ctx: int, budget: int, link: Link) -> float:
    """Elapsed over computation of a context's last pass repeated, once it has settled."""
    passes: list[list[RecordedVisit]] = []
    for visit in MIXED.visits:
        if visit.begins_pass:
            passes.append([])
        if visit.ctx == ctx:
            passes[-1].append(visit)
    last = next(visits for visits in reversed(passes) if visits)
    visits = [replace(visit, step=step, micro=0) for step in range(10) for visit in last]
    drive = drive_of(Workload(MIXED.pages, visits, MIXED.sets), budget, link)
    return median(_ratio(one) for one in drive.run().passes[5:9])


def _ratio(one: PassResult) -> float:
    return one.elapsed_ns / one.compute_ns


@pytest.mark.parametrize(("share", "r"), cells(fast=(0.25, 1.0)))
def test_later_passes_of_a_visit_run_as_if_their_context_ran_alone(share: float, r: float) -> None:
    """A training pass that was expected behind each token once cost generation twice its time."""
    budget, link = budget_for(MIXED, share), link_for(MIXED, r)
    best = {ctx: alone(ctx, budget, link) for ctx in (0, 1)}
    passes = drive_of(MIXED, budget, link).run().passes
    later = [_ratio(p) / best[p.ctx] for p in passes if p.step >= WARM_UP and not p.first]
    assert len(later) > 30
    assert fmean(later) <= 1.02


def test_a_training_pass_out_of_turn_is_best_begun_as_played_by_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where loads are counted, dirty pages go that have just been used."""
    gains: list[float] = []

    def noting(cycle: Cycle, last: Schedule | None = None, **options: int) -> Schedule | None:
        if not cycle.cyclic:
            keeps = [Timely(cycle).run(), *(Belady(cycle, 4 * n).run() for n in range(5))]
            times = [d[0] for k in keeps if k is not None and (d := decode(cycle, k)) is not None]
            assert len(times) == 6
            gains.append(min(times[1:]) / times[0])
        return search(cycle, last, **options)

    monkeypatch.setattr("odc.memory.rehearsal.search", noting)
    drive_of(MIXED, budget_for(MIXED, 0.5), link_for(MIXED, 3.0)).run()
    assert len(gains) > 10
    assert fmean(gains) > 1.01
