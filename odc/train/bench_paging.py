"""`odc bench paging`: the pager with real frames, copies and computation, beside its simulation.

A contender pages a made workload for real: a thread computes products with the bytes of the pages
that are resident, the engine's threads copy pages from and to their home. It takes its cycles (a
few steps from an empty device) in turn with the same computation in a budget that holds everything,
so that what else the machine does hits both alike. From the latter come the compute times, from the
former's own transfers the link's figures; with these the same needs run on the virtual clock.
"""

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Link, Workload
from odc.memory.replay.accesses import Accesses
from odc.memory.replay.best_found import best_found
from odc.memory.replay.bounds import window_bound
from odc.memory.replay.ratios import budget_for, link_for, ratio_of
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape, expand, synthetic
from odc.memory.replay.workload import Bundle
from odc.train.paged_workload import Cycle, PagedWorkload, prepared, run_cycle
from odc.train.policies import make_policy

WARM_UP = 2  # cycles
COUNTS = 0.05  # of the step: rows whose repeats spread further say nothing
# Layers of each model and ms of a layer's forward: about half a second a cycle, and long enough
# beside the pager's own half a millisecond an access.
_SIZES = {"W1": (10, 12), "W2": (8, 10), "W3": (16, 12), "W4": (4, 8), "W5": (10, 12)}


@dataclass(frozen=True)
class Task:
    """What is run.

    Attributes:
        workload: Name of a made workload.
        r: Chooses the emulated link of a home in host memory; `None`: what the home is able to.
        home: `host` or `disk`.
        home_dir: Of a disk home; `None`: a temporary one.
        budget: C.
        policy: `EVICTION+PREFETCH`.
        layers: Of each model.
        steps: A cycle.
        compute_ns: Forward of a layer.
    """

    workload: str
    r: float | None = 1.0
    home: str = "host"
    home_dir: Path | None = None
    budget: float = 0.5
    policy: str = "cost_aware+popularity"
    layers: int = 10
    steps: int = 2
    compute_ns: int = 12_000_000

    def cycle(self) -> Workload:
        """The needs of one cycle."""
        shape = Shape(layers=self.layers, compute_ns=self.compute_ns)
        return synthetic(self.workload, steps=self.steps, shape=shape)


def make_tasks(
    names: Sequence[str],
    ratios: Sequence[float],
    homes: Sequence[str],
    *,
    policy: str,
    home_dir: Path | None = None,
) -> list[Task]:
    """Returns a task for each workload, and each ratio in host memory; on disk its own ratio.

    Raises:
        ConfigError: There is no workload of such a name.
    """
    found = []
    for name in (n for given in names for n in expand(given)):
        layers, compute_ms = _SIZES[name[:2]]
        one = Task(
            name,
            policy=policy,
            home_dir=home_dir,
            layers=layers,
            steps=4 if name.startswith("W4") else 2,  # four until each kind of pass was seen
            compute_ns=compute_ms * 1_000_000,
        )
        if "host" in homes:
            found += [replace(one, r=r) for r in ratios]
        if "disk" in homes:
            found.append(replace(one, r=None, home="disk"))
    return found


