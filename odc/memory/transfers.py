"""Transfers: page states and commands in flight; ``books.py`` keeps the books of their frames.

A write-back that is queued is taken back when its page is written again or dies; one that has
started runs on, and the page stays dirty.

Errors of commands are raised by ``poll``, ``settle``, ``wait_any`` and ``drain``, once, when the
books are right again: a page whose store failed is resident and dirty, one whose load failed is at
home. The caller may go on or try again. Where an update at home failed, what lies there may be half
of it: every later use of its page raises the error again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from odc.memory.books import Books
from odc.memory.engines.base import (
    CommandKind,
    HomeUpdate,
    Priority,
    Ticket,
    TransferEngine,
)
from odc.memory.events import Act, Sink, Tier
from odc.memory.pages import PageState, PageTable

# Looking a name up in an enumeration is slow, and most of these are needed at every access.
_HOME, _LOADING, _RESIDENT, _EVICTING = PageState
_LOAD, _RELEASE = CommandKind.LOAD, CommandKind.RELEASE
_URGENT, _NORMAL = Priority.URGENT, Priority.NORMAL


def _failed(ticket: Ticket) -> bool:
    return ticket.done_ns >= 0 and ticket.error is not None


def _done(tickets: dict[int, Ticket]) -> list[tuple[int, Ticket]]:
    """Those that have ended, as the pages they are of. Raises what the first of them raised."""
    done = []
    for page, ticket in tickets.items():
        if ticket.done_ns >= 0:
            if ticket.error is not None:
                raise ticket.error
            done.append((page, ticket))
    return done


def _done_stores(stores: dict[int, _Storing]) -> list[tuple[int, _Storing]]:
    done = []
    for page, storing in stores.items():
        if storing.ticket.done_ns >= 0:
            if storing.ticket.error is not None:
                raise storing.ticket.error
            done.append((page, storing))
    return done


def _smoothed(rate: float, num_bytes: int, dur_ns: int) -> float:
    """A rate with one more transfer in it."""
    if dur_ns <= 0:
        return rate
    return rate + (0.1 if rate else 1.0) * (num_bytes / dur_ns - rate)


class TimedEngine(TransferEngine, Protocol):
    """An engine and the clock it lives in."""

    def now_ns(self) -> int: ...


@dataclass(slots=True)
class _Storing:
    ticket: Ticket
    generation: int
    early: bool


class Transfers(Books):
    """Moves pages and keeps the books.

    Args:
        table: the pages; their states are written here and nowhere else.
        engine: runs the commands.
        num_frames: frames of the pool, all free.
        home_tier: for the trace, where all pages have their home in one; else set ``tier_of``.
        policy: policy code for the trace.
    """

    def __init__(
        self,
        table: PageTable,
        engine: TimedEngine,
        num_frames: int,
        home_tier: Tier,
        policy: int = 0,
    ) -> None:
        super().__init__(table, num_frames)
        self.engine = engine
        self._now_ns = engine.now_ns
        self.home_tier = home_tier
        self.tier_of: Callable[[int], Tier] = lambda page: home_tier
        self.policy = policy
        self.sink: Sink | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.total_in = 0  # bytes loaded since the beginning
        self.waited_ns = 0  # for commands to end, since the beginning; not for waking up behind it
        self.loading: dict[int, Ticket] = {}
        self.storing: dict[int, _Storing] = {}
        self.updating: dict[int, Ticket] = {}  # by page of parameters
        self.update_bytes = 0  # of parameters that were updated at home
        self.update_ns = 0  # how long that took
        self._broken: dict[int, BaseException] = {}  # by page: the update that failed
        self._old: set[int] = set()  # pages on their way out whose frames nobody wants back
        self.in_flight_bytes = 0
        self.out_flight_bytes = 0
        self.prefetched: set[int] = set()
        self.arrived: list[int] = []  # pages that became evictable; the pager clears it
        self.bytes_per_ns = 0.0  # of the way in, as measured
        self.bytes_out_per_ns = 0.0
        self._in_busy_until_ns = 0.0  # by that rate
        self.num_resident = 0
        self._demanded: dict[int, int] = {}  # page -> seq of the need that a load serves
        self.evicting: dict[int, Ticket] = {}  # pages that may be rescued, and others
        self._generation = [0] * len(table.pages)
        self._ended = -1  # commands that had ended at the last look; -1: look again

    @property
    def in_busy_ns(self) -> float:
        """How long the way in will be busy with what is in flight."""
        if not self.loading:
            return 0.0
        return max(self._in_busy_until_ns - self.engine.now_ns(), 0.0)

    @property
    def store_byte_ns(self) -> float:
        """What storing a byte takes; that of loading one while nothing was stored, 0 if unknown."""
        rate = self.bytes_out_per_ns or self.bytes_per_ns
        return 1.0 / rate if rate else 0.0

    def load_ns(self, num_bytes: float) -> float:
        """What a load takes, 0 if unknown."""
        return num_bytes / self.bytes_per_ns if self.bytes_per_ns else 0.0

    def stored_ns(self, store: float) -> dict[int, float]:
        """By page that is stored, about the time until that ends; ``store``: ns a byte."""
        found, ahead = {}, 0
        for page in self.storing:
            ahead += self.table.pages[page].home_bytes
            found[page] = ahead * store
        return found

    # -- books ---------------------------------------------------------------------------------

    def _book_behind(self, page: int, spare: int = 0) -> tuple[Ticket, ...]:
        """Book frames for a page; returns what a command that fills them waits for."""
        tickets = self._book(page, spare)
        own = self.evicting.get(page)
        if own is not None:
            tickets.append(own)
        return tuple(tickets)

    def _is_done(self, ticket: Ticket) -> bool:
        """Whether a command has ended well; an error is left to whoever polls it next."""
        try:
            return self.engine.poll(ticket)
        except Exception:
            return False

    # -- the way in ----------------------------------------------------------------------------

    def load(self, page: int, seq: int, spare: int = 0) -> None:
        """Load a page.

        Args:
            page: the page.
            seq: the need it serves, -1 for a prefetch.
            spare: free frames that should be left, if others are on their way.
        """
        if self._broken:
            self._check_whole(page)
        table = self.table
        need = table.frames[page]
        after: tuple[Ticket, ...] = ()
        if self.coming_frames or need > self.free or page in self.evicting:
            after = self._book_behind(page, spare)
        else:  # nearly always
            self.free -= need
        if self.updating:
            after = self._behind_update(page, after)
        what = table.pages[page]
        ticket = self.engine.submit(_LOAD, what, after, _NORMAL if seq < 0 else _URGENT)
        table.state[page] = _LOADING  # (``set_state`` of a page that was absent, written out)
        table.is_absent[page] = 0
        self.loading[page] = ticket
        num_bytes = what.home_bytes
        self.in_flight_bytes += num_bytes
        self.bytes_in += num_bytes
        rate = self.bytes_per_ns
        if rate:
            start, busy = self._now_ns(), self._in_busy_until_ns
            if busy > start and len(self.loading) > 1:
                self._in_busy_until_ns = busy + num_bytes / rate
            else:
                self._in_busy_until_ns = start + num_bytes / rate
        if seq < 0:
            self.prefetched.add(page)
        else:
            self._demanded[page] = seq

    def create(self, page: int) -> None:
        """Give a page frames without loading it."""
        after = self._book_behind(page)
        ticket = self.engine.submit(
            CommandKind.CREATE, self.table.pages[page], after, Priority.URGENT
        )
        if ticket.done_ns >= 0:  # it was run as it was submitted
            self._ended = -1
        self.table.set_state(page, PageState.LOADING)
        self.loading[page] = ticket

    def settle(self, page: int) -> int:
        """Wait until a page that is on its way is resident; returns the time waited."""
        ticket = self.loading[page]
        waited = self._wait(ticket)
        self._arrived(page, ticket)
        return waited

    def _arrived(self, page: int, ticket: Ticket) -> None:
        del self.loading[page]
        if self._booked:
            self._booked.pop(page, None)
        table = self.table
        table.state[page] = _RESIDENT  # (``set_state`` of a page that was loading, written out)
        table.is_resident[page] = 1
        table.is_evictable[page] = not table.pins[page]
        self.arrived.append(page)
        self.num_resident += 1
        if ticket.kind == _LOAD:
            num_bytes = ticket.page.home_bytes
            self.total_in += num_bytes
            rate, dur_ns = self.bytes_per_ns, ticket.dur_ns
            if dur_ns > 0:  # (``_smoothed`` written out)
                self.bytes_per_ns = rate + (0.1 if rate else 1.0) * (num_bytes / dur_ns - rate)
            self.in_flight_bytes -= num_bytes
            if self.sink is not None:
                act = Act.PREFETCH if page in self.prefetched else Act.LOAD
                seq = self._demanded.get(page, -1)
                self._record(ticket, seq, page, act, self.tier_of(page), Tier.DEVICE, num_bytes)
            if self._demanded:
                self._demanded.pop(page, None)
            self.prefetched.discard(page)

    def cancel_one_prefetch(self) -> bool:
        """Take back the prefetch that was queued last; False if none can be."""
        for page in reversed(list(self.loading)):
            if page not in self.prefetched or self.table.pins[page]:  # somebody waits for it
                continue
            if self._cancel_load(page):
                return True
        return False

    def _cancel_load(self, page: int) -> bool:
        """Take a load back that has not begun."""
        if not self.engine.cancel(self.loading[page]):
            return False
        num_bytes = self._forget_load(page)
        self._record(None, -1, page, Act.CANCEL, self.tier_of(page), Tier.DEVICE, num_bytes)
        return True

    def _forget_load(self, page: int) -> int:
        """Undo ``load`` or ``create`` in the books; returns the bytes that did not move."""
        ticket = self.loading.pop(page)
        self.prefetched.discard(page)
        self._demanded.pop(page, None)
        num_bytes = self.table.pages[page].home_bytes if ticket.kind == CommandKind.LOAD else 0
        self.in_flight_bytes -= num_bytes
        self.bytes_in -= num_bytes
        if num_bytes and self.bytes_per_ns:
            self._in_busy_until_ns -= num_bytes / self.bytes_per_ns
        evicting = page in self.evicting
        self.table.set_state(page, PageState.EVICTING if evicting else PageState.HOME)
        self._unbook(page, self._is_done)
        return num_bytes

    # -- the way out ---------------------------------------------------------------------------

    def store(self, page: int, early: bool) -> Ticket:
        """Write a dirty page home."""
        overtaken = self.storing.pop(page, None)
        if overtaken is not None:  # it runs on, but what it writes is old already
            self._stored(page, overtaken)
        priority = Priority.EARLY if early else Priority.NORMAL
        ticket = self.engine.submit(CommandKind.STORE, self.table.pages[page], (), priority)
        self.storing[page] = _Storing(ticket, self._generation[page], early)
        num_bytes = self.table.pages[page].home_bytes
        self.out_flight_bytes += num_bytes
        self.bytes_out += num_bytes
        return ticket

    def evict(self, page: int) -> None:
        """Start a page's way out: store it if it is dirty, then give its frames back."""
        table = self.table
        after: tuple[Ticket, ...] = ()
        storing = self.storing.get(page)
        if storing is not None and storing.early and self._take_back(page):
            storing = None  # it would stand behind stores that are queued from now on
        if storing is not None:
            if storing.generation != self._generation[page]:
                after = (storing.ticket, self.store(page, early=False))
            else:
                after = (storing.ticket,)
        elif table.is_dirty[page]:
            after = (self.store(page, early=False),)
        self._release(page, after)
        if self.sink is not None:
            self._record(None, -1, page, Act.EVICT, Tier.DEVICE, self.tier_of(page), 0)

    def rescue(self, page: int) -> bool:
        """Take an eviction back, if the page is still in its frames and nobody counts on them.

        What is being stored goes on being stored.
        """
        ticket = self.evicting.get(page)
        if ticket is None or self.table.state[page] != PageState.EVICTING or page in self._old:
            return False
        whole = self._comes_whole(ticket, self.table.frames[page])
        if not whole or not self.engine.cancel(ticket):
            return False
        self._forget_coming(ticket)
        del self.evicting[page]
        self.table.set_state(page, PageState.RESIDENT)
        self.table.is_evictable[page] = self.table.pins[page] == 0
        self.num_resident += 1
        self._record(None, -1, page, Act.CANCEL, Tier.DEVICE, self.tier_of(page), 0)
        return True

    def rescue_all(self) -> None:
        """Take back every eviction that can be."""
        for page in list(self.evicting):
            if self.rescue(page):
                self.arrived.append(page)

    def recall_all(self) -> None:
        """Take back every eviction and every store that can be: others may be due now."""
        self.rescue_all()
        for page in list(self.storing):
            if self.table.state[page] == _RESIDENT:
                self._take_back(page)

    def update(self, page: int, gradient: int, run: Callable[[], None]) -> None:
        """Give parameters and their gradient up, and update them at home.

        Nothing has them pinned. What the home lacks is stored first; what is loaded or stored
        there from now on waits for the update.

        Args:
            page: of parameters.
            gradient: page of their gradient.
            run: updates what lies at home; called on a thread of the engine.
        """
        self._check_whole(page)
        for leaves in (page, gradient):
            self.give_up(leaves)
        stores = [s.ticket for p in (page, gradient) if (s := self.storing.get(p)) is not None]
        num_bytes = self.table.pages[page].num_bytes
        work = HomeUpdate((page, gradient), num_bytes, run)
        after = self._behind_update(page, tuple(stores))
        earlier = self.updating.pop(page, None)
        if earlier is not None:  # if it fails, so does its follower
            self._updated(page, earlier)
        self.updating[page] = self.engine.submit(
            CommandKind.UPDATE, self.table.pages[page], after, Priority.NORMAL, work
        )
        self.table.left.append(page)

    def give_up(self, page: int) -> None:
        """Let a page leave for good: stored if it is dirty, and not to be rescued."""
        if page in self.loading and not self._cancel_load(page):
            self.settle(page)
        if self.table.state[page] == PageState.RESIDENT:
            self.evict(page)
        if self.table.state[page] == PageState.EVICTING:
            self._old.add(page)

    def finish_updates(self, pages: Sequence[int]) -> None:
        """Wait until no page is being stored or updated at home.

        Raises:
            PageIOError: an update failed, now or before.
        """
        for page in pages:
            if page in self.storing:
                self._wait(self.storing[page].ticket)
            ticket = self.updating.get(page)
            if ticket is not None:
                self._wait(ticket)
            self._check_whole(page)
        self.poll()

    def _behind_update(self, page: int, after: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
        """What a command waits for, and the last update of its page, which may have failed."""
        update = self.updating.get(page)
        return after if update is None else (*after, update)

    def _check_whole(self, page: int) -> None:
        broken = self._broken.get(page)
        if broken is not None:
            raise broken

    def _updated(self, page: int, ticket: Ticket) -> None:
        """An update has ended, or one that follows it has taken its place in the books."""
        if ticket.done_ns < 0 or ticket.error is not None:
            return
        num_bytes = self.table.pages[page].num_bytes
        self.update_bytes += num_bytes
        self.update_ns += ticket.dur_ns
        tier = self.tier_of(page)
        self._record(ticket, -1, page, Act.UPDATE, tier, tier, num_bytes)

    def _note_failed_updates(self) -> None:
        for page in [p for p, t in self.updating.items() if _failed(t)]:
            error = self.updating.pop(page).error
            assert error is not None
            self._broken[page] = error

    def drop(self, page: int) -> None:
        """A page died: give its frames back, store nothing."""
        after: tuple[Ticket, ...] = ()
        if page in self.storing and not self._take_back(page):
            after = (self.storing[page].ticket,)
        self.table.is_dirty[page] = False
        self._generation[page] += 1
        self._release(page, after)
        self._record(None, -1, page, Act.DROP, Tier.DEVICE, Tier.DEVICE, 0)

    def _release(self, page: int, after: tuple[Ticket, ...]) -> None:
        table = self.table
        table.set_state(page, _EVICTING)
        table.is_evictable[page] = False
        self.num_resident -= 1
        ticket = self.engine.submit(_RELEASE, table.pages[page], after)
        frames = table.frames[page]
        if not after and self.engine.poll(ticket):  # made at once
            table.set_state(page, _HOME)
            self.free += frames
            return
        if ticket.done_ns >= 0:  # it was run as it was submitted
            self._ended = -1
        self._old.discard(page)
        self.evicting[page] = ticket
        self._comes(ticket, frames)

    def dirtied(self, page: int) -> None:
        """The content of a resident page is about to change."""
        self._generation[page] += 1
        self.table.is_dirty[page] = True
        if page in self.storing:
            self._take_back(page)

    def _take_back(self, page: int) -> bool:
        """Cancel a queued store."""
        storing = self.storing[page]
        if not self.engine.cancel(storing.ticket):
            return False
        del self.storing[page]
        num_bytes = self.table.pages[page].home_bytes
        self.out_flight_bytes -= num_bytes
        self.bytes_out -= num_bytes
        self._record(None, -1, page, Act.CANCEL, Tier.DEVICE, self.tier_of(page), num_bytes)
        return True

    # -- completion ----------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of what is done. Raises what a command raised."""
        ended = self.engine.ended()
        if ended == self._ended:
            return
        try:
            # What the engine has counted is done: tickets are read without asking it for each.
            for page, ticket in _done(self.loading):
                self._arrived(page, ticket)
            if self.storing or self.updating or self.evicting or self._coming:
                self._poll_way_out()
        except Exception:
            self._recover()
            raise
        self._ended = ended

    def _poll_way_out(self) -> None:
        if self.storing:
            for page, storing in _done_stores(self.storing):
                del self.storing[page]
                self._stored(page, storing)
        if self.updating:
            for page, ticket in _done(self.updating):
                del self.updating[page]
                self._updated(page, ticket)
        if self.evicting or self._coming:
            self._poll_evictions()

    def _poll_evictions(self) -> None:
        for page, _ in _done(self.evicting):
            del self.evicting[page]
            self._old.discard(page)
            if self.table.state[page] == PageState.EVICTING:
                self.table.set_state(page, PageState.HOME)
        self._take_what_came()

    def _wait(self, ticket: Ticket) -> int:
        """Wait for a command; returns the time it took, 0 if it was done."""
        try:
            if self.engine.poll(ticket):
                return 0
            start = self.engine.now_ns()
            self.engine.wait(ticket)
        except Exception:
            if _failed(ticket):
                self._recover()
            raise
        now = self.engine.now_ns()
        self.waited_ns += max(min(ticket.done_ns, now) - start, 0)
        return now - start

    def _recover(self) -> None:
        """Commands failed: wait for the rest, then undo the failed ones in the books."""
        stores = [s.ticket for s in self.storing.values()]
        moves = [*self.loading.values(), *stores, *self.evicting.values()]
        for ticket in [*moves, *self.updating.values()]:
            with contextlib.suppress(Exception):
                self.engine.wait(ticket)
        self._note_failed_updates()
        for page in [p for p, s in self.storing.items() if _failed(s.ticket)]:
            del self.storing[page]
            num_bytes = self.table.pages[page].home_bytes
            self.out_flight_bytes -= num_bytes
            self.bytes_out -= num_bytes
        kept = [p for p, t in self.evicting.items() if _failed(t)]
        for page in [p for p, t in self.loading.items() if _failed(t)]:
            self._forget_load(page)
        for page in kept:
            self._stays(page)

    def _stays(self, page: int) -> None:
        """A page could not be stored: it has not left its frames."""
        ticket = self.evicting.pop(page)
        self._old.discard(page)
        self._forget_coming(ticket)
        self.table.set_state(page, PageState.RESIDENT)
        self.table.is_evictable[page] = self.table.pins[page] == 0
        self.arrived.append(page)
        self.num_resident += 1

    def _stored(self, page: int, storing: _Storing) -> None:
        num_bytes = self.table.pages[page].home_bytes
        self.out_flight_bytes -= num_bytes
        ticket = storing.ticket
        self.bytes_out_per_ns = _smoothed(self.bytes_out_per_ns, num_bytes, ticket.dur_ns)
        if storing.generation == self._generation[page]:
            self.table.is_dirty[page] = False
        if self.sink is None:
            return
        act = Act.EARLY_WRITE_BACK if storing.early else Act.WRITE_BACK
        self._record(storing.ticket, -1, page, act, Tier.DEVICE, self.tier_of(page), num_bytes)

    def wait_any(self) -> bool:
        """Wait for one command in flight; False if there is none."""
        tickets = [*self.loading.values(), *(t for t, _ in self._coming)]
        if not tickets:
            return False
        self._wait(tickets[0])
        self.poll()
        return True

    def check(self) -> None:
        """Assert that every frame is in exactly one place, and that states and books agree."""
        table = self.table
        for page, state in enumerate(table.state):
            assert (state == PageState.LOADING) == (page in self.loading), f"{page=} {state=}"
            assert state != PageState.EVICTING or page in self.evicting, f"{page=} {state=}"
            evictable = state == PageState.RESIDENT and not table.pins[page]
            assert table.is_evictable[page] == evictable, f"{page=} {state=} {table.pins[page]=}"
        assert set(self._booked) <= set(self.loading)
        assert self.prefetched <= set(self.loading)
        assert self.num_resident == int(table.resident.sum())
        held = sum(int(n) for n, r in zip(table.num_frames, table.resident, strict=True) if r)
        booked = sum(int(table.num_frames[p]) for p in self.loading)
        self._check_frames(held, booked)

    def drain(self) -> None:
        """Wait for everything in flight."""
        for page in list(self.loading):
            self.settle(page)
        for storing in list(self.storing.values()):
            self._wait(storing.ticket)
        for ticket in [*self.evicting.values(), *self.updating.values()]:
            self._wait(ticket)
        self.poll()

    def _record(
        self,
        ticket: Ticket | None,
        seq: int,
        page: int,
        act: Act,
        src: Tier,
        dst: Tier,
        num_bytes: int,
    ) -> None:
        if self.sink is None:
            return
        if ticket is None or ticket.done_ns < 0:
            start, duration = self.engine.now_ns(), 0
        else:
            start, duration = ticket.done_ns - ticket.dur_ns, ticket.dur_ns
        self.sink.action(start, seq, page, act, src, dst, num_bytes, duration, 0, self.policy)
