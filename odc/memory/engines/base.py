"""Commands, tickets and the ``TransferEngine`` protocol that every engine obeys.

The training thread decides and submits; an engine acts elsewhere. A command may wait for others
(``after``); it runs in one of three channels: *in* (frames are mapped and filled), *out* (frames
are written home) and *moves* (frames are given back, or mapped without content). Within a channel
the ready command of the highest priority runs first, in order of submission among equals. ``wait``
makes a command, and all that it waits for, urgent: a demand overtakes queued prefetches.
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
    """A submitted command. ``done_ns`` is set once, when it has run or failed."""

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
        """Whether a command is done. Raises what it raised."""

    def wait(self, ticket: Ticket) -> None:
        """Block until a command is done. Raises what it raised, or if it takes too long."""

    def cancel(self, ticket: Ticket) -> bool:
        """Take a command back; False if it has started (it will then run to its end)."""


class Clock(Protocol):
    """The time an engine lives in."""

    def now_ns(self) -> int: ...
