"""Thinking ahead: loads before their use and write-backs before their page has to go.

Called at every access. How much is put in flight follows from time, not from a count: the line in
is fed until the next hook. More would take frames from pages that are used until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import Space, choose_load, choose_write_backs, take_victims
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageState
from odc.memory.prefetch import LEAVES_NS, Prefetcher
from odc.memory.room import Room
from odc.memory.transfers import Transfers

_EVICTING = PageState.EVICTING  # looking up a member's name is slow
_REST = 3  # accesses of members to let pass after one for which there was nothing to move
_SMOOTH = 0.3  # weight of the last pass in how busy the line is
_SET_MARGIN = 1.05  # guesses that are equal would swap for ever


@dataclass(frozen=True, slots=True)
class Tuning:
    """Knobs of the scheduler, each with the measurement behind its default in docs/log.md."""

    flight_bytes: int = 12 * 1024 * 1024  # in flight while no rate is known; two pages if more
    early_stores: int = 2  # early write-backs in flight
    lookahead_bytes: int = 48 * 1024 * 1024  # future victims worth cleaning
    early_write_back: bool = True
    gate: bool = True  # a prefetcher that is not the pager's own has to earn its keep
    rehearse: str = "now"  # or "aside": in a thread of its own; "" for never
    max_items: int | None = None


class Lookahead:
    """Issues loads ahead and early write-backs.

    Args:
        library: the place in the recorded order.
        transfers: books and commands.
        room: evicts pages.
        prefetcher: says what to load.
        tuning: knobs.

    Attributes:
        created: the visit that runs has made fresh what it does.
    """

    def __init__(
        self,
        library: OrderLibrary,
        transfers: Transfers,
        room: Room,
        prefetcher: Prefetcher,
        tuning: Tuning,
    ) -> None:
        self.library = library
        self.table = library.stations.table
        self.transfers = transfers
        self.room = room
        self.prefetcher = prefetcher
        self.tuning = tuning
        self.created = False
        self._counted = -1  # entry for which frames on their way out are counted on
        self._short = 0  # frames that what lingers could not make up for; 0: nothing lingers
        self._stuck: tuple[int, int, int, bool, bool] | None = None
        self._rest, self._rest_version = 0, -1
        self._mark = (transfers.engine.now_ns(), 0)  # when the last pass began, bytes until then
        self._has_sets = bool(library.stations.sets)
        self._margin = _SET_MARGIN if library.stations.sets else 1.0
        self._largest = max((p.home_bytes for p in self.table.pages), default=0)
        self._flight_bytes = max(tuning.flight_bytes, 2 * self._largest)
        self._early_stores = tuning.early_stores if tuning.early_write_back else 0
        self._is_limited = tuning.max_items is not None

    def begin_pass(self) -> None:
        """Put enough in flight for the longest time without a hook."""
        self._measure_line()
        self._stuck, self._counted, self._short = None, -1, 0
        order = self.library.order
        if order is not None:
            gap = int(order.longest_ns * self.transfers.bytes_per_ns) + self._largest
            self._flight_bytes = max(self.tuning.flight_bytes, 2 * self._largest, gap)

    def _measure_line(self) -> None:
        """How busy the line in was since the last pass began."""
        transfers = self.transfers
        now, moved = transfers.engine.now_ns(), transfers.total_in
        elapsed, loaded = now - self._mark[0], moved - self._mark[1]
        self._mark = (now, moved)
        if elapsed > 0 and transfers.bytes_per_ns:
            busy = min(loaded / transfers.bytes_per_ns / elapsed, 1.0)
            before = self.prefetcher.utilization
            self.prefetcher.utilization = before + _SMOOTH * (busy - before) if before else busy

    def think(self) -> None:
        """Load ahead and write back early, as far as the plan and the lines allow."""
        stuck, transfers, room = self._stuck, self.transfers, self.room
        if stuck is not None and stuck[0] == self.library.position and stuck == self._situation():
            return
        has_sets, moved = self._has_sets, 0
        if has_sets:
            if self._rest > 0 and self._rest_version == self.prefetcher.version:
                self._rest -= 1
                return
            moved = transfers.bytes_in + transfers.bytes_out
        scheduled = room.planned and self.prefetcher.scheduled
        stores = self._early_stores - len(transfers.storing)
        # Under a schedule what leaves has left, but for what lingers.
        if self._load_ahead(scheduled) and stores > 0 and (room.lingering or not scheduled):
            self._clean(stores, scheduled)
        if has_sets and moved == transfers.bytes_in + transfers.bytes_out:
            self._rest, self._rest_version = _REST, self.prefetcher.version

    def _situation(self) -> tuple[int, int, int, bool, bool]:
        """What a schedule's loads ahead depend on: where none was possible, until it changes."""
        transfers = self.transfers
        return (
            self.library.position,
            transfers.free + transfers.coming_frames,
            len(transfers.loading),
            self.created,
            self.room.lingering,
        )

    def _line_is_fed(self) -> bool:
        """Whether the line in is busy until the next hook.

        Under a schedule it is fed somewhat longer: its loads take frames only from pages that
        leave.
        """
        transfers = self.transfers
        order, place = self.library.order, self.library.position
        if not transfers.bytes_per_ns or order is None or place < 0:
            return transfers.in_flight_bytes >= self._flight_bytes
        return transfers.in_busy_ns >= order.entries[place].dur_ns

    def _load_ahead(self, scheduled: bool) -> bool:
        """Loads what the plan wants; returns whether it wants more than there is room for."""
        transfers, room = self.transfers, self.room
        enough = 2 * self._flight_bytes if scheduled else 0
        if transfers.in_flight_bytes >= enough and (scheduled or self._line_is_fed()):
            return True
        frames_of = self.table.frames
        free = transfers.free + transfers.coming_frames
        items = self._items() if self._is_limited else None
        order, place = self.library.order, self.library.position
        makes_fresh = bool(order and order.makes_fresh and place >= 0 and order.fresh[place])
        counted = self._counted >= 0 and self._counts_on(place)
        for page, fresh in self.prefetcher.wanted():
            reserve = self._reserve(fresh) if makes_fresh else fresh
            need = frames_of[page]
            fits = need + reserve <= free
            if transfers.evicting and (fits or not counted) and transfers.rescue(page):
                free = transfers.available
                room.keep(page)
                continue
            if fits and items is None:
                free -= need
                if scheduled and (room.lingering or self._short):
                    free += self._let_go(page, reserve)
            elif scheduled and not room.lingering and need + reserve - free >= max(self._short, 1):
                self._stuck = self._situation()  # nobody is left to make room
                return True
            else:
                space = Space(free, items, reserve)
                if not self._exchange(page, space, scheduled):
                    return True
                free, items = space.frames, space.items
            spare = self._spare(reserve) if reserve and transfers.coming_frames else reserve
            counted = counted or spare < reserve
            transfers.load(page, -1, spare)
            if transfers.in_flight_bytes >= enough and (scheduled or self._line_is_fed()):
                return True
            if scheduled and free <= 0 and not room.lingering and not transfers.evicting:
                # Whatever else is wanted finds no room (``_situation`` written out).
                self._stuck = (place, free, len(transfers.loading), self.created, False)
                return True
        return False

    def _counts_on(self, place: int) -> bool:
        """Whether frames on their way out are counted on at an entry, or at one that follows."""
        return place < self._counted or (place == self._counted and not self.created)

    def _spare(self, reserve: int) -> int:
        """Free frames that a load leaves for what is made fresh.

        None, if what is on its way out will be gone by then.
        """
        transfers = self.transfers
        place, fresh_in_ns = self._next_fresh()
        stored_ns = transfers.stored_ns(transfers.store_byte_ns)
        if max(stored_ns.values(), default=0.0) > fresh_in_ns:
            return reserve
        self._counted = place
        return 0

    def _next_fresh(self) -> tuple[int, float]:
        """The next entry that makes something fresh, -1 for none; and the computation until it."""
        order, place = self.library.order, self.library.position
        if order is None or place < 0:
            return -1, 0.0
        ahead_ns = -self.library.live[-1].dur_ns
        if self.created or not order.entries[place].creates:
            ahead_ns += order.entries[place].dur_ns
            place += 1
        while place < len(order.entries) and not order.entries[place].creates:
            ahead_ns += order.entries[place].dur_ns
            place += 1
        if place == len(order.entries):
            return -1, 0.0
        entry = order.entries[place]
        created = [ns for kind, ns in enumerate(entry.at_ns) if entry.creates >> kind & 1]
        return place, ahead_ns + min(created)

    def _let_go(self, page: int, reserve: int) -> int:
        """Evict what a schedule lets go and may be gone before what is on its way out.

        For a load that would have to wait for frames; returns those that come in addition.
        """
        table, free = self.table, self.transfers.free
        if free >= table.frames[page]:
            return 0
        short = table.frames[page] + reserve - free
        until, queue = self.prefetcher.until, self.room.victims(LEAVES_NS)
        found = take_victims(table, queue, short, until, LEAVES_NS, clean_first=True) or []
        self.room.evict(found)
        return sum(table.frames[victim] for victim in found)

    def _exchange(self, page: int, space: Space, scheduled: bool) -> bool:
        """Evict what a load ahead takes the place of; False if it must not be made now."""
        until, later_than = self.prefetcher.until, LEAVES_NS
        if not scheduled:
            now = self.library.now_ns
            later_than = now + self._margin * (float(until[page]) - now)
        queue = self.room.victims(later_than)
        victims = choose_load(self.table, page, queue, until, later_than, space, scheduled)
        if victims is None:
            self.room.lingering = scheduled and self.room.still_lingers()
            if scheduled:
                self._stuck = self._situation()
                short = self.table.frames[page] + space.reserve - space.frames
                self._short = short if self.room.lingering else 0
            return False
        self.room.lingering = self.room.lingering or self._short > 0
        self._short = 0
        self.room.evict(victims)
        return True

    def _items(self) -> int:
        """Resident pages that may still be added."""
        assert self.tuning.max_items is not None
        return self.tuning.max_items - self.transfers.num_resident - len(self.transfers.loading)

    def _reserve(self, ahead: int) -> int:
        """Frames to leave for what will be made fresh, ``ahead`` of them by later visits.

        For a visit that makes pages fresh itself.
        """
        order, place = self.library.order, self.library.position
        assert order is not None
        if self.library.live[-1].goes:  # what was made fresh here has left for its update
            return ahead
        here, dies = order.fresh[place], order.entries[place].dies
        if not self.created:
            return max(here, ahead) if dies else here + ahead
        return max(ahead - here, 0) if dies else ahead

    def _clean(self, stores: int, scheduled: bool) -> None:
        """Write back early what will have to go for the loads ahead."""
        transfers = self.transfers
        victims: Iterable[int] = self.room.victims().first()
        frames = self.tuning.lookahead_bytes // FRAME_BYTES - transfers.available
        if scheduled:
            until = self.prefetcher.until
            victims = takewhile(lambda page: until[page] > LEAVES_NS, victims)
            frames = transfers.num_frames
        if frames > 0:
            chosen = choose_write_backs(self.table, victims, transfers.storing, frames, stores)
            for page in chosen:
                transfers.store(page, early=True)
            untried = scheduled and not self._short and self.room.still_lingers()
            self.room.lingering = bool(chosen) or untried
