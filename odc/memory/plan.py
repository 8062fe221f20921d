"""The plan: what will be needed, how soon, how surely; and so what is worth keeping.

A source says how likely each visit ahead needs each of its pages. From that follow, for every page,

    keep value = sum over its uses ahead of P(this is the next use) / time until it,

the expected rate at which evicting it would cost a load (times the cost of a load per byte, where
pages differ). With certain uses this is Belady's order (farthest next use goes first), with
nothing known but frequencies it is GDSF's frequency x cost / size. The same number admits
prefetches: a page is loaded ahead only over victims that are worth less, so what is needed
sooner is never evicted for what is needed later (rule 2 of Cao, Felten, Karlin and Li, 1995).

Plans are made when something was learned (a pass began, its backward began, a set's members became
known, the order was lost) and stay valid in between: on the recorded order a used page passes from
``keep`` to ``keep_next``, its value once its next use is past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from odc.memory.events import Kind, Phase
from odc.memory.scores import SetScorer
from odc.memory.stations import OrderLibrary, Stations, Upcoming, Visit

# A use is never nearer than this: keeps 1 / eta finite and the nearest uses comparable.
_SOONEST_NS = 1000.0
_PARAMETER = 1 << Kind.PARAMETER
_ALL_KINDS = sum(1 << kind for kind in (Kind.PARAMETER, Kind.MOMENT))


@dataclass(slots=True)
class Plan:
    """What a source says.

    Attributes:
        keep: (num_pages,) keep values, 1/ns.
        keep_next: (num_pages,) the same once a page's next use is past.
        wish: pages to have, by expected time of use.
        wish_visit: for each of them, the number of visits ahead at which it is used.
        visits: visits begun since the plan was made.
        cursor: entries of ``wish`` below this belong to visits that are past.
    """

    keep: np.ndarray
    keep_next: np.ndarray
    wish: np.ndarray
    wish_visit: np.ndarray
    visits: int = 0
    cursor: int = 0


class Prefetcher(Protocol):
    """Where knowledge of the future comes from. Whatever it says, nothing but time can be lost."""

    def plan(self, current: Visit | None, remaining: list[int]) -> Plan | None:
        """Plan from the current visit on. ``remaining``: members of its set still to run."""

    def observe(self, visit: Visit, tokens: int) -> None:
        """The members of a set that a forward visit needs became known."""

    def advance(self, visit: Visit) -> bool:
        """A visit began; returns whether the plan must be made anew."""

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """The runtime knows more than the past: P(group is used at its next forward visit)."""


class _Builder:
    """Adds up keep values and the wish list over uses ahead, in order of time."""

    def __init__(self, num_pages: int, threshold: float) -> None:
        self.keep = np.zeros(num_pages)
        self.keep_next = np.zeros(num_pages)
        self._alive = np.ones(num_pages)  # P(no use so far)
        self._alive_next = np.full(num_pages, -1.0)  # the same after the first use; -1 before it
        self._threshold = threshold
        self._wish: list[np.ndarray] = []
        self._wish_visit: list[int] = []

    def use(
        self,
        pages: np.ndarray,
        eta_ns: float | np.ndarray,
        prob: np.ndarray | None,
        visit: int,
    ) -> None:
        """Pages are used in ``eta_ns`` with probability ``prob`` (None: surely)."""
        rate = 1.0 / np.maximum(eta_ns, _SOONEST_NS)
        alive, again = self._alive[pages], self._alive_next[pages]
        first = again < 0.0
        if prob is None:
            self.keep[pages] += alive * rate
            self._alive[pages] = 0.0
            self.keep_next[pages] += np.maximum(again, 0.0) * rate
            self._alive_next[pages] = first
            self._wish.append(pages)
        else:
            now = alive * prob
            self.keep[pages] += now * rate
            self._alive[pages] = alive - now
            later = np.maximum(again, 0.0) * prob
            self.keep_next[pages] += later * rate
            self._alive_next[pages] = np.where(first, 1.0, again - later)
            pages = pages[prob >= self._threshold]
            self._wish.append(pages)
        self._wish_visit += [visit] * len(pages)

    def append(self, tail: _Builder, visits: int) -> None:
        """Uses of a pass that begins in ``visits`` visits come after all that was added."""
        unused = self._alive_next < 0.0
        again = np.where(unused, 1.0, self._alive_next)
        self.keep += self._alive * tail.keep
        self.keep_next += again * np.where(unused, tail.keep_next, tail.keep)
        self._wish += tail._wish
        self._wish_visit += [visit + visits for visit in tail._wish_visit]

    def finish(self, weight: np.ndarray) -> Plan:
        wish = np.concatenate(self._wish) if self._wish else np.zeros(0, np.int64)
        ahead = np.array(self._wish_visit, np.int64)
        return Plan(self.keep * weight, self.keep_next * weight, wish, ahead)


@dataclass(slots=True)
class Limits:
    """Upper limits of a plan that users may set; None leaves it to bytes and link time."""

    page_prefetch: int | None = None  # visits ahead
    prefetch_window: int | None = None  # passes ahead


class OrderPrefetcher:
    """Plans along the recorded order; subclasses say how likely members of sets are.

    Args:
        library: recorded orders and the tape.
        weight: (num_pages,) cost of a load per byte, relative.
        threshold: least probability at which a page is worth loading ahead.
        limits: how far ahead pages may be loaded.
    """

    def __init__(
        self,
        library: OrderLibrary,
        weight: np.ndarray,
        threshold: float = 0.35,
        limits: Limits | None = None,
    ) -> None:
        self.library = library
        self.stations: Stations = library.stations
        self.weight = weight
        self.threshold = threshold
        self.limits = limits or Limits()
        self._last_phase = -1
        self._tail: _Builder | None = None  # the pass after this one, as of the last phase

    def observe(self, visit: Visit, tokens: int) -> None:
        """Nothing is learned from a set's members but the order itself."""

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """A recorded order takes no hints."""

    def advance(self, visit: Visit) -> bool:
        changed = visit.phase != self._last_phase or len(self.library.live) == 1
        self._last_phase = visit.phase
        if changed:
            self._tail = None
        is_set = self.stations.stations[visit.station].set_index >= 0
        return changed or (is_set and visit.phase in (Phase.FORWARD, Phase.EVALUATION))

    def plan(self, current: Visit | None, remaining: list[int]) -> Plan | None:
        if self.library.ctx not in self.library.orders:
            return None
        builder = _Builder(len(self.weight), self.threshold)
        if current is not None:
            self._use_current(builder, current, remaining)
        ahead = 0
        for ahead, upcoming in enumerate(self.library.rest(), start=1):
            self._use(builder, upcoming, ahead)
        builder.append(self._following(), ahead)
        plan = builder.finish(self.weight)
        self._limit(plan)
        return plan

    def _following(self) -> _Builder:
        """The pass after this one. It is far: its plan is made once a phase and used again."""
        if self._tail is None:
            self._tail = _Builder(len(self.weight), self.threshold)
            for ahead, upcoming in enumerate(self.library.following(), start=1):
                self._use(self._tail, upcoming, ahead)
        return self._tail

    def _use_current(self, builder: _Builder, current: Visit, remaining: list[int]) -> None:
        """What this visit still needs: a group's other kinds; of a set, what runs and what will."""
        recorded = self._recorded(current)
        kinds = recorded.kinds if recorded is not None else _PARAMETER
        pages, members = self.stations.pages(current.station, kinds)
        if current.used is None:
            builder.use(pages, 0.0, None, 0)
            return
        count = max(
            recorded.used.sum() if recorded is not None and recorded.used is not None else 0, 1
        )
        each = (recorded.dur_ns if recorded is not None else 0.0) / count
        running = [m for m in current.order[-1:] if m not in remaining]
        order = [*running, *remaining]
        position = np.full(len(current.used), -1)
        position[order] = np.arange(len(order))
        place = position[members]
        by_order = np.argsort(place, kind="stable")[np.count_nonzero(place < 0) :]
        builder.use(pages[by_order], place[by_order] * each, None, 0)

    def _recorded(self, visit: Visit) -> Visit | None:
        order = self.library.orders.get(self.library.ctx, [])
        position = self.library.position
        if 0 <= position < len(order) and order[position].key == visit.key:
            return order[position]
        return None

    def _use(self, builder: _Builder, upcoming: Upcoming, ahead: int) -> None:
        visit = upcoming.visit
        kinds = self._kinds(upcoming)
        if not kinds:
            return
        pages, members = self.stations.pages(visit.station, kinds)
        chances = self._members(upcoming)
        if chances is None:
            builder.use(pages, upcoming.eta_ns, None, ahead)
            return
        order = self._order(upcoming)
        if order:
            position = np.full(len(chances), len(order))
            position[order] = np.arange(len(order))
            by_order = np.argsort(position[members], kind="stable")
            pages, members = pages[by_order], members[by_order]
        builder.use(pages, upcoming.eta_ns, chances[members], ahead)

    def _limit(self, plan: Plan) -> None:
        allowed = np.ones(len(plan.wish), bool)
        if self.limits.page_prefetch is not None:
            allowed &= plan.wish_visit <= self.limits.page_prefetch
        if self.limits.prefetch_window is not None:
            order = self.library.orders[self.library.ctx]
            left = len(order) - 1 - self.library.position
            allowed &= plan.wish_visit <= left + len(order) * (self.limits.prefetch_window - 1)
        plan.wish, plan.wish_visit = plan.wish[allowed], plan.wish_visit[allowed]

    def _kinds(self, upcoming: Upcoming) -> int:
        return upcoming.visit.kinds

    def _order(self, upcoming: Upcoming) -> list[int]:
        return upcoming.visit.order

    def _members(self, upcoming: Upcoming) -> np.ndarray | None:
        """(num_members,) probability of each member, or None for a single group."""
        used = upcoming.visit.used
        return None if used is None else used.astype(np.float64)


