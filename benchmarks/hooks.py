"""What an access costs the training thread: hook and plan together, without the waiting.

    python benchmarks/hooks.py [--steps 20] [--predictor DIR]

Trains the demo's model for a few steps and times every call into the pager (accesses and the
opening of sets, planning included) in CPU time of the training thread. The target is 50 us at the
median.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from odc.memory.pager import Pager
from odc.train.config import load_config
from odc.train.demo import CONFIG
from odc.train.tasks import make_task
from odc.train.trainer import train


class _Timer:
    """CPU time that a method of the pager takes of the training thread; waiting takes none."""

    def __init__(self, name: str) -> None:
        self.original = getattr(Pager, name)
        self.name = name
        self.ns: list[int] = []

    def __enter__(self) -> _Timer:
        original, ns = self.original, self.ns

        def timed(pager: Pager, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return original(pager, *args, **kwargs)
            finally:
                ns.append(time.thread_time_ns() - start)

        setattr(Pager, self.name, timed)
        return self

    def __exit__(self, *_: Any) -> None:
        setattr(Pager, self.name, self.original)


def measure(policy: list[str], steps: int, task: Any) -> tuple[dict[str, float], Any]:
    """Quantiles in microseconds over the accesses of a short run."""
    config, _ = load_config(CONFIG, [*policy, f"train.steps={steps}", "profiler.trace_interval=1"])
    task = task or make_task(config)
    with (
        tempfile.TemporaryDirectory() as folder,
        _Timer("access") as access,
        _Timer("open_set") as open_set,
    ):
        train(config, Path(folder) / "run", task=task)
    late = np.array(access.ns[len(access.ns) // 4 :]) / 1e3
    sets = np.array(open_set.ns[len(open_set.ns) // 4 :]) / 1e3
    total = (late.sum() + sets.sum()) / (len(late) or 1)
    return {
        "access_p50": float(np.percentile(late, 50)),
        "access_p90": float(np.percentile(late, 90)),
        "access_p99": float(np.percentile(late, 99)),
        "open_set_p50": float(np.percentile(sets, 50)),
        "mean_with_sets": float(total),
    }, task


def main() -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--predictor", type=Path, default=None)
    args = parser.parse_args()
    policies = {
        "lru+none": ["memory.evict_strategy=lru", "memory.prefetch=none"],
        "cost_aware+popularity": ["memory.prefetch=popularity"],
    }
    if args.predictor is not None:
        kind = args.predictor.name
        policies[f"cost_aware+{kind}"] = [
            f"memory.predictor={kind}",
            f"memory.predictor_path={args.predictor}",
        ]
    found = {}
    task = None
    for name, words in policies.items():
        found[name], task = measure(words, args.steps, task)
        print(name, {k: round(v, 1) for k, v in found[name].items()}, "us", flush=True)
    return found


if __name__ == "__main__":
    main()
