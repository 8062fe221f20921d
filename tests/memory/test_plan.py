"""Times of next use and wish lists of single groups, against recorded strings read ahead."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from odc.memory.events import Kind, Op
from odc.memory.next_k import NextKPrefetcher
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageState, PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.plan_sets import UNKNOWN_NS
from odc.memory.prefetch import Limits
from odc.memory.scores import ReplayScorer
from tests.memory.passes import (
    BACKWARD,
    FORWARD,
    P,
    Player,
    Step,
    go,
    put,
    record,
    stations,
    trained,
)

Cycle = list[tuple[int, list[Step]]]  # contexts and their passes
NEVER = UNKNOWN_NS / 8


def replay(library: OrderLibrary, limits: Limits | None = None) -> OrderPrefetcher:
    return OrderPrefetcher(library, ReplayScorer(library.stations.members), limits)


def random_cycle(seed: int, num_groups: int, num_passes: int) -> Cycle:
    """Passes of forward visits in any order, groups repeated, and now and then a backward."""
    rng = random.Random(seed)
    cycle: Cycle = []
    for ctx in range(num_passes):
        forward = [rng.randrange(num_groups) for _ in range(rng.randint(3, 12))]
        forward = [g for at, g in enumerate(forward) if at == 0 or forward[at - 1] != g]
        steps = [(g, FORWARD, rng.choice((1e6, 2e6, 5e6))) for g in forward]
        if rng.random() < 0.6:
            own = dict.fromkeys(reversed(forward))
            steps += [(g, BACKWARD, rng.choice((1e6, 3e6))) for g in own]
        cycle.append((ctx, steps))
    return cycle


class Future:
    """Where each group of a cycle is used next, by reading on."""

    def __init__(self, cycle: Cycle) -> None:
        self.steps = [step for _, steps in cycle for step in steps]
        self.first = {}
        at = 0
        for ctx, steps in cycle:
            self.first[ctx] = at
            at += len(steps)

    def next_use(self, group: int, ctx: int, number: int) -> float | None:
        """Compute from the beginning of a visit to the group's first use in a later one."""
        at, time = self.first[ctx] + number, 0.0
        for place in range(at, at + len(self.steps)):
            time += self.steps[place % len(self.steps)][2]
            if self.steps[(place + 1) % len(self.steps)][0] == group:
                return time
        return None


# -- times of next use -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_times_of_next_use_are_those_of_the_string_at_every_point(
    seed: int, num_passes: int
) -> None:
    """Certain orders: of every page, at every visit, from the third round on."""
    cycle = random_cycle(seed, 9, num_passes)
    future = Future(cycle)
    library = OrderLibrary(stations(10))  # group 9 is never used
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    for turn in range(6):
        for ctx, steps in cycle:
            for number in player.play(steps, ctx):
                if turn < 2:
                    continue
                for group in range(10):
                    expected = future.next_use(group, ctx, number)
                    if expected is None:
                        assert prefetcher.until[group] > NEVER
                    else:
                        found = prefetcher.until[group] - library.now_ns
                        assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(6))
def test_times_are_right_again_as_soon_as_a_pass_is_that_was_not_expected(seed: int) -> None:
    """Two passes in any order: the one that runs is known from its first visit on."""
    rng = random.Random(seed)
    cycle = random_cycle(seed, 8, 2)
    library = OrderLibrary(stations(8))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    for turn in range(30):
        ctx, steps = cycle[rng.randrange(2)] if turn > 1 else cycle[turn]
        for number in player.play(steps, ctx):
            if turn < 2:
                continue
            time = 0.0
            seen = set()
            for at in range(number, len(steps) - 1):
                time += steps[at][2]
                group = steps[at + 1][0]
                if group not in seen:
                    seen.add(group)
                    assert prefetcher.until[group] - library.now_ns == pytest.approx(time)


