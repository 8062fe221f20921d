"""Times of next use of the members of sets, from a scorer's guesses and the tape.

For each kind of page of a set, the visits of the set ahead are walked: P(first use there) / time
until it is added up, and the sum's inverse is the time that stands for all of them (``plan.py``).
What a forward used, its backward and its update use; before that forward they are a guess.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from odc.memory.events import FORWARD_PHASES, Kind, Phase
from odc.memory.orders import OrderLibrary
from odc.memory.recorded import Entry, RecordedOrder
from odc.memory.scores import SetScorer
from odc.memory.stations import Visit

UNKNOWN_NS = 1e17  # nothing is known of the page's next use; less for what was used later
FAR_NS = UNKNOWN_NS / 8  # from there on no use is in sight
SOONEST_NS = 1000.0  # a use is never nearer: keeps 1 / time finite
_PASSES = 3  # passes that are looked at: later ones hardly count
_ALL = sum(1 << kind for kind in Kind)
_FORWARD = frozenset(int(p) for p in FORWARD_PHASES)
Passes = Sequence[tuple[RecordedOrder, float]]


class SetTimes:
    """Works out the times of pages of sets.

    Args:
        library: recorded orders and the tape.
        scorer: of the members.
        until: (num_pages,) times of next use, written here.

    Attributes:
        later: (num_pages,) times of next use after the visit that runs.
        holds: for each page, whether it belongs to a set.
        station: for each page, the station of its set; -1 for none.
        pages_of: by station of a set, its pages.
    """

    def __init__(self, library: OrderLibrary, scorer: SetScorer, until: np.ndarray) -> None:
        self.library = library
        self.stations = library.stations
        self.scorer = scorer
        # What is sharp of the next visit says little of those behind it.
        self._later_scores = getattr(scorer, "later_scores", scorer.scores)
        self.until = until
        self.later = np.full(len(until), UNKNOWN_NS)
        self.holds = bytearray(len(until))
        self.station = [-1] * len(until)
        self.pages_of: dict[int, list[int]] = {}
        self.hints: dict[int, dict[int, float]] = {}  # set -> member -> score
        self._guessed: dict[tuple[int, float, bool], list[int]] = {}  # until scores or hints change
        for groups in self.stations.sets:
            station = self.stations.of_group[groups[0]]
            pages = self.pages_of[station] = self.stations.pages(station, _ALL)[0].tolist()
            for page in pages:
                self.holds[page] = 1
                self.station[page] = station

    def observe(self, visit: Visit, set_index: int, tokens: int) -> None:
        """The members of a set that a forward visit needs became known."""
        if visit.phase in _FORWARD and visit.used is not None:
            self.hints.pop(set_index, None)
            self._guessed.clear()
            self.scorer.observe(set_index, visit.used, tokens)

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> list[int]:
        """Take scores that replace the scorer's until the set is visited; returns the sets."""
        changed = set()
        self._guessed.clear()
        for group, score in zip(groups, scores, strict=True):
            set_index = self.stations.stations[self.stations.of_group[group]].set_index
            if set_index >= 0:
                member = self.stations.member_of[group]
                self.hints.setdefault(set_index, {})[member] = min(max(float(score), 0.0), 1.0)
                changed.add(set_index)
        return sorted(changed)

    def chances(self, set_index: int) -> np.ndarray:
        """(num_members,) P(used at the next forward visit), float64."""
        count = len(self.stations.sets[set_index])
        scores = np.array(self.scorer.scores()[set_index, :count], np.float64)
        for member, score in self.hints.get(set_index, {}).items():
            scores[member] = score
        return scores

    def later_chances(self, set_index: int) -> np.ndarray:
        """(num_members,) P(used at a forward visit behind the next), float64."""
        count = len(self.stations.sets[set_index])
        return np.array(self._later_scores()[set_index, :count], np.float64)

    def known(self, entry: Entry, set_index: int, cycle: int) -> np.ndarray | None:
        """The members that an entry is known to use, or None."""
        if cycle or entry.phase in _FORWARD:
            return None
        if entry.phase == Phase.OPTIMIZER:
            return self.library.touched[set_index]
        return self.library.tape[set_index]

    def likely(self, entry: Entry, set_index: int, cycle: int, threshold: float) -> list[int]:
        """Members that an entry needs, surely or likely enough, in the order of their use."""
        if self.known(entry, set_index, cycle) is not None:
            return self.library.taped(set_index, entry.phase)
        is_next = cycle <= (self.library.tape[set_index] is not None)
        guessed = self._guessed.get((set_index, threshold, is_next))
        if guessed is None:
            scores = self.chances(set_index) if is_next else self.later_chances(set_index)
            likely = np.flatnonzero(scores >= threshold)
            guessed = likely[np.argsort(-scores[likely], kind="stable")].tolist()
            self._guessed[set_index, threshold, is_next] = guessed
        return guessed

    def rekey(self, set_index: int, passes: Passes, remaining: Sequence[int]) -> None:
        """Times of a set's pages: after the visit that runs, and now.

        Args:
            set_index: the set.
            passes: orders of this pass and those expected after it, and when each begins.
            remaining: members that the visit that runs will still use, if it is of this set.
        """
        station = self.stations.of_group[self.stations.sets[set_index][0]]
        now = self.library.now_ns
        scores = self.chances(set_index)
        keep = np.zeros((len(Kind), len(scores)))
        alive = np.ones((len(Kind), len(scores)))
        seen = 0
        for time, entry, probability, guessed in self._visits(station, set_index, scores, passes):
            rate = 1.0 / max(time - now, SOONEST_NS)
            for kind in Kind:
                if not entry.kinds >> kind & 1:
                    continue
                if guessed and kind == Kind.PARAMETER and entry.phase not in _FORWARD:
                    continue  # its forward's guess already counts
                used = alive[kind] * probability
                keep[kind] += used * rate
                alive[kind] -= used
                seen |= 1 << kind
        self._store(station, keep, seen, now)
        self.adjust(set_index, station, now)
        pages, _ = self.stations.pages(station, _ALL)
        self.until[pages] = self.later[pages]
        self._hold_remaining(station, remaining, now)

    def _store(self, station: int, keep: np.ndarray, seen: int, now: float) -> None:
        pages, _ = self.stations.pages(station, _ALL)
        self.later[pages] = UNKNOWN_NS / 2
        with np.errstate(divide="ignore"):
            times = now + np.minimum(1.0 / keep, UNKNOWN_NS / 4)
        for kind in Kind:
            if seen >> kind & 1:
                own, members = self.stations.pages(station, 1 << kind)
                self.later[own] = np.minimum(self.later[own], times[kind][members])

    def _hold_remaining(self, station: int, remaining: Sequence[int], now: float) -> None:
        """What the visit that runs will still use is needed at once."""
        live, order = self.library.live, self.library.order
        if not live or live[-1].station != station:
            return
        visit = live[-1]
        kinds = visit.kinds | 1 << Kind.PARAMETER
        if order is not None and visit.place >= 0:
            kinds |= order.entries[visit.place].kinds
        for place, member in enumerate(remaining):
            for page in self.stations.member_pages(station, kinds, member):
                self.until[page] = now + place

    def adjust(self, set_index: int, station: int, now: float) -> None:
        """For those who know more than the scores of the next visit: change ``later``."""

    def _visits(
        self, station: int, set_index: int, scores: np.ndarray, passes: Passes
    ) -> Iterator[tuple[float, Entry, np.ndarray, bool]]:
        """Visits of a set ahead: time, entry, P(member is used), and whether that is a guess.

        The scores are of the next forward visit, and of what mirrors it.
        """
        later, next_cycle = self.later_chances(set_index), -1
        for cycle, (order, start) in enumerate(passes[:_PASSES]):
            places = order.of_station.get(station, ())
            first = bisect_right(places, self.library.position) if cycle == 0 else 0
            for place in places[first:]:
                entry = order.entries[place]
                known = self.known(entry, set_index, cycle)
                if known is not None:
                    chances = known.astype(np.float64)
                else:
                    next_cycle = cycle if next_cycle < 0 else next_cycle
                    chances = scores if cycle == next_cycle else later
                yield start + order.start_ns[place], entry, chances, known is None
