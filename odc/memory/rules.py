"""A cycle run by the rules that need no schedule: what a schedule has to beat, and begins with."""

from __future__ import annotations

import heapq

from odc.memory.cycle import Cycle, Event, Keep

_ROUNDS = 3  # to settle, and as many that count


class Belady:
    """L. A. Belady's choice (1966): the fewest loads, if time did not count.

    Args:
        cycle: what is run.
        spare_frames: frames that are set aside, so that loads can overlap.
    """

    def __init__(self, cycle: Cycle, spare_frames: int) -> None:
        self.cycle = cycle
        self.keep: Keep = [True] * len(cycle.uses)
        self._here: dict[int, int] = {}  # page -> its last use
        self._pinned: set[int] = set()
        self._farthest: list[tuple[int, int, int]] = []  # (-moment of next use, page, use)
        self._free = cycle.num_frames - spare_frames
        for u in range(cycle.num_uses, len(cycle.uses)):
            self._free -= cycle.frames[cycle.uses[u].page]
            self._stay(u, 0, -1)

    def run(self) -> Keep | None:
        """What is kept once it has settled; None if the frames are too few."""
        for turn in range(3 if self.cycle.cyclic else 1):
            for number, event in enumerate(self.cycle.events):
                if not self._event(event, turn, number):
                    return None
        return self.keep

    def _event(self, event: Event, turn: int, number: int) -> bool:
        cycle = self.cycle
        for u in event.uses:
            page = cycle.uses[u].page
            if page not in self._here:
                self._free -= cycle.frames[page]
            self._here[page] = u
            self._pinned.add(page)
        while self._free < 0:
            if not self._farthest:
                return False
            _, page, u = heapq.heappop(self._farthest)
            if self._here.get(page) == u and page not in self._pinned:
                self.keep[u] = False
                del self._here[page]
                self._free += cycle.frames[page]
        for u in event.ends:
            page = cycle.uses[u].page
            self._pinned.discard(page)
            if cycle.uses[u].leaves:
                self._free += cycle.frames[page]
                self._here.pop(page, None)
            else:
                self._stay(u, turn, number)
        return True

    def _stay(self, u: int, turn: int, number: int) -> None:
        page = self.cycle.uses[u].page
        self.keep[u] = True
        self._here[page] = u
        heapq.heappush(self._farthest, (-self.cycle.moment(u, turn, number), page, u))


class Greedy:
    """The cycle run by the rule that needs no schedule: farthest page out, soonest page in.

    Loads start while the line in would otherwise stand idle until the next event, over victims
    that are needed later than what is loaded.
    """

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.now = self.line_ns = self.store_ns = 0.0
        self.free = cycle.num_frames
        self.until: dict[int, int] = {}  # resident page -> moment of its next use
        self.arrives: dict[int, float] = {}
        self.pinned: set[int] = set()
        self.dirty = bytearray(len(cycle.frames))
        self.farthest: list[tuple[int, int]] = []  # (-moment of next use, page)
        self.moment = -1
        self.cursor = 0
        for u in range(cycle.num_uses, len(cycle.uses)):
            use = cycle.uses[u]
            self.free -= cycle.frames[use.page]
            self.dirty[use.page] = use.dirties
            self._wait_for(use.page, cycle.moment(u, 0, -1))
        self.line_ns = cycle.begins_with.load_ns

    def run(self) -> float | None:
        """Time of a run, or of a cycle once it has settled; None if something never fits."""
        settled_ns = 0.0
        rounds = _ROUNDS if self.cycle.cyclic else 0
        for turn in range(2 * rounds or 1):
            if turn == rounds:
                settled_ns = self.now
            for number, event in enumerate(self.cycle.events):
                self.moment = turn * len(self.cycle.events) + number
                if not self._event(event):
                    return None
        return (self.now - settled_ns) / max(rounds, 1)

    def _event(self, event: Event) -> bool:
        cycle = self.cycle
        for u in event.uses:
            use = cycle.uses[u]
            self.pinned.add(use.page)
            if use.page not in self.until:
                if not self._make_room(cycle.frames[use.page], None):
                    return False
                if not use.created:
                    self._load(use.page)
                self.free -= cycle.frames[use.page]
            self.now = max(self.now, self.arrives.pop(use.page, 0.0))
            self.until[use.page] = self.moment
            self.dirty[use.page] |= use.dirties
        self._load_ahead(self.now + event.compute_ns)
        self.now += event.compute_ns
        for u in event.ends:
            self._end(u)
        return True

    def _end(self, u: int) -> None:
        use = self.cycle.uses[u]
        self.pinned.discard(use.page)
        if use.leaves:
            self.dirty[use.page] = 0
            del self.until[use.page]
            self.free += self.cycle.frames[use.page]
            return
        turn, number = divmod(self.moment, len(self.cycle.events))
        self._wait_for(use.page, self.cycle.moment(u, turn, number))

    def _wait_for(self, page: int, moment: int) -> None:
        self.until[page] = moment
        heapq.heappush(self.farthest, (-moment, page))

    def _load(self, page: int) -> None:
        self.line_ns = max(self.line_ns, self.now) + self.cycle.load_ns[page]
        self.arrives[page] = self.line_ns

    def _load_ahead(self, until_ns: float) -> None:
        cycle, count = self.cycle, len(self.cycle.events)
        self.cursor = max(self.cursor, self.moment + 1)
        last = self.moment + count if cycle.cyclic else count
        while self.line_ns < until_ns and self.cursor < last:
            event = cycle.events[self.cursor % count]
            absent = [u for u in event.uses if cycle.uses[u].page not in self.until]
            absent = [u for u in absent if not cycle.uses[u].created]
            if not absent:
                self.cursor += 1
                continue
            page = cycle.uses[absent[0]].page
            if not self._make_room(cycle.frames[page], self.cursor):
                return
            self._load(page)
            self.free -= cycle.frames[page]
            self._wait_for(page, self.cursor)

    def _make_room(self, frames: int, before: int | None) -> bool:
        """Free frames by evicting pages that are needed after a moment (None: any)."""
        cycle = self.cycle
        while self.free < frames:
            if not self.farthest:
                return False
            moment, page = self.farthest[0]
            if page in self.pinned or self.until.get(page) != -moment:
                heapq.heappop(self.farthest)
                continue
            if before is not None and -moment <= before:
                return False
            heapq.heappop(self.farthest)
            del self.until[page]
            self.arrives.pop(page, None)
            self.free += cycle.frames[page]
            self.cursor = min(self.cursor, -moment)
            if self.dirty[page]:
                self.dirty[page] = 0
                self.store_ns = max(self.store_ns, self.now) + cycle.store_ns[page]
                self.line_ns = max(self.line_ns, self.store_ns)
        return True
