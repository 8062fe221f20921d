"""`odc bench paging`: the pager with real frames, copies and computation, beside its simulation.

A contender pages a made workload for real: a thread computes products with the bytes of the pages
that are resident, the engine's threads copy pages from and to their home. It takes its cycles (a
few steps from an empty device) in turn with the same computation in a budget that holds everything,
so that what else the machine does hits both alike. From the latter come the compute times, from the
former's own transfers the link's figures; with these the same needs run on the virtual clock.

Every page carries a number that a write raises and a read checks: a copy that was not made, or was
made too late, is an error and not a good time.
"""

import ctypes
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter_ns

import numpy as np
from threadpoolctl import threadpool_limits

from odc.errors import OdcError
from odc.memory.events import Act, Kind, Op, Phase, StepRow
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import MemoryManager
from odc.memory.replay import Link, Workload
from odc.memory.replay.accesses import Accesses
from odc.memory.replay.best_found import best_found
from odc.memory.replay.bounds import window_bound
from odc.memory.replay.drive import Drive
from odc.memory.replay.ratios import budget_for, link_for, ratio_of
from odc.memory.replay.results import SimResult
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape, expand, synthetic
from odc.memory.replay.workload import Bundle
from odc.train.policies import make_policy

WARM_UP = 2  # cycles
COUNTS = 0.05  # of the step: rows whose repeats spread further say nothing
_COMPUTE_NS = 4_000_000  # of a layer's forward: at r = 0.5 still slower than memory can be copied
_HEIGHT = 1024  # rows of a page taken as a matrix of floats; page sizes are multiples of 4 KiB


@dataclass(frozen=True)
class Task:
    """What is run.

    Attributes:
        workload: Name of a made workload.
        r: Chooses the emulated link of a home in host memory; `None`: what the home is able to.
        home: `host` or `disk`.
        budget: C.
        policy: `EVICTION+PREFETCH`.
        layers: Of each model.
        steps: A cycle.
        compute_ns: Forward of a layer.
    """

    workload: str
    r: float | None = 1.0
    home: str = "host"
    budget: float = 0.5
    policy: str = "cost_aware+popularity"
    layers: int = 16
    steps: int = 2
    compute_ns: int = _COMPUTE_NS

    def cycle(self) -> Workload:
        """The needs of one cycle."""
        shape = Shape(layers=self.layers, compute_ns=self.compute_ns)
        return synthetic(self.workload, steps=self.steps, shape=shape)


def tasks(
    names: Sequence[str], ratios: Sequence[float], homes: Sequence[str], policy: str
) -> list[Task]:
    """Returns a task for each workload, and each ratio in host memory; on disk its own ratio.

    Raises:
        ConfigError: There is no workload of such a name.
    """
    found = []
    for name in (n for given in names for n in expand(given)):
        # Two models, and four steps until each of their passes was seen.
        one = Task(name, policy=policy, layers=6, steps=4) if name.startswith("W4") else Task(name)
        one = replace(one, policy=policy)
        if "host" in homes:
            found += [replace(one, r=r) for r in ratios]
        if "disk" in homes:
            found.append(replace(one, r=None, home="disk"))
    return found


