"""Recorded orders: unions that are never cleared, places found again, contexts told ahead."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest

from odc.memory.events import Kind, Op, Phase
from odc.memory.orders import OrderLibrary
from odc.memory.recorded import RecordedOrder
from odc.memory.replay import Workload, synthetic
from odc.memory.stations import Stations
from tests.memory.passes import BACKWARD, FORWARD, ahead, go, record, stations

P, M = Kind.PARAMETER, Kind.MOMENT


def groups_of(order: RecordedOrder) -> list[int]:
    """First groups of the stations of an order's entries."""
    return [order.stations.stations[e.station].groups[0] for e in order.entries]


def chances(library: OrderLibrary, ctx: int = 0) -> dict[int, float]:
    """By group, of an order in which each occurs once."""
    order = library.orders[ctx]
    return {g: e.chance for g, e in zip(groups_of(order), order.entries, strict=True)}


def end(library: OrderLibrary, ctx: int = 0) -> None:
    """The pass that ran is recorded when the next one begins."""
    library.begin_pass(ctx)


# -- what is known ahead ---------------------------------------------------------------------------


def test_a_pass_that_was_seen_is_known_ahead() -> None:
    library = OrderLibrary(stations(4))
    record(library, [0, 1, 2, 3])
    end(library)
    assert ahead(library, 4) == [0, 1, 2, 3]
    go(library, 0)
    assert ahead(library, 6) == [1, 2, 3, 0, 1, 2], "this pass, then the next"


def test_times_ahead_add_up_and_are_smoothed_from_pass_to_pass() -> None:
    library = OrderLibrary(stations(3))
    for dur_ns in (100.0, 200.0):
        library.begin_pass(0)
        for group in range(3):
            go(library, group, dur_ns=dur_ns)
    end(library)
    assert library.orders[0].start_ns == pytest.approx([0.0, 130.0, 260.0])
    assert library.orders[0].total_ns == pytest.approx(390.0)


def test_an_order_that_stays_as_it_is_is_worked_out_once() -> None:
    library = OrderLibrary(stations(4))
    for number in range(20):
        library.begin_pass(0)
        for group in range(4):
            go(library, group, dur_ns=100.0 + number % 2)  # 1 % more or less is no change
    end(library)
    assert library.orders[0].compiled == 1
    for _ in range(4):
        for group in range(4):
            go(library, group, dur_ns=200.0)
        end(library)
    assert library.orders[0].compiled > 1
    assert library.orders[0].total_ns > 600.0


def test_what_an_entry_needed_once_it_is_expected_to_need() -> None:
    library = OrderLibrary(stations(2))
    for kinds in ((P,), (P, M), (P,)):
        library.begin_pass(0)
        visit = library.visit(library.stations.of_group[0], FORWARD)
        for kind in kinds:
            visit.note(kind, Op.READ, 0)
    end(library)
    assert library.orders[0].entries[0].kinds == 1 << P | 1 << M


# -- skip, new, back -------------------------------------------------------------------------------


def test_a_branch_that_was_not_expected_finds_its_place_again() -> None:
    """Layers 2 and 3 are skipped: the walk goes on behind them."""
    library = OrderLibrary(stations(8))
    record(library, list(range(8)))
    library.begin_pass(0)
    for group in (0, 1, 4):
        go(library, group)
    assert library.diverged == 1 and library.skipped == range(2, 4)
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


def test_going_back_follows_the_order_from_there() -> None:
    library = OrderLibrary(stations(8))
    record(library, list(range(8)))
    library.begin_pass(0)
    for group in (0, 1, 2, 3, 4, 1):
        go(library, group)
    assert library.divergences == {(0, "back"): 1}
    assert ahead(library, 3) == [2, 3, 4]
    go(library, 2)
    assert library.diverged == 1, "one divergence, whatever its length"


@pytest.mark.parametrize("seed", range(5))
def test_random_branches_keep_the_place_after_every_join(seed: int) -> None:
    rng = random.Random(seed)
    library = OrderLibrary(stations(30))
    record(library, list(range(30)))
    for _ in range(6):
        library.begin_pass(0)
        order = library.orders[0]
        kept = [g for g in range(30) if rng.random() >= 0.2]
        for group in kept:
            go(library, group)
            assert order.entries[library.position].key == library.live[-1].key
            assert ahead(library, 29 - group) == list(range(group + 1, 30))


def test_a_backward_that_mirrors_a_forward_with_gaps_is_expected() -> None:
    """The forward's three gaps are found one by one; its backward is known to have them too."""
    library = OrderLibrary(stations(12))
    whole, kept = list(range(12)), [0, 2, 3, 7, 8, 11]
    for groups in (whole, kept):
        library.begin_pass(0)
        for group in groups:
            go(library, group)
        assert library.diverged == (0 if groups is whole else 3)
        for at, group in enumerate(reversed(groups)):
            go(library, group, BACKWARD)
            if groups is kept and at < len(kept) - 1:
                assert ahead(library, 1) == [kept[-2 - at]]
    assert library.diverged == 3


