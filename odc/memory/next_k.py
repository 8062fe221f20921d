"""The prefetcher that knows no order: the pages that follow in address order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from odc.memory.events import Kind
from odc.memory.orders import OrderLibrary
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.stations import Visit

_STEP = 32.0  # doubles near UNKNOWN_NS are 16 apart


class NextKPrefetcher:
    """The next ``k`` pages in address order after the page last used; knows no order."""

    def __init__(self, library: OrderLibrary, k: int = 4) -> None:
        self.stations = library.stations
        self.table = self.stations.table
        self.k = k
        self.until = np.full(len(self.table.pages), UNKNOWN_NS)
        self.version = 0
        self.scheduled = False
        self.utilization = 0.0
        parameters = [p.page for p in self.table.pages if p.kind == Kind.PARAMETER]
        self._parameters = np.array(parameters, np.int64)
        self._uses = 0
        self._wish: list[int] = []

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        for page in self._wish:
            self.until[page] = UNKNOWN_NS
        station = self.stations.stations[visit.station]
        members = visit.order or [0]
        last = max(self.table.of(station.groups[members[-1]], Kind.PARAMETER))
        at = int(np.searchsorted(self._parameters, last)) + 1
        self._wish = self._parameters[at : at + self.k].tolist()
        self.until[self._wish] = 0.0
        self.version += 1

    def next_use(self, page: int) -> float:
        self._uses += 1
        return UNKNOWN_NS - _STEP * self._uses

    def wanted(self) -> Iterator[tuple[int, int]]:
        self.table.left.clear()
        for page in self._wish:
            if self.table.is_absent[page]:
                yield page, 0

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Takes no hints."""