@dataclass(frozen=True)
class PagingRow:
    """Medians over cycles, a step each; times in s.

    Attributes:
        r: As measured: of the compute times and the link's figures below.
        step_s, stall_s: Measured; stalling is all that is not computing.
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
    r: float
    step_s: float
    iqr_s: float
    stall_s: float
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


def measure(task: Task, *, repeats: int, moves: int) -> PagingRow:
    """Runs a task for real, and simulates it.

    Raises:
        BudgetError: A group does not fit the budget.
        OdcError: A page came back with other bytes than it left with.
    """
    cycle = task.cycle()
    budget_bytes = budget_for(cycle, task.budget)
    whole = cycle.repeated(WARM_UP + repeats)
    with prepared() as rate, _world(whole, task, rate) as free:
        for turn in range(WARM_UP):
            free.cycle(turn)
        emulated = None
        if task.r is not None:
            emulated = link_for(_timed(cycle, free.times[-1:]), task.r).bandwidth_in
        with _world(whole, task, rate, budget_bytes, emulated) as paged:
            for turn in range(WARM_UP):
                paged.cycle(turn)
            paged.log.clear()
            cycles = []
            for turn in range(WARM_UP, WARM_UP + repeats):
                order = (free, paged) if turn % 2 else (paged, free)
                taken = {one: one.cycle(turn) for one in order}
                cycles.append(taken[paged])
        timed = _timed(cycle, free.times[WARM_UP:])
        link = paged.log.link()
    return _row(task, timed, budget_bytes, link, cycles, moves)


def _row(
    task: Task,
    timed: Workload,
    budget_bytes: int,
    link: Link,
    cycles: "Sequence[Cycle]",
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
        r=ratio_of(timed, link.bandwidth_in),
        step_s=statistics.median(steps),
        iqr_s=high - low,
        stall_s=statistics.median(one.stall_ns for one in cycles) / task.steps / 1e9,
        simulated_step_s=simulated.elapsed_ns / task.steps / 1e9,
        simulated_stall_s=simulated.stall_ns / task.steps / 1e9,
        window_bound_s=window_bound(accesses, budget_bytes, *speed).elapsed_s / task.steps,
        best_found_s=None if best is None else best.elapsed_s / task.steps,
        bandwidth_in=speed[0],
        bandwidth_out=speed[1],
        steps=steps,
    )


@dataclass(frozen=True)
class Cycle:
    """What a cycle took."""

    elapsed_ns: int
    compute_ns: int

    @property
    def stall_ns(self) -> int:
        return self.elapsed_ns - self.compute_ns


def _run_cycle(drive: Drive, steps: int, turn: int, empty: bool = True) -> Cycle:
    if empty:
        drive.empty()
    before = len(drive.result.passes)
    result: SimResult = drive.run((turn + 1) * steps)
    taken = result.passes[before:]
    return Cycle(sum(p.elapsed_ns for p in taken), sum(p.compute_ns for p in taken))


def _simulated(task: Task, timed: Workload, budget_bytes: int, link: Link, repeats: int) -> Cycle:
    """The median cycle on the virtual clock, in the same order of calls."""
    whole = timed.repeated(WARM_UP + repeats)
    eviction, prefetch = make_policy(task.policy, whole)
    drive = virtual_drive(
        whole, budget_bytes=budget_bytes, link=link, eviction=eviction, prefetch=prefetch
    )
    cycles = [_run_cycle(drive, task.steps, turn) for turn in range(WARM_UP + repeats)]
    return sorted(cycles[WARM_UP:], key=lambda one: one.elapsed_ns)[repeats // 2]


def _timed(cycle: Workload, times: Sequence[Sequence[int]]) -> Workload:
    """The needs of a cycle with measured times: for each computation the median over cycles.

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


# -- the real thing --------------------------------------------------------------------------------


@contextmanager
def prepared() -> Iterator[float]:
    """One thread computes, and gives way at once; yields its floating-point operations a ns."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        with threadpool_limits(1):
            yield _calibrated()
    finally:
        sys.setswitchinterval(interval)


def _calibrated(rows: int = 64, columns: int = 2048) -> float:
    left, right = np.ones((rows, _HEIGHT), np.float32), np.ones((_HEIGHT, columns), np.float32)
    took = []
    for _ in range(9):
        start = perf_counter_ns()
        left @ right
        took.append(perf_counter_ns() - start)
    return 2.0 * rows * _HEIGHT * columns / statistics.median(took)


class Log:
    """A sink that keeps what the link did."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget it."""
        self._bytes = {"in": 0, "out": 0}
        self._ns = {"in": 0, "out": 0}

    def action(
        self,
        t_ns: int,
        seq: int,
        page: int,
        act: int,
        src: int,
        dst: int,
        num_bytes: int,
        dur_ns: int,
        wait_ns: int,
        policy: int,
    ) -> None:
        """A transfer adds to its direction."""
        way = _WAYS.get(Act(act))
        if way is not None:
            self._bytes[way] += num_bytes
            self._ns[way] += dur_ns

    def need(self, *columns: int) -> None:
        """Not kept."""

    def mem(self, *columns: int) -> None:
        """Not kept."""

    def step(self, row: StepRow) -> None:
        """Not kept."""

    def link(self) -> Link:
        """Bytes over time of the transfers, each way; as the way in where nothing went out.

        Raises:
            OdcError: Nothing was loaded.
        """
        if not self._ns["in"]:
            raise OdcError("nothing was loaded: the budget holds everything; name a smaller one")
        rates = [self._bytes[w] / self._ns[w] * 1e9 if self._ns[w] else None for w in ("in", "out")]
        assert rates[0] is not None
        return Link(rates[0], rates[1], latency_ns=0, frame_move_ns=0)


_WAYS = {
    Act.LOAD: "in",
    Act.PREFETCH: "in",
    Act.WRITE_BACK: "out",
    Act.EARLY_WRITE_BACK: "out",
}


