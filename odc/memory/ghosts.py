"""Ghosts: caches of access ids, run beside the real one to compare orders of eviction.

A ghost holds as many frames as the pager and loads on demand. It sees what the pager sees: a page
is needed (and held), its last holder lets go of it, its content dies. It is asked what it would
have had to load and, if it is given a clock, how long it would have waited.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from odc.memory.events import Op
from odc.memory.pages import PageTable
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.prefetch import LEAVES_NS
from odc.memory.victims import EvictionPolicy

_HALF_LIFE = 1000.0  # accesses after which a use counts half: that of ``Lfu``


class DemandClock:
    """What demand paging waits for: two lines, and frames that dirty pages leave when stored.

    Frames are taken as the pager books them: free ones, then those that come first.

    Args:
        table: sealed; bytes and frames of pages.
        loads: for each page, what a load of it costs.

    Attributes:
        waited_ns: since the beginning.
        load_ns: of a unit of load.
        store_ns: of a byte.
    """

    def __init__(self, table: PageTable, loads: list[float]) -> None:
        self.waited_ns = self.load_ns = self.store_ns = 0.0
        self._bytes = [page.home_bytes for page in table.pages]
        self._frames, self._loads = table.frames, loads
        self._is_dirty = bytearray(len(loads))
        self._now = self._until = 0.0  # of an access: its time, and when its pages are there
        self._in_until = self._out_until = 0.0  # when the lines are free
        self._free = self._capacity = 0
        self._coming: deque[tuple[float, int, int]] = deque()  # when, frames, and of which page

    def begin(self, computed_ns: float, changed: Sequence[tuple[int, Op]], capacity: int) -> None:
        """An access begins, behind so much computing, that changes pages."""
        self._now = self._until = computed_ns + self.waited_ns
        self._free += capacity - self._capacity
        self._capacity = capacity
        while self._coming and self._coming[0][0] <= self._now:
            self._free += self._coming.popleft()[1]
        for page, _ in changed:
            self._is_dirty[page] = 1

    def end(self) -> None:
        """Its pages are there."""
        self.waited_ns += self._until - self._now

    def evicted(self, page: int) -> None:
        """Its frames come when it has been stored."""
        if not self._is_dirty[page]:
            self._free += self._frames[page]
            return
        self._is_dirty[page] = 0
        begin = max(self._out_until, self._now)
        self._out_until = begin + self._bytes[page] * self.store_ns
        self._coming.append((self._out_until, self._frames[page], page))

    def came(self, page: int, loads: bool) -> None:
        """A page comes into frames; one that has not left them yet stays there."""
        if any(of == page and frames == self._frames[page] for _, frames, of in self._coming):
            self._coming = deque(entry for entry in self._coming if entry[2] != page)
            return
        until, need = self._now, self._frames[page]
        taken = max(min(need, self._free), 0)
        self._free -= taken
        need -= taken
        while need > 0 and self._coming:
            until, frames, of = self._coming.popleft()
            if frames > need:
                self._coming.appendleft((until, frames - need, of))
            need -= frames
        if loads:
            until = max(self._in_until, until) + self._loads[page] * self.load_ns
            self._in_until = until
        self._until = max(self._until, until)

    def dropped(self, page: int) -> None:
        """Nothing of it is stored."""
        self._is_dirty[page] = 0
        self._free += self._frames[page]


class Ghost(ABC):
    """A cache of ids.

    Args:
        table: sealed; frames and loads of pages.
        loads: for each page, what a load of it costs.

    Attributes:
        cost: of loads so far.
        clock: tells how long it waits, or None.
        is_here: by page.
        scores: (num_pages,) at the end of the last use; the highest goes first.
    """

    def __init__(self, table: PageTable, loads: list[float]) -> None:
        self.cost = 0.0
        self.clock: DemandClock | None = None
        self.scores = np.zeros(len(table.pages))
        self._frames = table.frames
        self._loads = loads
        self.is_here = bytearray(len(table.pages))
        self._used = 0

    def accessed(
        self, pages: Sequence[int], changed: Sequence[tuple[int, Op]], capacity: int
    ) -> None:
        """Pages are needed at once, some to be changed or made fresh (see ``access``)."""
        created = [page for page, op in changed if op == Op.CREATE]
        for page in pages:
            if self.is_here[page]:  # none of them makes room for another
                self._hold(page)
        for page in pages:
            self.access(page, capacity, page not in created)

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
        clock = self.clock
        while self._used > capacity:
            victim = self._victim()
            if victim < 0:
                break  # all others are held: the pager would have refused
            self.is_here[victim] = 0
            self._used -= self._frames[victim]
            if clock is not None:
                clock.evicted(victim)
        if clock is not None:
            clock.came(page, loads)

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
            if self.clock is not None:
                self.clock.dropped(page)

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


class _HeapGhost(Ghost):
    """Any order in which a page keeps its place until it is used again: the least key first."""

    def __init__(self, table: PageTable, loads: list[float]) -> None:
        super().__init__(table, loads)
        self._keys: list[float] = [-math.inf] * len(table.pages)
        self._heap: list[tuple[float, int]] = []  # of equal ones the last page first, as the queue
        self._offered: dict[int, float] = {}

    def _hold(self, page: int) -> None:
        self._offered.pop(page, None)

    def _offer(self, page: int) -> None:
        key = self._offered[page] = self._keys[page]
        heappush(self._heap, (key, -page))
        if len(self._heap) > 4 * len(self._keys) + 64:  # mostly of pages that were used again
            self._heap = sorted((k, -p) for p, k in self._offered.items())

    def _victim(self) -> int:
        while self._heap:
            key, page = heappop(self._heap)
            if self._offered.get(-page) == key:
                del self._offered[-page]
                return -page
        return -1


class FrequencyGhost(_HeapGhost):
    """LFU, decayed as ``Lfu`` is: log2 of the count, less the decay that all have in common."""

    def note(self, page: int, time: int) -> None:
        now, before = time / _HALF_LIFE, self._keys[page]
        high, low = (before, now) if before > now else (now, before)
        count = self._keys[page] = high + math.log2(1.0 + 2.0 ** (low - high))
        self.scores[page] = -count


class PolicyGhost(_HeapGhost):
    """Any policy's order, where it does not go by a plan.

    Args:
        policy: of this ghost alone.

    Attributes:
        time: virtual time, told from outside.
    """

    def __init__(self, table: PageTable, loads: list[float], policy: EvictionPolicy) -> None:
        super().__init__(table, loads)
        self.time = 0
        self._policy = policy

    def access(self, page: int, capacity: int, loads: bool) -> None:
        if not self.is_here[page]:
            self._policy.arrived(page, self.time)
        super().access(page, capacity, loads)

    def note(self, page: int, time: int) -> None:
        score = self.scores[page] = self._policy.score(page, time)
        self._keys[page] = -score

    def reorder(self, scores: np.ndarray) -> None:
        """The policy goes by another order from now on."""
        self.scores[:] = scores
        self._keys = (-scores).tolist()
        self._offered = {page: self._keys[page] for page in self._offered}
        self._heap = sorted((key, -page) for page, key in self._offered.items())

    def _victim(self) -> int:
        victim = super()._victim()
        if victim >= 0:
            self._policy.evicted(victim)
        return victim


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