# -- unions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_a_model_with_gaps_is_the_order_of_the_whole_model(seed: int) -> None:
    """No pass runs all of its layers; the union is in order all the same, once each was seen."""
    rng = random.Random(seed)
    library = OrderLibrary(stations(20))
    kept: list[list[int]] = [[g for g in range(20) if rng.random() < 0.8] for _ in range(20)]
    for groups in kept:
        record(library, groups)
    end(library)
    found = groups_of(library.orders[0])
    assert sorted(found) == sorted(set().union(*kept)), "every layer once"
    pairs = [(a, b) for groups in kept for a, b in zip(groups, groups[1:], strict=False)]
    at = {g: place for place, g in enumerate(found)}
    assert all(at[a] < at[b] for a, b in pairs), "and in the order in which they ran"


@pytest.mark.parametrize("seed", range(5))
def test_the_chance_of_an_entry_is_the_share_of_passes_that_made_it(seed: int) -> None:
    rng = random.Random(seed)
    library = OrderLibrary(stations(10))
    seen = np.zeros(10)
    for number in range(1, 20):
        kept = [0, *(g for g in range(1, 10) if rng.random() < 0.1 * g)]
        record(library, kept)
        seen[kept] += 1
        end(library)  # an empty pass is none
        found = chances(library)
        assert found == pytest.approx({g: seen[g] / number for g in found})
        assert set(found) == set(np.flatnonzero(seen).tolist()), "skipped entries stay"


def test_of_many_passes_the_recent_ones_count_most() -> None:
    library = OrderLibrary(stations(3))
    for number in range(400):
        record(library, [0, 1, 2] if number % 4 else [0, 2])
    end(library)
    assert chances(library)[1] == pytest.approx(0.75, abs=0.05)
    for _ in range(60):
        record(library, [0, 2])
    end(library)
    assert 0.01 < chances(library)[1] < 0.05, "it was dropped, and is not forgotten yet"
    assert chances(library)[0] == pytest.approx(1.0)


def test_nothing_is_cleared_by_whatever_comes() -> None:
    """A storm of passes in any order leaves other contexts, and the entries of its own."""
    rng = random.Random(0)
    library = OrderLibrary(stations(30))
    for _ in range(3):
        record(library, range(30), ctx=0)
        record(library, range(10), ctx=1)
    end(library, 2)
    before = library.orders[0], list(library.orders[0].entries), library.orders[0].compiled
    for _ in range(60):
        record(library, rng.sample(range(10), rng.randint(1, 10)), ctx=1)
    end(library, 0)
    assert (library.orders[0], library.orders[0].entries, library.orders[0].compiled) == before
    assert sorted(groups_of(library.orders[1])) == list(range(10))
    assert ahead(library, 30) == list(range(30)), "the first pass back is known"


def test_an_order_without_any_order_does_not_grow_for_ever() -> None:
    """Entries that do not come back are less likely in each pass, and in the end forgotten."""
    rng = random.Random(0)
    library = OrderLibrary(stations(40))
    record(library, range(30))
    sizes = []
    for number in range(250):
        record(library, rng.choices(range(30 if number else 39, 40), k=20))
        sizes.append(len(library.orders[0].entries))
    assert max(sizes[150:]) <= 1.2 * max(sizes[:150])
    assert not set(groups_of(library.orders[0])) & set(range(30)), "a hundred passes without them"


# -- the place is found again ----------------------------------------------------------------------


def test_the_visits_before_tell_which_of_several_places_it_is() -> None:
    """Group 9 runs three times; the suffix tells the first from the one that is nearer."""
    library = OrderLibrary(stations(10))
    record(library, [4, 9, 5, 1, 9, 2, 3, 9, 7, 4, 8, 6])
    library.begin_pass(0)
    for group in (1, 9, 2, 3, 9, 7, 4):
        go(library, group)
    assert ahead(library, 2) == [8, 6]
    go(library, 9)  # instead of 8: after 4 it was followed by 5
    assert library.position == 1 and ahead(library, 2) == [5, 1]


