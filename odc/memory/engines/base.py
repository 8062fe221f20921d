"""Commands, tickets and the ``TransferEngine`` protocol that every engine obeys.

The training thread decides and submits; an engine acts elsewhere. A command may wait for others
(``after``). It runs on a *line*: each tier of the home has one *in* (frames are mapped and filled)
and one *out* (frames are written home), there is one for *moves* (frames are given back, or mapped
without content), and one for *updates* (the optimizer runs on what lies at home). Lines work side
by side. On a line the ready command of the highest priority runs first, in order of submission
among equals.

Loads and stores move in slices of ``SLICE_BYTES`` of the page on the device; of a page that is
coded at home fewer bytes move for them, and take less time. Between two slices a line looks again:
a command of a higher priority goes first, and the one it overtook goes on later where it stopped,
before anything of its own priority that has not begun. ``wait`` makes a command, and all that it
waits for, urgent: a demand overtakes prefetches and early write-backs, queued ones and running
ones. Stores of one page never overtake each other, nor an update that reads or writes the page at
home; a load waits for it. A command is done when its last slice is.

A command that fails changes nothing: frames that were to be filled are in the pool, frames that
were to be written or given back are still mapped. All that waits for it fails with its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from odc.memory.pages import Page

if TYPE_CHECKING:
    from odc.memory.engines.board import Line

# Loads of 64 MiB pages in slices of 1, 4, 8, 16, 64 MiB beside a computing thread (medians of
# benchmarks/engine.py): from host 5.1, 5.7, 5.6, 6.0, 5.7 GB/s, from disk 2.1, 2.6, 2.5, 2.5, 2.3.
# From 8 MiB on slicing costs nothing that could be told from noise (of which there was much), and a
# demand waits at most 3 ms for the slice that runs.
SLICE_BYTES = 8 * 1024 * 1024


class CommandKind(IntEnum):
    LOAD = 0  # map frames, fill them from home
    CREATE = 1  # map frames, content is the caller's
    STORE = 2  # write frames home
    RELEASE = 3  # unmap frames, give them back to the pool
    UPDATE = 4  # compute on what lies at home; no frame is touched


class Priority(IntEnum):
    URGENT = 0
    NORMAL = 1
    EARLY = 2


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """The way between the device and one tier of the home.

    Attributes:
        bandwidth_in, bandwidth_out: bytes/s of each direction.
        latency_ns: fixed cost of a load or store.
    """

    bandwidth_in: float
    bandwidth_out: float
    latency_ns: int = 0


@dataclass(frozen=True, slots=True)
class HomeUpdate:
    """What an update does.

    Attributes:
        pages: pages whose content at home it reads or writes and that are loaded or stored as well.
        num_bytes: bytes of parameters that it goes over.
        run: does it, on a thread of the engine; a clock without bytes does not call it.
    """

    pages: tuple[int, ...]
    num_bytes: int
    run: Callable[[], None]


class Ticket:
    """A submitted command.

    Attributes:
        line: where it runs; None for a command that was run as it was submitted.
        ready_ns: since when nothing holds it back: it was submitted, or the last command that it
            waited for ended; when it was taken back, if it was.
        started: its first slice has begun; it will run to its end.
        moved_bytes: what of it has moved, in bytes of the page on the device.
        done_ns: set once, when it has run or failed; -1 before.
        dur_ns: how long its line was busy with it; less than from begin to end if it was overtaken.
        update: what it does, for an update.
    """

    __slots__ = (
        "after",
        "cancelled",
        "dependants",
        "done_ns",
        "dur_ns",
        "error",
        "key",
        "kind",
        "line",
        "moved_bytes",
        "number",
        "page",
        "priority",
        "ready_ns",
        "started",
        "update",
        "waits",
    )

    def __init__(
        self, kind: CommandKind, page: Page, priority: Priority, number: int, ready_ns: int
    ) -> None:
        self.kind = kind
        self.page = page
        self.priority = priority
        self.number = number
        self.ready_ns = ready_ns
        self.line: Line | None = None
        self.after: tuple[Ticket, ...] = ()
        self.waits = 0  # commands in ``after`` that have not ended
        self.dependants: list[Ticket] = []
        self.key = -1  # of its place in the line's queue; -1: it is not in it
        self.started = False
        self.cancelled = False
        self.moved_bytes = 0
        self.done_ns = -1
        self.dur_ns = 0
        self.error: BaseException | None = None
        self.update: HomeUpdate | None = None

    def inherited_error(self) -> BaseException | None:
        """The error of the first command that this one waits for and that failed."""
        for ticket in self.after:
            if ticket.error is not None:
                return ticket.error
        return None

    def urge(self) -> None:
        """Make this command, and all that it waits for, urgent; for engines, under their lock."""
        if self.done_ns >= 0 or self.cancelled:
            return
        if self.priority != Priority.URGENT:
            self.priority = Priority.URGENT
            if self.key >= 0 and self.line is not None:
                self.line.push(self)
        for ticket in self.after:
            ticket.urge()


class TransferEngine(Protocol):
    """Runs commands. All methods are called on the training thread."""

    def submit(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...] = (),
        priority: Priority = Priority.NORMAL,
        update: HomeUpdate | None = None,
    ) -> Ticket:
        """Queue a command; never blocks. ``update`` says what an update does."""

    def ended(self) -> int:
        """How many commands have run or failed so far, of those that had to wait for a line.

        As long as it stays the same no ticket has changed, and none needs to be polled.
        """

    def poll(self, ticket: Ticket) -> bool:
        """Whether a command is done (never, if it was cancelled). Raises what it raised."""

    def urge(self, ticket: Ticket) -> None:
        """Make a command, and all that it waits for, urgent; never blocks."""

    def wait(self, ticket: Ticket) -> None:
        """Urge a command and block until it is done or was cancelled.

        Raises what it raised, or an ``OdcError`` with the queues if it takes too long.
        """

    def cancel(self, ticket: Ticket) -> bool:
        """Take a command back; False if it has started (it will then run to its end).

        What waits for it goes on without it.
        """


class Clock(Protocol):
    """The time an engine lives in."""

    def now_ns(self) -> int: ...
