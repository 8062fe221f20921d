"""Prints how tight the bounds are, as Markdown tables.

    python -m tests.memory.replay.figures

About five minutes on one core. Every ratio is of elapsed times, computation and stall.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import (
    Accesses,
    Link,
    Workload,
    best_found,
    fluid_bound,
    oracle_factory,
    simulate,
    window_bound,
)
from odc.memory.victims import CostAware
from tests.memory.replay.brute import TICK_NS, Brute
from tests.memory.replay.fluid_fixtures import stored
from tests.memory.replay.runs import tiny
from tests.memory.workloads import COMPUTE_NS, dense, experts

Rows = dict[str, list[tuple[float, ...]]]


def table(title: str, names: Iterable[str], rows: Rows) -> None:
    print(f"\n{title}\n\n| runs | number | {' | '.join(names)} |")
    print("|---|---|" + "---|" * len(list(names)))
    for kind, ratios in rows.items():
        columns = (
            f"{np.mean(column):.3f}, {max(column):.3f}" for column in zip(*ratios, strict=True)
        )
        print(f"| {kind} | {len(ratios)} | {' | '.join(columns)} |")


def tiny_runs(number: int = 1000) -> None:
    rows: Rows = defaultdict(list)
    optimal: dict[str, int] = defaultdict(int)
    for seed in range(number):
        run = tiny(seed)
        rest = (*run.rates, run.half_duplex, run.initial)
        ticks = Brute(
            run.accesses, run.capacity, run.load_ticks, run.store_ticks, *rest[2:]
        ).ticks()
        best = ticks * TICK_NS / 1e9
        window = window_bound(run.accesses, run.capacity * FRAME_BYTES, *rest).elapsed_s
        fluid = fluid_bound(run.accesses, run.capacity, *rest).elapsed_s
        found = best_found(run.accesses, run.capacity, *rest, search_tiny=False)
        soiled = bool(run.accesses.dirties.any() or run.initial.dirty.any())
        kind = f"{'dirty' if soiled else 'clean'}, {'one line' if run.half_duplex else 'two lines'}"
        ratios = (best / fluid, best / window, found.elapsed_s / best)
        rows[kind].append((*ratios, found.certificate.greedy_s / best))
        optimal[kind] += ratios[2] < 1 + 1e-9
    names = ("optimum / fluid", "optimum / window", "best found / optimum", "greedy / optimum")
    table("Tiny runs against brute force (mean, most)", names, rows)
    print("\nsearch without the exact mode meets the optimum:", dict(optimal))


def fixtures() -> None:
    rows: Rows = defaultdict(list)
    for fixture in stored():
        kind = f"{fixture.kind}, {'one line' if fixture.half_duplex else 'two lines'}"
        rows[kind].append(
            (
                fixture.fluid_s / fixture.window_s,
                fixture.best_found_s / fixture.window_s,
                fixture.best_found_s / fixture.fluid_s,
            )
        )
    names = ("fluid / window", "best found / window", "best found / fluid")
    table("24 equal pages (mean, most)", names, rows)


def steps(name: str, workload: Workload, rows: Rows, with_fluid: bool) -> None:
    accesses = Accesses.from_workload(workload)
    for share in (0.3, 0.6):
        frames = int(share * accesses.page_frames.sum())
        for ratio in (0.3, 1.0, 3.0):
            rate = float(accesses.page_bytes.mean()) / (ratio * COMPUTE_NS / 1e9)
            window = window_bound(accesses, frames * FRAME_BYTES, rate, rate).elapsed_s
            found = best_found(accesses, frames, rate, rate, moves=300 if with_fluid else 20)
            result = simulate(
                workload,
                budget_bytes=frames * FRAME_BYTES,
                link=Link(rate, latency_ns=0, frame_move_ns=0),
                eviction=CostAware(),
                prefetch=oracle_factory(workload),
            )
            policy = result.compute_s + result.stall_s
            ratios = [found.elapsed_s / window, policy / found.elapsed_s]
            if with_fluid:
                fluid = fluid_bound(accesses, frames, rate, rate).elapsed_s
                ratios += [found.elapsed_s / fluid, fluid / window]
            rows[f"{name}, {accesses.num_accesses} accesses"].append(tuple(ratios))


def workloads() -> None:
    small: Rows = defaultdict(list)
    steps("dense, 8 layers", dense(8, 4), small, True)
    steps("experts, 3 x 6", experts(3, 6, 2, 4), small, True)
    names = ["best found / window", "cost_aware+oracle / best found"]
    more = ["best found / fluid", "fluid / window"]
    table("Steps, cold first one included (mean, most)", names + more, small)
    large: Rows = defaultdict(list)
    steps("dense, 32 layers", dense(32, 8), large, False)
    steps("experts, 12 x 8", experts(12, 8, 3, 8), large, False)
    table("Longer runs (mean, most)", names, large)


if __name__ == "__main__":
    fixtures()
    workloads()
    tiny_runs()
