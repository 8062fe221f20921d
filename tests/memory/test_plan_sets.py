"""Members of sets: the tape, scores and hints, against all futures added up one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from odc.memory.events import Kind, Op, Phase
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageState
from odc.memory.plan import OrderPrefetcher
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.replay.oracle import FutureScorer, FutureTimes
from odc.memory.scores import PopularityScorer, ReplayScorer, SetScorer
from odc.memory.stations import Visit
from tests.memory.passes import BACKWARD, FORWARD, G, M, P, put, stations, trained

MS = 1e6


class FixedScorer:
    """Members of every set, always equally likely; learns nothing."""

    def __init__(self, *scores: float) -> None:
        self._scores = np.array([scores], np.float32)

    def observe(self, set_index: int, used: np.ndarray, tokens: int) -> None: ...

    def scores(self) -> np.ndarray:
        return self._scores


class Experts:
    """A set of four experts (groups 0-3) between two layers (4, 5), told visit by visit."""

    def __init__(
        self, scorer: SetScorer, moments: bool = False, threshold: float = 0.5, **options: object
    ) -> None:
        places = (trained if moments else stations)(6, [(0, 1, 2, 3)])
        self.library = OrderLibrary(places)
        self.moments = moments
        self.prefetcher = OrderPrefetcher(
            self.library,
            scorer,
            threshold=threshold,
            **options,  # type: ignore[arg-type]
        )

    def layer(self, group: int, phase: Phase = FORWARD) -> None:
        visit = self._begin(group, phase)
        self.prefetcher.advance(visit, 1, [])
        visit.note(P, Op.READ, 0)
        for page in self.library.stations.table.of(group, P):
            self.prefetcher.until[page] = self.prefetcher.next_use(page)

    def members(self, used: Sequence[int], phase: Phase = FORWARD) -> None:
        """A visit of the set, in the order of ``used``; all of it released."""
        library, prefetcher = self.library, self.prefetcher
        visit = self._begin(0, phase)
        assert visit.used is not None
        if phase == FORWARD:
            visit.used[list(used)] = True
            visit.order = list(used)
            library.forward_done(0, visit.used, visit.order)
        prefetcher.advance(visit, 1, list(used))
        for member in used:
            visit.note(P, Op.READ, member)
            if phase == BACKWARD and self.moments:
                visit.note(G, Op.CREATE, member)
                visit.note(M, Op.WRITE, member)
        table = library.stations.table
        for member in used:
            for kind in Kind:
                for page in table.of(member, kind):
                    prefetcher.until[page] = prefetcher.next_use(page)

    def _begin(self, group: int, phase: Phase) -> Visit:
        visit = self.library.visit(self.library.stations.of_group[group], phase)
        visit.dur_ns = MS
        return visit

    def whole_pass(self, used: Sequence[int]) -> None:
        self.library.begin_pass(0)
        self.layer(4)
        self.members(used)
        self.layer(5)
        self.layer(5, BACKWARD)
        self.members(used[::-1], BACKWARD)
        self.layer(4, BACKWARD)

    def wanted(self, count: int = 100) -> list[int]:
        """Pages that are wanted, each loaded as soon as it is told, up to a number of them."""
        told: list[int] = []
        table = self.library.stations.table
        for page, _ in self.prefetcher.wanted():
            told.append(page)
            put(table, page, PageState.LOADING)
            if len(told) == count:
                break
        return told


# -- the tape --------------------------------------------------------------------------------------


def test_backward_needs_exactly_what_this_forward_used() -> None:
    """Experts 0 and 1 were used until now; this forward used 3, then 2."""
    experts = Experts(ReplayScorer([4]))
    for _ in range(3):
        experts.whole_pass([0, 1])
    experts.library.begin_pass(0)
    experts.layer(4)
    experts.members([3, 2])
    experts.layer(5)
    table = experts.library.stations.table
    for page in (4, 5):
        put(table, page, PageState.RESIDENT)
    assert experts.wanted(2) == [2, 3], "the tape, backwards; nothing of the last pass"
    now = experts.library.now_ns
    for member, until in zip((2, 3, 0, 1), (2 * MS, 2 * MS, None, None), strict=True):
        if until is None:  # in the next pass at the earliest
            assert experts.prefetcher.until[member] - now > 4 * MS
        else:
            assert experts.prefetcher.until[member] - now == pytest.approx(until)


def test_an_update_needs_what_all_micro_steps_touched_and_nothing_else() -> None:
    experts = Experts(FixedScorer(0, 0, 0, 0), moments=True)
    library, table = experts.library, experts.library.stations.table

    def run(stop: bool) -> None:
        for used in ([0, 1], [1, 3]):
            library.begin_pass(0)
            experts.members(used)
            experts.layer(4)
        if stop:
            return
        visit = library.visit(library.stations.of_group[0], Phase.OPTIMIZER)
        experts.prefetcher.advance(visit, 1, [])
        for member in (0, 1, 3):
            visit.note(M, Op.WRITE, member)
        library.end_update()

    for _ in range(3):
        run(stop=False)
    run(stop=True)
    moments = [p for member in (0, 1, 3) for p in table.of(member, M)]
    told = [p for p in experts.wanted() if table.pages[p].kind == M]
    assert told == moments, "not the moments of expert 2"


@pytest.mark.parametrize(
    ("phase", "expected"),
    [(BACKWARD, [2, 0, 3]), (Phase.RECOMPUTE, [3, 0, 2]), (Phase.OPTIMIZER, [0, 2, 3])],
)
def test_members_are_wanted_in_the_order_in_which_each_phase_takes_them(
    phase: Phase, expected: list[int]
) -> None:
    """Backwards, again as they ran, and one group after the other."""
    experts = Experts(FixedScorer(0, 0, 0, 0))
    library = experts.library
    for again in (True, True, False):
        library.begin_pass(0)
        experts.members([3, 0, 2])
        experts.layer(4)
        if again:
            experts.members([3, 0, 2], phase)
    assert [page for page in experts.wanted() if page < 4] == expected


# -- scores ----------------------------------------------------------------------------------------


def test_members_of_a_set_to_come_go_by_how_often_they_were_used() -> None:
    experts = Experts(PopularityScorer([4]))
    for used in ([0, 1], [0, 2], [0, 1], [0, 1]):
        experts.whole_pass(used)
    experts.library.begin_pass(0)
    experts.layer(4)
    until = experts.prefetcher.until
    assert list(np.argsort(until[:4], kind="stable")) == [0, 1, 2, 3]
    wanted = experts.wanted(4)
    assert wanted[:3] == [4, 0, 1], "the likeliest first"
    assert 3 not in wanted, "what is unlikely is not loaded ahead"


@pytest.mark.parametrize("scores", [(0.9, 0.5, 0.2, 0.05), (0.35, 0.36, 0.0, 1.0)])
def test_only_what_is_likely_enough_is_wanted(scores: tuple[float, ...]) -> None:
    experts = Experts(FixedScorer(*scores), threshold=0.355)
    for _ in range(3):
        experts.whole_pass([0])
    experts.library.begin_pass(0)
    experts.layer(4)
    told = [page for page in experts.wanted() if page < 4]
    likely = sorted((m for m in range(4) if scores[m] >= 0.355), key=lambda m: -scores[m])
    assert told == likely


def test_guesses_are_followed_for_three_passes_and_no_farther() -> None:
    """What is guessed of later ones is the same, and costs time at every access."""
    experts = Experts(FixedScorer(1.0, 0.9, 0.0, 0.0))
    for _ in range(3):
        experts.whole_pass([0, 1])
    experts.library.begin_pass(0)
    experts.layer(4)
    told = [page for page, _ in experts.prefetcher.wanted()]  # and nothing is loaded
    assert told[:5] == [4, 0, 1, 5, 5]
    assert [told.count(page) for page in range(6)] == [6, 6, 0, 0, 6, 6]


class Futures:
    """Every future of a member: in each of three passes it is used or not, for itself."""

    def __init__(self, chance: float, now: float, forward: float, backward: float) -> None:
        self.chance, self.now, self.forward, self.backward = chance, now, forward, backward

    def expected_rate(self, total: float, known: bool | None, kind: Kind) -> float:
        """E[1 / time until the first use], over the rest of this pass and two more."""
        rate = 0.0
        for used in product((False, True), repeat=3):
            weight = 1.0
            for n, is_used in enumerate(used):
                if n == 0 and known is not None:
                    weight *= float(is_used == known)
                else:
                    weight *= self.chance if is_used else 1.0 - self.chance
            times = [
                n * total + at
                for n, is_used in enumerate(used)
                if is_used
                for at in ([self.backward] if kind == M else [self.forward, self.backward])
            ]
            times = [at for at in times if at > self.now]
            rate += weight / (min(times) - self.now) if times and weight else 0.0
        return rate


@pytest.mark.parametrize("kind", [P, M])
@pytest.mark.parametrize("place", ["before the forward", "behind it"])
def test_the_time_of_a_likely_use_is_the_harmonic_mean_over_all_futures(
    kind: Kind, place: str
) -> None:
    scores = (0.9, 0.5, 0.2, 0.05)
    experts = Experts(FixedScorer(*scores), moments=True)
    for _ in range(4):
        experts.whole_pass([0, 1])
    library = experts.library
    library.begin_pass(0)
    experts.layer(4)
    known: list[bool | None] = [None] * 4
    if place == "behind it":
        experts.members([0, 3])
        known = [True, False, False, True]
    order = library.orders[0]
    for member, chance in enumerate(scores):
        now = library.now_ns - library.base_ns
        futures = Futures(chance, now, order.start_ns[1], order.start_ns[4])
        expected = futures.expected_rate(order.total_ns, known[member], kind)
        (page,) = library.stations.table.of(member, kind)
        found = experts.prefetcher.until[page] - library.now_ns
        assert 1 / found == pytest.approx(expected, rel=1e-6)


def test_the_oracle_s_times_are_those_of_the_recorded_future() -> None:
    """Beyond the next pass: by whole passes, which is enough for their order."""
    uses = [[0, 1], [1, 2], [1, 3], [0, 2], [1, 2], [3, 1], [0, 1], [2, 3]]
    future = np.array([[m in used for m in range(4)] for used in uses])
    experts = Experts(FutureScorer([future]), sets=FutureTimes)
    library = experts.library
    for at, used in enumerate(uses[:-2]):
        library.begin_pass(0)
        experts.layer(4)
        if at > 1:
            until = experts.prefetcher.until[:4] - library.now_ns
            ahead = [next(n for n, row in enumerate(uses[at:]) if m in row) for m in range(4)]
            soonest = np.flatnonzero(np.array(ahead) == 0)
            assert until[soonest] == pytest.approx(MS)
            by_future = sorted(range(4), key=lambda m: ahead[m])
            assert [ahead[m] for m in np.argsort(until, kind="stable")] == [
                ahead[m] for m in by_future
            ]
        experts.members(used)
        experts.layer(5)
        experts.layer(5, BACKWARD)
        experts.members(used[::-1], BACKWARD)
        experts.layer(4, BACKWARD)


def test_a_member_of_which_nothing_is_expected_goes_before_all_others() -> None:
    experts = Experts(FixedScorer(0.0, 1.0, 0.5, 0.01))
    for _ in range(3):
        experts.whole_pass([1])
    experts.library.begin_pass(0)
    experts.layer(4)
    until = experts.prefetcher.until
    assert until[0] > UNKNOWN_NS / 8 > until[3] > until[2] > until[1]


def test_while_a_set_runs_what_it_will_still_use_is_needed_at_once() -> None:
    experts = Experts(FixedScorer(0.1, 0.1, 0.1, 0.1))
    for _ in range(2):
        experts.whole_pass([0, 1])
    library, prefetcher = experts.library, experts.prefetcher
    library.begin_pass(0)
    experts.layer(4)
    visit = library.visit(library.stations.of_group[0], FORWARD)
    assert visit.used is not None
    visit.used[[3, 0, 2]] = True
    visit.order = [3, 0, 2]
    library.forward_done(0, visit.used, visit.order)
    prefetcher.advance(visit, 1, [3, 0, 2])
    assert np.argsort(prefetcher.until, kind="stable")[:3].tolist() == [3, 0, 2]
    assert experts.wanted(3) == [3, 0, 2], "in the order in which they run"


# -- hints -----------------------------------------------------------------------------------------


def test_a_hint_replaces_the_score_until_its_set_was_visited() -> None:
    experts = Experts(PopularityScorer([4]))
    for _ in range(4):
        experts.whole_pass([0, 1])
    library, prefetcher = experts.library, experts.prefetcher
    library.begin_pass(0)
    experts.layer(4)
    put(library.stations.table, 4, PageState.RESIDENT)
    version = prefetcher.version
    prefetcher.hint([3, 0], [1.0, 0.0])
    assert prefetcher.version != version
    until = prefetcher.until
    assert until[3] < until[1] < until[0], "what will be used goes last, whatever was popular"
    assert experts.wanted(2) == [3, 1]
    experts.members([0, 1])
    assert until[0] < until[3], "the set was visited: its scores count again"


def test_scores_out_of_range_are_clipped() -> None:
    told = Experts(FixedScorer(0.5, 0.5, 0.5, 0.5))
    clean = Experts(FixedScorer(0.5, 0.5, 0.5, 0.5))
    for experts in (told, clean):
        for _ in range(3):
            experts.whole_pass([0, 1])
        experts.library.begin_pass(0)
        experts.layer(4)
    told.prefetcher.hint([3, 2], [7.0, -1.0])
    clean.prefetcher.hint([3, 2], [1.0, 0.0])
    assert (told.prefetcher.until == clean.prefetcher.until).all()


def test_a_hint_before_a_pass_s_first_visit_counts_for_that_pass() -> None:
    experts = Experts(PopularityScorer([4]))
    for _ in range(4):
        experts.whole_pass([0, 1])
    experts.library.begin_pass(0)
    experts.prefetcher.hint([3], [1.0])
    experts.layer(4)
    assert experts.prefetcher.until[3] == experts.prefetcher.until[:4].min()
