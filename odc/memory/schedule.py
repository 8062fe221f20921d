"""Schedules: which pages leave after which use, found by rehearsing a recorded cycle.

Loading the soonest absent page as early as any victim allows is right while the link has time to
spare. On a busy link it costs: a page is pushed out for one that could have waited, and is loaded
once more. Where a cycle of passes is known and needs the same pages each time, that choice is
made beforehand. Between two uses a page is *kept* or *leaves*; the choice for all of them is a
schedule. Loads then run in the order of need, each as early as a page that leaves makes room, and
dirty pages that leave are written at once: they will not change again.

``decode`` tells how long a cycle takes under a schedule, on two lines and with given rates. The
search begins with the schedules of fewest loads (L. A. Belady, 1966, run around the cycle with some
frames set aside so that loads overlap) and improves the best by local moves: keep what was waited
for, let something else go. It is deterministic, and its work is bounded.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from odc.memory.events import Kind
from odc.memory.orders import Entry, RecordedOrder
from odc.memory.pages import PageTable

WORK = 250_000  # uses that a search may decode: about a third of a second
_MOVES = 600
_ROUNDS = 2  # of a cycle that is decoded: the second counts
_SLACKS = (0, 1, 2, 3, 4)  # frames set aside, in units of the largest page
_AIMED = 0.7  # share of moves that keep a page that was waited for
_GREEDY_ROUNDS = 3  # to settle, and as many that count
_AS_GOOD = 1.03
_CLEARLY = 0.99
_Keep = list[bool]


@dataclass(slots=True)
class _Use:
    """A page in use: from an event to another."""

    page: int
    end: int
    created: bool
    dirties: bool
    dies: bool


@dataclass(slots=True)
class _Event:
    """A moment at which pages are needed, and the computation behind it."""

    place: tuple[int, int]  # number of the order, place in it
    uses: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    compute_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the two lines, ns a byte."""

    load: float
    store: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What leaves, and what that takes.

    Attributes:
        leaves: by order of the cycle and place in it, the pages that leave when this use ends.
        first: pages that leave at the beginning.
        keep: for each use of the cycle, whether its page stays until the next.
        cycle_ns: time of a cycle, as decoded.
        compute_ns: computation in it.
        loads: pages loaded in a cycle.
    """

    leaves: list[list[frozenset[int]]]
    keep: tuple[bool, ...]
    cycle_ns: float
    compute_ns: float
    loads: float
    first: frozenset[int] = frozenset()


class Cycle:
    """Passes as events and uses: a cycle that goes on for ever, or a run from what is resident.

    Args:
        table: pages and their sizes.
        orders: recorded orders of the passes, none of which visits a set.
        num_frames: capacity.
        rates: of the lines.
        resident: what is resident at the beginning of a run; None for a cycle.
    """

    def __init__(
        self,
        table: PageTable,
        orders: Sequence[RecordedOrder],
        num_frames: int,
        rates: Rates,
        resident: Sequence[int] | None = None,
    ) -> None:
        self.table, self.orders = table, orders
        self.frames = table.frames
        pinned = {
            p
            for group, spec in enumerate(table.groups)
            if spec.pinned
            for p in table.of(group, Kind.PARAMETER)
        }
        self.num_frames = num_frames - sum(self.frames[p] for p in pinned)
        self._pinned = pinned
        self.load_ns = [p.num_bytes * rates.load for p in table.pages]
        self.store_ns = [p.num_bytes * rates.store for p in table.pages]
        self.uses: list[_Use] = []
        self.events: list[_Event] = []
        for number, order in enumerate(orders):
            self._add_order(number, order)
        self.compute_ns = sum(e.compute_ns for e in self.events)
        self.num_uses = len(self.uses)  # real ones; behind them stands what is resident
        self.cyclic = resident is None
        self.resident = [p for p in resident or () if p not in pinned]
        self._link()
        self.rounds = _ROUNDS if self.cyclic else 1

    # -- events ----------------------------------------------------------------------------------

    def _add_order(self, number: int, order: RecordedOrder) -> None:
        ends: dict[int, list[int]] = {}  # place at which uses end
        for place, entry in enumerate(order.entries):
            station = order.stations.stations[entry.station]
            moments = sorted(
                {entry.at_ns[k] for k in Kind if (entry.kinds | entry.creates) >> k & 1} | {0.0}
            )
            opened: dict[int, int] = {}
            held_ns = min(max(entry.held_ns, moments[-1]), entry.dur_ns)
            for at_ns, next_ns in zip(moments, [*moments[1:], held_ns], strict=True):
                event = _Event((number, place), compute_ns=max(next_ns - at_ns, 0.0))
                self._open(event, entry, station.groups[0], at_ns, opened)
                self.events.append(event)
            ends.setdefault(place + entry.span, []).extend(opened.values())
            for use in ends.pop(place, []):
                self.uses[use].end = len(self.events) - 1
                event.ends.append(use)
            rest = max(entry.dur_ns - held_ns, 0.0)
            self.events.append(_Event((number, place), compute_ns=rest))
        for left in ends.values():  # held to the end of the pass
            for use in left:
                self.uses[use].end = len(self.events) - 1
                self.events[-1].ends.append(use)

    def _open(
        self, event: _Event, entry: Entry, group: int, at_ns: float, opened: dict[int, int]
    ) -> None:
        for kind in Kind:
            bit = 1 << kind
            if not (entry.kinds | entry.creates) & bit or entry.at_ns[kind] != at_ns:
                continue
            for page in self.table.of(group, kind):
                if page in self._pinned:
                    continue
                dirties = bool(entry.writes & bit)
                created = bool(entry.creates & bit and not self.table.groups[group].compact)
                if page in opened:
                    self.uses[opened[page]].dirties |= dirties
                    continue
                opened[page] = len(self.uses)
                event.uses.append(opened[page])
                dies = bool(entry.drops & bit)
                self.uses.append(_Use(page, 0, created, dirties, dies))

    def _link(self) -> None:
        by_page: dict[int, list[int]] = {}
        first_event = {u: e for e, event in enumerate(self.events) for u in event.uses}
        for number, use in enumerate(self.uses):
            by_page.setdefault(use.page, []).append(number)
        count = len(self.uses)
        self.before, self.next = [-1] * count, [-1] * count
        self.start = [first_event[u] for u in range(count)]
        for numbers in by_page.values():
            for at, number in enumerate(numbers):
                if at or self.cyclic:
                    self.before[number] = numbers[at - 1]
                if at + 1 < len(numbers) or self.cyclic:
                    self.next[number] = numbers[(at + 1) % len(numbers)]
        self._around = [u for u in range(count) if 0 <= self.next[u] <= u]
        for page in self.resident:  # in use until the beginning
            following = by_page.get(page, [-1])[0]
            if following >= 0:
                self.before[following] = len(self.uses)
            self.uses.append(_Use(page, -1, False, bool(self.table.is_dirty[page]), False))
            self.before.append(-1)
            self.next.append(following)
            self.start.append(-1)

    def moment(self, u: int, turn: int, number: int) -> int:
        """Number of the event, counted through all turns, that uses a page next after a use."""
        following = self.next[u]
        if following < 0:
            return 1 << 40
        there = self.start[following]
        return (turn + (there <= number)) * len(self.events) + there

    # -- decoding --------------------------------------------------------------------------------

    def decode(self, keep: _Keep, waits: list[int] | None = None) -> tuple[float, float] | None:
        """Time and loads of a cycle under a schedule; None if it does not fit.

        Args:
            keep: for each use, whether its page stays until its next use.
            waits: takes the uses that were waited for.
        """
        uses, frames = self.uses, self.frames
        room = self.num_frames - sum(
            frames[uses[u].page] for u in self._around if keep[u] and not uses[u].dies
        )
        room -= sum(frames[page] for page in self.resident)
        if room < 0:
            return None
        lines = _Lines(self, room)
        for u in range(self.num_uses, len(uses)):
            lines.begin(u, keep[u])
        start = 0.0
        for turn in range(self.rounds):
            if turn == self.rounds - 1:
                start = lines.now
            for event in self.events:
                if not lines.run(event, keep, waits):
                    return None
        return lines.now - start, lines.loads / self.rounds

    # -- the fewest loads ------------------------------------------------------------------------

    def fewest_loads(self, spare_frames: int) -> _Keep | None:
        """Belady's choice around the cycle, with some frames set aside; None if that is too few."""
        keep = [True] * len(self.uses)
        here: dict[int, int] = {}  # page -> its last use
        pinned: set[int] = set()
        farthest: list[tuple[int, int, int]] = []  # (-next use, page, use)
        free = self.num_frames - spare_frames
        for u in range(self.num_uses, len(self.uses)):
            page = self.uses[u].page
            here[page] = u
            free -= self.frames[page]
            heapq.heappush(farthest, (-self.moment(u, 0, -1), page, u))
        for turn in range(3 if self.cyclic else 1):
            for number, event in enumerate(self.events):
                for u in event.uses:
                    page = self.uses[u].page
                    if page not in here:
                        free -= self.frames[page]
                    here[page] = u
                    pinned.add(page)
                while free < 0:
                    if not farthest:
                        return None
                    _, page, u = heapq.heappop(farthest)
                    if here.get(page) == u and page not in pinned:
                        keep[u] = False
                        del here[page]
                        free += self.frames[page]
                for u in event.ends:
                    page = self.uses[u].page
                    pinned.discard(page)
                    if self.uses[u].dies:
                        free += self.frames[page]
                        here.pop(page, None)
                        continue
                    keep[u] = True
                    heapq.heappush(farthest, (-self.moment(u, turn, number), page, u))
        return keep

    # -- the search ------------------------------------------------------------------------------

    def search(
        self, last: Schedule | None = None, work: int = WORK, seed: int = 0
    ) -> Schedule | None:
        """The best schedule found; None if none fits or the rule without a schedule is faster.

        Args:
            last: what was followed until now. It is kept if it is nearly as good: another one
                costs loads until residency fits it.
            work: uses that may be decoded.
            seed: of the moves.
        """
        greedy_ns = _Greedy(self).run()
        largest = max((self.frames[u.page] for u in self.uses), default=1)
        best: tuple[float, float] | None = None
        keep: _Keep = []
        starts: list[_Keep | None] = [self.fewest_loads(n * largest) for n in _SLACKS]
        starts.append([False] * len(self.uses))  # fits wherever anything does
        before = None
        if last is not None and len(last.keep) == len(self.uses):
            starts.append(list(last.keep))
            before = self.decode(list(last.keep))
        for tried in starts:
            found = self.decode(tried) if tried is not None else None
            if tried is not None and found is not None and (best is None or found < best):
                best, keep = found, tried
        if best is None:
            return None
        keep, best = self._improve(keep, best, work, random.Random(seed))
        if greedy_ns is not None and greedy_ns <= _CLEARLY * best[0]:
            return None
        if before is not None and before[0] <= _AS_GOOD * best[0]:
            return last
        return self._schedule(keep, best)

    def _improve(
        self, keep: _Keep, best: tuple[float, float], work: int, rng: random.Random
    ) -> tuple[_Keep, tuple[float, float]]:
        lasting = [u for u, use in enumerate(self.uses) if not use.dies and self.next[u] >= 0]
        waits: list[int] = []
        self.decode(keep, waits)
        moves = min(_MOVES, work // (self.rounds * max(len(self.uses), 1)))
        for _ in range(moves if lasting else 0):
            if best[0] <= self.compute_ns * (1 + 1e-9) and not waits:
                break
            tried = self._move(keep, waits, lasting, rng)
            now_waits: list[int] = []
            found = self.decode(tried, now_waits)
            if found is not None and found <= best:
                best, keep, waits = found, tried, now_waits
        return keep, best

    def _move(self, keep: _Keep, waits: list[int], lasting: list[int], rng: random.Random) -> _Keep:
        """A neighbour: something is kept that was waited for, something else leaves."""
        tried = keep[:]
        if waits and rng.random() < _AIMED:
            wanted = self.before[rng.choice(waits)]
        else:
            wanted = rng.choice(lasting)
        if wanted < 0:  # it was not there at the beginning
            wanted = rng.choice(lasting)
        kind = rng.random()
        if kind < 0.85:
            tried[wanted] = True
        if kind >= 0.1:
            for _ in range(8):
                other = rng.choice(lasting)
                if tried[other] and other != wanted:
                    tried[other] = False
                    break
        return tried

    def _schedule(self, keep: _Keep, best: tuple[float, float]) -> Schedule:
        leaves: list[list[set[int]]] = [[set() for _ in order.entries] for order in self.orders]
        for event in self.events:
            number, place = event.place
            for u in event.uses:
                if not keep[u] and not self.uses[u].dies:
                    leaves[number][place].add(self.uses[u].page)
        frozen = [[frozenset(pages) for pages in order] for order in leaves]
        real = range(self.num_uses, len(self.uses))
        first = frozenset(self.uses[u].page for u in real if not keep[u])
        return Schedule(frozen, tuple(keep), best[0], self.compute_ns, best[1], first)


class _Lines:
    """The two lines and the frames while a schedule is decoded."""

    __slots__ = (
        "cycle",
        "dirty",
        "frames_ns",
        "free",
        "freed",
        "left_ns",
        "load_ns",
        "loads",
        "now",
        "store_ns",
    )

    def __init__(self, cycle: Cycle, room: int) -> None:
        self.cycle = cycle
        self.now = 0.0
        self.load_ns = 0.0  # the way in is busy until then
        self.store_ns = 0.0
        self.frames_ns = 0.0  # when the last frame that was taken became free
        self.free = room
        self.freed: list[tuple[float, int]] = []
        self.left_ns = [0.0] * len(cycle.frames)
        self.dirty = bytearray(len(cycle.frames))
        self.loads = 0

    def run(self, event: _Event, keep: _Keep, waits: list[int] | None) -> bool:
        """One event; False if there is no room for what it needs."""
        cycle = self.cycle
        ready = self.now
        for u in event.uses:
            use, last = cycle.uses[u], cycle.before[u]
            here = last >= 0 and keep[last] and not cycle.uses[last].dies
            if use.created or not here:
                if not self._take(cycle.frames[use.page]):
                    return False
                if use.created:
                    ready = max(ready, self.frames_ns)
                else:
                    self._load(use.page)
                    if self.load_ns > ready:
                        ready = self.load_ns
                        if waits is not None:
                            waits.append(u)
            if use.dirties:
                self.dirty[use.page] = 1
        self.now = ready + event.compute_ns
        for u in event.ends:
            self._end(u, keep[u])
        return True

    def begin(self, u: int, kept: bool) -> None:
        """A page that is resident at the beginning stays or leaves."""
        use = self.cycle.uses[u]
        self.dirty[use.page] = use.dirties
        self._end(u, kept)

    def _take(self, count: int) -> bool:
        while self.free < count:
            if not self.freed:
                return False
            when, frames = heapq.heappop(self.freed)
            self.free += frames
            if when > self.frames_ns:
                self.frames_ns = when
        self.free -= count
        return True

    def _load(self, page: int) -> None:
        start = max(self.load_ns, self.frames_ns, self.left_ns[page])
        self.load_ns = start + self.cycle.load_ns[page]
        self.loads += 1

    def _end(self, u: int, kept: bool) -> None:
        use = self.cycle.uses[u]
        if kept and not use.dies:
            return
        when = self.now
        if self.dirty[use.page]:
            self.dirty[use.page] = 0
            if not use.dies:
                self.store_ns = max(self.store_ns, self.now) + self.cycle.store_ns[use.page]
                when = self.store_ns
        self.left_ns[use.page] = when
        heapq.heappush(self.freed, (when, self.cycle.frames[use.page]))


class _Greedy:
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

    def run(self) -> float | None:
        """Time of a run, or of a cycle once it has settled; None if something never fits."""
        settled_ns = 0.0
        rounds = _GREEDY_ROUNDS if self.cycle.cyclic else 0
        for turn in range(2 * rounds or 1):
            if turn == rounds:
                settled_ns = self.now
            for number, event in enumerate(self.cycle.events):
                self.moment = turn * len(self.cycle.events) + number
                if not self._event(event):
                    return None
        return (self.now - settled_ns) / max(rounds, 1)

    def _event(self, event: _Event) -> bool:
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
        if use.dies:
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
