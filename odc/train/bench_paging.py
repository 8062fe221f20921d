"""`odc bench paging`: the pager with real frames, copies and computation, beside its simulation.

A contender pages a made workload for real: a thread computes products with the bytes of the pages
that are resident, the engine's threads copy pages from and to their home. It takes its cycles (a
few steps from an empty device) in turn with another run of the same, so that what else the machine
does hits both alike. The one is *measured*. From the other, the *timing run*, come the times of
each computation, the pager's own time between computations, and the link's figures; with these the
same needs run on the virtual clock. So what is measured and what is simulated share no run.

Copies slow a computation down that shares memory and, on some machines, a core with them. How much
says a third run, in a budget that holds everything. Its times also choose the emulated link.
"""

import statistics
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Link, Workload
from odc.memory.replay.accesses import Accesses
from odc.memory.replay.best_found import BestFound, best_found
from odc.memory.replay.bounds import window_bound
from odc.memory.replay.ratios import budget_for, compute_ns, link_for, ratio_of
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape, expand, synthetic
from odc.memory.replay.workload import Bundle
from odc.train.paged_workload import Cycle, PagedWorkload, prepared, run_cycle
from odc.train.policies import make_policy

WARM_UP = 2  # cycles
_ALONE = 2  # cycles of the run in a budget that holds everything, behind one of warm-up
COUNTS = 0.05  # of the step: rows whose repeats spread further say nothing


@dataclass(frozen=True)
class Size:
    """How large a workload is.

    Attributes:
        layers: Of each model.
        compute_ms: Forward of a layer: what a layer of 8 MiB takes for some hundred tokens on a
            core, and long beside the pager's own third of a millisecond an access.
        steps: A cycle: enough that filling an empty device does not outweigh the rest.
    """

    layers: int
    compute_ms: int
    steps: int


_SIZES = {
    "W1": Size(10, 25, 3),
    "W2": Size(8, 25, 6),
    "W3": Size(16, 25, 4),
    "W4": Size(4, 40, 4),  # four steps until each kind of pass was seen
    "W5": Size(10, 25, 4),
}


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
    steps: int = 3
    compute_ns: int = 25_000_000

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
        size = _SIZES[name[:2]]
        one = Task(
            name,
            policy=policy,
            home_dir=home_dir,
            layers=size.layers,
            steps=size.steps,
            compute_ns=size.compute_ms * 1_000_000,
        )
        if "host" in homes:
            found += [replace(one, r=r) for r in ratios]
        if "disk" in homes:
            found.append(replace(one, r=None, home="disk"))
    return found


@dataclass(frozen=True)
class Figures:
    """Medians over cycles; times in s, a step each.

    Attributes:
        step_s: All of it: computing, `stall_s` of waiting for transfers to end, `own_s` of the
            pager, waking up behind a transfer included.
        first_s: The first step of a cycle, which begins with an empty device.
        later_s: The mean of the others.
    """

    step_s: float
    stall_s: float
    own_s: float
    first_s: float
    later_s: float

    @staticmethod
    def of(cycles: Sequence[Cycle]) -> "Figures":
        """Returns the figures of some cycles."""
        steps = len(cycles[0].steps_ns)

        def middle(values: Iterable[float]) -> float:
            return statistics.median(values) / 1e9

        return Figures(
            step_s=middle(one.elapsed_ns / steps for one in cycles),
            stall_s=middle(one.waited_ns / steps for one in cycles),
            own_s=middle(one.own_ns / steps for one in cycles),
            first_s=middle(one.steps_ns[0] for one in cycles),
            later_s=middle(statistics.fmean(one.steps_ns[1:] or one.steps_ns) for one in cycles),
        )


