"""What policies reach that do not know what a pass will use, against every policy there is."""

import random
from functools import cache
from statistics import fmean

import pytest

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Accesses, best_found, budget_for, link_for, synthetic
from odc.memory.replay.online import (
    NOTHING,
    Model,
    dropped_layers,
    least_expected,
    places_of,
    used_groups,
)
from odc.memory.replay.rollout import Player, Rollout, Rule, best_rule, reached
from odc.memory.replay.synthetic import Shape

BRANCHES = ((0, 1.0),), ((1, 0.5), (2, 0.5)), ((3, 1.0),)


def tick_by_tick(model: Model, passes: int) -> float:
    """The least expected ticks, by deciding at every tick; a computation is one of them.

    A pass is drawn place by place, when the use before has ended; there are no events. Only that a
    use that waits is loaded for first is taken over from ``least_expected``.
    """
    pages, ticks, places = range(model.num_pages), int(model.load), model.places

    @cache
    def begin(left: int, here: frozenset[int], line: tuple[int, int] | None) -> float:
        return draw(left, 0, (), here, line) if left else 0.0

    @cache
    def draw(left, at, used, here, line) -> float:  # type: ignore[no-untyped-def]
        if at == len(places):
            return back(left, used, here, line)
        return sum(
            chance
            * (
                draw(left, at + 1, used, here, line)
                if page == NOTHING
                else wait(left, at, (*used, page), True, here, line)
            )
            for page, chance in places[at]
        )

    def back(left, used, here, line) -> float:  # type: ignore[no-untyped-def]
        if not used:
            return begin(left - 1, here, line)
        return wait(left, -1, used, False, here, line)

    @cache
    def wait(left, at, used, forward, here, line) -> float:  # type: ignore[no-untyped-def]
        """The use of the last page of ``used`` waits or begins; then one tick goes by."""
        runs = used[-1] in here
        found = []
        for chosen, rest in options(here, line, used[-1] if runs else -1):
            after = rest
            moved = None if chosen is None else (chosen[0], chosen[1] - 1)
            if moved is not None and not moved[1]:
                after, moved = rest | {moved[0]}, None
            if not runs:
                if line is None and (chosen is None or chosen[0] != used[-1]):
                    continue
                found.append(1 + wait(left, at, used, forward, after, moved))
            elif forward:
                found.append(1 + draw(left, at + 1, used, after, moved))
            else:
                found.append(1 + back(left, used[:-1], after, moved))
        return min(found)

    def options(here, line, pinned):  # type: ignore[no-untyped-def]
        if line is not None:
            return [(line, here)]
        made = [(None, here)]
        for page in pages:
            if page in here:
                continue
            if len(here) < model.capacity:
                made.append(((page, ticks), here))
            made += [((page, ticks), here - {out}) for out in here if out != pinned]
        return made

    return begin(passes, frozenset(), None)


@pytest.mark.parametrize("load", [1, 2, 3])
@pytest.mark.parametrize("places", [dropped_layers(3, 0.3), BRANCHES])
def test_the_least_expected_time_is_what_deciding_at_every_tick_gives(places, load) -> None:
    for capacity in (1, 2):
        model = Model(places, capacity, load)
        found = least_expected(model, 2, ticks_per_unit=1)
        assert found == pytest.approx(tick_by_tick(model, 2), abs=1e-9)


def test_knowing_all_draws_it_is_the_best_schedule_that_is_found() -> None:
    """Two parts of the project that share no code: a clock of units, and accesses and holds."""
    workload = synthetic("W1", steps=1, shape=Shape(layers=4))
    link, accesses = link_for(workload, 1.5), Accesses.from_workload(workload)
    frames = budget_for(workload, 0.5) // FRAME_BYTES
    best = best_found(accesses, frames, link.bandwidth_in, link.bandwidth_in)
    model = Model(places_of(workload), frames * FRAME_BYTES // Shape().page_bytes, 1.5)
    assert used_groups(workload) == [[0, 1, 2, 3]]
    assert best.certificate.optimal
    unit_s = accesses.compute_s / 8
    assert least_expected(model, 1) * unit_s == pytest.approx(best.elapsed_s)


def test_no_policy_is_faster_in_the_mean_and_the_rule_is_near() -> None:
    model = Model(dropped_layers(4, 0.3), 2, 2.0)
    least = least_expected(model, 2)
    draws = [(random.Random(n), Player(model, Rule())) for n in range(400)]
    passes = [[player.draw(rng) for _ in range(2)] for rng, player in draws]
    rule = best_rule(model)
    by_rule = fmean(Player(model, rule).play(drawn) for drawn in passes)
    by_rollout = fmean(Rollout(model, rule, 4, 2, n).play(d) for n, d in enumerate(passes[:100]))
    noise = 0.03  # of 400 draws; the first 100 of them are no worse off
    assert (1 - noise) * least <= by_rule <= (1.03 + noise) * least
    assert (1 - 2 * noise) * least <= by_rollout <= (1.03 + 2 * noise) * least


def test_who_knows_the_draws_is_clearly_faster() -> None:
    """So much of the distance to the best schedule no policy can make up."""
    model = Model(dropped_layers(4, 0.3), 2, 2.0)
    rng = random.Random(0)
    drawn = [[Player(model, Rule()).draw(rng) for _ in range(2)] for _ in range(150)]
    knowing = fmean(least_expected(model, [model.drawn(used) for used in two]) for two in drawn)
    assert least_expected(model, 2) > 1.08 * knowing


def test_with_nothing_to_draw_the_reference_is_the_best_there_is() -> None:
    model = Model(dropped_layers(5, 0.0), 3, 1.0)
    assert reached(model, [list(range(5))] * 2) == pytest.approx(least_expected(model, 2))


def test_a_load_that_is_no_whole_number_of_ticks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"load must be a multiple of 1 / 2 and above 0, got 1\.3"):
        least_expected(Model(dropped_layers(2, 0.1), 1, 1.3), 1)
