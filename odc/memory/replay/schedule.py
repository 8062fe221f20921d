"""Offline schedules: what is loaded, stored and evicted when, with the whole run known ahead.

``decode`` turns a few choices into a schedule by playing them through in events. Whole pages move
on a line in and a line out (or on one line that goes one way at a time), without latency; frames
are taken when a load starts and given back when a page is evicted, clean, or dies. The greedy part
follows Cao, Felten, Karlin and Li (1995): load what is needed next, as early as frames allow; evict
what is needed last; never evict what is needed before what is loaded. Stores, which they do not
have, start when the line out is idle: early, a little ahead of need, or when a victim must go.

``Choices`` change single gaps; a search over them is in ``best_found``.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, inf

from odc.memory.replay.accesses import Moving
from odc.memory.replay.instance import Choices, Clean, Instance, Keep, Plan


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule that was played to its end.

    Attributes:
        elapsed_s: to the end of the last computation; inf if it was broken off.
        stall_s: (n,) stall before each access.
        loads, stores: pages in the order in which transfers ended.
        evicted: gaps in which a page went.
        stored: gaps in which a page was stored.
    """

    elapsed_s: float
    stall_s: list[float]
    loads: list[int]
    stores: list[int]
    evicted: list[int]
    stored: list[int]


def decode(instance: Instance, plan: Plan, choices: Choices, limit: float = inf) -> Schedule:
    """Play a plan through; broken off as soon as it cannot end before ``limit``."""
    return _Run(instance, plan, choices, limit).run()


_ABSENT, _LOADING, _RESIDENT, _CUT = range(4)  # _CUT: frames taken, load interrupted
# Plain numbers: comparing with a member of an enum takes several times as long.
_ALWAYS, _NEVER = int(Keep.ALWAYS), int(Keep.NEVER)
_AT_ONCE, _LATE = int(Clean.AT_ONCE), int(Clean.LATE)


