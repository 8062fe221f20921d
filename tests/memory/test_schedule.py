"""Schedules: decoded against a machine that runs tick by tick, found against brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from odc.memory.cycle import Cycle, Rates, Start
from odc.memory.decode import Lines, decode
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.orders import OrderLibrary
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.recorded import RecordedOrder
from odc.memory.rules import Belady
from odc.memory.schedule import Schedule, search
from odc.memory.stations import Stations
from tests.memory.reference_policies import fewest_misses
from tests.memory.reference_schedule import (
    START,
    Leave,
    Program,
    Row,
    place_of_uses,
    random_program,
    run_schedule,
)

SHARES = (0.2, 0.5, 0.8, 0.95)  # of uses whose page stays


def leaves_of(cycle: Cycle, keep: Sequence[bool]) -> set[Leave]:
    places = place_of_uses(cycle)
    return {places[u] for u, kept in enumerate(keep) if not kept}


def leaves_in(schedule: Schedule) -> set[Leave]:
    """As the pager is told: by pass and visit, and at the beginning."""
    found = {
        (number, place, page)
        for number, places in enumerate(schedule.leaves)
        for place, pages in enumerate(places)
        for page in pages
    }
    return found | {(*START, page) for page in schedule.first}


def all_decoded(cycle: Cycle) -> Iterator[tuple[float, float]]:
    """Time and loads of every schedule that fits."""
    for keep in product((False, True), repeat=len(cycle.uses)):
        found = decode(cycle, list(keep))
        if found is not None:
            yield found


# -- decoding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_a_cycle_takes_as_long_as_on_a_machine_that_runs_it_tick_by_tick(
    seed: int, num_passes: int
) -> None:
    rng = random.Random(seed)
    program = random_program(seed, num_passes)
    cycle = program.cycle()
    assert cycle.compute_ns == sum(row.ticks for rows in program.passes for row in rows)
    for share in SHARES:
        keep = [rng.random() < share for _ in cycle.uses]
        expected = run_schedule(program, leaves_of(cycle, keep))
        assert decode(cycle, keep) == (None if expected is None else expected[:2])


def test_of_a_run_the_pass_that_may_follow_counts_as_much_as_it_is_likely() -> None:
    program = random_program(1, 2)
    cycle = program.cycle([])
    keep = [False] * len(cycle.uses)

    def time(chance: float) -> float:
        cycle.chance = chance
        found = decode(cycle, keep)
        assert found is not None
        return found[0]

    assert time(0.0) < time(1.0)
    assert time(0.25) == pytest.approx(0.75 * time(0.0) + 0.25 * time(1.0))


def read_loop(groups: Sequence[int], table: PageTable) -> RecordedOrder:
    """A pass that reads groups, ten ticks each."""
    library = OrderLibrary(Stations(table, []))
    for _ in range(2):
        library.begin_pass(0)
        for group in groups:
            visit = library.visit(library.stations.of_group[group], Phase.FORWARD)
            visit.note(Kind.PARAMETER, Op.READ, 0)
            visit.dur_ns = 10.0
    library.begin_pass(0)
    return library.orders[0]


def test_of_a_run_what_may_follow_instead_counts_by_what_it_would_wait_for() -> None:
    """Groups 0 and 1 are read now and perhaps again; 2 and 3 are read next, more likely or not."""
    table = PageTable(FRAME_BYTES)
    for group in range(4):
        table.add_group(GroupSpec(f"g{group}", FRAME_BYTES, 0, False), {})
    table.seal()
    now, following = read_loop([0, 1], table), read_loop([2, 3], table)
    rates = Rates(20.0 / FRAME_BYTES, 20.0 / FRAME_BYTES)

    def run(chance: float, other_chance: float) -> Cycle:
        start = Start([0, 1])
        return Cycle(table, [now, following], 2, rates, start, chance, now, other_chance)

    cycle = run(0.0, 0.5)
    kept = {u: page for page, u in cycle.last.items()}
    assert sorted(kept.values()) == [0, 1]
    leaves = [u not in kept for u in range(len(cycle.uses))]
    stay, go = decode(run(0.0, 0.5), [True] * len(cycle.uses)), decode(run(0.0, 0.5), leaves)
    assert stay is None, "what follows does not fit then"
    assert go is not None and go[0] == 2 * 10.0 + 0.5 * (2 * 20.0 - 10.0)
    keeps = {}
    for chance in (0.2, 0.8):
        found = search(run(chance, 1.0 - chance))
        assert found is not None
        keeps[chance] = sum(found.keep[u] for u in kept)
    assert keeps[0.2] > keeps[0.8]


def test_a_run_waits_for_what_the_lines_have_to_do_when_it_begins() -> None:
    """Everything is loaded; a page of which nothing is needed leaves when its store has ended."""
    table = PageTable(FRAME_BYTES)
    for group in range(2):
        table.add_group(GroupSpec(f"g{group}", FRAME_BYTES, 0, True), {})
    table.seal()
    library = OrderLibrary(Stations(table, []))
    for _ in range(2):
        library.begin_pass(0)
        visit = library.visit(0, Phase.FORWARD)
        visit.note(Kind.PARAMETER, Op.READ, 0)
        visit.dur_ns = 10.0
    library.begin_pass(0)
    (page,), (other,) = table.of(0, Kind.PARAMETER), table.of(1, Kind.PARAMETER)
    rates = Rates(5.0 / FRAME_BYTES, 5.0 / FRAME_BYTES)

    def time(start: Start, num_frames: int) -> float:
        cycle = Cycle(table, [library.orders[0]], num_frames, rates, start)
        found = decode(cycle, [False] * len(cycle.uses))
        assert found is not None
        return found[0]

    assert time(Start([]), 1) == 5.0 + 10.0
    assert time(Start([], load_ns=3.0), 1) == 3.0 + 5.0 + 10.0
    assert time(Start([other], stored_ns={other: 4.0}), 1) == 4.0 + 5.0 + 10.0
    assert time(Start([page], stored_ns={page: 4.0}), 1) >= 10.0


def decoded_with_times(
    cycle: Cycle, keep: list[bool], monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[float, float] | None, list[float]]:
    """What ``decode`` says, and the times from which it gives each request its frames."""
    granted: list[float] = []

    class Noting(Lines):
        def _load(self, page: int) -> None:
            granted.append(max(self.load_ns, self.frames_ns))
            super()._load(page)

        def _make(self, count: int, ready: float) -> float:
            granted.append(super()._make(count, ready))
            return granted[-1]

    monkeypatch.setattr("odc.memory.decode.Lines", Noting)
    return decode(cycle, keep), granted


def runs() -> Iterator[tuple[random.Random, Program, Cycle, list[int], list[int]]]:
    """One or two passes, once; some of what is there at the beginning is dirty."""
    for seed in range(80):
        rng = random.Random(seed)
        program = random_program(seed, 1 + seed % 2)
        table = program.table
        here = [page.page for page in table.pages if rng.random() < 0.5]
        while sum(table.frames[page] for page in here) > program.frames:
            here.pop()
        dirty = [page for page in here if rng.random() < 0.5]
        for page in dirty:
            table.is_dirty[page] = 1
        yield rng, program, program.cycle(here), here, dirty


def test_a_run_from_what_is_resident_takes_as_long_as_tick_by_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine gives frames in the order of the times at which ``decode`` does."""
    faster = 0
    for rng, program, cycle, here, dirty in runs():
        for share in SHARES:
            keep = [rng.random() < share for _ in cycle.uses]
            found, granted = decoded_with_times(cycle, keep, monkeypatch)
            in_need = run_schedule(program, leaves_of(cycle, keep), here, dirty)
            if found is None:
                assert in_need is None
                continue
            ran = run_schedule(program, leaves_of(cycle, keep), here, dirty, granted)
            assert ran is not None and ran[:2] == found
            assert ran[2] <= program.frames
            assert in_need is not None and found[0] <= in_need[0]
            faster += found[0] < in_need[0]
    assert faster > 3, "loads began before what is made fresh had taken its frames"


