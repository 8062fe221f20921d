"""The engine of a machine without a device: a worker thread for each direction.

Copies and direct I/O release the interpreter lock, so they run beside the computation. With
``link_bandwidth`` the bus of a device is emulated: each direction is a line that is busy for
``bytes / bandwidth`` a page. All clocks advance by durations from when a command could start, not
from when a sleeping thread happened to wake, so that the pace is the same on a busy machine; a copy
that really takes longer (disk) holds its line longer.

Threads are woken as rarely as possible, since every wake-up competes with the training thread for
the interpreter lock: a channel is told of its own commands only, small moves of frames are made by
whoever submits them, and a release that waited for a store is made by the thread that stored.
"""

from __future__ import annotations

import os
import threading
import time

from odc.errors import OdcError
from odc.memory.engines.base import CommandKind, Priority, Ticket, describe
from odc.memory.frames import FramePool
from odc.memory.home import Home
from odc.memory.pages import Page

_INLINE_FRAMES = 8  # moving these costs less than waking a thread


class _Channel:
    """Queue of one direction, and the clock of its line."""

    def __init__(self, lock: threading.Lock) -> None:
        self.queue: list[Ticket] = []
        self.free_ns = 0
        self.work = threading.Condition(lock)

    def take(self) -> Ticket | None:
        best = None
        for ticket in self.queue:
            if (
                best is None or (ticket.priority, ticket.number) < (best.priority, best.number)
            ) and ticket.is_ready():
                best = ticket
        if best is not None:
            self.queue.remove(best)
            best.started = True
        return best


