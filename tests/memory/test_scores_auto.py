"""The scorer that chooses: useless rungs stay off, a better one takes over, noise moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import popularity
from odc.memory.orders import OrderLibrary
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits
from odc.memory.replay import Link, SimResult, Workload, simulate
from odc.memory.replay.oracle import FutureScorer, future_sets
from odc.memory.scores import PopularityScorer, SetScorer
from odc.memory.scores_auto import AutoScorer, auto_prefetcher, load_costs
from odc.memory.stations import Stations
from odc.memory.victims import CostAware
from tests.memory.test_scores_markov import MEMBERS, SETS, chained, independent
from tests.memory.workloads import experts

LOADS = [np.ones(MEMBERS)] * SETS
SETTLED = 24  # visits of each set after which a rung that is no use must be off for good


class Shuffled:
    """Another's scores, given to other members."""

    def __init__(self, scorer: SetScorer, members: int, seed: int = 0) -> None:
        self.scorer = scorer
        self.ways = np.random.default_rng(seed).permutation(members)

    def observe(self, set_index: int, used: np.ndarray, tokens: int) -> None:
        self.scorer.observe(set_index, used, tokens)

    def scores(self) -> np.ndarray:
        return self.scorer.scores()[:, self.ways]


class Inverted(Shuffled):
    """The opposite of what another says."""

    def scores(self) -> np.ndarray:
        return 1.0 - self.scorer.scores()


class Everything(Shuffled):
    """All members for certain."""

    def scores(self) -> np.ndarray:
        return np.ones_like(self.scorer.scores())


class Noisy:
    """Popularity, and noise of its own."""

    def __init__(self, members: list[int], seed: int) -> None:
        self.scorer, self.rng = PopularityScorer(members), np.random.default_rng(seed)

    def observe(self, set_index: int, used: np.ndarray, tokens: int) -> None:
        self.scorer.observe(set_index, used, tokens)

    def scores(self) -> np.ndarray:
        scores = self.scorer.scores()
        return np.clip(scores + self.rng.normal(0, 0.05, scores.shape), 0, 1).astype(np.float32)


def charges(scorer: AutoScorer, passes: Iterator[np.ndarray]) -> list[int]:
    """The rung in charge behind each pass."""
    told = []
    for used in passes:
        for set_index, row in enumerate(used):
            scorer.observe(set_index, row, 64)
        told.append(scorer.in_charge)
    return told


def wrong_scorers(members: int, future: list[np.ndarray]) -> dict[str, Callable[[], SetScorer]]:
    counts = [members] * len(future)
    return {
        "shuffled": lambda: Shuffled(PopularityScorer(counts), members),
        "shuffled_oracle": lambda: Shuffled(FutureScorer(future), members),
        "inverted": lambda: Inverted(PopularityScorer(counts), members),
        "everything": lambda: Everything(PopularityScorer(counts), members),
    }


WRONG = list(wrong_scorers(1, [np.zeros((1, 1), bool)]))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("passes", [independent, chained])
def test_a_useless_rung_is_never_in_charge_once_it_is_known(name: str, passes: Callable) -> None:
    rows = np.array(list(passes(0, 120)))
    useless = wrong_scorers(MEMBERS, [rows[:, s] for s in range(SETS)])[name]()
    scorer = AutoScorer([PopularityScorer([MEMBERS] * SETS), useless], LOADS)
    assert not any(charges(scorer, iter(rows))[SETTLED:])


def test_one_that_knows_is_in_charge_soon_and_stays() -> None:
    rows = np.array(list(independent(0, 60)))
    knows = FutureScorer([rows[:, s] for s in range(SETS)])
    told = charges(AutoScorer([PopularityScorer([MEMBERS] * SETS), knows], LOADS), iter(rows))
    assert all(told[6:])


def test_one_that_ceases_to_know_is_turned_off() -> None:
    rows = np.array(list(independent(0, 120)))
    lies = rows[:, :, ::-1].copy()
    lies[:60] = rows[:60]
    knew = FutureScorer([lies[:, s] for s in range(SETS)])
    told = charges(AutoScorer([PopularityScorer([MEMBERS] * SETS), knew], LOADS), iter(rows))
    assert told[59] == 1 and not any(told[60 + SETTLED :])


