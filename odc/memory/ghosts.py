"""Ghosts: caches of access ids, run beside the real one to compare orders of eviction.

A ghost holds as many frames as the pager and loads on demand. It sees what the pager sees: a page
is needed (and held), its last holder lets go of it, its content dies. What it would have had to
load is all that it is asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from heapq import heappop, heappush

import numpy as np

from odc.memory.pages import PageTable
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.prefetch import LEAVES_NS

_HALF_LIFE = 1000.0  # accesses after which a use counts half: that of ``Lfu``


class Ghost(ABC):
    """A cache of ids.

    Args:
        table: sealed; frames and loads of pages.
        loads: for each page, what a load of it costs.

    Attributes:
        cost: of loads so far.
        is_here: by page.
        scores: (num_pages,) at the end of the last use; the highest goes first.
    """

    def __init__(self, table: PageTable, loads: list[float]) -> None:
        self.cost = 0.0
        self.scores = np.zeros(len(table.pages))
        self._frames = table.frames
        self._loads = loads
        self.is_here = bytearray(len(table.pages))
        self._used = 0

    def access(self, page: int, capacity: int, loads: bool) -> None:
        """A page is needed, and held until ``release`` or ``drop``.

        Args:
            page: its number.
            capacity: frames there are.
            loads: its content is needed; else it is made fresh.
        """
        if self.is_here[page]:
            self._hold(page)
            return
        if loads:
            self.cost += self._loads[page]
        self.is_here[page] = 1
        self._used += self._frames[page]
        while self._used > capacity:
            victim = self._victim()
            if victim < 0:
                break  # all others are held: the pager would have refused
            self.is_here[victim] = 0
            self._used -= self._frames[victim]

    def release(self, page: int, time: int) -> None:
        """A use ended, at a virtual time (number of accesses)."""
        self.note(page, time)
        if self.is_here[page]:
            self._offer(page)

    def drop(self, page: int) -> None:
        """Its content died."""
        if self.is_here[page]:
            self._hold(page)
            self.is_here[page] = 0
            self._used -= self._frames[page]

    def wake(self) -> None:
        """Goes on with what was there when it was last called; nothing is held."""
        for page, here in enumerate(self.is_here):
            if here:
                self._offer(page)

    @abstractmethod
    def note(self, page: int, time: int) -> None:
        """Score a page whose use ended."""

    @abstractmethod
    def _hold(self, page: int) -> None:
        """It cannot go."""

    @abstractmethod
    def _offer(self, page: int) -> None:
        """It can go; it may have been offered before."""

    @abstractmethod
    def _victim(self) -> int:
        """The next to go, which is held from then on; -1 for none."""


class RecencyGhost(Ghost):
    """LRU, or MRU.

    Args:
        latest_first: MRU.
    """

    def __init__(self, table: PageTable, loads: list[float], latest_first: bool) -> None:
        super().__init__(table, loads)
        self._latest_first = latest_first
        self._sign = 1.0 if latest_first else -1.0
        self._order: OrderedDict[int, None] = OrderedDict()

    def note(self, page: int, time: int) -> None:
        self.scores[page] = self._sign * time

    def _hold(self, page: int) -> None:
        self._order.pop(page, None)

    def _offer(self, page: int) -> None:
        self._order[page] = None  # at the end, as it was held; else it keeps its place

    def _victim(self) -> int:
        return self._order.popitem(self._latest_first)[0] if self._order else -1


class FrequencyGhost(Ghost):
    """LFU, decayed as ``Lfu`` is: log2 of the count, less the decay that all have in common."""

    def __init__(self, table: PageTable, loads: list[float]) -> None:
        super().__init__(table, loads)
        self._count: list[float] = [-math.inf] * len(table.pages)
        self._heap: list[tuple[float, int]] = []
        self._offered: dict[int, float] = {}

    def note(self, page: int, time: int) -> None:
        now, before = time / _HALF_LIFE, self._count[page]
        high, low = (before, now) if before > now else (now, before)
        count = self._count[page] = high + math.log2(1.0 + 2.0 ** (low - high))
        self.scores[page] = -count

    def _hold(self, page: int) -> None:
        self._offered.pop(page, None)

    def _offer(self, page: int) -> None:
        count = self._offered[page] = self._count[page]
        heappush(self._heap, (count, page))
        if len(self._heap) > 4 * len(self._count) + 64:  # mostly of pages that were used again
            self._heap = sorted((c, p) for p, c in self._offered.items())

    def _victim(self) -> int:
        while self._heap:
            count, page = heappop(self._heap)
            if self._offered.get(page) == count:
                del self._offered[page]
                return page
        return -1


class PlanGhost(Ghost):
    """The farthest next use first, as a plan has it, whatever schedule it follows.

    A schedule lets pages go for the sake of the lines' time, not of the fewest loads: its times
    are compared without what it adds to them.

    Args:
        until: (num_pages,) times of next use, changed from outside.
    """

    def __init__(self, table: PageTable, loads: list[float], until: np.ndarray) -> None:
        super().__init__(table, loads)
        self._until = until
        self._can_go = bytearray(len(table.pages))
        self._mask = np.frombuffer(self._can_go, bool)
        self._masked = np.zeros(len(table.pages))
        self._is_stale = True

    def changed(self) -> None:
        """Many times have changed."""
        self._is_stale = True

    def note(self, page: int, time: int) -> None:
        score = float(self._until[page])
        self.scores[page] = score - LEAVES_NS if LEAVES_NS <= score < UNKNOWN_NS / 8 else score

    def _hold(self, page: int) -> None:
        self._can_go[page] = 0

    def _offer(self, page: int) -> None:
        self._can_go[page] = 1

    def _victim(self) -> int:
        if self._is_stale:
            self._is_stale = False
            adds = (self._until >= LEAVES_NS) & (self._until < UNKNOWN_NS / 8)
            np.subtract(self._until, LEAVES_NS * adds, out=self.scores)
        self._masked.fill(-np.inf)
        np.copyto(self._masked, self.scores, where=self._mask)
        victim = int(self._masked.argmax())
        if not self._can_go[victim]:
            return -1
        self._can_go[victim] = 0
        return victim
