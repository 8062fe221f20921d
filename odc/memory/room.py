"""Room: which pages go when frames are needed, and what is asked of a page whose use ends.

The scores by which pages go are the plan's times of next use where there is a plan and the policy
goes by it; else the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np

from odc.errors import BudgetError
from odc.memory.auto_eviction import Auto
from odc.memory.gate import Gate
from odc.memory.issue import take_victims
from odc.memory.pages import PageState, PageTable
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.prefetch import LEAVES_NS, Prefetcher
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy, VictimQueue

_STRANGE_NS = UNKNOWN_NS / 8
_NEVER = float("inf")
_SOON, _LATER = 1.25, 0.5  # of a load that has to be made again, in this pass and far behind it
_NEAR = 4  # loads behind the end of this pass that count as soon
_WEIGHED = 64  # victims that are weighed by when their frames can be had


class _SoonFirst:
    """The front of a queue by what it costs to wait for its frames, and to load the page again.

    A dirty page's store has to end first, and those before it; until then the line in stands idle
    once it has done what it has. To load a page again costs somewhat more than a load in this pass,
    and later about half of one: the line may have time to spare then. Under a schedule all that is
    to leave will, and what is gone first makes room first.
    """

    def __init__(self, room: Room, later_than: float) -> None:
        self._room = room
        self._later_than = later_than

    def first(self) -> Iterator[int]:
        """Victims in order of cost; the order is made as far as it is asked for.

        What a page costs beside waiting does not fall along the queue. So one that costs no waiting
        goes at once, behind those before it that wait and are not dearer for it.
        """
        scores, later_than = self._room.score_of, self._later_than
        victims, is_dirty = self._room.queue.first(), self._room.table.is_dirty
        number = 0
        for page in victims:
            if scores[page] <= later_than:
                return
            if is_dirty[page]:
                break
            yield page
            number += 1
        else:
            return
        rest = takewhile(lambda page: scores[page] > later_than, chain((page,), victims))
        yield from self._weighed(islice(rest, max(_WEIGHED - number, 0)))
        yield from rest

    def _weighed(self, victims: Iterable[int]) -> Iterator[int]:
        is_dirty, wait_ns, cost_of = self._room.table.is_dirty, self._waits(), self._costs()
        held: list[tuple[float, int, int]] = []
        for number, page in enumerate(victims):
            cost = cost_of(page)
            while held and held[0][0] <= cost:
                yield heappop(held)[2]
            wait = wait_ns(page) if is_dirty[page] else 0.0
            if cost + wait > cost:
                heappush(held, (cost + wait, number, page))
            else:
                yield page
        yield from (page for _, _, page in sorted(held))

    def _costs(self) -> Callable[[int], float]:
        """What it costs to load a page again, in ns."""
        room = self._room
        scores = room.score_of
        if room.scheduled:
            return lambda page: 0.0 if scores[page] > LEAVES_NS else _NEVER
        load = room.transfers.load_ns(room.mean_bytes)
        near, soon, later = room.end_ns + _NEAR * load, _SOON * load, _LATER * load

        def cost(page: int) -> float:
            time = scores[page]
            return soon if time < near else later if time < _STRANGE_NS else 0.0

        return cost

    def _waits(self) -> Callable[[int], float]:
        """How long the line in stands idle until a dirty page's store has ended, in ns."""
        transfers, pages = self._room.transfers, self._room.table.pages
        byte_ns = transfers.store_byte_ns
        queued = transfers.stored_ns(byte_ns)
        ahead = max(queued.values(), default=0.0)
        busy = 0.0 if self._room.scheduled else transfers.in_busy_ns

        def wait(page: int) -> float:
            until = queued.get(page)
            if until is None:
                until = ahead + pages[page].home_bytes * byte_ns
            return max(until - busy, 0.0)

        return wait


class NoRoom(Exception):
    """Everything else is pinned; the pager says so in words."""


