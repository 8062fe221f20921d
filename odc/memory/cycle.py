"""A cycle of passes as events and uses: what rehearsals run.

An *event* is a moment at which pages are needed, with the computation behind it; a *use* is a page
in use, from an event to another. Between a use and the next of the same page it is *kept* or
*leaves*; a choice for all uses is what ``schedule.py`` looks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from odc.memory.events import Kind
from odc.memory.pages import PageTable
from odc.memory.recorded import Entry, RecordedOrder

ROUNDS = 2  # of a cycle that are run: the second counts
Keep = list[bool]  # by use: its page stays until its next use


@dataclass(slots=True)
class Use:
    """A page in use: from an event to another."""

    page: int
    end: int
    created: bool
    dirties: bool
    dies: bool
    goes: bool = False  # home, for an update there: it leaves whatever a schedule says

    @property
    def leaves(self) -> bool:
        """Whether it is gone when the use ends, with no choice."""
        return self.dies or self.goes


@dataclass(slots=True)
class Event:
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
class Start:
    """What a run begins with.

    Attributes:
        resident: pages that are there, or on their way in.
        load_ns: time for which the way in is still busy.
        stored_ns: of pages that are being stored, the time until that has ended.
    """

    resident: Sequence[int]
    load_ns: float = 0.0
    stored_ns: Mapping[int, float] = field(default_factory=dict)


class Cycle:
    """Passes as events and uses: a cycle that goes on for ever, or a run from what is resident.

    Args:
        table: pages and their sizes.
        orders: recorded orders of the passes, none of which visits a set.
        num_frames: capacity.
        rates: of the lines.
        start: what a run begins with; None for a cycle.
        chance: that the second order of a run follows the first.
        other, other_chance: what may follow instead; its pages are worth to be kept as well.
    """

    def __init__(
        self,
        table: PageTable,
        orders: Sequence[RecordedOrder],
        num_frames: int,
        rates: Rates,
        start: Start | None = None,
        chance: float = 1.0,
        other: RecordedOrder | None = None,
        other_chance: float = 0.0,
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
        mean = sum(table.load_weight) / max(len(table.load_weight), 1) or 1.0
        self.load_ns = [
            p.home_bytes * rates.load * weight / mean
            for p, weight in zip(table.pages, table.load_weight, strict=True)
        ]
        self.store_ns = [p.home_bytes * rates.store for p in table.pages]
        self.uses: list[Use] = []
        self.events: list[Event] = []
        self.chance, self.surely = chance, 0
        self.other_chance = other_chance
        self.other = [] if other is None else self._first_uses(other)
        self._far = {page: (1 << 30) + at for at, (page, _) in enumerate(self.other)}
        for number, order in enumerate(orders):
            self._add_order(number, order)
            if number == 0 or start is None:
                self.surely = len(self.events)  # events of passes that surely come
        self.compute_ns = sum(e.compute_ns for e in self.events)
        self.num_uses = len(self.uses)  # real ones; behind them stands what is resident
        self.cyclic = start is None
        self.begins_with = start or Start(())
        self.resident = [p for p in self.begins_with.resident if p not in pinned]
        self._link()
        self.last = self._last_uses() if self.other else {}
        self.rounds = ROUNDS if self.cyclic else 1

    def _first_uses(self, order: RecordedOrder) -> list[tuple[int, float]]:
        """Pages whose content a pass needs, each with the computation before that."""
        first: dict[int, float] = {}
        for place, pages in enumerate(order.uses):
            for page in pages:
                if page not in self._pinned:
                    first.setdefault(page, order.start_ns[place])
        return list(first.items())

    def _last_uses(self) -> dict[int, int]:
        """By page of what may follow instead: its last use in what surely comes, if it has one."""
        wanted = {page for page, _ in self.other}
        last = {u.page: n for n, u in enumerate(self.uses) if n >= self.num_uses}
        for number, use in enumerate(self.uses[: self.num_uses]):
            if self.start[number] < self.surely:
                last[use.page] = number
        return {page: u for page, u in last.items() if page in wanted}

    # -- events ----------------------------------------------------------------------------------

    def _add_order(self, number: int, order: RecordedOrder) -> None:
        ends: dict[int, list[int]] = {}  # place at which uses end
        begun = len(self.uses)
        for place, entry in enumerate(order.entries):
            station = order.stations.stations[entry.station]
            moments = sorted(
                {entry.at_ns[k] for k in Kind if (entry.kinds | entry.creates) >> k & 1} | {0.0}
            )
            opened: dict[int, int] = {}
            held_ns = min(max(entry.held_ns, moments[-1]), entry.dur_ns)
            for at_ns, next_ns in zip(moments, [*moments[1:], held_ns], strict=True):
                event = Event((number, place), compute_ns=max(next_ns - at_ns, 0.0))
                self._open(event, entry, station.groups[0], at_ns, opened)
                self.events.append(event)
            ends.setdefault(place + entry.span, []).extend(opened.values())
            for use in ends.pop(place, []):
                self.uses[use].end = len(self.events) - 1
                event.ends.append(use)
            if entry.goes:
                self._let_go(order.stations.member_pages(entry.station, entry.goes), begun)
            rest = max(entry.dur_ns - held_ns, 0.0)
            self.events.append(Event((number, place), compute_ns=rest))
        for left in ends.values():  # held to the end of the pass
            for use in left:
                self.uses[use].end = len(self.events) - 1
                self.events[-1].ends.append(use)

    def _open(
        self, event: Event, entry: Entry, group: int, at_ns: float, opened: dict[int, int]
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
                self.uses.append(Use(page, 0, created, dirties, dies))

    def _let_go(self, pages: Sequence[int], begun: int) -> None:
        """Pages leave for an update: at the end of their last use of this pass."""
        last = {self.uses[u].page: u for u in range(begun, len(self.uses))}
        for page in pages:
            if page in last:
                self.uses[last[page]].goes = True

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
        self.around = [u for u in range(count) if 0 <= self.next[u] <= u]
        for page in self.resident:  # in use until the beginning
            following = by_page.get(page, [-1])[0]
            if following >= 0:
                self.before[following] = len(self.uses)
            dirty = bool(self.table.is_dirty[page]) and page not in self.begins_with.stored_ns
            self.uses.append(Use(page, -1, False, dirty, False))
            self.before.append(-1)
            self.next.append(following)
            self.start.append(-1)

    def moment(self, u: int, turn: int, number: int) -> int:
        """Number of the event, counted through all turns, that uses a page next after a use."""
        following = self.next[u]
        if following < 0:
            return self._far.get(self.uses[u].page, 1 << 40)
        there = self.start[following]
        return (turn + (there <= number)) * len(self.events) + there