class ThreadEngine:
    """Moves bytes between a home and frames of a pool.

    Args:
        pool: the frames; the caller books them, the engine takes them.
        home: where pages live.
        link_bandwidth: bytes/s each way of the emulated bus, or None for none.
        timeout_s: how long a wait may take before it is an error with a dump of the queues.
    """

    def __init__(
        self,
        pool: FramePool,
        home: Home,
        link_bandwidth: float | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.pool = pool
        self.home = home
        self.link_bandwidth = link_bandwidth
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._in, self._out = _Channel(self._lock), _Channel(self._lock)
        self._moves = _Channel(self._lock)
        self._channels = {
            CommandKind.LOAD: self._in,
            CommandKind.STORE: self._out,
            CommandKind.RELEASE: self._moves,
            CommandKind.CREATE: self._moves,
        }
        self._number = 0
        self._pid = os.getpid()
        self._stopped = False
        self._workers = [
            threading.Thread(target=self._run, args=channels, name=f"odc-{name}", daemon=True)
            for name, channels in (("in", (self._in,)), ("out", (self._moves, self._out)))
        ]
        for worker in self._workers:
            worker.start()

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def submit(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...] = (),
        priority: Priority = Priority.NORMAL,
    ) -> Ticket:
        after = tuple(t for t in after if (t.done_ns < 0 or t.error) and not t.cancelled)
        ticket = Ticket(kind, page, after, priority, self._number, time.perf_counter_ns())
        self._number += 1
        if os.getpid() != self._pid:
            raise OdcError(
                "a paged model was used in a forked process, which has no transfer threads; build "
                "the model in the process that uses it"
            )
        channel = self._channels[kind]
        if channel is self._moves and not after and page.num_frames <= _INLINE_FRAMES:
            ticket.started = True
            self._try(ticket)
            ticket.done_ns = time.perf_counter_ns()
            return ticket
        with self._lock:
            channel.queue.append(ticket)
            self._tell(channel)
        return ticket

    def poll(self, ticket: Ticket) -> bool:
        if ticket.done_ns >= 0 and ticket.error is not None:
            raise ticket.error
        return ticket.done_ns >= 0

    def wait(self, ticket: Ticket) -> None:
        if ticket.done_ns < 0:
            with self._lock:
                ticket.urge()
                done = self._done.wait_for(
                    lambda: ticket.done_ns >= 0 or ticket.cancelled or self._stopped,
                    self.timeout_s,
                )
            if not done or (self._stopped and ticket.done_ns < 0 and not ticket.cancelled):
                why = "the engine is closed" if self._stopped else f"after {self.timeout_s:g} s"
                raise OdcError(
                    f"page {ticket.page.page}: {ticket.kind.name} not done ({why})\n{self.dump()}"
                )
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.started or ticket.cancelled:
                return ticket.cancelled
            self._channels[ticket.kind].queue.remove(ticket)
            ticket.cancelled, ticket.ready_ns = True, time.perf_counter_ns()
            self._tell_dependants()
        return True

    def close(self) -> None:
        """Finish what has started and nothing more; stop the workers."""
        with self._lock:
            self._stopped = True
            for condition in (self._done, self._in.work, self._out.work):
                condition.notify_all()
        for worker in self._workers:
            worker.join(timeout=5)

    def dump(self) -> str:
        """The queues in words, for errors."""
        queues = {"in": self._in.queue, "out": self._out.queue, "moves": self._moves.queue}
        return f"pool: {self.pool.num_free} of {self.pool.num_frames} free\n{describe(queues)}"

    def _tell(self, channel: _Channel) -> None:
        """Wake the worker of a channel; the out worker also makes the moves."""
        (self._out if channel is self._moves else channel).work.notify()

    def _tell_dependants(self) -> None:
        """Something ended: commands that waited for it may start."""
        for channel in (self._in, self._out):
            if channel.queue:
                channel.work.notify()
        if self._moves.queue:
            self._out.work.notify()
        self._done.notify_all()

    def _run(self, *channels: _Channel) -> None:
        """A worker: the first channel that has a command ready goes first."""
        work = channels[-1].work
        while True:
            with self._lock:
                while not self._stopped and (found := _next(channels)) is None:
                    work.wait()
                if self._stopped:
                    return
            assert found is not None
            channel, ticket = found
            start = time.perf_counter_ns()
            self._try(ticket)
            end = time.perf_counter_ns()
            if self.link_bandwidth is not None:
                start, end = self._pace(channel, ticket, end - start)
            with self._lock:
                ticket.dur_ns = max(end - start, 1)
                ticket.done_ns = end
                ticket.after = ()  # a chain of finished commands would never be freed
                self._tell_dependants()

    def _try(self, ticket: Ticket) -> None:
        """Run a command; what it raises surfaces where the training thread asks for it."""
        ticket.error = ticket.inherited_error()
        if ticket.error is None:
            try:
                self._execute(ticket)
            except BaseException as error:
                ticket.error = error

    def _execute(self, ticket: Ticket) -> None:
        page = ticket.page
        if ticket.kind == CommandKind.RELEASE:
            self.pool.unmap(page.address)
        elif ticket.kind == CommandKind.STORE:
            self.home.store(page.page, page.offset, page.address, page.num_bytes)
        else:
            self.pool.map(page.address, page.num_frames)
            if ticket.kind == CommandKind.LOAD:
                try:
                    self.home.load(page.page, page.offset, page.address, page.num_bytes)
                except BaseException:
                    self.pool.unmap(page.address)
                    raise

    def _pace(self, channel: _Channel, ticket: Ticket, took_ns: int) -> tuple[int, int]:
        """Hold the line for as long as the emulated bus would; returns begin and end."""
        assert self.link_bandwidth is not None
        earlier = (max(t.done_ns, t.ready_ns) for t in ticket.after)
        begin = max(channel.free_ns, ticket.ready_ns, *earlier)
        if ticket.error is None and ticket.kind in (CommandKind.LOAD, CommandKind.STORE):
            took_ns = max(took_ns, int(ticket.page.num_bytes / self.link_bandwidth * 1e9))
        channel.free_ns = end = begin + took_ns
        while (left := end - time.perf_counter_ns()) > 0:
            time.sleep(left / 1e9)
        return begin, end


def _next(channels: tuple[_Channel, ...]) -> tuple[_Channel, Ticket] | None:
    """Take the command that a worker runs next."""
    for channel in channels:
        ticket = channel.take()
        if ticket is not None:
            return channel, ticket
    return None
