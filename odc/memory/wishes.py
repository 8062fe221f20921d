"""The wish list: absent pages to load ahead, soonest first.

A cursor over the entries of this pass and of those expected after it: it moves on over pages that
are there, and goes back for one that left. Entries are numbered through: their *serial numbers*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from odc.memory.plan_sets import FAR_NS
from odc.memory.prefetch import LEAVES_NS, Limits
from odc.memory.recorded import Entry, RecordedOrder

if TYPE_CHECKING:
    from odc.memory.plan import OrderPrefetcher

NEVER = 0.02  # what is less likely is not expected
_WORTH = 0.1  # least chance at which an entry is worth a load, times how busy the line in is
_BUSY, _FULL = 0.9, 0.97  # from there on, and where it has no time to spare,
_FULL_WORTH = 0.6  # this: there every load that is not used delays one that is
_BEYOND = 64  # entries that are looked at behind one that waits for an update
_SET_PASSES = 3  # passes for which members of sets are loaded ahead
_NOWHERE: tuple[int, int, Sequence[tuple[int, ...]]] = (0, 0, ())


class WishList:
    """What a plan wants to be loaded ahead.

    Args:
        plan: knows when pages are used, and how likely.
        limits: how far ahead pages may be loaded.
        threshold: least probability at which a member of a set is worth loading ahead.

    Attributes:
        cursor: serial number of the entry that is looked at next.
    """

    def __init__(self, plan: OrderPrefetcher, limits: Limits, threshold: float) -> None:
        self._plan = plan
        self._library, self._table, self._stations = plan.library, plan.table, plan.stations
        self._until_of: Any = plan.until.data  # to read one is faster than of an array
        self._limits, self._threshold = limits, threshold
        self.cursor = 0
        self._orders: Sequence[RecordedOrder] = ()  # this pass's and those expected after it
        self._offsets: Sequence[int] = (0,)  # serial number of the first entry of each
        self._later: Sequence[int] = ()  # by page, its first entry in later passes, from this end
        self._makes_fresh = False  # some entry of them does
        self._end = -1  # serial number of the last entry of passes in sight
        self._near = _NOWHERE  # first and last entry of an order, and its pages by entry
        self._again: list[int] = []  # serial numbers of sets to look at again

    def begin_pass(
        self, orders: Sequence[RecordedOrder], later: Sequence[int], follows: bool
    ) -> None:
        """Other passes are in sight; ``follows``: those that were, after one of them."""
        passed = self._offsets[1] if self._orders else 0
        self._orders, self._later, self._near = orders, later, _NOWHERE
        self._offsets = [0, *accumulate(len(order.entries) for order in orders)]
        self._makes_fresh = any(o.lasting_fresh[-1] or o.most_dying for o in orders)
        self._end = self._last_serial()
        if follows:
            self.cursor = max(self.cursor - passed, 0)
            self._again = [s - passed for s in self._again if s >= passed]
        else:
            self.cursor = 0

    def look_again(self, serials: Iterable[int]) -> None:
        """Scores of sets have changed whose entries the cursor may have passed."""
        self._again = sorted({*serials, *self._again})

    def forget_near(self) -> None:
        """What entries need has changed."""
        self._near = _NOWHERE

    def wanted(self) -> Iterator[tuple[int, int]]:
        """See ``Prefetcher.wanted``."""
        if not self._orders:
            return
        if self._table.left:
            self._go_back()
        cursor = self.cursor
        if cursor < self._library.position:
            cursor = self.cursor = self._library.position
        last = self._end if self._limits.page_prefetch is None else self._last_serial()
        if self._again:
            yield from self._wanted_again(last)
        absent, makes_fresh = self._table.is_absent, self._makes_fresh
        updates = self._orders[0].goes_at
        low, high, uses = self._near
        pages: Sequence[int]
        while cursor <= last:
            if low <= cursor < high:
                pages = uses[cursor - low]
            else:
                pages = self._pages_at(cursor)
                low, high, uses = self._near
            if updates and self._is_updated_before(pages, cursor):
                self.cursor = cursor
                yield from self._wanted_beyond(last)
                return
            for page in pages:
                if absent[page]:
                    self.cursor = cursor
                    yield page, self._fresh_ahead() if makes_fresh else 0
            cursor += 1
        self.cursor = cursor

    def _wanted_beyond(self, last: int) -> Iterator[tuple[int, int]]:
        """The same behind entries whose pages are first updated at home: these keep their room."""
        order, absent, held = self._orders[0], self._table.is_absent, 0
        seen: set[int] = set()
        for serial in range(self.cursor, min(last, self.cursor + _BEYOND) + 1):
            for page in self._pages_at(serial):
                if not absent[page] or page in seen:
                    continue
                seen.add(page)
                if self._plan.goes_ahead(page, order):
                    held += self._table.frames[page]
                else:
                    yield page, self._fresh_ahead() + held

    def _wanted_again(self, last: int) -> Iterator[tuple[int, int]]:
        """The same of sets that the cursor has passed, whose scores have changed."""
        absent = self._table.is_absent
        while self._again:
            serial = self._again[0]
            if serial >= self.cursor or serial > last:
                self._again.clear()
                break
            if serial >= self._library.position:
                for page in self._pages_at(serial):
                    if absent[page]:
                        yield page, self._fresh_ahead()
            self._again.pop(0)

    def _is_updated_before(self, pages: Sequence[int], serial: int) -> bool:
        """Whether what an entry of a later pass needs is still to be updated at home in this."""
        order = self._orders[0]
        if not order.goes_at or serial < self._offsets[1]:
            return False
        return any(self._plan.goes_ahead(page, order) for page in pages)

    def _go_back(self) -> None:
        """Pages that left since the last look: the cursor returns to the use of the soonest."""
        left, is_evictable = self._table.left, self._table.is_evictable
        gone, until = self._plan.left, self._until_of
        order, position = self._orders[0], self._library.position
        for page in left:
            gone[page] = 1
            if order.is_certain:  # (``_next_serial`` written out)
                places = order.at[page]
                first = bisect_right(places, position)
                if first < len(places):
                    serial = places[first]
                else:
                    serial = self._offsets[1] + self._later[page]
            else:
                serial = self._next_serial(page)
            if serial < self.cursor:
                self.cursor = serial
            if LEAVES_NS <= until[page] < FAR_NS and not is_evictable[page]:
                until[page] -= LEAVES_NS  # it has left; when it comes back it stays
        left.clear()

    def _next_serial(self, page: int) -> int:
        """The entry ahead that uses a page; where nothing is known of one, the end."""
        order = self._orders[0]
        places = order.at[page]
        if self._plan.sets.holds[page]:
            places = order.of_station.get(self._plan.sets.station[page], [])
        for place in places[bisect_right(places, self._library.position) :]:
            if self._library.expects(order, place):
                return place
        return self._offsets[1] + self._later[page]

    def _last_serial(self) -> int:
        """The last entry that limits let pages be loaded for."""
        last = self._offsets[-1] - 1
        if self._limits.page_prefetch is not None:
            last = min(last, self._library.position + self._limits.page_prefetch)
        window = self._limits.prefetch_window
        if self._stations.sets:  # farther off, guesses are the same, and looked at again and again
            window = min(window or _SET_PASSES, _SET_PASSES)
        if window is not None:
            last = min(last, self._offsets[min(window, len(self._orders))] - 1)
        return last

    def _pages_at(self, serial: int) -> Sequence[int]:
        """Pages that an entry needs, likely ones only, in the order of their use."""
        cycle = 0
        while self._offsets[cycle + 1] <= serial:
            cycle += 1
        order = self._orders[cycle]
        place = serial - self._offsets[cycle]
        if order.is_certain and not self._plan.hinted:
            self._near = (self._offsets[cycle], self._offsets[cycle + 1], order.uses)
            return order.uses[place]
        entry = order.entries[place]
        set_index = self._stations.stations[entry.station].set_index
        if set_index >= 0:
            return self._set_pages(entry, set_index, serial, cycle)
        chance = entry.chance
        if cycle == 0 and place > self._library.position:
            chance = self._plan.chance(order, place)
        return order.uses[place] if chance >= self.least_worth() else ()

    def least_worth(self) -> float:
        """Least chance at which an entry is worth a load, as busy as the line in is."""
        worth = _WORTH * self._plan.utilization
        full = min((self._plan.utilization - _BUSY) / (_FULL - _BUSY), 1.0)
        if full > 0.0:
            worth += full * (_FULL_WORTH - _WORTH)
        return max(worth, NEVER)

    def _set_pages(self, entry: Entry, set_index: int, serial: int, cycle: int) -> list[int]:
        members = self._plan.remaining
        if serial != self._library.position:
            members = self._plan.sets.likely(entry, set_index, cycle, self._threshold)
        member_pages = self._stations.member_pages
        return [p for m in members for p in member_pages(entry.station, entry.kinds, m)]

    def _fresh_ahead(self) -> int:
        """Frames to leave free: for the next visit, or under a schedule up to the cursor.

        A schedule gives frames to what needs them in the order of need.
        """
        if not self._makes_fresh:
            return 0
        position = self._library.position
        if not self._plan.scheduled:
            return self._orders[0].frames_to_create(position + 1)
        lasting, dying = 0, 0
        for cycle, order in enumerate(self._orders):
            low = position + 1 if cycle == 0 else 0
            high = min(len(order.entries), self.cursor - self._offsets[cycle] + 1)
            if high <= low:
                break
            lasting += order.lasting_fresh[high] - order.lasting_fresh[low]
            if order.dying_fresh[high] > order.dying_fresh[low]:
                dying = max(dying, order.most_dying)
        return lasting + dying