def test_a_skipped_layer_is_used_later_than_was_thought() -> None:
    library = OrderLibrary(stations(6))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    for _ in range(3):
        player.pass_of(range(6))
    library.begin_pass(0)
    player.visit(0)
    assert prefetcher.until[1] - library.now_ns == pytest.approx(10.0)
    version = prefetcher.version
    player.visit(3)
    assert prefetcher.version != version, "the order of victims has changed"
    for group in (1, 2):  # in the next pass
        assert prefetcher.until[group] - library.now_ns == pytest.approx(30.0 + 10.0 * group)


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_an_uncertain_use_stands_for_the_harmonic_mean_of_its_times(quarters: int) -> None:
    """Group 1 runs in the second place in some passes, and in the last place of all."""
    library = OrderLibrary(stations(4))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    for number in range(20):
        often = (number * quarters) % 4 < quarters
        player.pass_of([0, 1, 2, 3, 1] if often else [0, 2, 3, 1], dur_ns=1e6)
    library.begin_pass(0)
    player.visit(0, dur_ns=1e6)
    order = library.orders[0]
    assert order.entries[1].chance == pytest.approx(quarters / 4)
    found = 1 / (prefetcher.until[1] - library.now_ns)
    low, high = (
        chance / order.start_ns[1] + (1 - chance) / order.start_ns[4]
        for chance in (quarters / 4 - 0.1, quarters / 4 + 0.1)  # so closely are chances followed
    )
    assert low <= found <= high


def branching(
    utilization: float, others: Container[int] = (15, 35)
) -> tuple[Player, OrderPrefetcher]:
    """Layers 1 to 4, or in some of 40 passes 5 to 8 instead; 0 before, 10 and 11 behind."""
    library = OrderLibrary(stations(12))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    for number in range(40):
        player.pass_of([0, 5, 6, 7, 8, 10, 11] if number in others else [0, 1, 2, 3, 4, 10, 11])
    prefetcher.utilization = utilization
    library.begin_pass(0)
    player.begin(0)
    return player, prefetcher


def test_on_an_idle_line_what_is_unlikely_is_loaded_too() -> None:
    _, idle = branching(0.0)
    assert [page for page, _ in idle.wanted()][:11] == list(range(9)) + [10, 11]
    _, busy = branching(1.0)
    assert [page for page, _ in busy.wanted()][:7] == [0, 1, 2, 3, 4, 10, 11]


def test_on_a_line_without_time_to_spare_even_odds_are_not_worth_a_load() -> None:
    _, busy = branching(0.85, range(0, 40, 2))
    assert sorted([page for page, _ in busy.wanted()][:11]) == [*range(9), 10, 11]
    _, full = branching(1.0, range(0, 40, 2))
    assert [page for page, _ in full.wanted()][:3] == [0, 10, 11]


def test_a_branch_that_is_taken_is_certain_from_its_first_layer_on() -> None:
    """The layers of the other one are not used in this pass, and those of this one are wanted."""
    player, prefetcher = branching(1.0)
    library, table = player.library, player.library.stations.table
    take(prefetcher.wanted(), table, 100)
    player.end(0)
    player.begin(5)
    now = library.now_ns
    assert [prefetcher.until[p] - now for p in (6, 7, 8, 10, 11)] == [10, 20, 30, 40, 50]
    assert min(prefetcher.until[1:5]) > library.end_ns
    assert take(prefetcher.wanted(), table, 2) == [6, 7, 8]


def test_with_one_pass_known_and_one_that_left_it_the_rest_is_still_expected() -> None:
    """What follows a layer that ran once is the next in order, not nothing."""
    library = OrderLibrary(stations(8))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    player.pass_of(range(8))
    player.pass_of([0, 1, 2, 5, 6, 7])
    library.begin_pass(0)
    for group in range(4):
        player.visit(group)
    for group in range(4, 8):
        assert prefetcher.until[group] - library.now_ns == pytest.approx(10.0 * (group - 3))
    assert [page for page, _ in prefetcher.wanted()][:5] == [3, 4, 5, 6, 7]


