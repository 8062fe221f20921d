"""The board: lines, their queues, and who waits for whom. Every engine keeps its commands here.

A command that waits for others has a count of them; the last one that ends puts it into its line's
queue, a heap by priority. So what a submit, a start or an end costs does not grow with how much is
queued. The board has no clock and no lock and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from odc.memory.engines.base import CommandKind, HomeUpdate, Priority, Ticket
from odc.memory.events import Tier
from odc.memory.pages import Page

_LOAD, _RELEASE = CommandKind.LOAD, CommandKind.RELEASE  # looking up a member's name is slow
_SHOWN = 20  # commands of a line in a dump
_NUMBERS = 48  # bits of a key that hold the number of a command


class Line:
    """Commands of one direction and tier that are ready, best first.

    Attributes:
        name: for people.
        tier: of the home; None for moves and updates.
        active: the command that runs now.
    """

    def __init__(self, name: str, tier: Tier | None) -> None:
        self.name = name
        self.tier = tier
        self.active: Ticket | None = None
        self._heap: list[tuple[int, Ticket]] = []

    def push(self, ticket: Ticket) -> None:
        """Queue a command that is ready; again, if its priority has changed."""
        rank = 2 * ticket.priority + (not ticket.started)
        ticket.key = key = (rank << _NUMBERS) | ticket.number
        heappush(self._heap, (key, ticket))

    def best_key(self) -> int:
        """Key of the command that goes first, -1 if none is ready. Lower is better."""
        heap = self._heap
        while heap:
            key, ticket = heap[0]
            if ticket.key == key:
                return key
            heappop(heap)  # taken back, or queued again under another key
        return -1

    def pop(self) -> Ticket | None:
        """Take the command that goes first."""
        heap = self._heap
        while heap:
            key, ticket = heappop(heap)
            if ticket.key == key:
                ticket.key = -1
                return ticket
        return None


def key_of(ticket: Ticket) -> int:
    """Order on a line: priority, then what has begun, then order of submission."""
    return ((2 * ticket.priority + (not ticket.started)) << _NUMBERS) | ticket.number


class Board:
    """The commands of an engine.

    Args:
        tiers: tiers of the home, each with a line in and a line out.
        tier_of: tells where a page has its home.
    """

    def __init__(self, tiers: Iterable[Tier], tier_of: Callable[[int], Tier]) -> None:
        self._tier_of = tier_of
        tiers = tuple(tiers)
        self._only_in: Line | None = None  # where all pages have their home in one tier
        names = [f"{tier.name.lower()} " if len(tiers) > 1 else "" for tier in tiers]
        self.moves = Line("moves", None)
        self.updates = Line("updates", None)
        self.ins = {t: Line(f"{name}in", t) for t, name in zip(tiers, names, strict=True)}
        self.outs = {t: Line(f"{name}out", t) for t, name in zip(tiers, names, strict=True)}
        if len(tiers) == 1:
            self._only_in = self.ins[tiers[0]]
        self.lines = (self.moves, self.updates, *self.ins.values(), *self.outs.values())
        self.ended = 0  # commands that have run or failed
        self._number = 0
        self._open: dict[int, Ticket] = {}  # submitted, and neither ended nor taken back
        self._last_store: dict[int, Ticket] = {}  # of each page, while it has not ended
        self._last_update: dict[int, Ticket] = {}  # the same

    def next_number(self) -> int:
        """Number for a command that is run as it is submitted."""
        self._number += 1
        return self._number

    def submit(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...],
        priority: Priority,
        now_ns: int,
        update: HomeUpdate | None = None,
    ) -> Ticket:
        """Add a command; it is in its line's queue if it waits for nothing."""
        self._number = number = self._number + 1
        ticket = Ticket(kind, page, priority, number, now_ns)
        if kind == _RELEASE:
            ticket.line = self.moves
        elif kind == _LOAD:
            ticket.line = self._only_in or self.ins[self._tier_of(page.page)]
            if self._last_update:
                after = _join(after, self._last_update.get(page.page))
        elif kind == CommandKind.STORE:
            ticket.line = self.outs[self._tier_of(page.page)]
            after = _join(after, self._last_store.get(page.page))
            after = _join(after, self._last_update.get(page.page))
            self._last_store[page.page] = ticket
        elif kind == CommandKind.UPDATE:
            assert update is not None, "an update says what it does"
            ticket.line, ticket.update = self.updates, update
            for used in update.pages:
                after = _join(after, self._last_store.get(used))
                after = _join(after, self._last_update.get(used))
            self._last_update.update(dict.fromkeys(update.pages, ticket))
        else:
            ticket.line = self.moves
        if after:
            self._wait_for(ticket, after)
        self._open[number] = ticket
        if not ticket.waits:  # (``push`` of what has not started, written out)
            ticket.key = key = ((2 * priority + 1) << _NUMBERS) | number
            heappush(ticket.line._heap, (key, ticket))
        return ticket

    @staticmethod
    def _wait_for(ticket: Ticket, after: tuple[Ticket, ...]) -> None:
        kept = []
        for earlier in after:
            if earlier.cancelled:
                continue
            if earlier.done_ns < 0:
                earlier.dependants.append(ticket)
                ticket.waits += 1
                kept.append(earlier)
            elif earlier.error is not None:
                kept.append(earlier)
        ticket.after = tuple(kept)

    def end(self, ticket: Ticket, now_ns: int) -> Sequence[Ticket]:
        """A command has run or failed; returns those that are ready because of it."""
        ticket.done_ns = now_ns
        self.ended += 1
        ticket.after = ()  # a chain of finished commands would never be freed
        return self._let_go(ticket, now_ns)

    def cancel(self, ticket: Ticket, now_ns: int) -> Sequence[Ticket]:
        """Take a command that has not started back; returns those that are ready because of it."""
        ticket.cancelled, ticket.ready_ns, ticket.key = True, now_ns, -1
        ticket.after = ()
        return self._let_go(ticket, now_ns)

    def _let_go(self, ticket: Ticket, now_ns: int) -> Sequence[Ticket]:
        del self._open[ticket.number]
        if self._last_store.get(ticket.page.page) is ticket:
            del self._last_store[ticket.page.page]
        for used in ticket.update.pages if ticket.update is not None else ():
            if self._last_update.get(used) is ticket:
                del self._last_update[used]
        if not ticket.dependants:
            return ()
        ready = []
        for waiting in ticket.dependants:
            waiting.waits -= 1
            waiting.ready_ns = max(waiting.ready_ns, now_ns)
            if not waiting.waits and not waiting.cancelled:
                assert waiting.line is not None
                waiting.line.push(waiting)
                ready.append(waiting)
        ticket.dependants = []
        return ready

    def is_empty(self) -> bool:
        """Whether every command has ended or was taken back."""
        return not self._open

    def dump(self) -> str:
        """What runs, is queued and waits, in words; the first 20 commands of each line."""
        lines = []
        for line in self.lines:
            own = [t for t in self._open.values() if t.line is line]
            own.sort(key=lambda t: (not t.started, t.waits > 0, key_of(t)))
            lines += [f"{line.name}: {_describe(ticket)}" for ticket in own[:_SHOWN]]
            if len(own) > _SHOWN:
                lines.append(f"{line.name}: and {len(own) - _SHOWN} more")
        return "\n".join(lines) or "no command is queued"


def _join(after: tuple[Ticket, ...], earlier: Ticket | None) -> tuple[Ticket, ...]:
    """What a command waits for, and one command more."""
    return after if earlier is None or earlier in after else (*after, earlier)


def _describe(ticket: Ticket) -> str:
    said = f"{ticket.kind.name} page {ticket.page.page} {ticket.priority.name.lower()}"
    if ticket.started:
        mib = ticket.moved_bytes >> 20, ticket.page.num_bytes >> 20
        said += " runs" if ticket.key < 0 else " overtaken"
        return f"{said}, {mib[0]} of {mib[1]} MiB moved"
    waits = [f"{t.kind.name} {t.page.page}" for t in ticket.after if t.done_ns < 0]
    return f"{said} after {waits}"
