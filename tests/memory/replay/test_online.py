"""What policies reach that do not know what a pass will use, against every policy there is."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Device:
    """What is there, and what moves: a page and the ticks left."""

    here: frozenset[int] = frozenset()
    line: tuple[int, int] | None = None

    def tick(self) -> "Device":
        if self.line is None:
            return self
        page, left = self.line
        if left == 1:
            return Device(self.here | {page})
        return Device(self.here, (page, left - 1))


class TickByTick:
    """The least expected ticks, by deciding at every tick; a computation is one of them.

    A pass is drawn place by place, when the use before has ended; there are no events. Only that a
    use that waits is loaded for first is taken over from ``least_expected``.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.draw = cache(self._draw)  # type: ignore[method-assign]
        self.wait = cache(self._wait)  # type: ignore[method-assign]

    def begin(self, left: int, device: Device) -> float:
        return self.draw(left, 0, (), device) if left else 0.0

    def _draw(self, left: int, at: int, used: tuple[int, ...], device: Device) -> float:
        """What the place ``at`` draws, and all that follows."""
        if at == len(self.model.places):
            return self.back(left, used, device)
        total = 0.0
        for page, chance in self.model.places[at]:
            if page == NOTHING:
                total += chance * self.draw(left, at + 1, used, device)
            else:
                total += chance * self.wait(left, at, (*used, page), device)
        return total

    def back(self, left: int, used: tuple[int, ...], device: Device) -> float:
        return self.wait(left, -1, used, device) if used else self.begin(left - 1, device)

    def _wait(self, left: int, at: int, used: tuple[int, ...], device: Device) -> float:
        """The use of the last page of ``used`` waits or computes for a tick; -1: in backward."""
        runs = used[-1] in device.here
        if not runs:
            return 1 + min(
                self.wait(left, at, used, chosen.tick())
                for chosen in self.choices(device, used[-1:], -1)
                if chosen.line is not None
            )
        found = []
        for chosen in self.choices(device, range(self.model.num_pages), used[-1]):
            after = chosen.tick()
            if at >= 0:
                found.append(1 + self.draw(left, at + 1, used, after))
            else:
                found.append(1 + self.back(left, used[:-1], after))
        return min(found)

    def choices(self, device: Device, pages: Iterable[int], pinned: int) -> Iterator[Device]:
        yield device
        if device.line is not None:
            return
        for page in pages:
            line = (page, int(self.model.load))
            if page in device.here:
                continue
            if len(device.here) < self.model.capacity:
                yield Device(device.here, line)
            for out in device.here - {pinned}:
                yield Device(device.here - {out}, line)


@pytest.mark.parametrize("load", [1, 2, 3])
@pytest.mark.parametrize("places", [dropped_layers(3, 0.3), BRANCHES])
def test_the_least_expected_time_is_what_deciding_at_every_tick_gives(places, load) -> None:
    for capacity in (1, 2):
        model = Model(places, capacity, load)
        found = least_expected(model, 2, ticks_per_unit=1)
        assert found == pytest.approx(TickByTick(model).begin(2, Device()), abs=1e-9)


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