def test_a_rung_must_beat_the_one_below_it() -> None:
    """Two that know the same: the lower one is taken, and the higher one adds nothing."""
    rows = np.array(list(independent(0, 60)))
    future = [rows[:, s] for s in range(SETS)]
    rungs = [PopularityScorer([MEMBERS] * SETS), FutureScorer(future), FutureScorer(future)]
    assert set(charges(AutoScorer(rungs, LOADS), iter(rows))[6:]) == {1}


@pytest.mark.parametrize("seed", range(4))
def test_noise_moves_nothing(seed: int) -> None:
    members = [MEMBERS] * SETS
    scorer = AutoScorer([Noisy(members, seed), Noisy(members, seed + 100)], LOADS)
    told = charges(scorer, independent(seed, 400))
    assert sum(a != b for a, b in zip(told, told[1:], strict=False)) <= 8


def test_what_is_dear_to_load_counts_more() -> None:
    """A rung that knows only the large members beats one that knows only the small ones."""
    rng = np.random.default_rng(0)
    rows = rng.random((60, 1, 8)) < 0.5
    large, small = rows[:, 0].copy(), rows[:, 0].copy()
    large[:, 4:], small[:, :4] = False, False
    loads = [np.array([8.0] * 4 + [1.0] * 4)]
    rungs = [FutureScorer([small]), FutureScorer([large])]
    assert charges(AutoScorer(rungs, loads), iter(rows))[-1] == 1
    rungs = [FutureScorer([large]), FutureScorer([small])]
    assert charges(AutoScorer(rungs, loads), iter(rows))[-1] == 0


def test_costs_are_bytes_of_parameters_by_tier() -> None:
    workload = experts(2, 4, 2, 1)
    table = workload.table()
    stations = Stations(table, workload.sets)
    table.load_weight = [3.0 if p.group == 5 else 1.0 for p in table.pages]
    costs = load_costs(stations)
    assert costs[0].tolist() == [FRAME_BYTES] * 4
    assert costs[1].tolist() == [FRAME_BYTES, 3 * FRAME_BYTES, FRAME_BYTES, FRAME_BYTES]
    assert [c.tolist() for c in load_costs(Stations(table, []))] == [[1.0]]


# -- whole runs ------------------------------------------------------------------------------------


def run(workload: Workload, prefetch: object, frames: int = 96) -> SimResult:
    return simulate(
        workload,
        budget_bytes=frames * FRAME_BYTES,
        link=Link(100e6),
        eviction=CostAware(),
        prefetch=prefetch,  # type: ignore[arg-type]
    )


def elapsed(result: SimResult) -> float:
    return result.compute_s + result.stall_s


@pytest.fixture(scope="module")
def workload() -> Workload:
    return experts(4, 16, 4, 60)


def with_learned(make: Callable[[], SetScorer], made: list[OrderPrefetcher]) -> object:
    def factory(library: OrderLibrary, limits: Limits) -> OrderPrefetcher:
        made.append(auto_prefetcher(library, limits, make()))
        return made[-1]

    return factory


@pytest.mark.parametrize("name", WRONG)
def test_a_useless_predictor_costs_a_run_nothing(name: str, workload: Workload) -> None:
    made: list[OrderPrefetcher] = []
    useless = wrong_scorers(16, future_sets(workload))[name]
    found = elapsed(run(workload, with_learned(useless, made)))
    assert found <= 1.02 * elapsed(run(workload, popularity))
    scorer = made[0].sets.scorer
    assert isinstance(scorer, AutoScorer) and scorer.in_charge < 2


def test_a_predictor_that_knows_is_used_and_saves_bytes(workload: Workload) -> None:
    made: list[OrderPrefetcher] = []
    knows = with_learned(lambda: FutureScorer(future_sets(workload)), made)
    found, base = (run(workload, p, 160).after(20) for p in (knows, popularity))
    scorer = made[0].sets.scorer
    assert isinstance(scorer, AutoScorer) and scorer.in_charge == 2
    assert sum(found.bytes_in) < 0.95 * sum(base.bytes_in)
