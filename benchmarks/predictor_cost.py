"""What a scorer costs in the hook: `observe` and `scores` of one visit, 4 sets of 32 members.

Each repeat times `VISITS` visits, one `perf_counter_ns` pair apiece, and takes their median; the
result is the median, lowest and highest of the repeats. Weights are random: the cost does not
depend on them. Run it with `python benchmarks/predictor_cost.py`.
"""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np
import torch

from odc.memory.scores import PopularityScorer, ReplayScorer, SetScorer
from predictor.features import HALF_LIVES, Structure
from predictor.lstm import LSTMNetwork, export_arrays
from predictor.model import cold_start
from predictor.scorer import LSTMScorer, MLPScorer

NUM_SETS, NUM_MEMBERS = 4, 32
MLP_HIDDEN = 128  # the largest candidate
VISITS = 4_000
REPEATS = 9


def make_scorers(structure: Structure) -> dict[str, SetScorer]:
    """Return one scorer of each kind."""
    rng, start = np.random.default_rng(0), cold_start(structure)
    num_outputs = structure.num_sets * structure.max_members
    sizes = [2 * num_outputs + structure.num_sets + 1, MLP_HIDDEN, num_outputs]
    shapes = {"stack": (structure.num_sets, structure.num_sets, 2 + len(HALF_LIVES))}
    for i in range(2):
        shapes |= {f"weight_{i}": (sizes[i], sizes[i + 1]), f"bias_{i}": (sizes[i + 1],)}
    mlp = {name: (rng.normal(size=s) * 0.1).astype(np.float32) for name, s in shapes.items()}
    lstm = export_arrays(LSTMNetwork(structure, hidden=64))
    return {
        "popularity": PopularityScorer(structure.members),
        "replay": ReplayScorer(structure.members),
        "lstm": LSTMScorer(structure, {**lstm, **start}),
        "sklearn": MLPScorer(structure, {**mlp, **start}),
    }


def time_visits(scorer: SetScorer, used: np.ndarray) -> float:
    """Return the median us of one `observe` with `scores`."""
    times = []
    for visit, members in enumerate(used):
        begin = time.perf_counter_ns()
        scorer.observe(visit % NUM_SETS, members, 32)
        scorer.scores()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def main() -> dict[str, dict[str, float]]:
    """Measure, print, and return median, lowest and highest us per visit of each scorer."""
    torch.manual_seed(0)
    used = np.random.default_rng(1).random((VISITS, NUM_MEMBERS)) < 0.5
    results: dict[str, dict[str, float]] = {}
    for name, scorer in make_scorers(Structure.regular(NUM_SETS, NUM_MEMBERS)).items():
        time_visits(scorer, used)  # warm caches, and past the first visits' changing rates
        times = []
        for _ in range(REPEATS):
            gc.collect()
            times.append(time_visits(scorer, used))
        results[name] = {
            "median_us": statistics.median(times),
            "min_us": min(times),
            "max_us": max(times),
        }
    print(f"{'scorer':12} {'median':>8} {'min':>8} {'max':>8}  us per visit")
    for name, row in results.items():
        print(f"{name:12} {row['median_us']:8.1f} {row['min_us']:8.1f} {row['max_us']:8.1f}")
    return results


if __name__ == "__main__":
    main()
