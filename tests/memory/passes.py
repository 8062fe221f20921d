"""Passes of groups by hand: a library, what is known ahead, and a prefetcher told as a pager would.

Groups are single pages of two frames, frozen; page ids are group ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.orders import OrderLibrary
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.prefetch import Prefetcher
from odc.memory.stations import Stations, Visit

P, G, M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
Step = tuple[int, Phase, float]  # group, phase, compute until the next


def stations(num_groups: int, sets: list[tuple[int, ...]] | None = None) -> Stations:
    """Frozen groups of one page; page ids are group ids."""
    table = PageTable(64 * FRAME_BYTES)
    for group in range(num_groups):
        table.add_group(GroupSpec(f"g{group}", 2 * FRAME_BYTES, 0, False), {})
    table.seal()
    return Stations(table, sets or [])


def trained(num_groups: int, sets: list[tuple[int, ...]] | None = None) -> Stations:
    """Groups with a page each of parameters, gradient and one moment."""
    table = PageTable(64 * FRAME_BYTES)
    for group in range(num_groups):
        table.add_group(GroupSpec(f"g{group}", 2 * FRAME_BYTES, 1, True), {})
    table.seal()
    return Stations(table, sets or [])


def go(library: OrderLibrary, group: int, phase: Phase = FORWARD, dur_ns: float = 10.0) -> Visit:
    """Visit a group and read its parameters."""
    places = library.stations
    visit = library.visit(places.of_group[group], phase)
    visit.note(P, Op.READ, places.member_of[group])
    visit.dur_ns = dur_ns
    return visit


def record(library: OrderLibrary, groups: Iterable[int], ctx: int = 0) -> None:
    """A pass of forward visits."""
    library.begin_pass(ctx)
    for group in groups:
        go(library, group)


def ahead(library: OrderLibrary, count: int) -> list[int]:
    """First groups of the visits expected next: of this pass, then of those that follow."""
    places = library.stations.stations
    found: list[int] = []
    for number, ctx in enumerate((library.ctx, *library.chain)):
        order = library.orders.get(ctx)
        if order is None:
            break
        first = library.position + 1 if number == 0 else 0
        found += [
            places[entry.station].groups[0]
            for at, entry in enumerate(order.entries)
            if at >= first and (number or library.expects(order, at))
        ]
    return found[:count]


class Player:
    """Plays passes of plain groups to a prefetcher, as the pager would without moving a page."""

    def __init__(self, library: OrderLibrary, prefetcher: Prefetcher) -> None:
        self.library, self.prefetcher = library, prefetcher

    def play(self, steps: Sequence[Step], ctx: int = 0) -> Iterable[int]:
        """One pass; yields the number of each visit when its pages are released."""
        self.library.begin_pass(ctx)
        for number, (group, phase, dur_ns) in enumerate(steps):
            self.visit(group, phase, dur_ns)
            yield number

    def visit(self, group: int, phase: Phase = FORWARD, dur_ns: float = 10.0) -> Visit:
        """One visit of a group, up to its release."""
        visit = self.begin(group, phase, dur_ns)
        self.end(group)
        return visit

    def begin(self, group: int, phase: Phase = FORWARD, dur_ns: float = 10.0) -> Visit:
        """A visit up to the moment at which its page is there."""
        places = self.library.stations
        visit = self.library.visit(places.of_group[group], phase)
        self.prefetcher.advance(visit, 1, [])
        visit.note(P, Op.READ, places.member_of[group])
        visit.dur_ns = dur_ns
        return visit

    def end(self, group: int) -> None:
        """A group's pages are released."""
        for page in self.library.stations.table.of(group, P):
            self.prefetcher.until[page] = self.prefetcher.next_use(page)

    def pass_of(self, groups: Iterable[int], ctx: int = 0, dur_ns: float = 10.0) -> None:
        """A whole pass of forward visits."""
        for _ in self.play([(g, FORWARD, dur_ns) for g in groups], ctx):
            pass


def put(table: PageTable, page: int, state: PageState) -> None:
    """Set a page's state as the books would: whoever arrives can go."""
    table.set_state(page, state)
    table.is_evictable[page] = state == PageState.RESIDENT
