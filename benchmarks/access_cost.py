"""What an access costs with 10,000 pages: decisions and commands, on the virtual engine.

    python benchmarks/access_cost.py [--workload W1,W2,W3,W4] [--share .5] [--r 1] [--repeats 3]
                                     [--pages 10000] [--profile]

Times every call that hooks make of the pager in the steps after the warm-up: ``access`` before a
group is used, ``release`` (or ``drop``) behind it. No frame is moved, no gradient copied. Each
repeat makes the same calls: of each the least time counts, what else the machine does being no
cost of the scheduler.

The virtual clock stands for the device. What it spends on letting commands start and end by
itself (its events: ``VirtualEngine._settle``, and ``wait``) runs beside the training thread, or
not at all, where a device does it; it is left out of ``us`` and counted in ``us with events``.
Queueing a command, its ticket and the board stay in: every engine needs them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from odc.memory.replay import budget_for, link_for
from odc.memory.replay.drive import Drive
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape, synthetic
from odc.train.policies import make_policy

_KINDS = {"W1": 1, "W2": 4, "W3": 1, "W4": 5}  # pages a layer
_STEPS = {"W1": 4, "W2": 3, "W3": 4, "W4": 6}
_WARM_UP = {"W1": 3, "W2": 2, "W3": 3, "W4": 5}
_CALLS = {"access": ("access",), "release": ("release", "drop")}


def make_drive(name: str, pages: int, share: float, r: float) -> Drive:
    """A workload behind its warm-up: every context was seen."""
    shape = Shape(layers=pages // _KINDS[name])
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
    return drive


class Stopwatch:
    """Times calls of a pager, and what of each its engine's events took."""

    def __init__(self, drive: Drive) -> None:
        self.found: dict[str, list[tuple[int, int]]] = {call: [] for call in _CALLS}
        self._events_ns = 0
        self._inside = False
        engine: Any = drive.pager.transfers.engine
        engine._settle = self._events(engine._settle)
        engine.wait = self._events(engine.wait)
        pager: Any = drive.pager
        for call, names in _CALLS.items():
            for name in names:
                setattr(pager, name, self._call(getattr(pager, name), self.found[call]))

    def _events(self, plain: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            if self._inside:
                plain(*args)
                return
            self._inside = True
            start = time.perf_counter_ns()
            plain(*args)
            self._events_ns += time.perf_counter_ns() - start
            self._inside = False

        return timed

    def _call(
        self, plain: Callable[..., None], found: list[tuple[int, int]]
    ) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            self._events_ns = 0
            start = time.perf_counter_ns()
            plain(*args, **kwargs)
            whole = time.perf_counter_ns() - start
            found.append((whole - self._events_ns, whole))

        return timed


def measure(name: str, pages: int, share: float, r: float) -> dict[str, np.ndarray]:
    """us of every call, without and with the engine's events, (n, 2)."""
    drive = make_drive(name, pages, share, r)
    stopwatch = Stopwatch(drive)
    drive.run()
    return {call: np.array(found) / 1e3 for call, found in stopwatch.found.items()}


def summary(us: np.ndarray) -> dict[str, float]:
    found = {f"p{q}": round(float(np.percentile(us, q)), 1) for q in (50, 90, 99)}
    return found | {"most": round(float(us.max()), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(_KINDS))
    parser.add_argument("--share", default="0.5")
    parser.add_argument("--r", default="1.0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead")
    args = parser.parse_args()
    cells = [
        (name, float(share), float(r))
        for name in args.workload.split(",")
        for share in args.share.split(",")
        for r in args.r.split(",")
    ]
    for name, share, r in cells:
        if args.profile:
            drive = make_drive(name, args.pages, share, r)
            with cProfile.Profile() as profile:
                drive.run()
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
            continue
        runs = [measure(name, args.pages, share, r) for _ in range(args.repeats)]
        for call in _CALLS:
            least = np.minimum.reduce([run[call] for run in runs])
            if len(least):
                row = {"n": len(least), "us": summary(least[:, 0])}
                row |= {"us with events": summary(least[:, 1])}
                row |= {"load": round(os.getloadavg()[0], 1)}
                print(f"{name} C {share} r {r} {call} {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
