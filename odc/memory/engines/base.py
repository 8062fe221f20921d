"""Commands, tickets and the ``TransferEngine`` protocol that every engine obeys.

The training thread decides and submits; an engine acts elsewhere. A command may wait for others
(``after``); it runs in one of three channels: *in* (frames are mapped and filled), *out* (frames
are written home) and *moves* (frames are given back, or mapped without content). Within a channel
the ready command of the highest priority runs first, in order of submission among equals. ``wait``
makes a command, and all that it waits for, urgent: a demand overtakes queued prefetches.

A command that fails changes nothing: frames that were to be filled are in the pool, frames that
were to be written or given back are still mapped. All that waits for it fails with its error.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from odc.memory.pages import Page


class CommandKind(IntEnum):
    LOAD = 0  # map frames, fill them from home
    CREATE = 1  # map frames, content is the caller's
    STORE = 2  # write frames home
    RELEASE = 3  # unmap frames, give them back to the pool


class Priority(IntEnum):
    URGENT = 0
    NORMAL = 1
    EARLY = 2


class Ticket:
    """A submitted command.

    Attributes:
        ready_ns: when it was submitted; when it was taken back, if it was.
        done_ns: set once, when it has run or failed; -1 before.
        dur_ns: how long its line was busy with it.
    """

    __slots__ = (
        "after",
        "cancelled",
        "done_ns",
        "dur_ns",
        "error",
        "kind",
        "number",
        "page",
        "priority",
        "ready_ns",
        "started",
    )

    def __init__(
        self,
        kind: CommandKind,
        page: Page,
        after: tuple[Ticket, ...],
        priority: Priority,
        number: int,
        ready_ns: int,
    ) -> None:
        self.kind = kind
        self.page = page
        self.after = after
        self.priority = priority
        self.number = number
        self.ready_ns = ready_ns
        self.started = False
        self.cancelled = False
        self.done_ns = -1
        self.dur_ns = 0
        self.error: BaseException | None = None

    def is_ready(self) -> bool:
        return all(t.done_ns >= 0 or t.cancelled for t in self.after)

    def inherited_error(self) -> BaseException | None:
        """The error of the first command that this one waits for and that failed."""
        return next((t.error for t in self.after if t.error is not None), None)

    def urge(self) -> None:
        """Make this command, and all that it waits for, urgent."""
        if self.done_ns >= 0 or self.cancelled:
            return
        self.priority = Priority.URGENT
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
    ) -> Ticket:
        """Queue a command; never blocks."""

    def poll(self, ticket: Ticket) -> bool:
        """Whether a command is done (never, if it was cancelled). Raises what it raised."""

    def wait(self, ticket: Ticket) -> None:
        """Block until a command is done or was cancelled.

        Raises what it raised, or an ``OdcError`` with the queues if it takes too long.
        """

    def cancel(self, ticket: Ticket) -> bool:
        """Take a command back; False if it has started (it will then run to its end).

        What waits for it goes on without it.
        """


def describe(queues: dict[str, list[Ticket]]) -> str:
    """Queues in words, for errors; the first 20 commands of each."""
    lines = []
    for name, queue in queues.items():
        for ticket in queue[:20]:
            waits = [f"{t.kind.name} {t.page.page}" for t in ticket.after if t.done_ns < 0]
            lines.append(f"{name}: {ticket.kind.name} page {ticket.page.page} after {waits}")
    return "\n".join(lines)


class Clock(Protocol):
    """The time an engine lives in."""

    def now_ns(self) -> int: ...
