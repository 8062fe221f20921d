"""The oracle: a recorded future handed to the pager. Only to measure how far policies could get.

Paging does not change what is computed, so the trace of one run is the future of any other run of
the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odc.memory.events import Kind, Op
from odc.memory.plan import FutureVisit, Limits, OraclePrefetcher, Prefetcher
from odc.memory.replay.simulate import PrefetchFactory
from odc.memory.replay.workload import Bundle, Workload
from odc.memory.stations import OrderLibrary


def _pages(library: OrderLibrary, bundle: Bundle) -> list[int]:
    """Pages whose content a bundle needs, in order."""
    table = library.stations.table
    found: dict[int, None] = {}
    created: set[Kind] = set()
    for kind, op, _ in bundle.rows:
        if op == Op.CREATE:
            created.add(kind)
        if op in (Op.READ, Op.WRITE) and kind not in created:
            found.update(dict.fromkeys(table.of(bundle.group, kind)))
    return list(found)


def future_of(workload: Workload, library: OrderLibrary) -> list[FutureVisit]:
    """The visits of a workload as the oracle reads them."""
    stations = library.stations
    future = []
    for visit in workload.visits:
        station = stations.of_group[visit.bundles[0].group]
        pages: Sequence[int] = [p for b in visit.bundles for p in _pages(library, b)]
        duration = sum(b.after_ns + sum(ns for _, _, ns in b.rows) for b in visit.bundles)
        key = station * 8 + visit.phase
        future.append(FutureVisit(key, np.array(pages, np.int64), float(duration)))
    return future


def oracle_factory(workload: Workload) -> PrefetchFactory:
    """A prefetcher that knows ``workload``."""

    def make(library: OrderLibrary, weight: np.ndarray, limits: Limits) -> Prefetcher:
        return OraclePrefetcher(future_of(workload, library), weight)

    return make