def test_what_the_visit_that_runs_still_needs_is_used_first_and_wanted_first() -> None:
    """The moments that the update inside a backward will ask for, when its gradient is not yet."""
    library = OrderLibrary(trained(3))
    table = library.stations.table
    for _ in range(2):
        library.begin_pass(0)
        for group in range(3):
            go(library, group, BACKWARD, 1e6).note(Kind.MOMENT, Op.WRITE, 0)
    prefetcher = replay(library)
    library.begin_pass(0)
    prefetcher.advance(library.visit(library.stations.of_group[0], BACKWARD), 1, [])
    pages = {*table.of(0, P), *table.of(0, Kind.MOMENT)}
    assert set(np.flatnonzero(prefetcher.until == prefetcher.until.min())) == pages
    wanted = prefetcher.wanted()
    assert {next(wanted)[0], next(wanted)[0]} == pages


# -- the wish list ---------------------------------------------------------------------------------


def wishes_by_reading_on(
    table: PageTable, uses: Sequence[Sequence[int]], first: int, last: int
) -> list[int]:
    """Absent pages in the order of need, each once: who is told loads it."""
    pages = [page for at in range(first, last + 1) for page in uses[at % len(uses)]]
    return list(dict.fromkeys(page for page in pages if table.is_absent[page]))


def take(wanted: Iterator[tuple[int, int]], table: PageTable, count: int) -> list[int]:
    """As the pager does: load what is told, up to one for which there is no room."""
    told: list[int] = []
    for page, _ in wanted:
        told.append(page)
        if len(told) > count:
            break
        put(table, page, PageState.LOADING)
        put(table, page, PageState.RESIDENT)
    return told


@pytest.mark.parametrize("seed", range(20))
def test_absent_pages_are_wanted_in_the_order_of_need_whatever_left_meanwhile(seed: int) -> None:
    """One recorded pass for ever; pages come and go at random, also behind the cursor."""
    rng = random.Random(seed)
    (_, steps), *_ = random_cycle(seed, 10, 1)
    uses = [[group] for group, _, _ in steps]
    library = OrderLibrary(stations(10))
    prefetcher = replay(library)
    player, table = Player(library, prefetcher), library.stations.table
    sight = 9 * len(steps)  # this pass and the eight that are expected after it
    for turn in range(12):
        library.begin_pass(0)
        for number, (group, phase, dur_ns) in enumerate(steps):
            player.begin(group, phase, dur_ns)
            put(table, group, PageState.RESIDENT)
            if turn and rng.random() < 0.7:
                expected = wishes_by_reading_on(table, uses, number, sight - 1)
                count = rng.randrange(4)
                assert take(prefetcher.wanted(), table, count) == expected[: count + 1]
                assert not table.left
            player.end(group)
            for page in np.flatnonzero(table.resident).tolist():
                if rng.random() < 0.3:
                    put(table, page, PageState.EVICTING)
                    if rng.random() < 0.7:
                        put(table, page, PageState.HOME)


def test_a_load_that_was_taken_back_is_wanted_again() -> None:
    library = OrderLibrary(stations(4))
    prefetcher = replay(library)
    player, table = Player(library, prefetcher), library.stations.table
    player.pass_of(range(4))
    library.begin_pass(0)
    player.visit(0)
    put(table, 0, PageState.RESIDENT)
    wanted = prefetcher.wanted()
    assert next(wanted)[0] == 1
    put(table, 1, PageState.LOADING)
    assert next(wanted)[0] == 2
    put(table, 1, PageState.HOME)  # cancelled, or it failed
    assert next(prefetcher.wanted())[0] == 1


def test_the_frames_that_the_next_visit_makes_fresh_are_to_be_left_free() -> None:
    library = OrderLibrary(trained(4))
    for _ in range(2):
        library.begin_pass(0)
        for group in range(4):
            go(library, group)
        for group in reversed(range(4)):
            go(library, group, BACKWARD).note(Kind.GRADIENT, Op.CREATE, 0)
    prefetcher = replay(library)
    library.begin_pass(0)
    reserves = []
    for group, phase in [*product(range(4), [FORWARD]), *product([3, 2], [BACKWARD])]:
        visit = go(library, group, phase)
        prefetcher.advance(visit, 1, [])
        reserves.append(next(prefetcher.wanted())[1])
    assert reserves == [0, 0, 0, 2, 2, 2], "gradients of two frames, from the last forward on"


