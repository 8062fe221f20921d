"""Hints that mean nothing: whatever they say, results, books and frames must stay right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageTable
from odc.memory.prefetch import LEAVES_NS, Limits
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
