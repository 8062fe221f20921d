"""What an access costs with 10,000 pages: decisions and commands, on the virtual engine.

    python benchmarks/access_cost.py [--workload W1,W2,W3,W4] [--repeats 3] [--profile]

CPU time of ``Pager.access`` in the steps after the warm-up; no frame is moved, no gradient copied.
Each repeat runs the same accesses: of each access the least time counts, what else the machine does
being no cost of the scheduler.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from typing import Any

import numpy as np

from odc.memory.replay import budget_for, link_for
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape, synthetic
from odc.train.policies import make_policy

PAGES = 10_000
_KINDS = {"W1": 1, "W2": 4, "W3": 1, "W4": 5}  # pages a layer
_STEPS = {"W1": 4, "W2": 3, "W3": 4, "W4": 6}
_WARM_UP = {"W1": 3, "W2": 2, "W3": 3, "W4": 5}


def measure(name: str, share: float, r: float, profile: cProfile.Profile | None = None) -> Any:
    """us of CPU of every access after the warm-up, (n,)."""
    shape = Shape(layers=PAGES // _KINDS[name])
    workload = synthetic(name, steps=_STEPS[name], shape=shape)
    eviction, prefetch = make_policy("cost_aware+popularity", workload)
    drive = virtual_drive(
        workload,
        budget_bytes=budget_for(workload, share),
        link=link_for(workload, r),
        eviction=eviction,
        prefetch=prefetch,
    )
    drive.run(_WARM_UP[name])
    found: list[int] = []
    plain = drive.pager.access

    def access(*args: Any, **kwargs: Any) -> None:
        start = time.thread_time_ns()
        plain(*args, **kwargs)
        found.append(time.thread_time_ns() - start)

    if profile is None:
        drive.pager.access = access  # type: ignore[method-assign]
        drive.run()
    else:
        profile.enable()
        drive.run()
        profile.disable()
    return np.array(found) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(_KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--r", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead")
    args = parser.parse_args()
    for name in args.workload.split(","):
        if args.profile:
            profile = cProfile.Profile()
            measure(name, args.share, args.r, profile)
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
            continue
        runs = [measure(name, args.share, args.r) for _ in range(args.repeats)]
        least = np.minimum.reduce(runs)
        row = {"accesses": len(least)}
        row |= {f"p{q}": round(float(np.percentile(least, q)), 1) for q in (50, 90, 99)}
        print(name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
