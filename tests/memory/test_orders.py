"""Recorded orders, the tape, and what plans make of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import wanted_pages
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.plan import (
    Limits,
    NextKPrefetcher,
    OrderPrefetcher,
    Plan,
    ReplayPrefetcher,
    TapePrefetcher,
)
from odc.memory.scores import PopularityScorer
from odc.memory.stations import OrderLibrary, Stations, Visit

P = Kind.PARAMETER
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def stations(num_groups: int, sets: list[tuple[int, ...]] | None = None) -> Stations:
    """Frozen groups of one page; page ids are group ids."""
    table = PageTable(64 * FRAME_BYTES)
    for group in range(num_groups):
        table.add_group(GroupSpec(f"g{group}", 2 * FRAME_BYTES, 0, False), {})
    table.seal()
    return Stations(table, sets or [])


def go(library: OrderLibrary, group: int, phase: Phase = FORWARD, dur_ns: float = 10.0) -> Visit:
    places = library.stations
    visit = library.visit(places.of_group[group], phase)
    visit.note(P, Op.READ, places.member_of[group])
    visit.dur_ns = dur_ns
    return visit


def record(library: OrderLibrary, groups: list[int], ctx: int = 0) -> None:
    library.begin_pass(ctx)
    for group in groups:
        go(library, group)


def ahead(library: OrderLibrary, count: int) -> list[int]:
    places = library.stations.stations
    return [places[u.visit.station].groups[0] for u in library.upcoming()][:count]


# -- the library -----------------------------------------------------------------------------------


def test_a_pass_that_was_seen_is_known_ahead() -> None:
    library = OrderLibrary(stations(4))
    record(library, [0, 1, 2, 3])
    library.begin_pass(0)
    assert ahead(library, 4) == [0, 1, 2, 3]
    go(library, 0)
    assert ahead(library, 6) == [1, 2, 3, 0, 1, 2], "this pass, then the next"


def test_times_ahead_add_up_and_are_smoothed_from_pass_to_pass() -> None:
    library = OrderLibrary(stations(3))
    for dur_ns in (100.0, 200.0):
        library.begin_pass(0)
        for group in range(3):
            go(library, group, dur_ns=dur_ns)
    library.begin_pass(0)
    assert [u.eta_ns for u in library.rest()] == pytest.approx([0.0, 130.0, 260.0])


def test_a_branch_that_was_not_expected_finds_its_place_again() -> None:
    """Layers 2 and 3 are skipped: the walk goes on behind them."""
    library = OrderLibrary(stations(8))
    record(library, list(range(8)))
    library.begin_pass(0)
    for group in (0, 1, 4):
        go(library, group)
    assert library.diverged == 1
    assert ahead(library, 3) == [5, 6, 7]


def test_a_group_that_is_not_in_the_order_does_not_lose_the_place() -> None:
    library = OrderLibrary(stations(8))
    record(library, [0, 1, 2, 3])
    library.begin_pass(0)
    go(library, 0)
    go(library, 7)
    assert ahead(library, 3) == [1, 2, 3]
    go(library, 1)
    assert library.diverged == 1 and ahead(library, 2) == [2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_random_branches_keep_the_place_after_every_join(seed: int) -> None:
    rng = random.Random(seed)
    library = OrderLibrary(stations(30))
    record(library, list(range(30)))
    for _ in range(6):
        library.begin_pass(0)
        order = library.orders[0]
        skipped = {g for g in range(30) if rng.random() < 0.2}
        for group in [g for g in range(30) if g not in skipped]:
            go(library, group)
            keys = [v.key for v in order]
            key = library.live[-1].key
            if key in keys:
                assert order[library.position].key == key
                rest = [u.visit.key for u in library.rest()]
                assert rest == keys[library.position + 1 :]


def test_contexts_keep_their_own_orders_and_their_own_successors() -> None:
    """Training and evaluation: the tail of a pass shows the first visits of the next kind."""
    library = OrderLibrary(stations(6))
    for _ in range(2):
        record(library, [0, 1, 2], ctx=0)
        record(library, [5, 4], ctx=1)
    library.begin_pass(0)
    go(library, 0)
    assert ahead(library, 4) == [1, 2, 5, 4]
    assert set(library.orders) == {0, 1}


# -- plans -----------------------------------------------------------------------------------------


def plan_of(prefetcher: OrderPrefetcher, current: Visit | None = None) -> Plan:
    plan = prefetcher.plan(current, [])
    assert plan is not None
    return plan


def test_with_certain_futures_keep_values_are_one_over_the_time_until_use() -> None:
    library = OrderLibrary(stations(5))
    durations = [1e6, 2e6, 4e6, 8e6, 16e6]
    for _ in range(2):
        library.begin_pass(0)
        for group in range(5):
            go(library, group, dur_ns=durations[group])
    library.begin_pass(0)
    current = go(library, 0, dur_ns=0.0)
    plan = plan_of(ReplayPrefetcher(library, np.ones(5)), current)
    starts = 0.5 * 1e6 + np.cumsum([0.0, 2e6, 4e6, 8e6])
    assert plan.keep[1:] == pytest.approx(1 / starts)
    whole = sum(durations)
    assert plan.keep_next[1:] == pytest.approx(1 / (starts + whole))
    assert plan.keep_next[0] == pytest.approx(1 / (whole - 0.5 * 1e6))
    assert list(np.argsort(-plan.keep)) == [0, 1, 2, 3, 4]


def test_what_the_visit_that_runs_still_needs_is_worth_most() -> None:
    table = PageTable(64 * FRAME_BYTES)
    for group in range(3):
        table.add_group(GroupSpec(f"g{group}", 2 * FRAME_BYTES, 1, True), {})
    table.seal()
    library = OrderLibrary(Stations(table, []))
    for _ in range(2):
        library.begin_pass(0)
        for group in range(3):
            visit = go(library, group, BACKWARD, 1e6)
            visit.note(Kind.MOMENT, Op.WRITE, 0)
    library.begin_pass(0)
    current = library.visit(library.stations.of_group[0], BACKWARD)
    plan = plan_of(ReplayPrefetcher(library, np.ones(len(table.pages))), current)
    moment = table.of(0, Kind.MOMENT)[0]
    assert plan.keep[moment] == plan.keep.max()
    assert moment in wanted_pages(table, plan, 1)


def experts() -> tuple[OrderLibrary, TapePrefetcher]:
    """A set of four experts (groups 0-3) between two layers (4, 5)."""
    library = OrderLibrary(stations(6, [(0, 1, 2, 3)]))
    return library, TapePrefetcher(library, np.ones(6), PopularityScorer([4]), threshold=0.5)


def visit_set(
    library: OrderLibrary, members: list[int], phase: Phase, prefetcher: TapePrefetcher
) -> Visit:
    visit = library.visit(library.stations.of_group[0], phase)
    visit.dur_ns = 1e6
    assert visit.used is not None
    for member in members:
        visit.note(P, Op.READ, member)
    if phase == FORWARD:
        library.forward_done(0, visit.used, list(visit.order))
        prefetcher.observe(visit, 1)
    return visit


def moe_pass(library: OrderLibrary, tape: TapePrefetcher, members: list[int]) -> None:
    library.begin_pass(0)
    go(library, 4, dur_ns=1e6)
    visit_set(library, members, FORWARD, tape)
    go(library, 5, dur_ns=1e6)
    go(library, 5, BACKWARD, 1e6)
    visit_set(library, members[::-1], BACKWARD, tape)
    go(library, 4, BACKWARD, 1e6)


def test_backward_needs_exactly_what_this_forward_used() -> None:
    library, tape = experts()
    moe_pass(library, tape, [0, 1])
    library.begin_pass(0)
    go(library, 4)
    visit_set(library, [2, 3], FORWARD, tape)
    current = go(library, 5)
    plan = plan_of(tape, current)
    near = [p for p, v in zip(plan.wish.tolist(), plan.wish_visit, strict=True) if v == 2]
    assert near == [3, 2], "the tape, backwards; nothing of the last pass"


def test_members_of_a_set_to_come_go_by_how_often_they_were_used() -> None:
    library, tape = experts()
    for used in ([0, 1], [0, 2], [0, 1], [0, 1]):
        moe_pass(library, tape, used)
    library.begin_pass(0)
    plan = plan_of(tape, go(library, 4))
    assert list(np.argsort(-plan.keep[:4], kind="stable")) == [0, 1, 2, 3]
    assert 3 not in plan.wish.tolist(), "what is unlikely is not loaded ahead"


def test_a_hint_replaces_the_score_until_its_set_was_visited() -> None:
    library, tape = experts()
    for _ in range(4):
        moe_pass(library, tape, [0, 1])
    library.begin_pass(0)
    tape.hint([3, 0], [1.0, 0.0])
    current = go(library, 4)
    plan = plan_of(tape, current)
    first = [p for p, v in zip(plan.wish.tolist(), plan.wish_visit, strict=True) if v == 1]
    assert sorted(first) == [1, 3]
    visit_set(library, [0, 1], FORWARD, tape)
    assert not tape._hints


def test_scores_out_of_range_are_clipped_and_unknown_groups_ignored() -> None:
    library, tape = experts()
    tape.hint([3, 2, 4], [7.0, -1.0, 0.5])
    assert tape._hints == {0: {3: 1.0, 2: 0.0}}


def test_limits_cut_the_wish_list_and_not_the_keep_values() -> None:
    library = OrderLibrary(stations(6))
    for _ in range(2):
        record(library, list(range(6)))
    library.begin_pass(0)
    current = go(library, 0)
    free = plan_of(ReplayPrefetcher(library, np.ones(6)), current)
    near = plan_of(ReplayPrefetcher(library, np.ones(6), limits=Limits(page_prefetch=2)), current)
    one = plan_of(ReplayPrefetcher(library, np.ones(6), limits=Limits(None, 1)), current)
    assert (near.keep == free.keep).all() and (one.keep == free.keep).all()
    assert near.wish.tolist() == [0, 1, 2]
    assert set(one.wish_visit.tolist()) <= set(range(6))


def test_next_k_wishes_for_the_pages_behind_the_last_one() -> None:
    places = stations(8)
    prefetcher = NextKPrefetcher(places, k=3)
    plan = prefetcher.plan(Visit(places.of_group[2], FORWARD), [])
    assert plan is not None and plan.wish.tolist() == [3, 4, 5]
    last = prefetcher.plan(Visit(places.of_group[7], FORWARD), [])
    assert last is not None and last.wish.tolist() == []
    assert prefetcher.plan(None, []) is None
