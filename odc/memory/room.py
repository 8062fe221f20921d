"""Room: which pages go when frames are needed, and what is asked of a page whose use ends.

The scores by which pages go are the plan's times of next use where there is a plan and the policy
goes by it; else the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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
_WEIGHED = 64  # victims that are weighed by when their frames can be had


class _SoonFirst:
    """The front of a queue by when frames can be had: a dirty page's store has to end first.

    A page's use counts as nearer by 1 + its wait, in stores as large as its own.
    """

    def __init__(self, room: Room, now: float) -> None:
        self._room = room
        self._now = now

    def first(self) -> Iterator[int]:
        room, now = self._room, self._now
        victims = room.queue.first()
        front = list(islice(victims, _WEIGHED))
        waits, until = self._waits(front), room.scores
        front.sort(key=lambda p: (until[p] - now) / (1.0 + waits.get(p, 0.0)), reverse=True)
        yield from front
        yield from victims

    def _waits(self, pages: Sequence[int]) -> dict[int, float]:
        """By page, for dirty ones: stores until its own has ended."""
        table, transfers = self._room.table, self._room.transfers
        queued, ahead = {}, 0
        for page in transfers.storing:
            ahead += table.pages[page].home_bytes
            queued[page] = ahead
        dirty = [page for page in pages if table.is_dirty[page]]
        sizes = [table.pages[page].home_bytes for page in dirty]
        return {
            page: queued.get(page, ahead + size) / size
            for page, size in zip(dirty, sizes, strict=True)
        }


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
        self._scores: Any = self.scores.data  # to read one is faster than of an array
        self.queue = VictimQueue(self.table, self.scores)

    def begin_pass(self, ctx: int) -> None:
        """A pass in context ``ctx`` begins: the order of eviction may change."""
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
            self._scores,
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
        return first >= 0 and self._scores[first] >= _STRANGE_NS

    def keep(self, page: int) -> None:
        """A page that was to go stays; its time of next use holds."""
        self.queue.push(page, float(self.scores[page]))

    def victims(self, now: float) -> VictimQueue | _SoonFirst:
        """Evictable pages in order; where writes queue up, by when their frames can be had.

        Args:
            now: on the plan's clock.
        """
        if self.transfers.storing and self.planned and not self.scheduled:
            return _SoonFirst(self, now)
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
            chosen = take_victims(self.table, self.queue, frames - transfers.available)
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
