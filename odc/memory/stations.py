"""Stations: the places of a pass where groups are needed.

A station is a single group, or a set of groups of which some are needed, in any order (the
experts of a layer). A *visit* is a station in a phase. The visits of a pass recur in a fixed order
even where the members of a set do not, so that orders are recorded of visits (``orders.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from odc.memory.events import Kind, Op
from odc.memory.pages import PageTable

_READ, _CREATE = Op.READ, Op.CREATE  # looking a name up in an enumeration is slow
_AT_ONCE = (0.0,) * len(Kind)


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
    """A station in a phase, as it happens.

    Attributes:
        station, phase: what recurs.
        kinds: bit set of kinds whose content was needed (a fresh gradient's was not).
        creates, writes, drops: bit sets of kinds that were made fresh, changed, and let die.
        goes: bit set of kinds that have left the device for an update at home.
        at_ns: by kind, compute from the beginning of the visit to its first need.
        held_ns: compute from the beginning of the visit to its last release.
        span: visits that began while its pages were held.
        used: (num_members,) bool, the members needed; None for a single group.
        order: members in the order they ran.
        dur_ns: compute from this visit to the next.
        place: its place in the recorded order, -1 for none.
    """

    station: int
    phase: int
    kinds: int = 0
    creates: int = 0
    writes: int = 0
    at_ns: Sequence[float] = _AT_ONCE
    held_ns: float = 0.0
    span: int = 0
    drops: int = 0
    goes: int = 0
    used: np.ndarray | None = None
    order: list[int] = field(default_factory=list)
    dur_ns: float = 0.0
    place: int = -1

    @property
    def key(self) -> int:
        return visit_key(self.station, self.phase)

    def note(self, kind: int, op: int, member: int) -> None:
        """A kind of a group was needed; ``member``: the group's place in its set."""
        bit = 1 << kind
        if self.dur_ns and not (self.kinds | self.creates) & bit:
            self.at_ns = [*self.at_ns[:kind], self.dur_ns, *self.at_ns[kind + 1 :]]
        if op == _READ:
            self.kinds |= bit
        elif op == _CREATE:
            self.creates |= bit
            self.writes |= bit
        else:
            self.kinds |= bit
            self.writes |= bit
        if self.used is not None:
            self._use(member)

    def go_home(self, kinds: int, member: int) -> None:
        """Kinds have left for an update at home."""
        self.goes |= kinds
        self._use(member)

    def _use(self, member: int) -> None:
        if self.used is not None and not self.used[member]:
            self.used[member] = True
            self.order.append(member)


def visit_key(station: int, phase: int) -> int:
    """What recurs, as one number."""
    return station * 8 + phase


class Stations:
    """The stations of a model and the pages behind them."""

    def __init__(self, table: PageTable, sets: list[tuple[int, ...]]) -> None:
        self.table = table
        self.sets = sets
        self.stations: list[Station] = []
        self.set_of: list[int] = []  # by station, its set; -1 for a single group
        self.of_group: list[int] = [-1] * len(table.groups)
        self.member_of: list[int] = [0] * len(table.groups)
        for set_index, groups in enumerate(sets):
            self._add(Station(groups, set_index))
        for group in range(len(table.groups)):
            if self.of_group[group] < 0:
                self._add(Station((group,)))
        self._pages: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._lists: dict[tuple[int, int, int], tuple[int, ...]] = {}

    @property
    def members(self) -> list[int]:
        """Members of each set, as scorers take it; one set of one where there is none."""
        return [len(groups) for groups in self.sets] or [1]

    def _add(self, station: Station) -> None:
        for member, group in enumerate(station.groups):
            self.of_group[group] = len(self.stations)
            self.member_of[group] = member
        self.stations.append(station)
        self.set_of.append(station.set_index)

    def pages(self, station: int, kinds: int) -> tuple[np.ndarray, np.ndarray]:
        """Pages of a station's kinds, and for each the member it belongs to. (n,), (n,)."""
        found = self._pages.get((station, kinds))
        if found is None:
            members = range(len(self.stations[station].groups))
            own = [self.member_pages(station, kinds, m) for m in members]
            ids = [p for pages in own for p in pages]
            of = [m for m, pages in zip(members, own, strict=True) for _ in pages]
            found = (np.array(ids, np.int64), np.array(of, np.int64))
            self._pages[station, kinds] = found
        return found

    def member_pages(self, station: int, kinds: int, member: int = 0) -> tuple[int, ...]:
        """Pages of one member's kinds."""
        found = self._lists.get((station, kinds, member))
        if found is None:
            group = self.stations[station].groups[member]
            ids = {p for k in Kind if kinds >> k & 1 for p in self.table.of(group, k)}
            found = self._lists[station, kinds, member] = tuple(sorted(ids))
        return found
