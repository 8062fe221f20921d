"""The oracle: a recorded future handed to the pager. Only to measure how far policies could get.

Paging does not change what is computed, so the trace of one run is the future of any other run of
the same steps.
"""

from __future__ import annotations

import numpy as np

from odc.memory.events import FORWARD_PHASES
from odc.memory.orders import OrderLibrary
from odc.memory.plan import FutureScorer, Limits, OraclePrefetcher, Prefetcher
from odc.memory.replay.simulate import PrefetchFactory
from odc.memory.replay.workload import Workload


def future_sets(workload: Workload) -> list[np.ndarray]:
    """For each set, the members that its forward visits need: (num_visits, num_members) bool."""
    place = {g: (s, m) for s, groups in enumerate(workload.sets) for m, g in enumerate(groups)}
    visits: list[list[np.ndarray]] = [[] for _ in workload.sets]
    for visit in workload.visits:
        found = place.get(visit.bundles[0].group)
        if found is None or visit.phase not in FORWARD_PHASES:
            continue
        used = np.zeros(len(workload.sets[found[0]]), bool)
        for bundle in visit.bundles:
            used[place[bundle.group][1]] = True
        visits[found[0]].append(used)
    return [
        np.array(rows, bool).reshape(len(rows), len(groups))
        for rows, groups in zip(visits, workload.sets, strict=True)
    ]


def oracle_factory(workload: Workload) -> PrefetchFactory:
    """A prefetcher that knows which members ``workload`` needs."""

    def make(library: OrderLibrary, limits: Limits) -> Prefetcher:
        return OraclePrefetcher(library, FutureScorer(future_sets(workload)), limits)

    return make