class _Run:
    """The state of a schedule between two events."""

    def __init__(self, instance: Instance, plan: Plan, choices: Choices, limit: float) -> None:
        self.instance = instance
        self.plan = plan
        self.keep, self.clean, self.order = choices.keep, choices.clean, choices.order
        self.limit = limit
        pages = len(instance.frames)
        self.now = 0.0
        self.access = 0  # the next to begin
        self.compute_end = self.in_end = self.out_end = inf
        self.waits_since = 0.0
        self.in_hold = self.in_page = self.out_page = self.out_gap = -1
        self.in_start = 0.0
        self.in_cut = self.out_stale = self.out_dead = self.late = False
        self.free = instance.capacity
        self.created = 0  # frames of created pages, less those of pages that died
        self.ready = 0  # frames of pages cleaned ahead that are still there
        self.short = inf  # access for which frames were sought in vain
        self.width = len(instance.page_of)
        self.state = [_ABSENT] * pages
        self.gap = [-1] * pages  # of resident pages that are not held
        self.last_gap = list(range(len(instance.page), self.width))
        self.dirty = instance.dirty[:]
        self.left = [0.0] * pages
        self.cleaned = [False] * pages
        self.cut: list[int] = []
        self.clean_heap: list[int] = []
        self.dirty_heap: list[int] = []
        self.eager_heap: list[int] = []
        self.stall: list[float] = []
        self.loads: list[int] = []
        self.stores: list[int] = []
        self.evicted: list[int] = []
        self.stored: list[int] = []
        holds = len(instance.page)
        for page in instance.resident:
            self.free -= instance.frames[page]
            self.state[page] = _RESIDENT
            self._offer(holds + page)
        self._go_on(*instance.moving)
        first = (instance.next_load[holds + p] for p, s in enumerate(self.state) if s == _ABSENT)
        self.want = [self.order[h] * self.width + h for h in first if h >= 0]
        heapify(self.want)

    def _go_on(self, loading: Moving | None, storing: Moving | None) -> None:
        """What moves at the beginning."""
        holds = len(self.instance.page)
        if loading is not None:
            self.state[loading.page], self.gap[loading.page] = _LOADING, -1
            self.in_hold = self.instance.next_load[holds + loading.page]
            self.in_page = loading.page
            self.in_end = loading.left_ns / 1e9
        if storing is not None:
            self.dirty[storing.page] = True
            self._offer(holds + storing.page)
            self.out_page, self.out_gap = storing.page, holds + storing.page
            self.out_end = storing.left_ns / 1e9

    def run(self) -> Schedule:
        last = self.instance.n
        half_duplex = self.instance.half_duplex
        while True:
            self.short = inf
            if self.compute_end == inf:
                self._begin()
                if self.compute_end == inf and self.access == last:
                    return self._finish(self.now)
            if half_duplex:
                self._one_line()
            else:
                self._two_lines()
            now = min(self.compute_end, self.in_end, self.out_end)
            if now == inf or self.late:
                return self._finish(inf)
            self.now = now
            if self.compute_end <= now:
                self._computed()
            if self.in_end <= now:
                self._arrived()
            if self.out_end <= now:
                self._stored()

    def _finish(self, elapsed_s: float) -> Schedule:
        return Schedule(elapsed_s, self.stall, self.loads, self.stores, self.evicted, self.stored)

    def _two_lines(self) -> None:
        if self.in_end == inf:
            self._load()
        elif self.compute_end == inf:
            self._interrupt()
        if self.out_end == inf:
            self._store()

    def _one_line(self) -> None:
        if self.in_end < inf:
            if self.compute_end == inf:
                self._interrupt()
        elif self.out_end == inf:
            if self.plan.stores_first:
                self._store()
            if self.out_end == inf:
                self._load()
                if self.in_end == inf:
                    self._store()

    # -- computation -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin accesses for as long as what they need is there and they take no time."""
        instance, state = self.instance, self.state
        while self.access < instance.n:
            access = self.access
            for page in instance.loaded[access]:
                if state[page] != _RESIDENT:
                    return
            need = instance.create_frames[access]
            if self.free < need and not self._make_room(need, access):
                return
            self.stall.append(self.now - self.waits_since)
            self.waits_since = self.now
            if self.now + instance.remaining[access] >= self.limit:
                self.late = True
                return
            for hold in instance.begins[access]:
                self._hold(hold)
            for hold in instance.released_at_start[access]:
                self._release(hold)
            self.access += 1
            if instance.compute[access] > 0.0:
                self.compute_end = self.now + instance.compute[access]
                return

    def _hold(self, hold: int) -> None:
        instance = self.instance
        page = instance.page[hold]
        if instance.creates[hold]:
            if self.state[page] == _ABSENT:
                self.free -= instance.frames[page]
                self.state[page] = _RESIDENT
            self.created += instance.frames[page]
        elif self.cleaned[page]:
            self.cleaned[page] = False
            self.ready -= instance.frames[page]
        self.gap[page] = -1
        if instance.dirties[hold]:
            self.dirty[page] = True
            if page == self.out_page:
                self.out_stale = True

    def _computed(self) -> None:
        self.compute_end = inf
        self.waits_since = self.now
        for hold in self.instance.released_after[self.access - 1]:
            self._release(hold)

    def _release(self, hold: int) -> None:
        instance = self.instance
        page = instance.page[hold]
        self.last_gap[page] = hold
        if not instance.dies[hold]:
            self._offer(hold)
            return
        self.dirty[page] = False
        self.state[page] = _ABSENT
        self.created -= instance.frames[page]
        if self.cleaned[page]:
            self.cleaned[page] = False
            self.ready -= instance.frames[page]
        if page == self.out_page:
            self.out_dead = True
        else:
            self.free += instance.frames[page]
        self._want(hold)

    def _offer(self, gap: int) -> None:
        """A page that nobody holds may go."""
        page = self.instance.page_of[gap]
        self.gap[page] = gap
        keep = self.keep[gap]
        if keep == _ALWAYS:
            return
        n = self.instance.n
        far = 2 * n if keep == _NEVER else self.instance.far[gap]
        entry = (n - far) * self.width + gap
        if not self.dirty[page]:
            heappush(self.clean_heap, entry)
            return
        heappush(self.dirty_heap, entry)
        clean = self.clean[gap]
        if clean == _AT_ONCE or (self.plan.early and clean != _LATE):
            heappush(self.eager_heap, entry)

    # -- room ------------------------------------------------------------------------------------

    def _farthest(self, heap: list[int], dirty: bool) -> int:
        """The gap of the page that is needed last among those in ``heap``, or -1."""
        width, page_of, gaps = self.width, self.instance.page_of, self.gap
        while heap:
            gap = heap[0] % width
            page = page_of[gap]
            if gaps[page] == gap and self.dirty[page] == dirty:
                return gap
            heappop(heap)
        return -1

    def _make_room(self, need: int, before: int) -> bool:
        """Evict clean pages that are needed after access ``before`` until ``need`` is free."""
        n, width = self.instance.n, self.width
        heap = self.clean_heap
        bar = (n - before) * width  # entries below it are needed later
        while self.free < need:
            gap = self._farthest(heap, False)
            if gap < 0 or heap[0] >= bar:
                if self._give_up_cut(before):
                    continue
                self.short = min(self.short, before)
                return False
            if self.plan.farthest and not (before == self.access and self.compute_end == inf):
                dirty = self._farthest(self.dirty_heap, True)
                if dirty >= 0 and self.dirty_heap[0] < heap[0]:
                    self.short = min(self.short, before)
                    return False
            heappop(heap)
            if self.instance.far[gap] > self.access:  # not what is needed at once
                self._evict(gap)
        return True

    def _evict(self, gap: int) -> None:
        page = self.instance.page_of[gap]
        self.gap[page] = -1
        self.state[page] = _ABSENT
        self.free += self.instance.frames[page]
        self.evicted.append(gap)
        if self.cleaned[page]:
            self.cleaned[page] = False
            self.ready -= self.instance.frames[page]
        self._want(gap)

    def _want(self, gap: int) -> None:
        hold = self.instance.next_load[gap]
        if hold >= 0:
            heappush(self.want, self.order[hold] * self.width + hold)

    def _give_up_cut(self, before: int) -> bool:
        """Forget an interrupted load of something that is needed after access ``before``."""
        for page in self.cut:
            if self.instance.far[self.last_gap[page]] > before:
                self.cut.remove(page)
                self.state[page] = _ABSENT
                self.free += self.instance.frames[page]
                return True
        return False

    # -- the line in -----------------------------------------------------------------------------

    def _load(self) -> None:
        instance, want = self.instance, self.want
        waits = self.compute_end == inf and self.access < instance.n
        if waits and self.cut and self._load_for_now():
            return
        while want:
            hold = want[0] % self.width
            page = instance.page[hold]
            wanted = self.state[page] in (_ABSENT, _CUT)
            if not wanted or instance.next_load[self.last_gap[page]] != hold:
                heappop(want)  # it was loaded out of turn
                continue
            window = self.plan.window
            in_window = not window or instance.first[hold] < self.access + window
            if in_window and self._start_load(hold):
                heappop(want)
            elif waits:
                self._load_for_now()
            return

    def _load_for_now(self) -> bool:
        """A computation waits: load what it needs, though something else stands first."""
        instance = self.instance
        for hold in instance.begins[self.access]:
            absent = self.state[instance.page[hold]] in (_ABSENT, _CUT)
            if absent and not instance.creates[hold] and self._start_load(hold):
                return True
        return False

    def _start_load(self, hold: int) -> bool:
        instance = self.instance
        page, first = instance.page[hold], instance.first[hold]
        duration = instance.load_s[page]
        if self.state[page] == _CUT:
            duration = self.left[page]
            self.cut.remove(page)
        else:
            need = instance.frames[page]
            growth = instance.created_frames(self.access, first) - self.created
            if growth > 0:
                need += growth
            if self.free < need and not self._make_room(need, first):
                return False
            self.free -= instance.frames[page]
        self.state[page] = _LOADING
        self.in_hold, self.in_page = hold, page
        self.in_start, self.in_cut = self.now, False
        self.in_end = self.now + duration
        return True

    def _interrupt(self) -> None:
        """A computation waits for something else than what is being loaded: end with this slice."""
        instance = self.instance
        want = self.want
        if self.in_cut or not want or self.in_end - self.now <= instance.slice_s:
            return
        if self.in_hold < 0:  # nobody needs what is being loaded: let it end
            return
        first = instance.first[want[0] % self.width]
        if first != self.access or instance.first[self.in_hold] <= first:
            return
        slices = max(ceil((self.now - self.in_start) / instance.slice_s - 1e-9), 1)
        end = self.in_start + slices * instance.slice_s
        if end < self.in_end:
            page = instance.page[self.in_hold]
            self.left[page] = self.in_end - end
            self.in_end, self.in_cut = end, True

    def _arrived(self) -> None:
        instance = self.instance
        self.in_end = inf
        page = self.in_page
        if self.in_cut:
            self.state[page] = _CUT
            self.cut.append(page)
            heappush(self.want, self.order[self.in_hold] * self.width + self.in_hold)
            return
        self.state[page] = _RESIDENT
        self.loads.append(page)
        gap = self.gap[page] = self.last_gap[page]
        heappush(self.clean_heap, (instance.n - instance.far[gap]) * self.width + gap)

    # -- the line out ----------------------------------------------------------------------------

    def _store(self) -> None:
        if self.short < inf:
            gap = self._farthest(self.dirty_heap, True)
            if gap >= 0 and self.dirty_heap[0] < (self.instance.n - self.short) * self.width:
                self._start_store(gap)
                return
        gap = self._farthest(self.eager_heap, True)
        if gap >= 0:
            self._start_store(gap)
            return
        if self.ready >= self.plan.ahead_frames or not self.want:
            return
        gap = self._farthest(self.dirty_heap, True)
        if gap >= 0:
            bar = self.instance.first[self.want[0] % self.width]
            if self.instance.far[gap] > bar and self.clean[gap] != _LATE:
                self._start_store(gap)
                self.ready += self.instance.frames[self.out_page]
                self.cleaned[self.out_page] = True

    def _start_store(self, gap: int) -> None:
        page = self.instance.page_of[gap]
        self.out_page, self.out_gap = page, gap
        self.out_stale = self.out_dead = False
        self.out_end = self.now + self.instance.store_s[page]

    def _stored(self) -> None:
        page = self.out_page
        self.out_end, self.out_page = inf, -1
        self.stores.append(page)
        self.stored.append(self.out_gap)
        if self.out_dead:
            self.free += self.instance.frames[page]
        elif not self.out_stale:
            self.dirty[page] = False
            if self.gap[page] >= 0:
                self._offer(self.gap[page])