def test_the_machine_tells_schedules_apart() -> None:
    """Of the cycles above some do not fit, some wait for loads, some for writes, some for none."""
    seen = set()
    for seed in range(30):
        program, rng = random_program(seed), random.Random(seed)
        cycle = program.cycle()
        for share in SHARES:
            found = decode(cycle, [rng.random() < share for _ in cycle.uses])
            seen.add(found and (found[0] > cycle.compute_ns, found[1] > 0))
    assert seen >= {None, (True, True), (False, True), (False, False)}


def test_uses_that_were_waited_for_are_told() -> None:
    program = plain_loop([0, 1, 2], 2, 3)
    cycle = program.cycle()
    waits: list[int] = []
    assert decode(cycle, [False, False, False], waits) is not None
    pages = [cycle.uses[u].page for u in waits]
    assert pages[-3:] == [0, 1, 2], "a load takes longer than what is computed meanwhile"
    assert decode(cycle, [True] * 3, waits) is None, "three pages in two frames"


# -- the fewest loads ------------------------------------------------------------------------------


def plain_loop(order: Sequence[int], frames: int, load: int = 1) -> Program:
    """A pass that reads pages of one frame, a tick each."""
    table = PageTable(FRAME_BYTES)
    for group in range(max(order) + 1):
        table.add_group(GroupSpec(f"g{group}", FRAME_BYTES, 0, False), {})
    table.seal()
    rows = [Row(g, Phase.FORWARD, [(Kind.PARAMETER, Op.READ, 0)], 1, 1) for g in order]
    return Program(table, [rows], frames, load, 1)


