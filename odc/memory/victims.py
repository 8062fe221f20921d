"""Eviction orders: which of the evictable pages go first.

A policy gives every page a score when its use ends; the page with the highest goes first. Policies
that go by the plan take its times of next use as scores. ``VictimQueue`` keeps the front of the
order sorted and the rest as it is.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from odc.memory.pages import PageTable

_INF = float("inf")
_FRONT = 384  # victims that are sorted at a time
_LOW = 160  # with fewer the front is made anew: a page of 256 MiB may need 128


class EvictionPolicy(Protocol):
    """Scores pages for eviction."""

    @property
    def planned(self) -> bool:
        """Whether it goes by the plan's times of next use where there is a plan.

        While it does, it is told only what was evicted.
        """

    def arrived(self, page: int, time: int) -> None:
        """A page came into frames, at a virtual time (number of accesses)."""

    def score(self, page: int, time: int) -> float:
        """Of a page whose use ended; the highest goes first."""

    def evicted(self, page: int) -> None:
        """A page was chosen to go."""


class Lru:
    """Least recently used first."""

    planned = False

    def arrived(self, page: int, time: int) -> None:
        """Its use counts."""

    def score(self, page: int, time: int) -> float:
        return -float(time)

    def evicted(self, page: int) -> None:
        """It is scored anew at its next use."""


class Mru(Lru):
    """Most recently used first: the fewest misses in plain loops."""

    def score(self, page: int, time: int) -> float:
        return float(time)


class Fifo(Lru):
    """First in, first out."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}

    def arrived(self, page: int, time: int) -> None:
        self._since[page] = time

    def score(self, page: int, time: int) -> float:
        return -float(self._since.get(page, time))


class Lfu(Lru):
    """Least frequently used first; a use counts half after ``half_life`` accesses.

    Scores are log2 of the decayed count, less the decay that all have in common, so that they
    need not be touched as time passes.
    """

    def __init__(self, half_life: float = 1000.0) -> None:
        self._half_life = half_life
        self._count: dict[int, float] = {}  # log2(count) + time / half_life at the last use

    def score(self, page: int, time: int) -> float:
        now = time / self._half_life
        before = self._count.get(page)
        count = now
        if before is not None:
            high, low = max(before, now), min(before, now)
            count = high + float(np.log2(1.0 + 2.0 ** (low - high)))
        self._count[page] = count
        return -count


class Gdsf(Lru):
    """Greedy-dual-size-frequency (Cherkasova, 1998): clock + frequency x cost / size.

    A reload costs its bytes, so that cost / size is one and what remains is frequency; the clock,
    the value of the last victim, ages what is no longer used.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._frequency: dict[int, int] = {}
        self._value: dict[int, float] = {}

    def score(self, page: int, time: int) -> float:
        frequency = self._frequency[page] = self._frequency.get(page, 0) + 1
        value = self._value[page] = self._clock + frequency
        return -value

    def evicted(self, page: int) -> None:
        self._clock = max(self._clock, self._value.get(page, 0.0))
        self._frequency.pop(page, None)


class CostAware(Lru):
    """Farthest expected next use first, as the plan has it; LRU where there is none."""

    planned = True


class Belady(CostAware):
    """Farthest next use first (L. A. Belady, 1966); meant for the oracle's times."""


class VictimQueue:
    """Evictable pages, the highest score first.

    Only the front of the order is sorted; what is scored below it waits until the front is used
    up. Entries are checked when they are taken: a page that is pinned again, has left or has
    another score by now is passed over.

    Args:
        table: says which pages are evictable.
        scores: (num_pages,) float64, changed from outside.
    """

    def __init__(self, table: PageTable, scores: np.ndarray) -> None:
        self._table = table
        self._scores: Any = scores.data  # to read one is faster than of an array
        self._all_scores = scores
        self._front: list[tuple[float, int]] = []  # ascending
        self._least = _INF  # what is scored below waits
        self._stale = True

    def invalidate(self) -> None:
        """Many scores have changed."""
        self._stale = True

    def push(self, page: int, score: float) -> None:
        """A page became evictable, or its score changed."""
        if not self._stale and score >= self._least:
            insort(self._front, (score, page))

    def peek(self) -> int:
        """The first victim, -1 if there is none; it is not taken out."""
        self._tidy()
        return self._front[-1][1] if self._front else next(self.first(), -1)

    def _tidy(self) -> None:
        """See to it that the first entry holds and that there are enough behind it."""
        is_evictable, scores = self._table.is_evictable, self._scores
        front = self._front
        while front and not (is_evictable[front[-1][1]] and scores[front[-1][1]] == front[-1][0]):
            front.pop()
        count = len(front)
        if self._stale or (count < _LOW and self._least > -_INF) or count > 4 * _FRONT:
            self._refill()

    def first(self) -> Iterator[int]:
        """Victims in order, at least as many as the largest page can need; none is taken out."""
        self._tidy()
        is_evictable, scores = self._table.is_evictable, self._scores
        last, count = -1, 0
        for score, page in reversed(self._front):
            if page != last and is_evictable[page] and scores[page] == score:
                last = page
                count += 1
                yield page
        if count < _LOW and self._least > -_INF:  # most of the front is not to be had
            seen = {page for _, page in self._front}
            self._refill()
            yield from (page for _, page in reversed(self._front) if page not in seen)

    def _refill(self) -> None:
        pages = np.flatnonzero(self._table.evictable)
        scores = self._all_scores[pages]
        self._stale = False
        self._least = -_INF
        if len(pages) > _FRONT:
            front = np.argpartition(scores, -_FRONT)[-_FRONT:]
            pages, scores = pages[front], scores[front]
            self._least = float(scores.min())
        self._front = sorted(zip(scores.tolist(), pages.tolist(), strict=True))
