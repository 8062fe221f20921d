"""Books of frames: free, coming back from evictions, and booked for loads.

Frames are *booked* before they are taken: what is free, then what a submitted eviction will give
back (the load then waits for that eviction). So what pages hold and have booked never exceeds the
pool, and a command never finds the pool empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from odc.memory.engines.base import Ticket
from odc.memory.frames import FRAME_BYTES
from odc.memory.pages import PageTable

_Booking = Sequence[tuple[Ticket | None, int]]


def _stored_as(ticket: Ticket) -> int:
    """The number of the store that an eviction waits for, -1 for none."""
    return ticket.after[-1].number if ticket.after else -1


class Books:
    """Frames of a pool, as numbers.

    Args:
        table: the pages.
        num_frames: frames of the pool, all free.

    Attributes:
        free: frames that nothing holds or has booked.
        coming_frames: frames that evictions under way will give back and that nothing has booked.
    """

    def __init__(self, table: PageTable, num_frames: int) -> None:
        self.table = table
        self.num_frames = num_frames
        self.free = num_frames
        self.coming_frames = 0
        self._coming: deque[tuple[Ticket, int]] = deque()
        self._booked: dict[int, _Booking] = {}  # of loads that did not find all frames free

    @property
    def available(self) -> int:
        """Frames that are free, or will be when evictions under way are done."""
        return self.free + self.coming_frames

    @property
    def used_bytes(self) -> int:
        """Bytes of frames that pages hold, have booked, or have not yet given back."""
        return (self.num_frames - self.free) * FRAME_BYTES

    def _book(self, page: int, spare: int = 0) -> list[Ticket]:
        """Take frames for a page, the last ``spare`` free ones only if nothing else is coming.

        Returns:
            The evictions that it has to wait for.
        """
        need = self.table.frames[page]
        assert need <= self.available, f"page {page}: {need} frames, {self.available} available"
        booking: list[tuple[Ticket | None, int]] = []
        taken = min(need, max(self.free - spare, need - self.coming_frames))
        if taken > 0:
            self.free -= taken
            booking.append((None, taken))
            need -= taken
        while need:
            ticket, frames = self._coming.popleft()
            taken = min(need, frames)
            if taken < frames:
                self._coming.appendleft((ticket, frames - taken))
            self.coming_frames -= taken
            booking.append((ticket, taken))
            need -= taken
        self._booked[page] = booking
        return [ticket for ticket, _ in booking if ticket is not None]

    def _unbook(self, page: int, is_done: Callable[[Ticket], bool]) -> None:
        """A load does not take its frames; ``is_done``: whether an eviction has ended well."""
        for ticket, frames in self._booked.pop(page, ((None, self.table.frames[page]),)):
            if ticket is None or is_done(ticket):
                self.free += frames
            else:  # if it failed, its page stays in these frames: ``_forget_coming`` follows
                self._comes(ticket, frames)

    def _comes(self, ticket: Ticket, frames: int) -> None:
        """An eviction will give frames back: behind those before it, as stores are queued."""
        coming, at = self._coming, len(self._coming)
        stored = _stored_as(ticket)
        while at and _stored_as(coming[at - 1][0]) > stored:
            at -= 1
        coming.insert(at, (ticket, frames))
        self.coming_frames += frames

    def _comes_whole(self, ticket: Ticket, frames: int) -> bool:
        """Whether nothing has booked any of the frames that an eviction will give back."""
        return sum(count for t, count in self._coming if t is ticket) == frames

    def _forget_coming(self, ticket: Ticket) -> None:
        """The frames that an eviction would have given back do not come."""
        for entry in [e for e in self._coming if e[0] is ticket]:
            self._coming.remove(entry)
            self.coming_frames -= entry[1]

    def _take_what_came(self) -> None:
        """Frames of evictions that have ended are free. Raises what the first of them raised."""
        for entry in [entry for entry in self._coming if entry[0].done_ns >= 0]:
            if entry[0].error is not None:
                raise entry[0].error
            self._coming.remove(entry)
            self.coming_frames -= entry[1]
            self.free += entry[1]

    def _check_frames(self, held: int, booked: int) -> None:
        """Assert that every frame is in exactly one place."""
        coming = sum(frames for _, frames in self._coming)
        assert coming == self.coming_frames, f"{coming=} {self.coming_frames=}"
        assert held + booked + coming + self.free == self.num_frames, (
            f"{held=} + {booked=} + {coming=} + {self.free=} != {self.num_frames}"
        )