@dataclass(frozen=True)
class PagingRow:
    """What a task measured; times in s, a step each.

    Attributes:
        asked_r: What the emulated link was made for; `None`: a disk, as fast as it is.
        r: As it was: of the timing run's computation and its link.
        measured, simulated: Beside each other. Of a simulated run the pager's own time is the
            timing run's, which it computes.
        spread: Interquartile range of the step over the repeats, as a share of the step; of the
            measured run or the timing run, whichever is wider.
        compute_s, alone_s: Computation in the timing run, beside its copies, and without paging.
        window_bound_s: No schedule is faster, with the same computation and link.
        best: The best schedule that a search found, a step; its first; its others. `None` where
            not searched.
        bandwidth_in, bandwidth_out: Bytes a second that transfers had.
        steps: All measured cycles, s a step, in order.
    """

    workload: str
    home: str
    policy: str
    budget: float
    asked_r: float | None
    r: float
    measured: Figures
    simulated: Figures
    spread: float
    compute_s: float
    alone_s: float
    window_bound_s: float
    best: tuple[float, float, float] | None
    bandwidth_in: float
    bandwidth_out: float
    steps: list[float]

    @property
    def difference(self) -> float:
        """Simulated stall less measured, as a share of the measured step."""
        return (self.simulated.stall_s - self.measured.stall_s) / self.measured.step_s

    @property
    def over_best(self) -> tuple[float, float, float] | None:
        """Measured over the best found: a step, the first of a cycle, the others."""
        if self.best is None:
            return None
        mine = self.measured
        whole, first, later = self.best
        return mine.step_s / whole, mine.first_s / first, mine.later_s / later

    @property
    def counts(self) -> bool:
        """Whether repeats were close enough to each other."""
        return self.spread <= COUNTS

    def as_json(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        told = {"difference": self.difference, "over_best": self.over_best, "counts": self.counts}
        return asdict(self) | told


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
    with prepared() as rate:
        alone = _alone(task, cycle, rate)
        emulated = None if task.r is None else link_for(alone, task.r).bandwidth_in
        make = partial(
            PagedWorkload,
            whole,
            task.policy,
            rate,
            budget_bytes=budget_bytes,
            home=task.home,
            home_dir=task.home_dir,
            bandwidth=emulated,
        )
        with closing(make()) as timing, closing(make()) as measured:
            taken: dict[PagedWorkload, list[Cycle]] = {timing: [], measured: []}
            for turn, end in enumerate(ends):
                if turn == WARM_UP:
                    timing.log.clear()
                for one in (timing, measured) if turn % 2 else (measured, timing):
                    taken[one].append(one.cycle(end))
            counted = [cycles[WARM_UP:] for cycles in (taken[measured], taken[timing])]
            link = timing.log.link()
            beside = timed_by(cycle, _medians(timing.times[WARM_UP:]))
            with_own = timed_by(whole, chain(*map(with_own_time, timing.times, timing.own)))
    simulated = _simulated(task, with_own, budget_bytes, link, ends)[WARM_UP:]
    return _row(task, counted, simulated, (beside, alone), budget_bytes, link, moves)


def _alone(task: Task, cycle: Workload, rate: float) -> Workload:
    """The needs of a cycle with the times of its computations where all pages stay resident."""
    whole = cycle.repeated(1 + _ALONE)
    with closing(PagedWorkload(whole, task.policy, rate)) as free:
        for turn in range(1 + _ALONE):
            free.cycle((turn + 1) * task.steps)
        return timed_by(cycle, _medians(free.times[1:]))


def _row(
    task: Task,
    counted: Sequence[Sequence[Cycle]],
    simulated: Sequence[Cycle],
    times: tuple[Workload, Workload],
    budget_bytes: int,
    link: Link,
    moves: int,
) -> PagingRow:
    beside, alone = times
    measured = counted[0]
    accesses, frames = Accesses.from_workload(beside), budget_bytes // FRAME_BYTES
    speed = (link.bandwidth_in, link.bandwidth_out or link.bandwidth_in)
    best = best_found(accesses, frames, *speed, moves=moves) if moves else None
    return PagingRow(
        workload=task.workload,
        home=task.home,
        policy=task.policy,
        budget=task.budget,
        asked_r=task.r,
        r=ratio_of(beside, link.bandwidth_in),
        measured=Figures.of(measured),
        simulated=Figures.of(simulated),
        spread=max(map(_spread, counted)),
        compute_s=compute_ns(beside) / task.steps / 1e9,
        alone_s=compute_ns(alone) / task.steps / 1e9,
        window_bound_s=window_bound(accesses, budget_bytes, *speed).elapsed_s / task.steps,
        best=None if best is None else _best_steps(best, beside),
        bandwidth_in=speed[0],
        bandwidth_out=speed[1],
        steps=[one.elapsed_ns / task.steps / 1e9 for one in measured],
    )


def _spread(cycles: Sequence[Cycle]) -> float:
    """Interquartile range over the median; 0 of a single cycle."""
    if len(cycles) < 2:
        return 0.0
    low, middle, high = statistics.quantiles([one.elapsed_ns for one in cycles], n=4)
    return (high - low) / middle


def _best_steps(best: BestFound, workload: Workload) -> tuple[float, float, float]:
    """A step of a schedule, the first, and the others, evaluation passes included."""
    begun = [visit.step for visit in workload.visits if visit.begins_pass]
    spent: dict[int, float] = {}
    for step, pass_s in zip(begun, best.pass_s, strict=True):
        spent[step] = spent.get(step, 0.0) + pass_s
    first, *later = spent.values()
    return best.elapsed_s / len(spent), first, statistics.fmean(later or [first])


def _simulated(
    task: Task, timed: Workload, budget_bytes: int, link: Link, ends: Sequence[int]
) -> list[Cycle]:
    """The cycles on the virtual clock, in the same order of calls."""
    eviction, prefetch = make_policy(task.policy, timed)
    drive = virtual_drive(
        timed, budget_bytes=budget_bytes, link=link, eviction=eviction, prefetch=prefetch
    )
    cycles = []
    for end in ends:
        drive.empty()
        cycles.append(run_cycle(drive, end))
    return cycles


def with_own_time(times: Sequence[int], own: Sequence[int]) -> list[int]:
    """Returns computations and the pager's own time behind each, for a clock that knows no other.

    Args:
        times: Computations of a cycle in order, ns.
        own: The pager's own time before each of them and behind the last, ns.
    """
    lead, *behind = own
    return [
        lead * (not at) + computed + rest
        for at, (computed, rest) in enumerate(zip(times, behind, strict=True))
    ]


def _medians(times: Sequence[Sequence[int]]) -> list[int]:
    """Each computation's median over cycles, scaled to the median of what a cycle computes.

    Times have long tails: medians of the parts sum up to less than a usual cycle takes.
    """
    cycles = np.array(times, np.float64)
    middle = np.median(cycles, axis=0)
    scale = np.median(cycles.sum(axis=1)) / middle.sum()
    return (middle * scale).astype(np.int64).tolist()


def timed_by(workload: Workload, times: Iterable[int]) -> Workload:
    """Returns the same needs with other times, one for each computation in order, ns."""
    following = iter(times)

    def timed(duration_ns: int) -> int:
        return next(following) if duration_ns > 0 else 0

    visits = []
    for visit in workload.visits:
        bundles = []
        for bundle in visit.bundles:
            rows = [(kind, op, timed(ns)) for kind, op, ns in bundle.rows]
            bundles.append(Bundle(bundle.group, rows, timed(bundle.after_ns)))
        visits.append(replace(visit, bundles=bundles))
    return Workload(workload.pages, visits, workload.sets)
