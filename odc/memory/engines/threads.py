"""The engine of a machine without a device: a worker thread for each line.

Copies and direct I/O release the interpreter lock, so they run beside the computation, and a
home of two tiers is copied from and read from disk at the same time; updates at home run on one
more. With ``link_bandwidth`` the
bus of a device is emulated: each line is busy for ``bytes / bandwidth`` a slice. All clocks
advance by durations from when a command could start, not from when a sleeping thread happened to
wake, so that the pace is the same on a busy machine; a copy that really takes longer (disk) holds
its line longer.

Threads are woken as rarely as possible, since every wake-up competes with the training thread for
the interpreter lock: a worker is told of its own commands only, small moves of frames are made by
whoever submits them, and a release that waited for a store is made by the thread that stored.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

from odc.errors import OdcError
from odc.memory.engines.base import SLICE_BYTES, CommandKind, HomeUpdate, Priority, Ticket
from odc.memory.engines.board import Board, Line
from odc.memory.events import Tier
from odc.memory.frames import FramePool
from odc.memory.home import Home
from odc.memory.pages import Page

_INLINE_FRAMES = 8  # moving these costs less than waking a thread


class _Worker:
    """A thread, the lines that it serves (the first that has something ready goes first)."""

    def __init__(self, engine: ThreadEngine, lines: tuple[Line, ...], lock: threading.Lock) -> None:
        self.lines = lines
        self.work = threading.Condition(lock)
        self.sleeps = False
        name = f"odc-{lines[-1].name.replace(' ', '-')}"
        self.thread = threading.Thread(target=engine._run, args=(self,), name=name, daemon=True)


class ThreadEngine:
    """Moves bytes between a home and frames of a pool.

    Args:
        pool: the frames; the caller books them, the engine takes them.
        home: where pages live.
        link_bandwidth: bytes/s of each line of the emulated bus, or None for none. Each tier has
            lines of its own.
        timeout_s: how long a wait may take before it is an error with a dump of the queues.
        slice_bytes: loads and stores can be overtaken at multiples of it.
    """

    def __init__(
        self,
        pool: FramePool,
        home: Home,
        link_bandwidth: float | None = None,
        timeout_s: float = 120.0,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self.pool = pool
        self.home = home
        self.link_bandwidth = link_bandwidth
        self.timeout_s = timeout_s
        self.slice_bytes = slice_bytes
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._awaited: Ticket | None = None
        self._board = board = Board(home.tiers, self._tier_of)
        self._free_ns = dict.fromkeys(board.lines, 0)  # the clocks of emulated lines
        self._pid = os.getpid()
        self._stopped = False
        ins = [(line,) for line in board.ins.values()]
        outs = [(board.moves, line) for line in board.outs.values()]
        served = (*ins, *outs, (board.updates,))
        self._workers = [_Worker(self, lines, self._lock) for lines in served]
        self._serving = {
            line: [w for w in self._workers if line in w.lines] for line in board.lines
        }
        for worker in self._workers:
            worker.thread.start()

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def _tier_of(self, page: int) -> Tier:
        """Whose lines a page takes: its home's, for what is no page (below 0) the nearest's."""
        return self.home.tier_of(page) if page >= 0 else self.home.tiers[0]

    def submit(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...] = (),
        priority: Priority = Priority.NORMAL,
        update: HomeUpdate | None = None,
    ) -> Ticket:
        if os.getpid() != self._pid:
            raise OdcError(
                "a paged model was used in a forked process, which has no transfer threads; build "
                "the model in the process that uses it"
            )
        moves = kind == CommandKind.RELEASE or kind == CommandKind.CREATE
        if moves and page.num_frames <= _INLINE_FRAMES and not any(map(_holds_back, after)):
            ticket = Ticket(kind, page, priority, self._board.next_number(), self.now_ns())
            ticket.started = True
            self._try(ticket, 0)
            ticket.done_ns = self.now_ns()
            return ticket
        with self._lock:
            ticket = self._board.submit(kind, page, after, priority, self.now_ns(), update)
            if not ticket.waits:
                self._wake(ticket)
        return ticket

    def ended(self) -> int:
        return self._board.ended

    def poll(self, ticket: Ticket) -> bool:
        if ticket.done_ns >= 0 and ticket.error is not None:
            raise ticket.error
        return ticket.done_ns >= 0

    def urge(self, ticket: Ticket) -> None:
        if ticket.done_ns < 0:
            with self._lock:
                ticket.urge()

    def wait(self, ticket: Ticket) -> None:
        if ticket.done_ns < 0:
            with self._lock:
                ticket.urge()
                self._awaited = ticket
                done = self._done.wait_for(
                    lambda: ticket.done_ns >= 0 or ticket.cancelled or self._stopped,
                    self.timeout_s,
                )
                self._awaited = None
                if not done or (self._stopped and ticket.done_ns < 0 and not ticket.cancelled):
                    raise OdcError(self._not_done(ticket))
        if ticket.error is not None:
            raise ticket.error

    def _not_done(self, ticket: Ticket) -> str:
        why = "the engine is closed" if self._stopped else f"after {self.timeout_s:g} s"
        return (
            f"page {ticket.page.page}: {ticket.kind.name} not done ({why}); what every line has "
            f"to do:\n{self.dump()}"
        )

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.started or ticket.cancelled:
                return ticket.cancelled
            for ready in self._board.cancel(ticket, self.now_ns()):
                self._wake(ready)
        return True

    def close(self) -> None:
        """Finish what has started and nothing more; stop the workers."""
        with self._lock:
            self._stopped = True
            for condition in (self._done, *(worker.work for worker in self._workers)):
                condition.notify_all()
        for worker in self._workers:
            worker.thread.join(timeout=5)

    def is_idle(self) -> bool:
        """Whether no command is queued or runs."""
        with self._lock:
            return self._board.is_empty()

    def dump(self) -> str:
        """The pool and the lines in words, for errors."""
        dead = [w.thread.name for w in self._workers if not w.thread.is_alive()]
        gone = f"threads that have ended: {', '.join(dead)}\n" if dead else ""
        free = f"pool: {self.pool.num_free} of {self.pool.num_frames} frames free\n"
        return f"{free}{gone}{self._board.dump()}"

    def _wake(self, ticket: Ticket) -> None:
        """Tell a worker that has nothing to do of a command that is ready."""
        assert ticket.line is not None
        for worker in self._serving[ticket.line]:
            if worker.sleeps:
                worker.sleeps = False
                worker.work.notify()
                return

    def _run(self, worker: _Worker) -> None:
        """What a worker does: take a command, move one slice of it, look again."""
        ticket: Ticket | None = None
        while True:
            with self._lock:
                ticket = self._take(worker)
                if ticket is None:
                    return
                ticket.started = True
            start = self.now_ns()
            size = min(self.slice_bytes, ticket.page.num_bytes - ticket.moved_bytes)
            self._try(ticket, size)
            end = self.now_ns()
            if self.link_bandwidth is not None:
                start, end = self._pace(ticket, size, end - start)
            with self._lock:
                self._note(ticket, size, start, end, worker)

    def _take(self, worker: _Worker) -> Ticket | None:
        """The command that a worker goes on with; None when it is to end."""
        while True:
            for line in worker.lines:
                while (ticket := line.pop()) is not None:
                    if ticket.started or not self._stopped:
                        return ticket
            if self._stopped:
                return None
            worker.sleeps = True
            worker.work.wait()
            worker.sleeps = False

    def _note(self, ticket: Ticket, size: int, start: int, end: int, worker: _Worker) -> None:
        """A slice has moved, or failed."""
        line = ticket.line
        assert line is not None
        ticket.dur_ns += max(end - start, 1)
        if ticket.error is None and line.tier is not None:
            ticket.moved_bytes += size
            if ticket.moved_bytes < ticket.page.num_bytes:
                line.push(ticket)
                return
        for ready in self._board.end(ticket, end):
            if ready.line not in worker.lines:  # else this worker is about to look
                self._wake(ready)
        if ticket is self._awaited:
            self._done.notify_all()

    def _try(self, ticket: Ticket, size: int) -> None:
        """Run a slice; what it raises surfaces where the training thread asks for it."""
        if not ticket.moved_bytes:
            ticket.error = ticket.inherited_error()
        if ticket.error is None:
            try:
                self._execute(ticket, size)
            except BaseException as error:
                ticket.error = error

    def _execute(self, ticket: Ticket, size: int) -> None:
        page, at = ticket.page, ticket.moved_bytes
        if page.page < 0:
            _copy_buffer(ticket, size)
        elif ticket.kind == CommandKind.RELEASE:
            self.pool.unmap(page.address)
        elif ticket.update is not None:
            ticket.update.run()
        elif ticket.kind == CommandKind.STORE:
            self.home.store(page.page, page.offset + at, page.address + at, size)
        else:
            if not at:
                self.pool.map(page.address, page.num_frames)
            if ticket.kind == CommandKind.LOAD:
                try:
                    self.home.load(page.page, page.offset + at, page.address + at, size)
                except BaseException:
                    self.pool.unmap(page.address)
                    raise

    def _pace(self, ticket: Ticket, size: int, took_ns: int) -> tuple[int, int]:
        """Hold the line for as long as the emulated bus would; returns begin and end."""
        line, bandwidth = ticket.line, self.link_bandwidth
        assert line is not None and bandwidth is not None
        bandwidth /= ticket.page.home_share  # in bytes of the page on the device
        if ticket.error is None and line.tier is not None:
            moved = ticket.moved_bytes
            due = int((moved + size) / bandwidth * 1e9) - int(moved / bandwidth * 1e9)
            took_ns = max(took_ns, due)
        with self._lock:
            begin = max(self._free_ns[line], ticket.ready_ns)
            self._free_ns[line] = end = begin + took_ns
        while (left := end - time.perf_counter_ns()) > 0:
            time.sleep(left / 1e9)
        return begin, end


def _copy_buffer(ticket: Ticket, size: int) -> None:
    """Move a slice of what is no page: its ``offset`` is an address in host memory."""
    page, at = ticket.page, ticket.moved_bytes
    home, device = page.offset + at, page.address + at
    source, target = (device, home) if ticket.kind == CommandKind.STORE else (home, device)
    ctypes.memmove(target, source, size)


def _holds_back(ticket: Ticket) -> bool:
    """Whether a command must not run inline because of this one."""
    return not ticket.cancelled and (ticket.done_ns < 0 or ticket.error is not None)
