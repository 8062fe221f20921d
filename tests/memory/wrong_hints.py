"""Hints that mean nothing: whatever they say, results, books and frames must stay right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from odc.memory.manager import popularity
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageTable
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.prefetch import LEAVES_NS, Limits, Prefetcher
from odc.memory.stations import Visit


class RandomPrefetcher:
    """Random times of next use, random wishes, and now and then a schedule that is none.

    The one promise kept is the protocol's: what is wished for is absent, and ``version`` tells
    that times have changed.
    """

    def __init__(self, table: PageTable, seed: int = 0, schedules: bool = True) -> None:
        self.table = table
        self.rng = np.random.default_rng(seed)
        self.until = self.rng.random(len(table.pages))
        self.version = 0
        self.scheduled = False
        self.utilization = 0.0
        self._schedules = schedules

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        rng = self.rng
        if rng.random() < 0.6:
            self.until[:] = rng.random(len(self.until)) * rng.choice((1.0, 2 * LEAVES_NS))
            self.version += 1
        if self._schedules:
            self.scheduled = bool(rng.random() < 0.3)

    def next_use(self, page: int) -> float:
        return float(self.rng.random() * self.rng.choice((1.0, 2 * LEAVES_NS)))

    def wanted(self) -> Iterator[tuple[int, int]]:
        self.table.left.clear()
        rng = self.rng
        for page in rng.integers(0, len(self.until), int(rng.integers(0, 12))).tolist():
            if self.table.is_absent[page]:
                yield page, int(rng.integers(0, 3))

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Takes no hints: it has enough of its own."""


def random_hints(library: OrderLibrary, limits: Limits) -> RandomPrefetcher:
    """A prefetch factory."""
    return RandomPrefetcher(library.stations.table)


class Told:
    """What another prefetcher says, word for word. The pager does not know it as its own.

    Args:
        inner: says it.
    """

    def __init__(self, inner: Prefetcher) -> None:
        self.inner = inner
        self.until = inner.until

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def scheduled(self) -> bool:
        return self.inner.scheduled

    @property
    def utilization(self) -> float:
        return self.inner.utilization

    @utilization.setter
    def utilization(self, share: float) -> None:
        self.inner.utilization = share

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        self.inner.advance(visit, tokens, remaining)

    def next_use(self, page: int) -> float:
        return self.inner.next_use(page)

    def wanted(self) -> Iterator[tuple[int, int]]:
        return self.inner.wanted()

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        self.inner.hint(groups, scores)


class Liar:
    """Lies in some passes, and else says what the shipped prefetcher says.

    Args:
        library: recorded orders.
        limits: of the shipped one.
        lies: in which pass, by its number and its context.
        scheduled: what is said of a schedule in such a pass.
    """

    def __init__(
        self,
        library: OrderLibrary,
        limits: Limits,
        lies: Callable[[int, int], bool] = lambda number, ctx: True,
        scheduled: bool = False,
    ) -> None:
        self.library = library
        self.table = library.stations.table
        self.inner = popularity(library, limits)
        self.until = self.inner.until.copy()
        self.version = 0
        self.utilization = 0.0
        self._lies, self._scheduled = lies, scheduled

    @property
    def lying(self) -> bool:
        return self._lies(self.library.passes, self.library.ctx)

    @property
    def scheduled(self) -> bool:
        return self.lying and self._scheduled

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        self.inner.advance(visit, tokens, remaining)
        self.until[:] = self.inner.until
        if self.lying:
            self.lie()
        self.version += 1

    def next_use(self, page: int) -> float:
        time = self.inner.until[page] = self.inner.next_use(page)
        return self.lie_of(page, time) if self.lying else time

    def wanted(self) -> Iterator[tuple[int, int]]:
        if not self.lying:
            yield from self.inner.wanted()
            return
        self.table.left.clear()
        for page in self.wishes():
            if self.table.is_absent[page]:
                yield page, 0

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        self.inner.hint(groups, scores)

    def lie(self) -> None:
        """Of all pages, in ``until``."""

    def lie_of(self, page: int, time: float) -> float:
        """Of a page whose use ended."""
        raise NotImplementedError

    def wishes(self) -> Iterable[int]:
        """Pages to load ahead."""
        return ()


class Inverse(Liar):
    """What is used soonest goes first, and what is used last is loaded."""

    def lie(self) -> None:
        self.until[:] = 2 * UNKNOWN_NS - self.inner.until

    def lie_of(self, page: int, time: float) -> float:
        return 2 * UNKNOWN_NS - time

    def wishes(self) -> Iterable[int]:
        return np.argsort(self.until).tolist()


class Thrash(Liar):
    """Everything that is absent is used now, whatever is there never again."""

    def lie(self) -> None:
        self.until[:] = np.where(self.table.absent, 0.0, UNKNOWN_NS)

    def lie_of(self, page: int, time: float) -> float:
        return UNKNOWN_NS

    def wishes(self) -> Iterable[int]:
        return reversed(range(len(self.until)))


class Purge(Liar):
    """A schedule that lets every page go as soon as its use ends, and loads nothing."""

    def __init__(self, library: OrderLibrary, limits: Limits, **options: Any) -> None:
        super().__init__(library, limits, scheduled=True, **options)

    def lie(self) -> None:
        self.until[:] = self.inner.until + 2 * LEAVES_NS

    def lie_of(self, page: int, time: float) -> float:
        return time + 2 * LEAVES_NS


class Still(Liar):
    """Says nothing but an order of eviction, that of addresses."""

    def lie(self) -> None:
        self.until[:] = np.arange(len(self.until))

    def lie_of(self, page: int, time: float) -> float:
        return float(page)