class World:
    """A manager with the groups of a workload, and the thread that computes on their pages.

    Args:
        workload: Cycles, one behind the other.
        task: Home, policy and the steps of a cycle.
        rate: Floating-point operations a ns.
        budget_bytes: For pages; `None` holds all of them.
        bandwidth: Bytes a second each way of the emulated link.

    Attributes:
        times: For each cycle so far, its computations in order, ns.
        log: What the link did.
    """

    def __init__(
        self,
        workload: Workload,
        task: Task,
        rate: float,
        budget_bytes: int | None,
        bandwidth: float | None,
    ) -> None:
        table = workload.table()
        eviction, prefetch = make_policy(task.policy, workload)
        self.manager = MemoryManager(
            page_budget=budget_bytes,
            page_size=max(int(table.num_frames.max()), 1) * FRAME_BYTES,
            home=task.home if budget_bytes is not None else "host",
            link_bandwidth=bandwidth,
            eviction=eviction,
            prefetch=prefetch or (lambda library, weight, limits: None),
        )
        for spec in table.groups:
            self.manager.add_group(spec)
        self.manager.seal(workload.sets, {})
        pages = self.manager.table.pages
        assert [p.num_bytes for p in pages] == [p.num_bytes for p in table.pages], "other pages"
        self.views = [_floats(p.address, p.num_bytes) for p in pages]
        self.right = [0.0] * len(pages)  # the number that each page has to carry
        self.log = Log()
        self.times: list[list[int]] = []
        self._rate = rate
        self._steps = task.steps
        self._left = np.full((_HEIGHT, _HEIGHT), 1e-3, np.float32)
        widest = max(p.num_bytes for p in pages) // 4 // _HEIGHT
        self._out = np.empty((_HEIGHT, widest), np.float32)
        self.fill()
        self.manager.set_sink(self.log)
        self.drive = Drive(workload, self.manager, self, self.manager.transfers.engine.now_ns)

    def fill(self) -> None:
        """Give every page with a home its first content, as building a model does."""
        manager = self.manager
        manager.begin_pass(-1)
        for group in range(len(manager.table.groups)):
            for kind in (Kind.PARAMETER, Kind.MOMENT):
                for part in range(manager.table.parts(group)):
                    ids = manager.table.of_part(group, kind, part)
                    if not ids:
                        continue
                    manager.access(group, [(kind, Op.CREATE)], Phase.OTHER, part)
                    for page in ids:
                        self.views[page].fill(1e-3)
                    self.touch(group, kind, Op.CREATE, part)
                    manager.release(group, kind, part)

    def cycle(self, turn: int) -> Cycle:
        """Run a cycle, from an empty device where not everything fits."""
        self.times.append([])
        return _run_cycle(self.drive, self._steps, turn, empty=not self.manager.unlimited)

    # -- the body --------------------------------------------------------------------------------

    def compute(self, group: int, duration_ns: int) -> None:
        """Multiply by the group's parameters as often as takes this long."""
        start = perf_counter_ns()
        resident = self.manager.table.resident
        views = [self.views[p] for p in self.manager.table.of(group, Kind.PARAMETER) if resident[p]]
        operations = 2.0 * max(sum(v.size for v in views), 1)
        left = max(round(duration_ns * self._rate / operations), 1)
        while left > 0:
            rows = min(left, _HEIGHT)
            for view in views:
                columns = view.size // _HEIGHT
                np.matmul(
                    self._left[:rows],
                    view.reshape(_HEIGHT, columns),
                    out=self._out[:rows, :columns],
                )
            left -= rows
        self.times[-1].append(perf_counter_ns() - start)

    def touch(self, group: int, kind: Kind, op: Op, part: int | None) -> None:
        """Check the number at both ends of each page, or raise it."""
        table = self.manager.table
        for page in table.of(group, kind) if part is None else table.of_part(group, kind, part):
            view, right = self.views[page], self.right[page]
            if op != Op.CREATE and not view[0] == view[-1] == right:
                raise OdcError(
                    f"page {page} of {table.groups[group].name} came with {view[0]} and {view[-1]} "
                    f"at its ends, {right} was written"
                )
            if op != Op.READ:
                self.right[page] = view[0] = view[-1] = right + 1.0

    def close(self) -> None:
        """Give everything back."""
        self.views.clear()
        self.manager.close()


@contextmanager
def _world(
    workload: Workload,
    task: Task,
    rate: float,
    budget_bytes: int | None = None,
    bandwidth: float | None = None,
) -> Iterator[World]:
    world = World(workload, task, rate, budget_bytes, bandwidth)
    try:
        yield world
    finally:
        world.close()


def _floats(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * (num_bytes // 4)).from_address(address))
