"""The plan: when each page is used next; ``wishes.py`` says from it which pages to load ahead.

For every page the plan holds the time of its next use on the clock of ``orders.py`` (compute along
the expected order). With certain uses, evicting the page with the farthest one is Belady's order.
A use that is only likely stands for

    next use = now + 1 / sum over uses ahead of P(this is the next use) / time until it,

the harmonic mean of the times it may have, so that what is likely soon is kept before what is
certain late; with nothing known but frequencies this is GDSF's frequency x cost / size. A page is
loaded ahead only over victims that are needed later than it is (Cao, Felten, Karlin and Li, 1995).

All is incremental. A page's time is worked out when its use ends and holds until the order is
left; only then, and when a pass comes that was not expected, are all pages looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from odc.memory.orders import OrderLibrary
from odc.memory.plan_sets import FAR_NS, SOONEST_NS, UNKNOWN_NS, SetTimes
from odc.memory.prefetch import LEAVES_NS, THRESHOLD, Limits
from odc.memory.recorded import CERTAIN, RecordedOrder
from odc.memory.scores import SetScorer
from odc.memory.stations import Visit
from odc.memory.wishes import NEVER, WishList

_UNKNOWN_STEP = 32.0  # doubles near 1e17 are 16 apart
_CHANGED = 0.25  # a chance that moves by so much is taken in at once
_KNOWN_CHAINS = 64  # chains of passes whose first uses are kept
_SETS_AHEAD = 4  # sets whose new scores are taken in at once; the others when they come near


class OrderPrefetcher:
    """Walks the recorded order ahead; a scorer says how likely members of sets are.

    Backward and optimizer mirror this forward exactly; only forward sets are the scorer's guess.

    Args:
        library: recorded orders and the tape.
        scorer: of the members of sets.
        limits: how far ahead pages may be loaded.
        threshold: least probability at which a page is worth loading ahead.
        sets: works out the times of pages of sets; ``SetTimes`` where not given.

    Attributes:
        sets: that.
        wishes: the wish list.
        hinted: by station, P(visited in this pass), where it was told.
        left: (num_pages,) whether a page left since its last use.
        remaining: members of the set that is visited that will run, in order.
    """

    def __init__(
        self,
        library: OrderLibrary,
        scorer: SetScorer,
        limits: Limits | None = None,
        threshold: float = THRESHOLD,
        sets: type[SetTimes] | None = None,
    ) -> None:
        self.library = library
        self.stations = library.stations
        self.table = library.stations.table
        count = len(self.table.pages)
        self.until = np.full(count, UNKNOWN_NS)
        self._until_of: Any = self.until.data  # to read one is faster than of an array
        shares = self.table.home_shares  # what is coded at home is loaded cheaply: the rest is dear
        self._dear = [share / min(shares) for share in shares]
        self.version = 0
        self.scheduled = False
        self.utilization = 0.0
        self.hinted: dict[int, float] = {}
        self.left = bytearray(count)
        self.remaining: Sequence[int] = ()
        self._seen: dict[int, float] = {}  # entries of this pass whose chance has changed
        self._reach: list[float] = []  # chances of the next entries, where they are uncertain
        self._leaves: list[list[frozenset[int]]] = []  # of this pass, then of those before it
        self._cycle: Sequence[RecordedOrder] = []  # the orders that these belong to
        self._schedule: object = None
        self._first: frozenset[int] | None = None
        self._anew = False  # the schedule has changed
        self.sets = (sets or SetTimes)(library, scorer, self.until)
        self._has_sets = bool(self.stations.sets)
        self._uses = 0
        self._pass = -1
        self._phase = -1
        self._position = -1
        self._chain: tuple[int, ...] = ()
        self._orders: list[RecordedOrder] = []  # this pass's and those expected after it
        self._starts: list[float] = []  # clock at the beginning of each
        self._after: list[float] = []  # by page: first use in later passes, from the end of this
        self._after_of: dict[tuple[tuple[int, int], ...], tuple[list[float], list[int]]] = {}
        self.wishes = WishList(self, limits or Limits(), threshold)

    # -- what the pager tells --------------------------------------------------------------------

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        library = self.library
        if library.passes != self._pass:
            self._begin_pass()
        order = library.order
        if self._has_sets:
            self.remaining = remaining
            set_index = self.stations.set_of[visit.station]
            if set_index >= 0 and visit.order:
                self.sets.observe(visit, set_index, tokens)
        if order is None:
            return
        if order.is_certain and not library.skipped and library.position >= self._position:
            if self._reach:  # the visit that was expected: nothing was learned
                self._reach = []
            self._position = position = library.position
            if position > self.wishes.cursor:
                self.wishes.cursor = position
        else:
            self._follow()
            self._look_ahead()
        if self._has_sets:
            self._look_at_sets(visit)

    def _look_at_sets(self, visit: Visit) -> None:
        """Times of members of sets anew: of all where a phase begins, else of those near."""
        set_index = self.stations.set_of[visit.station]
        if visit.phase != self._phase:
            self._rekey_sets(range(len(self.stations.sets)))
            self.wishes.cursor = max(self.library.position, 0)
        elif set_index >= 0:
            self._rekey_sets([set_index, *self._sets_ahead()])
        self._phase = visit.phase

    def _follow(self) -> None:
        """The place in the order has moved."""
        position, skipped = self.library.position, self.library.skipped
        if position < self._position:
            self.wishes.cursor = 0
            self._rekey_all()
        elif skipped:
            order = self.library.order
            assert order is not None
            for place in skipped:  # its pages are used later than was thought
                for page in order.uses[place]:
                    self.until[page] = self._next_use(page)
            self.version += 1
        self._position = position
        self.wishes.cursor = max(self.wishes.cursor, position)

    def _look_ahead(self) -> None:
        """Where passes differ: which of the next entries can still come, seen from here."""
        order, position = self.library.order, self.library.position
        assert order is not None
        if order.is_certain or position < 0:
            self._reach = []
            return
        self._reach = order.reach(position)
        worth = self.wishes.least_worth()
        for place, chance in enumerate(self._reach, start=position + 1):
            before = self._seen.get(place, order.entries[place].chance)
            if abs(chance - before) < _CHANGED and (chance < NEVER) == (before < NEVER):
                continue
            self._seen[place] = chance
            for page in order.uses[place]:
                self.until[page] = self._next_use(page)
                self.version += 1
            if before < worth <= chance:  # passed over until now
                self.wishes.cursor = min(self.wishes.cursor, place)

    def chance(self, order: RecordedOrder, place: int) -> float:
        """P(an entry of this pass is visited), from where the pass is and from its tape."""
        library = self.library
        if not library.expects(order, place):
            return 0.0
        if self.hinted:
            hinted = self.hinted.get(order.entries[place].station)
            if hinted is not None:
                return hinted
        mirror = order.mirror[place]
        if 0 <= mirror <= library.position:
            return 1.0
        ahead = place - library.position - 1
        return self._reach[ahead] if ahead < len(self._reach) else order.entries[place].chance

    def wanted(self) -> Iterator[tuple[int, int]]:
        return self.wishes.wanted()

    def next_use(self, page: int) -> float:
        library = self.library
        if library.passes != self._pass:  # a page may be held from one pass into the next
            self._begin_pass()
        self.left[page] = 0
        order = library.order
        if order is not None and order.writes and self._is_written_yet(page, order):
            return library.now_ns
        return self._next_use(page)

    def _is_written_yet(self, page: int, order: RecordedOrder) -> bool:
        """Whether the visit that runs, which has only read the page so far, goes on to write it.

        As a backward that lets parameters go and then updates them.
        """
        library = self.library
        if not library.live:
            return False
        visit, of_page = library.live[-1], self.table.pages[page]
        if visit.place < 0:
            return False
        if not order.entries[visit.place].writes & ~visit.writes & 1 << of_page.kind:
            return False
        return self.stations.of_group[of_page.group] == visit.station

    def _next_use(self, page: int) -> float:
        """The same, for a page that may have left since its last use."""
        library = self.library
        order = library.order
        if order is None:
            self._uses += 1
            return UNKNOWN_NS - _UNKNOWN_STEP * self._uses
        if self.sets.holds[page]:
            return float(self.sets.later[page])
        if order.is_certain and not order.goes_at and not self.hinted:  # nearly always
            uses = order.at[page]
            first = bisect_right(uses, library.position)
            if first < len(uses):
                time = library.base_ns + order.start_ns[uses[first]]
            else:
                time = library.base_ns + order.total_ns + self._after[page]
        else:
            time = self._time_of(page, order)
        if self.scheduled:
            return time + LEAVES_NS if self._has_to_leave(page, order) else time
        weight = self.table.load_weight[page] * self._dear[page]
        if weight != 1.0:  # what is dear to load goes later
            time = library.now_ns + (time - library.now_ns) / weight
        return time

    def _time_of(self, page: int, order: RecordedOrder) -> float:
        """When a page outside sets is used next."""
        library = self.library
        uses = order.at[page]
        after = library.end_ns + self._after[page]
        if order.goes_at and self.goes_ahead(page, order):
            after = max(after, UNKNOWN_NS / 2)  # what comes after the update is no use of this copy
        first = bisect_right(uses, library.position)
        if order.is_certain and not self.hinted:
            return library.base_ns + order.start_ns[uses[first]] if first < len(uses) else after
        for at in range(first, len(uses)):
            place = uses[at]
            chance = self.chance(order, place)
            if chance < NEVER:
                continue
            time = library.base_ns + order.start_ns[place]
            if chance >= CERTAIN or order.mirror[place] >= 0:
                return time
            return _mean_time(library.now_ns, chance, time, after)
        return after

    def goes_ahead(self, page: int, order: RecordedOrder) -> bool:
        """Whether a page still leaves for an update in this pass."""
        goes, library = order.goes_at.get(page), self.library
        if not goes or goes[-1] < library.position:
            return False
        return goes[-1] > library.position or not library.live or not library.live[-1].goes

    def _has_to_leave(self, page: int, order: RecordedOrder) -> bool:
        """Whether the schedule lets a page go after its last use, and it has not gone yet."""
        if self.left[page]:
            return False  # it has been loaded for its next use since, or it will be
        uses = order.held_at[page]
        at = bisect_right(uses, self.library.position)
        if at:
            return page in self._leaves[0][uses[at - 1]]
        if self._first is not None:
            return page in self._first
        for number in (*range(1, len(self._cycle)), 0):
            uses = self._cycle[number].held_at[page]
            if uses:
                return page in self._leaves[number][uses[-1]]
        return False

    def follow(
        self,
        schedule: object,
        orders: Sequence[RecordedOrder],
        leaves: list[list[frozenset[int]]],
        first: frozenset[int] | None = None,
    ) -> None:
        """Take a schedule for the pass that begins.

        Args:
            schedule: what tells it from others; None for no schedule.
            orders: of this pass and those before it, the last one first.
            leaves: for each of them and each place, the pages that leave after their use there.
            first: pages that leave at once, for a pass that is no part of a cycle.
        """
        self._first = first
        if first is not None:  # it knows what is resident, whenever that came
            self.left = bytearray(len(self.left))
            self.table.left.clear()
        self._anew = self._anew or schedule is not self._schedule
        self._schedule, self._cycle, self._leaves = schedule, orders, leaves
        self.scheduled = schedule is not None

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Hold the scores: of set members until their set is visited, of other groups in this pass.

        A layer that will be dropped has the score 0: told when its mask is drawn, it costs
        nothing.
        """
        self._begin_pass_if_new()  # a hint before its first visit is for the pass that begins
        sets = self.sets.hint(groups, scores)
        order = self.library.order
        for group, score in zip(groups, scores, strict=True):
            station = self.stations.of_group[group]
            if self.stations.stations[station].set_index < 0:
                self.hinted[station] = min(max(float(score), 0.0), 1.0)
        if order is None or not self._orders:
            return
        if self.hinted:
            self.wishes.forget_near()
            self._rekey_all()
            self.wishes.cursor = max(self.library.position, 0)
        self._rekey_sets(sets)

    # -- passes ----------------------------------------------------------------------------------

    def _begin_pass_if_new(self) -> None:
        if self.library.passes != self._pass:
            self._begin_pass()

    def _begin_pass(self) -> None:
        library = self.library
        self._pass, self._phase, self._position = library.passes, -1, -1
        self._seen.clear()
        self.hinted.clear()
        self._reach = []
        passed = bool(self._orders)
        before, self._chain = self._chain, library.chain
        self._orders, self._starts = [], []
        if library.order is None:
            self.wishes.begin_pass((), (), False)
            return
        start = library.base_ns
        for ctx in (library.ctx, *library.chain):
            order = library.orders.get(ctx)
            if order is None:
                break
            self._orders.append(order)
            self._starts.append(start)
            start += order.total_ns
        follows = library.as_expected and passed and before[1:] == self._chain[:-1]
        follows, self._anew = follows and not self._anew, False
        self._after, later = self._first_uses()
        self.wishes.begin_pass(self._orders, later, follows)
        if follows:
            self._find_far()
        else:
            self._rekey_all()

    def _find_far(self) -> None:
        """One more pass is in sight: pages that had no use so far may have one in it."""
        far = np.flatnonzero(self.until >= FAR_NS)
        for page in far.tolist():
            if not self.sets.holds[page]:
                self.until[page] = self._next_use(page)
                self.version += 1

    def _first_uses(self) -> tuple[list[float], list[int]]:
        """By page, the first use in the passes expected after this one, from the end of this one.

        Returns:
            The time until it, and the number of the entry that has it.
        """
        orders = self._orders[1:]
        key = tuple((id(order), order.compiled) for order in orders)
        known = self._after_of.get(key)
        if known is not None:
            return known
        count = len(self.table.pages)
        first = [UNKNOWN_NS / 2] * count
        start = sum(order.total_ns for order in orders)
        number = sum(len(order.entries) for order in orders)
        serials = [number] * count
        for order in reversed(orders):
            start -= order.total_ns
            number -= len(order.entries)
            self._note_uses(first, order, range(len(order.entries)), start, 0.0)
            self._note_serials(serials, order, number)
        if len(self._after_of) >= _KNOWN_CHAINS:
            self._after_of.clear()
        self._after_of[key] = first, serials
        return first, serials

    def _note_serials(self, serials: list[int], order: RecordedOrder, number: int) -> None:
        """Write the numbers of first entries in an order over those of later ones."""
        for place in reversed(range(len(order.uses))):
            for page in order.uses[place]:
                serials[page] = number + place
        for station, places in order.of_station.items():
            for page in self.sets.pages_of[station]:
                serials[page] = number + places[0]

    def _note_uses(
        self,
        times: list[float],
        order: RecordedOrder,
        places: Sequence[int],
        start: float,
        now: float,
    ) -> None:
        """Write the first uses in an order that starts at ``start`` over later times of use."""
        for place in reversed(places):
            time = start + order.start_ns[place]
            chance = order.entries[place].chance
            certain = chance >= CERTAIN or order.mirror[place] >= 0
            for page in order.uses[place]:
                times[page] = time if certain else _mean_time(now, chance, time, times[page])

    def _rekey_all(self) -> None:
        """The times of all pages anew: the pass that runs is not the one that was expected."""
        library = self.library
        order = library.order
        assert order is not None
        times = (np.array(self._after) + library.end_ns).tolist()
        ahead = [
            place
            for place in range(library.position + 1, len(order.entries))
            if self.chance(order, place) >= NEVER
        ]
        self._note_uses(times, order, ahead, library.base_ns, library.now_ns)
        if library.position >= 0:
            for page in order.uses[library.position]:
                times[page] = library.now_ns
        if self.scheduled:
            self._note_left()
            for page, time in enumerate(times):
                if self._has_to_leave(page, order):
                    times[page] = time + LEAVES_NS
        outside = np.frombuffer(self.sets.holds, bool) == 0
        self.until[outside] = np.array(times)[outside]
        self.version += 1

    def _note_left(self) -> None:
        for page in self.table.left:
            self.left[page] = 1

    # -- sets ------------------------------------------------------------------------------------

    def _sets_ahead(self) -> list[int]:
        """The sets whose visits come next: their scores have just changed, look at them again."""
        order = self.library.order
        assert order is not None
        position = self.library.position
        ahead: list[tuple[int, int]] = []
        for station, places in order.of_station.items():
            index = bisect_right(places, position)
            if index < len(places):
                ahead.append((places[index], station))
        ahead = sorted(ahead)[:_SETS_AHEAD]
        self.wishes.look_again([max(position, 0), *(place for place, _ in ahead)])
        return [self.stations.stations[station].set_index for _, station in ahead]

    def _rekey_sets(self, sets: Iterable[int]) -> None:
        passes = list(zip(self._orders, self._starts, strict=True))
        for set_index in sets:
            self.sets.rekey(set_index, passes, self.remaining)
        self.version += 1


def _mean_time(now: float, chance: float, time: float, otherwise: float) -> float:
    """The time of a use that comes with a chance at ``time``, else at ``otherwise``."""
    soon = chance / max(time - now, SOONEST_NS)
    return now + 1.0 / (soon + (1.0 - chance) / max(otherwise - now, SOONEST_NS))