def test_limits_cut_the_wish_list_and_not_the_times_of_use() -> None:
    def told(limits: Limits) -> tuple[list[int], np.ndarray]:
        library = OrderLibrary(stations(6))
        for _ in range(2):
            record(library, range(6))
        prefetcher = replay(library, limits)
        Player(library, prefetcher).pass_of([0], 0)
        return [page for page, _ in prefetcher.wanted()], prefetcher.until

    free, until = told(Limits())
    assert free[:12] == [*range(6), *range(6)]
    near, near_until = told(Limits(page_prefetch=2))
    assert near == [0, 1, 2]
    one, one_until = told(Limits(prefetch_window=1))
    assert one == [*range(6)]
    two, _ = told(Limits(prefetch_window=2))
    assert two == [*range(6), *range(6)]
    assert (near_until == until).all() and (one_until == until).all()


# -- without any order -----------------------------------------------------------------------------


def test_with_nothing_known_what_was_used_last_is_used_first() -> None:
    library = OrderLibrary(stations(6))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    order = [3, 1, 4, 0, 1, 5, 3]
    player.pass_of(order)
    by_use = sorted(set(order), key=lambda g: prefetcher.until[g])
    assert by_use == list(dict.fromkeys(reversed(order)))
    assert list(prefetcher.wanted()) == []
    assert prefetcher.until[2] >= max(prefetcher.until[order]), "never used: last of all"


def test_next_k_wants_the_pages_behind_the_last_one() -> None:
    library = OrderLibrary(stations(8))
    prefetcher = NextKPrefetcher(library, k=3)
    table = library.stations.table

    def told(group: int) -> list[int]:
        prefetcher.advance(library.visit(library.stations.of_group[group], FORWARD), 1, [])
        return [page for page, _ in prefetcher.wanted()]

    assert list(prefetcher.wanted()) == []
    assert told(2) == [3, 4, 5]
    put(table, 4, PageState.RESIDENT)
    assert [page for page, _ in prefetcher.wanted()] == [3, 5]
    assert told(6) == [7] and told(7) == []


def test_next_k_keeps_what_it_wants_and_else_what_was_used_last() -> None:
    library = OrderLibrary(stations(8))
    prefetcher = NextKPrefetcher(library, k=2)
    player = Player(library, prefetcher)
    for group in (5, 0, 3):
        player.visit(group)
    order = np.argsort(prefetcher.until, kind="stable").tolist()
    assert order[:2] == [4, 5] and order[2:4] == [3, 0]


def test_a_hint_that_a_layer_is_dropped_moves_its_use_to_the_next_pass() -> None:
    """And the hint is forgotten when this pass is over."""
    library = OrderLibrary(stations(3))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    player.pass_of(range(3))
    library.begin_pass(0)
    player.visit(0)
    before = prefetcher.until.copy()
    assert before[0] > before[2] > before[1]
    prefetcher.hint([2, 1], [0.0, 1.0])
    assert prefetcher.until[1] == before[1]
    assert prefetcher.until[2] == before[2] + library.orders[0].total_ns
    player.visit(1)
    player.visit(2)  # it runs all the same
    library.begin_pass(0)
    player.visit(0)
    assert prefetcher.until[0] > prefetcher.until[2] > prefetcher.until[1]


def test_a_hint_before_a_pass_s_first_visit_is_for_that_pass() -> None:
    """A mask that is drawn when the forward begins."""
    library = OrderLibrary(stations(3))
    prefetcher = replay(library)
    player = Player(library, prefetcher)
    player.pass_of(range(3))
    library.begin_pass(0)
    prefetcher.hint([1], [0.0])
    player.visit(0)
    assert prefetcher.until[1] - library.now_ns > library.orders[0].total_ns
    put(library.stations.table, 0, PageState.RESIDENT)
    assert next(prefetcher.wanted())[0] == 2