@pytest.mark.parametrize("seed", range(40))
def test_belady_around_the_cycle_needs_the_fewest_loads_of_all_schedules(seed: int) -> None:
    """Where his choice comes to recur from round to round; else it fits no cycle."""
    rng = random.Random(seed)
    num = rng.randint(3, 5)
    order = [rng.randrange(num) for _ in range(rng.randint(4, 8))]
    cycle = plain_loop(order, rng.randint(2, num - 1)).cycle()
    fewest = min(loads for _, loads in all_decoded(cycle))
    keep = Belady(cycle, 0).run()
    assert keep is not None
    found = decode(cycle, keep)
    assert found is None or found[1] == fewest
    spared = [k for n in range(1, 4) if (k := Belady(cycle, n).run()) is not None]
    assert found or any(decode(cycle, k) is not None for k in spared), "with a frame to spare"


@pytest.mark.parametrize("num", [3, 5, 8, 20])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_there_and_back_belady_s_choice_recurs_and_loads_what_his_does(
    num: int, share: float
) -> None:
    order = [*range(num), *reversed(range(num))]
    frames = max(int(share * num), 2)
    cycle = plain_loop(order, frames).cycle()
    keep = Belady(cycle, 0).run()
    found = decode(cycle, keep) if keep is not None else None
    assert found is not None
    a_round = fewest_misses(order * 12, frames) - fewest_misses(order * 11, frames)
    assert found[1] == a_round


# -- the search ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_the_best_of_all_schedules_of_a_tiny_cycle(seed: int) -> None:
    program = random_program(seed, num_groups=2)
    cycle = program.cycle()
    if len(cycle.uses) > 10:
        program.passes[0] = program.passes[0][:3]
        cycle = program.cycle()
    best = min(all_decoded(cycle))
    found = search(cycle)
    assert found is not None and len(cycle.uses) <= 12
    assert found.cycle_ns == best[0]


def starts_of(cycle: Cycle) -> list[tuple[float, float]]:
    """Belady's choices with frames set aside, and keeping nothing: those that fit, decoded."""
    largest = max(cycle.frames)
    keeps = [Belady(cycle, n * largest).run() for n in range(5)]
    keeps.append([False] * len(cycle.uses))
    return [d for keep in keeps if keep is not None and (d := decode(cycle, keep)) is not None]


@pytest.mark.parametrize("seed", range(12))
def test_the_search_is_never_worse_than_where_it_starts(seed: int) -> None:
    cycle = random_program(seed, 2, num_groups=10, spare=3).cycle()
    found = search(cycle)
    assert found is not None
    assert found.cycle_ns <= min(starts_of(cycle))[0]
    assert found.cycle_ns >= found.compute_ns == cycle.compute_ns


