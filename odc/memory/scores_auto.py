"""Scorers in rungs, each of which must beat the one below it or it stays off.

Every rung sees every visit, and none but the one in charge moves a page. Before a visit is shown
to them, each is charged with what following it would have cost (a ghost on access ids):

    each used member that it would not have loaded:  1 load, waited for
    each loaded member that was not used:            the share of it that others wait for

A load is a member's bytes, weighted by the tier that it comes from: time on the link up to a
constant that all rungs share. The share of a needless load is that of the time for which the line
was busy, and at least one half: it takes frames as well, and a score of ``THRESHOLD`` is worth a
load exactly where a needless one costs about half of a missing one (p = (1 - p) / 2 at p = 1/3).

A rung takes over where it saved 3 % and more than noise explains: twice the standard error of the
difference. The window is four passes, fading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from odc.memory.events import Kind
from odc.memory.orders import OrderLibrary
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import THRESHOLD, Limits
from odc.memory.scores import BoolArray, FloatArray, PopularityScorer, SetScorer
from odc.memory.scores_markov import MarkovScorer
from odc.memory.stations import Stations

MARGIN = 0.03  # saved before something else is let take over
WINDOW = 4.0  # passes
_LEAST_BUSY = 0.5
_SURE = 2.0  # standard errors
_LEAST_PASSES = 2  # before which the lowest rung is in charge


class AutoScorer:
    """The scores of the rung that is in charge.

    Args:
        rungs: scorers, each of which must beat those before it.
        loads: for each set, (num_members,) what a load of a member costs, in any unit.
        threshold: least score at which a member is loaded.

    Attributes:
        in_charge: index of the rung whose scores are given. Changes at the first visit of a pass.
        busy: returns the share of time for which the line in is busy, 0 to 1.
    """

    def __init__(
        self,
        rungs: Sequence[SetScorer],
        loads: Sequence[np.ndarray],
        threshold: float = THRESHOLD,
    ) -> None:
        if not rungs:
            raise ValueError("rungs must hold at least one scorer, got none")
        self.rungs = list(rungs)
        self.in_charge = 0
        self.busy: Callable[[], float] = lambda: _LEAST_BUSY
        self._loads = [np.asarray(load, np.float64) for load in loads]
        self._threshold = threshold
        count = len(self.rungs)
        self._keep = math.exp(-1.0 / (WINDOW * len(self._loads)))
        self.costs = [0.0] * count  # fading sums
        # By pair of rungs, higher first: fading sums of the squared differences of their costs.
        self._squares = {(a, b): 0.0 for a in range(count) for b in range(a)}
        self._last = -1
        self._passes = 0

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        """Takes in one forward visit (see ``SetScorer.observe``)."""
        if len(self.rungs) > 1:
            self._charge(set_index, used)
        for rung in self.rungs:
            rung.observe(set_index, used, tokens)

    def scores(self) -> FloatArray:
        """Those of the rung in charge (see ``SetScorer.scores``)."""
        return self.rungs[self.in_charge].scores()

    def later_scores(self) -> FloatArray:
        """Those of the lowest rung: of the visits behind the next it knows as much as any."""
        return self.rungs[0].scores()

    def _charge(self, set_index: int, used: BoolArray) -> None:
        loads, keep = self._loads[set_index], self._keep
        share = min(max(self.busy(), _LEAST_BUSY), 1.0)
        needed = loads * used
        worth = share * (loads - needed) - needed  # what loading each would have added
        nothing = float(needed.sum())  # where none is loaded, all that are used are waited for
        cost = []
        for number, rung in enumerate(self.rungs):
            loaded = rung.scores()[set_index, : len(used)] >= self._threshold
            cost.append(nothing + float(worth.dot(loaded)))
            self.costs[number] = keep * self.costs[number] + cost[number]
        for a, b in self._squares:
            self._squares[a, b] = keep * self._squares[a, b] + (cost[a] - cost[b]) ** 2
        if set_index <= self._last:
            self._passes += 1
            if self._passes >= _LEAST_PASSES:
                self.in_charge = self._choose()
        self._last = set_index

    def _choose(self) -> int:
        """From the lowest rung upwards: each must beat the best below it, or it stays off.

        What was on stays on until the other is better by as much: neither flaps.
        """
        best = 0
        for rung in range(1, len(self.rungs)):
            if rung == self.in_charge:
                takes = not self._beats(best, rung)
            else:
                takes = self._beats(rung, best)
            if takes:
                best = rung
        return best

    def _beats(self, one: int, other: int) -> bool:
        saved = self.costs[other] - self.costs[one]
        noise = _SURE * math.sqrt(self._squares[max(one, other), min(one, other)])
        return saved > max(MARGIN * self.costs[other], noise)


def load_costs(stations: Stations) -> list[np.ndarray]:
    """For each set, (num_members,) bytes of each member's parameters, weighted by their tier.

    One set of one member where the model has none, as ``Stations.members`` has it.
    """
    table, costs = stations.table, []
    for groups in stations.sets:
        pages = [table.of(group, Kind.PARAMETER) for group in groups]
        weighted = [
            [table.pages[p].home_bytes * table.load_weight[p] for p in own] for own in pages
        ]
        costs.append(np.array([sum(own) for own in weighted], np.float64))
    return costs or [np.ones(1)]


def auto_prefetcher(
    library: OrderLibrary, limits: Limits, learned: SetScorer | None = None
) -> OrderPrefetcher:
    """A prefetcher that chooses its scorer: popularity, Markov, and a learned one if there is one.

    Args:
        library: recorded orders.
        limits: of loads ahead.
        learned: the highest rung.
    """
    members = library.stations.members
    rungs: list[SetScorer] = [PopularityScorer(members), MarkovScorer(members)]
    if learned is not None:
        rungs.append(learned)
    scorer = AutoScorer(rungs, load_costs(library.stations))
    prefetcher = OrderPrefetcher(library, scorer, limits)
    scorer.busy = lambda: prefetcher.utilization
    return prefetcher