@dataclass(frozen=True)
class PagingRow:
    """Medians over cycles, a step each; times in s.

    Attributes:
        asked_r: What the emulated link was made for; `None`: a disk, as fast as it is.
        r: As measured: of the compute times and the link's figures below.
        step_s: Measured: computing, `stall_s` of waiting for transfers, `own_s` of the pager.
        iqr_s: Interquartile range of the measured step over the repeats.
        simulated_step_s, simulated_stall_s: With the measured compute times and link.
        window_bound_s, best_found_s: With the same, a step; `None` where not searched.
        bandwidth_in, bandwidth_out: Bytes a second that transfers had.
        steps: All measured ones, in order.
    """

    workload: str
    home: str
    policy: str
    budget: float
    asked_r: float | None
    r: float
    step_s: float
    iqr_s: float
    stall_s: float
    own_s: float
    simulated_step_s: float
    simulated_stall_s: float
    window_bound_s: float
    best_found_s: float | None
    bandwidth_in: float
    bandwidth_out: float
    steps: list[float]

    @property
    def difference(self) -> float:
        """Simulated less measured, as a share of the measured step."""
        return (self.simulated_step_s - self.step_s) / self.step_s

    @property
    def counts(self) -> bool:
        """Whether repeats were close enough to each other."""
        return self.iqr_s <= COUNTS * self.step_s

    def as_json(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        return asdict(self) | {"difference": self.difference, "counts": self.counts}


def measure(task: Task, *, repeats: int, moves: int) -> PagingRow:
    """Runs a task for real, and simulates it.

    Raises:
        BudgetError: A group does not fit the budget.
        OdcError: A page came back with other bytes than it left with.
    """
    cycle = task.cycle()
    budget_bytes = budget_for(cycle, task.budget)
    ends = [(turn + 1) * task.steps for turn in range(WARM_UP + repeats)]
    whole = cycle.repeated(len(ends))
    with prepared() as rate, closing(PagedWorkload(whole, task.policy, rate)) as free:
        for end in ends[:WARM_UP]:
            free.cycle(end)
        emulated = None
        if task.r is not None:
            emulated = link_for(timed_by(cycle, free.times[-1:]), task.r).bandwidth_in
        paged = PagedWorkload(
            whole,
            task.policy,
            rate,
            budget_bytes=budget_bytes,
            home=task.home,
            home_dir=task.home_dir,
            bandwidth=emulated,
        )
        with closing(paged):
            for end in ends[:WARM_UP]:
                paged.cycle(end)
            paged.log.clear()
            cycles = []
            for turn, end in enumerate(ends[WARM_UP:]):
                order = (free, paged) if turn % 2 else (paged, free)
                taken = {one: one.cycle(end) for one in order}
                cycles.append(taken[paged])
        timed = timed_by(cycle, free.times[WARM_UP:])
        link = paged.log.link()
    return _row(task, timed, budget_bytes, link, cycles, moves)


def _row(
    task: Task,
    timed: Workload,
    budget_bytes: int,
    link: Link,
    cycles: Sequence[Cycle],
    moves: int,
) -> PagingRow:
    simulated = _simulated(task, timed, budget_bytes, link, len(cycles))
    steps = [one.elapsed_ns / task.steps / 1e9 for one in cycles]
    low, _, high = statistics.quantiles(steps, n=4) if len(steps) > 1 else (steps[0],) * 3
    accesses, frames = Accesses.from_workload(timed), budget_bytes // FRAME_BYTES
    speed = (link.bandwidth_in, link.bandwidth_out or link.bandwidth_in)
    best = best_found(accesses, frames, *speed, moves=moves) if moves else None
    return PagingRow(
        workload=task.workload,
        home=task.home,
        policy=task.policy,
        budget=task.budget,
        asked_r=task.r,
        r=ratio_of(timed, link.bandwidth_in),
        step_s=statistics.median(steps),
        iqr_s=high - low,
        stall_s=statistics.median(one.waited_ns for one in cycles) / task.steps / 1e9,
        own_s=statistics.median(one.own_ns for one in cycles) / task.steps / 1e9,
        simulated_step_s=simulated.elapsed_ns / task.steps / 1e9,
        simulated_stall_s=(simulated.elapsed_ns - simulated.compute_ns) / task.steps / 1e9,
        window_bound_s=window_bound(accesses, budget_bytes, *speed).elapsed_s / task.steps,
        best_found_s=None if best is None else best.elapsed_s / task.steps,
        bandwidth_in=speed[0],
        bandwidth_out=speed[1],
        steps=steps,
    )


def _simulated(task: Task, timed: Workload, budget_bytes: int, link: Link, repeats: int) -> Cycle:
    """The median cycle on the virtual clock, in the same order of calls."""
    ends = [(turn + 1) * task.steps for turn in range(WARM_UP + repeats)]
    whole = timed.repeated(len(ends))
    eviction, prefetch = make_policy(task.policy, whole)
    drive = virtual_drive(
        whole, budget_bytes=budget_bytes, link=link, eviction=eviction, prefetch=prefetch
    )
    cycles = [run_cycle(drive, end) for end in ends]
    return sorted(cycles[WARM_UP:], key=lambda one: one.elapsed_ns)[repeats // 2]


def timed_by(cycle: Workload, times: Sequence[Sequence[int]]) -> Workload:
    """Returns the needs of a cycle with measured times: medians over cycles.

    Args:
        cycle: Needs, and where something is computed.
        times: For each measured cycle, its computations in order, ns.
    """
    medians = iter(np.median(np.array(times), axis=0).astype(np.int64).tolist())

    def measured(duration_ns: int) -> int:
        return next(medians) if duration_ns > 0 else 0

    visits = []
    for visit in cycle.visits:
        bundles = []
        for bundle in visit.bundles:
            rows = [(kind, op, measured(ns)) for kind, op, ns in bundle.rows]
            bundles.append(Bundle(bundle.group, rows, measured(bundle.after_ns)))
        visits.append(replace(visit, bundles=bundles))
    return Workload(cycle.pages, visits, cycle.sets)
