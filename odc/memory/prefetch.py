"""What the pager asks of whoever knows the future: the ``Prefetcher`` protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from odc.memory.stations import Visit

LEAVES_NS = 1e15  # added to the time of a page that a schedule lets go
THRESHOLD = 0.35  # least probability at which a page is worth loading ahead


class Prefetcher(Protocol):
    """Where knowledge of the future comes from. Whatever it says, nothing but time can be lost.

    Attributes:
        until: (num_pages,) float64, when each page is used next; only order counts. From
            ``LEAVES_NS`` on the page is to leave, or nothing is known of its next use.
        version: changes when many of them did.
        scheduled: a schedule says what leaves; only that makes room for loads ahead.
        utilization: share of the last passes for which the line in was busy, told by the pager: on
            a line that stands idle much less likely pages are worth a load.
    """

    until: np.ndarray
    version: int
    scheduled: bool
    utilization: float

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        """A visit began. ``remaining``: members of its set that will run, in order.

        The members that a set's forward visit needs are known when this is called, if they are
        known before they run: ``visit.order`` is empty else.
        """

    def next_use(self, page: int) -> float:
        """When a page whose use just ended is used again."""

    def wanted(self) -> Iterator[tuple[int, int]]:
        """Absent pages to load ahead, soonest first.

        With each, the frames that later visits will make fresh before it is needed, as far as
        they must be left free.
        """

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """The runtime knows more than the past: P(group is used at its next forward visit)."""


@dataclass(slots=True)
class Limits:
    """Upper limits of a plan that users may set; None leaves it to bytes and link time."""

    page_prefetch: int | None = None  # visits ahead
    prefetch_window: int | None = None  # passes ahead
