"""The two numbers that place a workload: C, the share of the budget, and r, the weight of the link.

C = budget / (bytes of the pages that have a home + the largest gradient of one group), both in
whole frames. Pages with a home are parameters and moments; gradients live between their creation
and their drop, and with the update in backward one of them is alive at a time. C = 1 holds all of a
workload whose gradients do not outlive the backward of their group.

r = (bytes that all visits read / bandwidth) / compute time: the mean time in which the link brings
what one page access reads over the mean compute of one such access. A page counts once for each
visit that needs its content (read or written); a created page is not loaded and does not count. So
at r = 1 an empty cache would keep the link busy exactly as long as the computation takes, and a
cache that hits all but a share m of the bytes loads the link to m * r of the compute time.
"""

from __future__ import annotations

import math

from odc.errors import BudgetError
from odc.memory.events import Kind, Op
from odc.memory.frames import FRAME_BYTES
from odc.memory.pages import PageTable
from odc.memory.replay.simulate import Link
from odc.memory.replay.workload import RecordedVisit, Workload
from odc.sizes import exact_size, format_bytes


def managed_bytes(table: PageTable) -> int:
    """Frame bytes of all pages with a home, and of the largest gradient: what C = 1 is."""
    homes = [p.num_frames for p in table.pages if p.kind != Kind.GRADIENT]
    gradients = [
        table.frames_of(table.of(group, Kind.GRADIENT))
        for group, spec in enumerate(table.groups)
        if spec.has_gradient and not spec.compact
    ]
    return (sum(homes) + max(gradients, default=0)) * FRAME_BYTES


def budget_for(workload: Workload, share: float) -> int:
    """The budget of C = ``share``, in bytes, rounded down to whole frames.

    Raises:
        BudgetError: some group does not fit it.
    """
    table = workload.table()
    total = managed_bytes(table)
    frames = int(share * total) // FRAME_BYTES
    least, owner = table.smallest_budget()
    if frames < least:
        raise BudgetError(
            f"budget: {100 * share:.3g}% of {format_bytes(total)} are {frames} frames of 2 MiB, "
            f"and group {table.groups[owner].name} needs {least}; use at least "
            f"{math.ceil(1000 * least * FRAME_BYTES / total) / 10:g}% "
            f"({exact_size(least * FRAME_BYTES)})"
        )
    return frames * FRAME_BYTES


def compute_ns(workload: Workload) -> int:
    """All compute of a workload."""
    return workload.lead_ns + sum(_visit_ns(visit) for visit in workload.visits)


def read_bytes(workload: Workload) -> int:
    """Bytes of the pages that visits read, a page once a visit."""
    table = workload.table()
    size = [page.home_bytes for page in table.pages]
    return sum(size[page] for visit in workload.visits for page in _read_pages(table, visit))


def link_for(workload: Workload, r: float) -> Link:
    """The link that has the ratio ``r``: the same bandwidth each way, no latency, free moves.

    Raises:
        ValueError: ``r`` is not above 0, or the workload computes nothing.
    """
    seconds = compute_ns(workload) / 1e9
    if not r > 0 or not seconds:
        raise ValueError(f"r must be above 0 and the workload must compute, got {r} and {seconds}")
    return Link(read_bytes(workload) / (r * seconds), latency_ns=0, frame_move_ns=0)


def ratio_of(workload: Workload, bandwidth: float) -> float:
    """The r of a workload on a link of ``bandwidth`` bytes/s."""
    seconds = compute_ns(workload) / 1e9
    return read_bytes(workload) / bandwidth / seconds if seconds else float("inf")


def _visit_ns(visit: RecordedVisit) -> int:
    return sum(b.after_ns + sum(ns for _, _, ns in b.rows) for b in visit.bundles)


def _read_pages(table: PageTable, visit: RecordedVisit) -> set[int]:
    return {
        page
        for bundle in visit.bundles
        for kind, op, _ in bundle.rows
        if op in (Op.READ, Op.WRITE)
        for page in table.of(bundle.group, kind)
    } - _created(table, visit)


def _created(table: PageTable, visit: RecordedVisit) -> set[int]:
    """Pages that the visit itself created; those of a compact group have a home."""
    return {
        page
        for bundle in visit.bundles
        for kind, op, _ in bundle.rows
        if op == Op.CREATE and not table.groups[bundle.group].compact
        for page in table.of(bundle.group, kind)
    }
