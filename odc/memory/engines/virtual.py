"""The engine of the simulator: no bytes, only a clock.

The same commands, lines, priorities and slices as the thread engine, in discrete events: a command
starts when its line is free and all that it waits for has ended, and takes
``latency + bytes / bandwidth`` (loads and stores), ``frames * frame_move`` (loads, maps and
unmaps) and ``bytes / update_rate`` (updates at home). The clock moves when the caller computes
(``advance``) or waits.

Slices are not events. A line that runs a command has one event, its end; when something of a higher
priority becomes ready, the event moves to the next border between slices, which is computed.
Whatever happens by now has happened when a method returns, but for the start of what was
submitted since: what is submitted at one moment is ordered before any of it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from odc.errors import OdcError
from odc.memory.engines.base import (
    SLICE_BYTES,
    CommandKind,
    HomeUpdate,
    Priority,
    Ticket,
    TierSpeed,
)
from odc.memory.engines.board import Board, Line, key_of
from odc.memory.events import Tier
from odc.memory.pages import Page

_NEVER = 1 << 62


class _Run:
    """A line and the command that it runs."""

    __slots__ = (
        "bandwidth",
        "begin_ns",
        "latency_ns",
        "line",
        "stop_bytes",
        "stop_ns",
        "ticket",
        "total_ns",
    )

    def __init__(self, line: Line, speed: TierSpeed, incoming: bool) -> None:
        self.line = line
        self.bandwidth = speed.bandwidth_in if incoming else speed.bandwidth_out
        self.latency_ns = speed.latency_ns
        self.ticket: Ticket | None = None
        self.begin_ns = 0  # of the part that runs now
        self.total_ns = 0  # of the whole command
        self.stop_ns = _NEVER  # when the line looks again
        self.stop_bytes = 0  # what of the command has moved by then


class VirtualEngine:
    """A clock, lines and no frames.

    Args:
        bandwidth_in, bandwidth_out: bytes/s of each direction.
        latency_ns: fixed cost of a load or store.
        frame_move_ns: cost of mapping or unmapping one frame.
        fault: asked at the start of each command; what it returns is raised as its error.
        tier_of: tells where a page has its home; None: all in one place.
        speeds: what holds, instead of the figures above, for each tier of the home.
        slice_bytes: loads and stores can be overtaken at multiples of it.
        update_rate: bytes of parameters that are updated at home in a second.
    """

    def __init__(
        self,
        bandwidth_in: float,
        bandwidth_out: float | None = None,
        latency_ns: int = 0,
        frame_move_ns: int = 0,
        fault: Callable[[Ticket], BaseException | None] | None = None,
        *,
        tier_of: Callable[[int], Tier] | None = None,
        speeds: Mapping[Tier, TierSpeed] | None = None,
        slice_bytes: int = SLICE_BYTES,
        update_rate: float = math.inf,
    ) -> None:
        out = bandwidth_out if bandwidth_out is not None else bandwidth_in
        common = TierSpeed(bandwidth_in, out, latency_ns)
        self.frame_move_ns = frame_move_ns
        self.update_rate = update_rate
        self.fault = fault
        self.slice_bytes = slice_bytes
        self.speeds = dict(speeds) if speeds else {Tier.HOST: common}
        only = next(iter(self.speeds))
        self._board = board = Board(self.speeds, tier_of or (lambda page: only))
        self._runs = {
            line: _Run(line, self.speeds.get(line.tier or only, common), line.name.endswith("in"))
            for line in board.lines
        }
        self._moves = self._runs[board.moves]
        self._all = tuple(self._runs.values())
        self._now = 0
        self._next_ns = _NEVER  # the next event
        self._changed: list[_Run] = []  # lines for which something has become ready or better

    def now_ns(self) -> int:
        return self._now

    def advance(self, duration_ns: int) -> None:
        """Let the computation take ``duration_ns``."""
        if self._changed:
            self._settle()
        self._now += int(duration_ns)
        if self._next_ns <= self._now:
            self._happen()

    def submit(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...] = (),
        priority: Priority = Priority.NORMAL,
        update: HomeUpdate | None = None,
    ) -> Ticket:
        ticket = self._board.submit(kind, page, after, priority, self._now, update)
        if not ticket.waits:
            self._changed.append(self._runs[ticket.line])  # type: ignore[index]
        return ticket

    def ended(self) -> int:
        if self._changed:
            self._settle()
        return self._board.ended

    def poll(self, ticket: Ticket) -> bool:
        if self._changed:
            self._settle()
        done = ticket.done_ns >= 0
        if done and ticket.error is not None:
            raise ticket.error
        return done

    def urge(self, ticket: Ticket) -> None:
        if self._changed:
            self._settle()
        ticket.urge()
        self._changed.extend(self._all)
        self._settle()

    def wait(self, ticket: Ticket) -> None:
        if self.poll(ticket) or ticket.cancelled:
            return
        self.urge(ticket)
        while ticket.done_ns < 0:
            if self._next_ns == _NEVER:
                raise OdcError(
                    f"page {ticket.page.page}: {ticket.kind.name} can never run\n{self.dump()}"
                )
            self._now = self._next_ns
            self._happen()
        self.poll(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        if self._changed:
            self._settle()
        if ticket.started or ticket.cancelled:
            return ticket.cancelled
        for ready in self._board.cancel(ticket, self._now):
            self._changed.append(self._runs[ready.line])  # type: ignore[index]
        return True

    def left_ns(self, ticket: Ticket) -> int:
        """Time until a command that has begun ends, once its line is at it and stays so."""
        if self._changed:
            self._settle()
        for run in self._all:
            if run.ticket is ticket:
                return run.begin_ns + run.total_ns - ticket.dur_ns - self._now
        run = self._runs[ticket.line]  # type: ignore[index]
        return int(ticket.page.home_bytes / run.bandwidth * 1e9) - ticket.dur_ns

    def dump(self) -> str:
        """The lines in words, for errors."""
        return self._board.dump()

    def is_idle(self) -> bool:
        """Whether no command is queued or runs."""
        return self._board.is_empty()

    def _settle(self) -> None:
        """Let start what can start now."""
        self._start(self._now)
        if self._next_ns <= self._now:
            self._happen()

    def _happen(self) -> None:
        """Let happen what happens by now, in order of time."""
        while self._next_ns <= self._now:
            at = self._next_ns
            for run in self._all:
                if run.stop_ns == at:
                    self._stop(run, at)
            self._start(at)

    def _stop(self, run: _Run, at: int) -> None:
        """A line has come to the end of its command, or to a border between slices."""
        ticket = run.ticket
        assert ticket is not None
        run.ticket, run.stop_ns = None, _NEVER
        ticket.dur_ns += at - run.begin_ns
        ticket.moved_bytes = run.stop_bytes
        self._changed.append(run)
        if ticket.dur_ns >= run.total_ns:
            self._end(ticket, at)
        else:
            run.line.push(ticket)

    def _end(self, ticket: Ticket, at: int) -> None:
        for ready in self._board.end(ticket, at):
            self._changed.append(self._runs[ready.line])  # type: ignore[index]

    def _start(self, at: int) -> None:
        """Give free lines their next command, and stop what has been overtaken.

        Moves first: what takes no time has happened before others choose.
        """
        changed = self._changed
        while changed:
            run = self._moves if self._moves in changed else changed[0]
            changed.remove(run)
            if run.ticket is not None:
                self._reconsider(run, at)
                continue
            ticket = run.line.pop()
            if ticket is not None and self._begin(run, ticket, at):
                changed.append(run)
        self._next_ns = min([run.stop_ns for run in self._all])

    def _begin(self, run: _Run, ticket: Ticket, at: int) -> bool:
        """Run a command or go on with it; True if it took no time."""
        if not ticket.started:
            ticket.started = True
            ticket.error = ticket.inherited_error()
            if ticket.error is None and self.fault is not None:
                ticket.error = self.fault(ticket)
        page = ticket.page
        total = 0 if ticket.error is not None else self._fixed_ns(run, ticket)
        if run.line.tier is not None and ticket.error is None:
            total += int(page.home_bytes / run.bandwidth * 1e9)
        if total <= ticket.dur_ns:
            self._end(ticket, at)
            return True
        run.ticket, run.begin_ns, run.total_ns = ticket, at, total
        run.stop_ns, run.stop_bytes = at + total - ticket.dur_ns, page.num_bytes
        return False

    def _reconsider(self, run: _Run, at: int) -> None:
        """If something better is ready than what runs, stop that when its slice ends."""
        ticket = run.ticket
        assert ticket is not None
        if run.line.tier is None or not 0 <= run.line.best_key() < key_of(ticket):
            return
        fixed = self._fixed_ns(run, ticket)
        spent = ticket.dur_ns + at - run.begin_ns
        bandwidth = run.bandwidth / ticket.page.home_share  # in bytes of the page on the device
        number = max(int((spent - fixed) * bandwidth / 1e9 / self.slice_bytes), 1)
        while True:
            end = fixed + int(number * self.slice_bytes / bandwidth * 1e9)
            # A slice that has just begun is not one that has ended.
            if end >= spent and end > ticket.dur_ns:
                break
            number += 1
        stop = run.begin_ns + end - ticket.dur_ns
        if stop < run.stop_ns:
            run.stop_ns, run.stop_bytes = stop, number * self.slice_bytes

    def _fixed_ns(self, run: _Run, ticket: Ticket) -> int:
        """What a command takes beside its bytes."""
        if ticket.kind == CommandKind.STORE:
            return run.latency_ns
        if ticket.update is not None:
            return int(ticket.update.num_bytes / self.update_rate * 1e9)
        moves = self.frame_move_ns * ticket.page.num_frames
        return moves + run.latency_ns if ticket.kind == CommandKind.LOAD else moves
