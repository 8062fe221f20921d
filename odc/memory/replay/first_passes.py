"""First passes of visits to a context, each beside the best schedule found from what it finds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odc.memory.pager import Pager
from odc.memory.pages import PageState
from odc.memory.replay.accesses import Accesses, Moving, Residency
from odc.memory.replay.best_found import best_found
from odc.memory.replay.drive import Drive


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The first pass of a visit to a context."""

    step: int
    ctx: int
    elapsed_s: float
    best_found_s: float

    @property
    def ratio(self) -> float:
        return self.elapsed_s / self.best_found_s


def first_passes(drive: Drive, bandwidth: float, from_step: int, moves: int) -> list[FirstPass]:
    """Run a workload and judge the first passes of its visits.

    Args:
        drive: on the virtual clock, not begun.
        bandwidth: of the link, bytes/s each way.
        from_step: steps before it are not judged.
        moves: changes that the search for the best tries.
    """
    accesses = Accesses.from_workload(drive.workload)
    found = _residency_at_passes(drive.pager)
    num_frames = drive.pager.transfers.num_frames
    rows = []
    for number, one in enumerate(drive.run().passes):
        if one.step < from_step or not one.first:
            continue
        inside = np.flatnonzero(accesses.in_pass == number)
        part = accesses.part(int(inside[0]), int(inside[-1]) + 1)
        start = found[number]
        best = best_found(part, num_frames, bandwidth, bandwidth, initial=start, moves=moves)
        rows.append(FirstPass(one.step, one.ctx, one.elapsed_ns / 1e9, best.elapsed_s))
    return rows


def _residency_at_passes(pager: Pager) -> list[Residency]:
    """What each pass finds.

    Of queued transfers nothing has happened: a page that waits to be loaded is absent, one that
    waits to be stored is dirty and has its frames.
    """
    found: list[Residency] = []
    begin_pass = pager.begin_pass

    def noted(ctx: int, tokens: int = 0) -> None:
        found.append(_residency(pager))
        begin_pass(ctx, tokens)

    pager.begin_pass = noted  # type: ignore[method-assign]
    return found


def _residency(pager: Pager) -> Residency:
    table, transfers = pager.table, pager.transfers
    transfers.poll()
    resident = np.array([state == PageState.RESIDENT for state in table.state])
    dirty = np.frombuffer(bytes(table.is_dirty), bool) & resident
    left_ns = transfers.engine.left_ns  # type: ignore[attr-defined]
    moving: dict[str, Moving] = {}
    for page, ticket in transfers.loading.items():
        resident[page] = ticket.started
        if ticket.started:
            moving["loading"] = Moving(page, left_ns(ticket))
    for page, storing in transfers.storing.items():
        resident[page] = True
        dirty[page] = not storing.ticket.started
        if storing.ticket.started:
            moving["storing"] = Moving(page, left_ns(storing.ticket))
    return Residency(resident, dirty, True, moving.get("loading"), moving.get("storing"))