class ReplayPrefetcher(OrderPrefetcher):
    """The last pass again, members and all."""


class TapePrefetcher(OrderPrefetcher):
    """Backward and optimizer mirror this forward exactly; forward sets are a scorer's guess."""

    def __init__(
        self,
        library: OrderLibrary,
        weight: np.ndarray,
        scorer: SetScorer,
        threshold: float = 0.35,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(library, weight, threshold, limits)
        self.scorer = scorer
        self._hints: dict[int, dict[int, float]] = {}  # set -> member -> score

    def observe(self, visit: Visit, tokens: int) -> None:
        assert visit.used is not None
        set_index = self.stations.stations[visit.station].set_index
        self._hints.pop(set_index, None)
        self.scorer.observe(set_index, visit.used, tokens)

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Hold the scores of set members until their set is visited; other groups are certain."""
        for group, score in zip(groups, scores, strict=True):
            set_index = self.stations.stations[self.stations.of_group[group]].set_index
            if set_index >= 0:
                member = self.stations.member_of[group]
                self._hints.setdefault(set_index, {})[member] = min(max(float(score), 0.0), 1.0)

    def _taped(self, upcoming: Upcoming) -> np.ndarray | None:
        """The members that are known, or None."""
        set_index = self.stations.stations[upcoming.visit.station].set_index
        if upcoming.cycle or self.library.is_forward(upcoming.visit.phase):
            return None
        if upcoming.visit.phase == Phase.OPTIMIZER:
            return self.library.touched[set_index]
        return self.library.tape[set_index]

    def _kinds(self, upcoming: Upcoming) -> int:
        visit = upcoming.visit
        if visit.used is None or self.library.is_forward(visit.phase):
            return visit.kinds
        if self._taped(upcoming) is not None:
            return visit.kinds
        return visit.kinds & ~_PARAMETER  # its forward's guess already counts for the parameters

    def _order(self, upcoming: Upcoming) -> list[int]:
        set_index = self.stations.stations[upcoming.visit.station].set_index
        if self._taped(upcoming) is None:
            return []
        return self.library.tape_order[set_index][::-1]

    def _members(self, upcoming: Upcoming) -> np.ndarray | None:
        visit = upcoming.visit
        if visit.used is None:
            return None
        taped = self._taped(upcoming)
        if taped is not None:
            return taped.astype(np.float64)
        set_index = self.stations.stations[visit.station].set_index
        scores = np.array(self.scorer.scores()[set_index, : len(visit.used)], np.float64)
        for member, score in self._hints.get(set_index, {}).items():
            scores[member] = score
        return scores


class NextKPrefetcher:
    """The next ``k`` pages in address order after the page last used; knows no order."""

    def __init__(self, stations: Stations, k: int = 4) -> None:
        self.table = stations.table
        self.stations = stations
        self.k = k
        parameters = [p.page for p in self.table.pages if p.kind == Kind.PARAMETER]
        self._parameters = np.array(parameters, np.int64)

    def observe(self, visit: Visit, tokens: int) -> None:
        """Nothing is learned."""

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Takes no hints."""

    def advance(self, visit: Visit) -> bool:
        return True

    def plan(self, current: Visit | None, remaining: list[int]) -> Plan | None:
        if current is None:
            return None
        station = self.stations.stations[current.station]
        members = current.order or [0]
        group = station.groups[members[-1]]
        return self.after(group)

    def after(self, group: int) -> Plan:
        """The plan after a use of ``group``."""
        last = max(self.table.of(group, Kind.PARAMETER))
        at = int(np.searchsorted(self._parameters, last)) + 1
        wish = self._parameters[at : at + self.k]
        keep = np.zeros(len(self.table.pages))
        keep[wish] = 1.0
        return Plan(keep, keep, wish, np.ones(len(wish), np.int64))


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


class OraclePrefetcher(TapePrefetcher):
    """Knows the members of every set's visits to come. For measuring only.

    Args:
        library, weight, limits: as for the tape.
        scorer: the recorded future.
    """

    def __init__(
        self,
        library: OrderLibrary,
        weight: np.ndarray,
        scorer: FutureScorer,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(library, weight, scorer, limits=limits)
        self.future = scorer

    def plan(self, current: Visit | None, remaining: list[int]) -> Plan | None:
        """The tape's plan; pages without a use in it are worth their next use in later passes."""
        plan = super().plan(current, remaining)
        if plan is None:
            return None
        pass_ns = sum(v.dur_ns for v in self.library.orders[self.library.ctx]) + _SOONEST_NS
        for set_index, groups in enumerate(self.stations.sets):
            station = self.stations.of_group[groups[0]]
            pages, members = self.stations.pages(station, _ALL_KINDS)
            later = self.weight[pages] / (
                self.future.passes_until_use(set_index)[members] * pass_ns
            )
            for keep in (plan.keep, plan.keep_next):
                keep[pages] = np.maximum(keep[pages], later)
        return plan
