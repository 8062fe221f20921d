"""Placement: which pages have their home in host memory and which on disk. Pure; integers only.

The bytes that cross to each tier in a step take ``bytes / speed`` of that tier, side by side, and
disk is the slower one. So host memory goes first to the pages that move most bytes a step for each
byte that they take: a gradient that comes home is written and read within the step; parameters are
read in forward and in backward and written after the update; a moment is read and written once.

Pages of one rank compete for what is left of host memory. They are not cut off at some place of the
model: then one part of every pass would be a run of disk pages that nothing can hide. Along the
order in which they are used, disk pages are spread evenly among them. On the virtual clock (24
layers, 30 % resident, half of the state on a disk of a quarter of host memory's speed) a step takes
1342 ms so, 1622 with each rank cut off at one place, 1787 with the first layers in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odc.memory.events import Kind
from odc.memory.pages import PageTable


def traffic_of(table: PageTable, gradients_come_home: bool = True) -> np.ndarray:
    """(num_pages,) how often a page's bytes cross to its home and back in a step, ranked.

    Args:
        table: sealed.
        gradients_come_home: False where each gradient is used up before its pages must go.
    """
    found = np.zeros(len(table.pages))
    for page in table.pages:
        spec = table.groups[page.group]
        if page.kind == Kind.GRADIENT:
            # Above parameters, though it moves less: it is short-lived, and waited for by the
            # end of the step.
            found[page.page] = 4.0 if gradients_come_home else 0.0
        elif page.kind == Kind.PARAMETER:
            found[page.page] = 3.0 if spec.has_gradient else 2.0
        else:
            found[page.page] = 2.0
        if spec.set_index >= 0 and page.kind != Kind.GRADIENT:
            found[page.page] /= 2  # a member of a set is not used in every step
    return found


def choose_host_pages(
    sizes: np.ndarray,
    traffic: np.ndarray,
    host_room: int,
    order: Sequence[int] | None = None,
) -> np.ndarray:
    """Which pages live in host memory.

    Args:
        sizes: (num_pages,) what each page takes at home, in any unit.
        traffic: (num_pages,) bytes moved a step for each byte, any unit.
        host_room: what host memory has room for.
        order: page ids in the order of use; that of their numbers if not given. Pages that it does
            not name come last.

    Returns:
        (num_pages,) bool. Together they take at most ``host_room``.
    """
    chosen = np.zeros(len(sizes), bool)
    named = list(dict.fromkeys(order)) if order is not None else []
    rank = np.full(len(sizes), len(named))
    rank[named] = np.arange(len(named))
    left = host_room
    for value in sorted(set(traffic.tolist()), reverse=True):
        alike = np.flatnonzero(traffic == value)
        alike = alike[np.argsort(rank[alike], kind="stable")]
        left -= _spread(sizes, alike, left, chosen)
    return chosen


def _spread(sizes: np.ndarray, pages: np.ndarray, room: int, chosen: np.ndarray) -> int:
    """Choose as many of ``pages`` as fit, evenly along their order; returns what they take."""
    total = int(sizes[pages].sum())
    if not total or room <= 0:
        return 0
    goal = min(room, total)
    taken = passed = 0
    skipped = []
    for page in pages.tolist():
        size = int(sizes[page])
        passed += size
        # Half a page early: on average the share is kept, not fallen short of.
        if taken + size <= room and (2 * taken + size) * total <= 2 * goal * passed:
            chosen[page] = True
            taken += size
        else:
            skipped.append(page)
    for page in skipped:  # what rounding has left
        if taken + int(sizes[page]) <= room:
            chosen[page] = True
            taken += int(sizes[page])
    return taken