class Room:
    """Evicts pages.

    Args:
        table: page states.
        transfers: books and commands.
        policy: order of eviction.
        prefetcher: knows times of next use, or None.

    Attributes:
        queue: evictable pages in order.
        scores: (num_pages,) the higher, the sooner a page goes.
        time: virtual time: accesses so far.
        end_ns: the end of the pass that runs, on the plan's clock.
        score_of: the scores, faster to read one by one.
        mean_bytes: of a page at home.
        lingering: pages that a schedule lets go may still be here.
        planned: pages go by the plan's times of next use.
        chooser: the policy, if it chooses its order at the beginning of a pass.
    """

    def __init__(
        self,
        table: PageTable,
        transfers: Transfers,
        policy: EvictionPolicy,
        prefetcher: Prefetcher | None,
    ) -> None:
        self.table = table
        self.transfers = transfers
        self.policy = policy
        self.prefetcher = prefetcher
        self.time = 0
        self.end_ns = 0.0
        self.mean_bytes = sum(p.home_bytes for p in table.pages) / max(len(table.pages), 1)
        self.lingering = True
        self.chooser = policy if isinstance(policy, Auto | Gate) else None
        if self.chooser is not None:
            self.chooser.watch(table, prefetcher)
        self._order = ""
        self._version = -1
        self._take_order()

    def _take_order(self) -> None:
        """Go by the plan, or by the policy's own scores."""
        prefetcher = self.prefetcher
        self.planned = prefetcher is not None and self.policy.planned
        self.scores = np.zeros(len(self.table.pages))
        if prefetcher is not None and self.planned:
            self.scores = prefetcher.until
        elif self.chooser is not None:
            self.scores = self.chooser.scores
        self.score_of: Any = self.scores.data  # to read one is faster than of an array
        self.queue = VictimQueue(self.table, self.scores)

    def begin_pass(self, ctx: int, end_ns: float) -> None:
        """A pass in context ``ctx`` begins: the order of eviction may change.

        Args:
            ctx: its context.
            end_ns: the end of the pass, on the plan's clock.
        """
        self.end_ns = end_ns
        if self.chooser is not None:
            self.chooser.begin_pass(ctx)
            self.reorder()

    def reorder(self) -> None:
        """The chooser may have changed its order."""
        if self.chooser is not None and self.chooser.chosen != self._order:
            self._order = self.chooser.chosen
            self._take_order()
            self.lingering = True

    @property
    def scheduled(self) -> bool:
        """A schedule says what leaves."""
        return self.planned and self.prefetcher is not None and self.prefetcher.scheduled

    def poll(self) -> None:
        """Take note of what the engine has done, and of what the plan has changed."""
        transfers = self.transfers
        transfers.poll()
        if transfers.arrived:
            self._note_arrivals()
        prefetcher = self.prefetcher
        if prefetcher is None:
            self.table.left.clear()
        elif prefetcher.version != self._version:
            self._version = prefetcher.version
            if self.planned:
                self.lingering = True
                self.queue.invalidate()

    def _note_arrivals(self, used: int = -1) -> None:
        """Score what came and can go, but for the page whose use just ended: that counts once."""
        arrived, is_evictable, scores = (
            self.transfers.arrived,
            self.table.is_evictable,
            self.score_of,
        )
        for page in arrived:
            if not self.planned:
                self.policy.arrived(page, self.time)
            if is_evictable[page] and page != used:
                if not self.planned:
                    scores[page] = self.policy.score(page, self.time)
                score = scores[page]
                if score > LEAVES_NS:
                    self.lingering = True
                self.queue.push(page, score)
        arrived.clear()

    def rank(self, page: int) -> None:
        """A page's use ended: when is it used next, and when does it go?"""
        if self.transfers.arrived:
            self._note_arrivals(page)
        prefetcher = self.prefetcher
        if prefetcher is not None:
            time = prefetcher.until[page] = prefetcher.next_use(page)
            if self.chooser is not None:
                self.chooser.released(page, self.time)
            if self.planned:
                if time > LEAVES_NS and prefetcher.scheduled:
                    if not self._has_strangers():
                        self.policy.evicted(page)
                        self.transfers.evict(page)  # at once: nothing is won by waiting
                        return
                    self.lingering = True
                self.queue.push(page, time)
                return
        elif self.chooser is not None:
            self.chooser.released(page, self.time)
        score = self.scores[page] = self.policy.score(page, self.time)
        self.queue.push(page, score)

    def _has_strangers(self) -> bool:
        """Pages are here that no pass in sight uses: they go before what a schedule lets go."""
        first = self.queue.peek()
        return first >= 0 and self.score_of[first] >= _STRANGE_NS

    def still_lingers(self) -> bool:
        """Whether a page is here that a schedule lets go."""
        first = self.queue.peek()
        return first >= 0 and self.score_of[first] > LEAVES_NS

    def keep(self, page: int) -> None:
        """A page that was to go stays; its time of next use holds."""
        self.queue.push(page, float(self.scores[page]))

    def victims(self, later_than: float = -_NEVER) -> VictimQueue | _SoonFirst:
        """Evictable pages in order; where writes queue up, by when their frames can be had.

        Args:
            later_than: pages that are needed before may be left out.
        """
        if self.planned and 1 in self.table.is_dirty:
            self.transfers.poll()
            return _SoonFirst(self, later_than)
        return self.queue

    def evict(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.policy.evicted(page)
            self.transfers.evict(page)

    def update(self, page: int, gradient: int, run: Callable[[], None]) -> None:
        """Parameters and their gradient leave; the parameters are updated at home."""
        for leaves in (page, gradient):
            if self.table.state[leaves] == PageState.RESIDENT:
                self.policy.evicted(leaves)
        self.transfers.update(page, gradient, run)
        if self.chooser is not None and self.chooser.awake:
            for left in (page, gradient):
                self.chooser.dropped(left)

    def drop(self, page: int) -> None:
        """A resident page's content died."""
        self.transfers.drop(page)
        if self.chooser is not None and self.chooser.awake:
            self.chooser.dropped(page)

    def make(self, frames: int) -> None:
        """Free frames, whatever it takes.

        Raises:
            NoRoom: every other page is pinned.
        """
        transfers = self.transfers
        while transfers.available < frames:
            chosen = take_victims(self.table, self.victims(), frames - transfers.available)
            if chosen is not None:
                self.evict(chosen)
                return
            self.evict(list(self.queue.first()))
            if transfers.available >= frames or transfers.cancel_one_prefetch():
                continue
            on_the_way = any(not self.table.pins[page] for page in transfers.loading)
            if not (on_the_way and transfers.wait_any()):
                raise NoRoom
            self.poll()

    def error(self, frames: int, option: str) -> BudgetError:
        """``NoRoom`` in words; ``option`` is the name of the budget's setting."""
        table, total = self.table, self.transfers.num_frames
        names = sorted(
            {table.groups[table.pages[p].group].name for p, n in enumerate(table.pins) if n}
        )
        return BudgetError(
            f"{option}: {frames} frames are needed and every other page is in use by "
            f"{', '.join(names[:8])}; {total} frames of 2 MiB are the budget, use at least "
            f"{total + frames} ({(total + frames) * 2} MiB)"
        )
