"""A run played by time: what is there when a load could begin decides what goes for it.

Counting loads (``rules.Belady``) is blind to stores: it lets go what was just used, and is dirty,
where a page that is clean or long written could have gone. Here both lines run beside the
computation, after P. Cao, E. W. Felten, A. R. Karlin and K. Li (1995): the soonest absent page is
loaded as early as frames allow, over the clean page that is needed last and later than it. Dirty
pages are stored while the line out stands idle, the one that is needed last first.
"""

from __future__ import annotations

import heapq
from math import inf

from odc.memory.cycle import Cycle, Event, Keep

_NEVER = 1 << 40
_MOVES = 4  # of pages, for each use and event: a run that takes more goes round in circles


class Timely:
    """Plays a run.

    Args:
        cycle: what is run, once.
        spare_frames: frames that are not used, so that small errors in times cost nothing.
    """

    def __init__(self, cycle: Cycle, spare_frames: int = 0) -> None:
        self.cycle = cycle
        self.keep: Keep = [True] * len(cycle.uses)
        self.free = cycle.num_frames - spare_frames
        self.at = 0.0
        self.moment = -1
        self.here: dict[int, int] = {}  # page that is there or comes -> its last use, -1 for none
        self.until: dict[int, int] = {}  # the same -> moment of its next use
        self.pinned: set[int] = set()
        self.dirty = bytearray(len(cycle.frames))
        self.clean_last: list[tuple[int, int]] = []  # (-moment of next use, page)
        self.dirty_last: list[tuple[int, int]] = []
        self.loading, self.load_end = -1, inf
        self.storing, self.store_end, self.is_stale = -1, inf, False
        self.cursor = 0
        self.holds_back = False  # frames that come free are for what is made fresh now
        self.moves_left = _MOVES * (len(cycle.uses) + len(cycle.events))
        self._creates = self._next_creations()
        self._most = max((cycle.frames[u.page] for u in cycle.uses if u.created), default=0)
        self._begin()

    def _next_creations(self) -> list[int]:
        """By event, the first from there on that makes a page fresh."""
        count, uses = len(self.cycle.events), self.cycle.uses
        found, following = [_NEVER] * (count + 1), _NEVER
        for at in reversed(range(count)):
            if any(uses[u].created for u in self.cycle.events[at].uses):
                following = at
            found[at] = following
        return found

    def _begin(self) -> None:
        cycle, start = self.cycle, self.cycle.begins_with
        for u in range(cycle.num_uses, len(cycle.uses)):
            use = cycle.uses[u]
            self.free -= cycle.frames[use.page]
            self.dirty[use.page] = use.dirties or use.page in start.stored_ns
            self.here[use.page] = u
        # What is being stored ends in order; only the first is known to have begun.
        self._queued = sorted((when, p) for p, when in start.stored_ns.items() if p in self.here)
        queued = set(start.stored_ns)
        for u in range(cycle.num_uses, len(cycle.uses)):
            page = cycle.uses[u].page
            self.until[page] = cycle.moment(u, 0, -1)
            if page not in queued:
                self._offer(page)
        if start.load_ns > 0.0:
            self.load_end = start.load_ns  # of something that is there already

    def run(self) -> Keep | None:
        """What is kept; None if something never fits, or only after moving without end."""
        for moment, event in enumerate(self.cycle.events):
            self.moment = moment
            if not self._event(event) or self.moves_left <= 0:
                return None
        return self.keep

    def _event(self, event: Event) -> bool:
        """What is needed comes, then is computed with; False if it never comes."""
        uses = [self.cycle.uses[u] for u in event.uses]
        self.pinned.update(use.page for use in uses)
        if uses and not self._wait(event):
            return False
        for u, use in zip(event.uses, uses, strict=True):
            if use.created and use.page not in self.here:
                self.free -= self.cycle.frames[use.page]
            self.here[use.page] = u
            if use.dirties:
                self.dirty[use.page] = 1
                self.is_stale |= use.page == self.storing
        self.cursor = max(self.cursor, self.moment + 1)
        end = self.at + event.compute_ns
        self._go(end)
        self.at = end
        for u in event.ends:
            self._end(u)
        return True

    def _wait(self, event: Event) -> bool:
        """Let the lines run until everything is there that an event needs."""
        frames, uses = self.cycle.frames, [self.cycle.uses[u] for u in event.uses]
        while True:
            absent = [use for use in uses if use.page not in self.here]
            fresh = sum(frames[use.page] for use in absent if use.created)
            coming = any(use.page == self.loading for use in uses)
            to_load = any(not use.created for use in absent)
            if not to_load and not coming and self._make_room(fresh, self.moment):
                return True
            if to_load:
                self.cursor = min(self.cursor, self.moment)
            self.holds_back = not to_load and not coming
            self._start()
            at = min(self.load_end, self.store_end)
            if at == inf or self.moves_left <= 0:
                return False
            self._go(at)
            self.holds_back = False

    def _end(self, u: int) -> None:
        use = self.cycle.uses[u]
        page = use.page
        self.pinned.discard(page)
        if use.leaves:
            self.dirty[page] = 0
            self.is_stale |= page == self.storing
            del self.here[page]
            self.free += self.cycle.frames[page]
            return
        self.until[page] = self.cycle.moment(u, 0, self.moment)
        self._offer(page)

    # -- the lines -------------------------------------------------------------------------------

    def _go(self, until_ns: float) -> None:
        """Let the lines run up to a time."""
        while True:
            self._start()
            at = min(self.load_end, self.store_end)
            if at > until_ns or self.moves_left <= 0:
                return
            self.moves_left -= 1
            self.at = max(self.at, at)
            if self.load_end <= at:
                self._arrive()
            if self.store_end <= at:
                self._stored()

    def _start(self) -> None:
        if self.store_end == inf:
            self._store()
        if self.load_end == inf:
            self._load()

    def _arrive(self) -> None:
        page, self.loading, self.load_end = self.loading, -1, inf
        if page >= 0:
            self._offer(page)

    def _stored(self) -> None:
        page, self.storing, self.store_end = self.storing, -1, inf
        if page in self.here:
            self.dirty[page] &= self.is_stale
            self._offer(page)

    def _offer(self, page: int) -> None:
        """A page that is not in use may go, or be stored."""
        if page not in self.pinned:
            heap = self.dirty_last if self.dirty[page] else self.clean_last
            heapq.heappush(heap, (-self.until[page], page))

    def _last(self, heap: list[tuple[int, int]], is_dirty: int) -> int:
        """The page that is needed last, of the clean or the dirty ones; -1 for none."""
        while heap:
            moment, page = heap[0]
            if (
                page in self.here
                and page not in self.pinned
                and page != self.loading
                and page != self.storing
                and self.until[page] == -moment
                and self.dirty[page] == is_dirty
            ):
                return page
            heapq.heappop(heap)
        return -1

    def _store(self) -> None:
        while self._queued:  # what was queued before
            when, page = self._queued.pop(0)
            if page in self.here and self.dirty[page]:
                self.storing, self.store_end = page, max(when, self.at)
                self.is_stale = False
                return
        page = self._last(self.dirty_last, is_dirty=1)
        if page >= 0:
            self.storing, self.is_stale = page, False
            self.store_end = self.at + self.cycle.store_ns[page]

    def _load(self) -> None:
        page, moment = (-1, 0) if self.holds_back else self._wanted()
        if page < 0:
            return
        fresh = self._most if self._creates[self.moment + 1] <= moment else 0
        if not self._make_room(self.cycle.frames[page] + fresh, moment):
            return
        self.free -= self.cycle.frames[page]
        self.here[page], self.until[page] = -1, moment
        self.loading, self.load_end = page, self.at + self.cycle.load_ns[page]

    def _wanted(self) -> tuple[int, int]:
        """The soonest absent page, and when it is needed; -1 for none."""
        cycle, here = self.cycle, self.here
        while self.cursor < len(cycle.events):
            for u in cycle.events[self.cursor].uses:
                use = cycle.uses[u]
                if not use.created and use.page not in here:
                    return use.page, self.cursor
            self.cursor += 1
        return -1, 0

    def _make_room(self, frames: int, before: int) -> bool:
        """Evict clean pages that are needed later than at a moment."""
        while self.free < frames:
            page = self._last(self.clean_last, is_dirty=0)
            if page < 0 or self.until[page] <= before:
                return False
            u = self.here.pop(page)
            if u >= 0:
                self.keep[u] = False
            self.free += self.cycle.frames[page]
            self.cursor = min(self.cursor, self.until[page])
        return True
