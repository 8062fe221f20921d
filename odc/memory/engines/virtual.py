"""The engine of the simulator: no bytes, only a clock.

The same commands, channels, priorities and dependencies as the thread engine, in discrete events:
a command starts when its channel is free and all that it waits for has ended, and takes
``latency + bytes / bandwidth`` (loads and stores) or ``frames * frame_move`` (maps and unmaps).
The clock moves when the caller computes (``advance``) or waits.
"""

from __future__ import annotations

from collections.abc import Callable

from odc.errors import OdcError
from odc.memory.engines.base import CommandKind, Priority, Ticket, describe
from odc.memory.pages import Page

_CHANNEL = {
    CommandKind.LOAD: 0,
    CommandKind.STORE: 1,
    CommandKind.RELEASE: 2,
    CommandKind.CREATE: 2,
}


class VirtualEngine:
    """A clock, two lines and a table of frames.

    Args:
        bandwidth_in, bandwidth_out: bytes/s of each direction.
        latency_ns: fixed cost of a load or store.
        frame_move_ns: cost of mapping or unmapping one frame.
        fault: asked at the start of each command; what it returns is raised as its error.
    """

    def __init__(
        self,
        bandwidth_in: float,
        bandwidth_out: float | None = None,
        latency_ns: int = 0,
        frame_move_ns: int = 0,
        fault: Callable[[Ticket], BaseException | None] | None = None,
    ) -> None:
        self.bandwidth_in = bandwidth_in
        self.bandwidth_out = bandwidth_out if bandwidth_out is not None else bandwidth_in
        self.latency_ns = latency_ns
        self.frame_move_ns = frame_move_ns
        self.fault = fault
        self._now = 0
        self._number = 0
        self._queues: tuple[list[Ticket], ...] = ([], [], [])
        self._free = [0, 0, 0]
        self._settled = True  # nothing can start before the clock moves or a command comes

    def now_ns(self) -> int:
        return self._now

    def advance(self, duration_ns: int) -> None:
        """Let the computation take ``duration_ns``."""
        self._now += int(duration_ns)
        self._settled = False

    def submit(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...] = (),
        priority: Priority = Priority.NORMAL,
    ) -> Ticket:
        ready = self._now
        pending = []
        for ticket in after:
            past = 0 <= ticket.done_ns <= self._now
            if not ticket.cancelled and (ticket.error is not None or not past):
                pending.append(ticket)
        made = Ticket(kind, page, tuple(pending), priority, self._number, ready)
        self._number += 1
        self._queues[_CHANNEL[kind]].append(made)
        self._settled = False
        return made

    def poll(self, ticket: Ticket) -> bool:
        if not self._settled:
            self._run()
        done = 0 <= ticket.done_ns <= self._now
        if done and ticket.error is not None:
            raise ticket.error
        return done

    def wait(self, ticket: Ticket) -> None:
        if self.poll(ticket) or ticket.cancelled:
            return
        ticket.urge()
        while ticket.done_ns < 0:
            start = self._next_start()
            if start is None:
                raise OdcError(
                    f"page {ticket.page.page}: {ticket.kind.name} can never run\n{self.dump()}"
                )
            self._now = max(self._now, start)
            self._run()
        self._now = max(self._now, ticket.done_ns)
        self.poll(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        self._run()
        if ticket.started or ticket.cancelled:
            return ticket.cancelled
        self._queues[_CHANNEL[ticket.kind]].remove(ticket)
        ticket.cancelled, ticket.ready_ns = True, self._now
        self._settled = False  # what waits for it is ready now
        return True

    def dump(self) -> str:
        """The queues in words, for errors."""
        return describe(dict(zip(("in", "out", "moves"), self._queues, strict=True)))

    def _ready_ns(self, ticket: Ticket) -> int | None:
        """When a queued command could start, or None while something it waits for has no end."""
        ready = ticket.ready_ns
        for earlier in ticket.after:
            if earlier.done_ns < 0 and not earlier.cancelled:
                return None
            ready = max(ready, earlier.done_ns, earlier.ready_ns)
        return ready

    def _next_start(self) -> int | None:
        """The earliest moment at which any queued command can start."""
        best: int | None = None
        for channel, queue in enumerate(self._queues):
            for ticket in queue:
                ready = self._ready_ns(ticket)
                if ready is not None:
                    start = max(ready, self._free[channel])
                    best = start if best is None else min(best, start)
        return best

    def _run(self) -> None:
        """Start every command that can start by now, in order of time."""
        while True:
            best: tuple[int, int, Ticket] | None = None
            for channel, queue in enumerate(self._queues):
                found = self._candidate(channel, queue)
                if found is not None and (best is None or found[0] < best[0]):
                    best = (found[0], channel, found[1])
            if best is None or best[0] > self._now:
                self._settled = True
                return
            start, channel, ticket = best
            self._queues[channel].remove(ticket)
            ticket.started = True
            ticket.error = ticket.inherited_error()
            if ticket.error is None and self.fault is not None:
                ticket.error = self.fault(ticket)
            ticket.dur_ns = self._duration(ticket) if ticket.error is None else 0
            ticket.done_ns = start + ticket.dur_ns
            self._free[channel] = ticket.done_ns
            ticket.after = ()

    def _candidate(self, channel: int, queue: list[Ticket]) -> tuple[int, Ticket] | None:
        """The command that a channel starts next, and when."""
        ready = [(r, t) for t in queue if (r := self._ready_ns(t)) is not None]
        if not ready:
            return None
        moment = max(self._free[channel], min(r for r, _ in ready))
        _, _, ticket = min((t.priority, t.number, t) for r, t in ready if r <= moment)
        return moment, ticket

    def _duration(self, ticket: Ticket) -> int:
        page = ticket.page
        if ticket.kind == CommandKind.STORE:
            return self.latency_ns + int(page.num_bytes / self.bandwidth_out * 1e9)
        moves = self.frame_move_ns * page.num_frames
        if ticket.kind == CommandKind.LOAD:
            return self.latency_ns + moves + int(page.num_bytes / self.bandwidth_in * 1e9)
        return moves
