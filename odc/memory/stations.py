"""Stations: the places of a pass where groups are needed, and the orders in which they recur.

A station is a single group, or a set of groups of which some are needed, in any order (the
experts of a layer). A *visit* is a station in a phase. The visits of a pass recur in a fixed order
even where the members of a set do not, so the library keeps one recorded order a context and
walks it ahead; what differs from source to source is only how likely each member is.

On a visit that was not expected the position is looked up again, near first, and the walk goes
on from there; a recorded order is replaced when its pass ends, never cleared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from odc.memory.events import FORWARD_PHASES, Kind, Op
from odc.memory.pages import PageTable


@dataclass(frozen=True, slots=True)
class Station:
    """A group, or the members of a set.

    Attributes:
        groups: group ids; for a set, in order of its members.
        set_index: number of the set, -1 for a single group.
    """

    groups: tuple[int, ...]
    set_index: int = -1


@dataclass(slots=True)
class Visit:
    """A station in a phase, as recorded.

    Attributes:
        station, phase: what recurs.
        kinds: bit set of kinds whose content was needed (a fresh gradient's was not).
        used: (num_members,) bool, the members needed; None for a single group.
        order: members in the order they ran.
        dur_ns: compute from this visit to the next.
    """

    station: int
    phase: int
    kinds: int = 0
    used: np.ndarray | None = None
    order: list[int] = field(default_factory=list)
    dur_ns: float = 0.0

    @property
    def key(self) -> int:
        return self.station * 8 + self.phase

    def note(self, kind: int, op: int, member: int) -> None:
        if op in (Op.READ, Op.WRITE):
            self.kinds |= 1 << kind
        if self.used is not None and not self.used[member]:
            self.used[member] = True
            self.order.append(member)


@dataclass(slots=True)
class Upcoming:
    """A visit ahead. ``eta_ns`` is compute from now; ``cycle`` 0 is the pass that runs."""

    visit: Visit
    eta_ns: float
    cycle: int


class Stations:
    """The stations of a model and the pages behind them."""

    def __init__(self, table: PageTable, sets: list[tuple[int, ...]]) -> None:
        self.table = table
        self.sets = sets
        self.stations: list[Station] = []
        self.of_group: list[int] = [-1] * len(table.groups)
        self.member_of: list[int] = [0] * len(table.groups)
        for set_index, groups in enumerate(sets):
            self._add(Station(groups, set_index))
        for group in range(len(table.groups)):
            if self.of_group[group] < 0:
                self._add(Station((group,)))
        self._pages: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _add(self, station: Station) -> None:
        for member, group in enumerate(station.groups):
            self.of_group[group] = len(self.stations)
            self.member_of[group] = member
        self.stations.append(station)

    def pages(self, station: int, kinds: int) -> tuple[np.ndarray, np.ndarray]:
        """Pages of a station's kinds, and for each the member it belongs to. (n,), (n,)."""
        found = self._pages.get((station, kinds))
        if found is None:
            ids: list[int] = []
            members: list[int] = []
            for member, group in enumerate(self.stations[station].groups):
                own = sorted({p for k in Kind if kinds >> k & 1 for p in self.table.of(group, k)})
                ids += own
                members += [member] * len(own)
            found = (np.array(ids, np.int64), np.array(members, np.int64))
            self._pages[station, kinds] = found
        return found


class OrderLibrary:
    """Recorded orders by context, the pass that runs, and the tape of its forward."""

    def __init__(self, stations: Stations) -> None:
        self.stations = stations
        self.orders: dict[int, list[Visit]] = {}
        self._followers: dict[int, dict[int, int]] = {}  # context -> how often which came next
        self.ctx = -1
        self.live: list[Visit] = []
        self.position = -1  # of the current visit in the recorded order
        self.diverged = 0
        self.tape: list[np.ndarray | None] = [None] * len(stations.sets)
        self.tape_order: list[list[int]] = [[] for _ in stations.sets]
        self.touched: list[np.ndarray | None] = [None] * len(stations.sets)

    def begin_pass(self, ctx: int) -> None:
        """A pass in context ``ctx`` begins; the one before it is recorded."""
        if self.live:
            self._keep(self.ctx, self.live)
            followers = self._followers.setdefault(self.ctx, {})
            followers[ctx] = followers.get(ctx, 0) + 1
        self.ctx = ctx
        self.live = []
        self.position = -1
        self.tape = [None] * len(self.tape)

    def end_update(self) -> None:
        """The optimizer step is over: no set has a gradient any more."""
        self.touched = [None] * len(self.touched)

    def _keep(self, ctx: int, order: list[Visit]) -> None:
        old = self.orders.get(ctx)
        if old is not None and len(old) == len(order):
            for before, now in zip(old, order, strict=True):
                if before.key == now.key:
                    now.dur_ns = 0.7 * before.dur_ns + 0.3 * now.dur_ns
                    now.kinds |= before.kinds
        self.orders[ctx] = order

    def visit(self, station: int, phase: int) -> Visit:
        """Begin a visit; finds its place in the recorded order."""
        members = self.stations.stations[station]
        used = np.zeros(len(members.groups), bool) if members.set_index >= 0 else None
        made = Visit(station, phase, used=used)
        self.live.append(made)
        order = self.orders.get(self.ctx, [])
        expected = self.position + 1
        if expected < len(order) and order[expected].key == made.key:
            self.position = expected
        elif order:
            self._find_again(order, made.key)
        return made

    def _find_again(self, order: list[Visit], key: int) -> None:
        self.diverged += 1
        start = self.position + 1
        for index in [*range(start, len(order)), *range(min(start, len(order)))]:
            if order[index].key == key:
                self.position = index
                return

    def forward_done(self, set_index: int, used: np.ndarray, order: list[int]) -> None:
        """The members that a set's forward needs are known: its backward needs the same."""
        self.tape[set_index] = used
        self.tape_order[set_index] = order
        seen = self.touched[set_index]
        self.touched[set_index] = used.copy() if seen is None else seen | used

    def successor(self, ctx: int) -> int:
        """The context that follows most often: an evaluation now and then is not expected."""
        followers = self._followers.get(ctx)
        return max(followers, key=lambda c: followers[c]) if followers else ctx

    def upcoming(self) -> Iterator[Upcoming]:
        """Visits ahead: the rest of this pass, then the whole pass that is expected after it."""
        yield from self.rest()
        yield from self.following()

    def rest(self) -> Iterator[Upcoming]:
        """Visits ahead in this pass."""
        eta = self._left_ns()
        for visit in self.orders.get(self.ctx, [])[self.position + 1 :]:
            yield Upcoming(visit, eta, 0)
            eta += visit.dur_ns

    def following(self) -> Iterator[Upcoming]:
        """Visits of the pass that is expected after this one."""
        order = self.orders.get(self.ctx)
        if order is None:
            return
        eta = self._left_ns() + sum(v.dur_ns for v in order[self.position + 1 :])
        for visit in self.orders.get(self.successor(self.ctx), []):
            yield Upcoming(visit, eta, 1)
            eta += visit.dur_ns

    def _left_ns(self) -> float:
        """Compute left in the current visit: half of it, for all one knows."""
        order = self.orders.get(self.ctx, [])
        return 0.5 * order[self.position].dur_ns if 0 <= self.position < len(order) else 0.0

    def is_forward(self, phase: int) -> bool:
        return phase in FORWARD_PHASES