def test_without_a_suffix_the_nearest_place_ahead_is_taken() -> None:
    library = OrderLibrary(stations(10))
    record(library, [9, 0, 1, 2, 9, 3, 4, 9, 5])
    library.begin_pass(0)
    for group in (9, 0, 1, 8, 9):  # 8 is new
        go(library, group)
    assert library.position == 4 and ahead(library, 2) == [3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_after_a_jump_the_place_is_found_within_three_visits(seed: int) -> None:
    """Eight groups in sixty places: one visit says little, three that follow each other say all."""
    rng = random.Random(seed)
    order = [rng.randrange(8) for _ in range(60)]
    order = [g for at, g in enumerate(order) if at == 0 or order[at - 1] != g]
    windows = [tuple(order[at : at + 3]) for at in range(len(order) - 3)]
    unique = [at for at, window in enumerate(windows) if windows.count(window) == 1]
    assert len(unique) > 20
    for to in unique:
        library = OrderLibrary(stations(8))
        record(library, order)
        library.begin_pass(0)
        for group in [*order[: rng.randrange(1, 20)], *order[to : to + 3]]:
            go(library, group)
        assert library.position == to + 2
        assert ahead(library, 1) == [order[to + 3]]


def divergence_lengths(workload: Workload, warm_up: int) -> list[int]:
    """Visits that came unexpected or unknown in a row, behind ``warm_up`` steps."""
    table = workload.table()
    library = OrderLibrary(Stations(table, workload.sets))
    lost: list[bool] = []
    for visit in workload.visits:
        if visit.begins_pass:
            library.begin_pass(visit.ctx)
            lost.append(False)
        group = visit.bundles[0].group
        made = go(library, group, visit.phase)
        order = library.order
        assert (made.place < 0) == (order is None or made.key not in [e.key for e in order.entries])
        if visit.step >= warm_up:
            lost.append(made.place < 0)
    return [len(list(run)) for is_lost, run in groupby(lost) if is_lost]


@pytest.mark.parametrize("name", ["W5p10", "W5p20", "W5p30", "W5b"])
def test_dropped_layers_and_random_branches_are_back_in_order_within_three_accesses(
    name: str,
) -> None:
    """From the second step on: a layer never seen is one visit, and what follows has its place."""
    assert max(divergence_lengths(synthetic(name, steps=16), 1), default=0) <= 3
    assert divergence_lengths(synthetic(name, steps=40), 20) == [], "by then each was seen"


# -- contexts --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "pattern", ["TE", "TTEGGG", "TTTTE", "TGTGE", "TDTDDE", "TETG"], ids=lambda text: text
)
def test_contexts_that_recur_are_known_ahead_after_two_rounds(pattern: str) -> None:
    names = sorted(set(pattern))
    contexts = [names.index(name) for name in pattern * 6]
    library = OrderLibrary(stations(1))
    for at, ctx in enumerate(contexts[: 4 * len(pattern)]):
        record(library, [0], ctx)
        if at >= 2 * len(pattern):
            told = tuple(contexts[at + 1 : at + 9])
            assert library.chain[: len(told)] == told
            assert library.as_expected


def test_a_context_that_comes_unexpected_is_told_apart_from_one_that_was_expected() -> None:
    library = OrderLibrary(stations(2))
    for _ in range(4):
        record(library, [0], ctx=0)
    assert library.as_expected and library.chain[0] == 0
    record(library, [1], ctx=7)
    assert not library.as_expected
    record(library, [0], ctx=0)
    record(library, [0], ctx=0)
    assert library.chain[0] == 0, "seven of eight times it was so"


# -- the tape --------------------------------------------------------------------------------------


def members(*used: int) -> np.ndarray:
    return np.isin(np.arange(4), used)


def test_an_update_needs_what_any_of_its_micro_steps_touched() -> None:
    library = OrderLibrary(stations(4, [(0, 1, 2, 3)]))
    for used in ((0, 1), (1, 3)):
        library.begin_pass(0)
        assert library.tape == [None], "each pass has a tape of its own"
        library.forward_done(0, members(*used), list(used))
    assert library.tape[0] is not None and library.tape[0].tolist() == members(1, 3).tolist()
    assert library.touched[0] is not None
    assert library.touched[0].tolist() == members(0, 1, 3).tolist()
    library.end_update()
    assert library.touched == [None]


# -- what is told ----------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [r.getMessage() for r in caplog.records if r.name == "odc.memory.orders"]


def test_each_kind_of_divergence_is_logged_once_in_a_context_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = OrderLibrary(stations(9))
    with caplog.at_level(logging.INFO, logger="odc.memory.orders"):
        for ctx in (0, 1):
            for _ in range(5):
                record(library, range(8), ctx)
                library.begin_pass(ctx)
                for group in (0, 1, 4, 2, 3, 4, 8, 5, 6, 7):  # ahead, back, ahead, new
                    go(library, group)
                library.live.clear()
    lines = told(caplog)
    assert len(lines) == 6
    for ctx in (0, 1):
        own = [line for line in lines if line.startswith(f"context {ctx}:")]
        assert ["further ahead" in own[0], "behind" in own[1], "unknown" in own[2]] == [True] * 3
        assert library.divergences[ctx, "new"] == 5
        assert library.divergences[ctx, "back"] == 5
    assert library.diverged == sum(library.divergences.values())


def test_a_run_that_keeps_to_its_order_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    library = OrderLibrary(stations(4))
    with caplog.at_level(logging.INFO, logger="odc.memory.orders"):
        for _ in range(5):
            library.begin_pass(0)
            for group in range(4):
                go(library, group)
            for group in reversed(range(4)):
                go(library, group, Phase.BACKWARD)
    assert told(caplog) == [] and library.diverged == 0


def test_the_next_context_is_as_likely_as_it_was_often_and_never_sure() -> None:
    library = OrderLibrary(stations(1))
    for ctx in (0, 1, 0, 1, 0, 3, 0, 1):
        library.begin_pass(ctx)
        library.visit(0, Phase.FORWARD)
    library.begin_pass(0)
    assert library.chain[0] == 1
    assert 0.0 < library.next_chance < 1.0
