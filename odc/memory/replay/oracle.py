"""The oracle: a recorded future handed to the pager. Only to measure how far policies could get.

Paging does not change what is computed, so the trace of one run is the future of any other run of
the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odc.memory.events import FORWARD_PHASES
from odc.memory.orders import OrderLibrary
from odc.memory.plan import OrderPrefetcher
from odc.memory.plan_sets import SOONEST_NS, UNKNOWN_NS, SetTimes
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay.simulate import PrefetchFactory
from odc.memory.replay.workload import Workload


class FutureScorer:
    """Scores of recorded future visits: 1 for members that will be used, 0 for the others.

    Args:
        future: for each set, its forward visits to come: (num_visits, num_members) bool.
    """

    def __init__(self, future: Sequence[np.ndarray]) -> None:
        self._future = list(future)
        self._seen = [0] * len(self._future)
        width = max((f.shape[1] for f in self._future), default=1)
        self._scores = np.zeros((len(self._future), width), np.float32)
        for set_index in range(len(self._future)):
            self._show(set_index)

    def observe(self, set_index: int, used: np.ndarray, tokens: int) -> None:
        """The next recorded visit of this set has come."""
        self._seen[set_index] += 1
        self._show(set_index)

    def scores(self) -> np.ndarray:
        """(num_sets, max_members) float32."""
        return self._scores

    def passes_until_use(self, set_index: int) -> np.ndarray:
        """(num_members,) passes until a member's next use, 1 for the next visit; inf for never."""
        future = self._future[set_index][self._seen[set_index] :]
        first = np.full(future.shape[1], np.inf)
        if len(future):
            used = future.any(axis=0)
            first[used] = future.argmax(axis=0)[used] + 1.0
        return first

    def _show(self, set_index: int) -> None:
        future, seen = self._future[set_index], self._seen[set_index]
        row = self._scores[set_index]
        row[:] = 0.0
        if seen < len(future):
            row[: future.shape[1]] = future[seen]


class FutureTimes(SetTimes):
    """Knows the members of every set's visits to come, beyond the next."""

    def adjust(self, set_index: int, station: int, now: float) -> None:
        """Pages without a use in this pass and the next are worth their use in later ones."""
        order = self.library.order
        assert order is not None and isinstance(self.scorer, FutureScorer)
        pages, members = self.stations.pages(station, 7)
        passes = self.scorer.passes_until_use(set_index)[members]
        later = now + np.minimum(passes * (order.total_ns + SOONEST_NS), UNKNOWN_NS / 4)
        self.later[pages] = np.minimum(self.later[pages], later)


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
        return OrderPrefetcher(
            library, FutureScorer(future_sets(workload)), limits, sets=FutureTimes
        )

    return make