def test_the_search_is_better_than_where_it_starts_on_busy_cycles() -> None:
    cycles = [random_program(seed, 2, num_groups=10, spare=3).cycle() for seed in range(12)]
    busy = [c for c in cycles if min(starts_of(c))[0] > 1.02 * c.compute_ns]
    gains = [min(starts_of(c))[0] / found.cycle_ns for c in busy if (found := search(c))]
    assert len(gains) == len(busy) > 5
    assert min(gains) > 1.0 and sum(gains) / len(gains) > 1.2


def test_a_schedule_without_waits_keeps_all_that_can_stay() -> None:
    """Of each page that leaves: if it stayed, the cycle would take longer or fill all of the room.

    One page's room stays free for loads.
    """
    checked = 0
    for seed in range(60):
        cycle = random_program(seed, 2, num_groups=10, spare=6 + seed % 5).cycle()
        found = search(cycle, work=10**9)
        if found is None or found.cycle_ns > found.compute_ns:
            continue
        cycle.num_frames -= max(cycle.frames[use.page] for use in cycle.uses)
        for u, use in enumerate(cycle.uses):
            if not found.keep[u] and not use.leaves and cycle.next[u] >= 0:
                keep = [*found.keep]
                keep[u] = True
                kept = decode(cycle, keep)
                assert kept is None or kept[0] > found.cycle_ns, f"{seed=}: {use=}"
                checked += 1
    assert checked > 20


def test_a_cycle_that_fits_only_by_keeping_little_is_scheduled_all_the_same() -> None:
    """None of Belady's choices recurs from round to round here."""
    cycle = random_program(6, 2, num_groups=10, spare=0).cycle()
    largest = max(cycle.frames)
    keeps = [Belady(cycle, n * largest).run() for n in range(5)]
    assert all(keep is None or decode(cycle, keep) is None for keep in keeps)
    found = search(cycle)
    assert found is not None and found.cycle_ns < 0.9 * min(starts_of(cycle))[0]


@pytest.mark.parametrize("seed", range(12))
def test_a_schedule_that_is_found_fits_and_takes_what_it_says(seed: int) -> None:
    """Followed as the pager is told, by visits, on the machine that runs tick by tick."""
    program = random_program(seed, 2, num_groups=10, spare=3)
    found = search(program.cycle())
    assert found is not None
    ran = run_schedule(program, leaves_in(found))
    assert ran is not None, "it would wait for ever"
    ticks, loads, most = ran
    assert (ticks, loads) == (found.cycle_ns, found.loads)
    assert most <= program.frames


@pytest.mark.parametrize("seed", range(4))
def test_a_search_repeats_and_its_work_is_bounded(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = random_program(seed, 2, num_groups=10, spare=3).cycle()
    assert search(cycle) == search(cycle)
    decoded = 0

    def counted(*args: object) -> tuple[float, float] | None:
        nonlocal decoded
        decoded += 2 * len(cycle.uses)
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("odc.memory.schedule.decode", counted)
    search(cycle, work=2_000)
    assert decoded <= 2_000 + 8 * 2 * len(cycle.uses), "the starts, and then so much"


def test_the_last_schedule_is_kept_while_it_is_nearly_as_good() -> None:
    """Another one would cost loads until residency fits it."""
    program = plain_loop([*range(12), *reversed(range(12))], 6, 3)
    last = search(program.cycle())
    assert last is not None and last.cycle_ns > last.compute_ns
    program.passes[0][5].ticks += 1
    assert search(program.cycle(), last) is last
    program.frames += 4
    other = search(program.cycle(), last)
    assert other is not None and other.cycle_ns < 0.9 * last.cycle_ns


def test_nothing_is_scheduled_that_cannot_fit() -> None:
    assert search(plain_loop([0, 1, 2], 0).cycle()) is None


def test_a_loop_that_the_plain_rule_runs_faster_gets_no_schedule() -> None:
    """A schedule repeats in every round; in a plain loop it pays to change what stays."""
    slow = plain_loop(list(range(24)), 6, 2)
    assert search(slow.cycle()) is None
    idle = plain_loop(list(range(24)), 18, 1)
    found = search(idle.cycle())
    assert found is not None and found.cycle_ns == found.compute_ns
