"""A made workload paged for real: frames, copies, and a thread that computes on the pages.

Every page carries a number that a write raises and a read checks: a copy that was not made, or was
made too late, is an error and not a good time.
"""

import ctypes
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from threadpoolctl import threadpool_limits

from odc.errors import OdcError
from odc.memory.events import Act, Kind, Op, Phase, StepRow
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import MemoryManager
from odc.memory.replay import Link, Workload
from odc.memory.replay.drive import Drive
from odc.train.policies import make_policy

_HEIGHT = 1024  # rows of a page taken as a matrix of floats; page sizes are multiples of 4 KiB
_WAYS = {
    Act.LOAD: "in",
    Act.PREFETCH: "in",
    Act.WRITE_BACK: "out",
    Act.EARLY_WRITE_BACK: "out",
}


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


@dataclass(frozen=True)
class Cycle:
    """What some steps took.

    Attributes:
        steps_ns: Each step, in order.
    """

    elapsed_ns: int
    compute_ns: int
    waited_ns: int
    steps_ns: tuple[int, ...]

    @property
    def own_ns(self) -> int:
        """Neither computing nor waiting for transfers: the pager's own time."""
        return self.elapsed_ns - self.compute_ns - self.waited_ns


def run_cycle(drive: Drive, before_step: int) -> Cycle:
    """Runs on up to a step."""
    before, waited = len(drive.result.passes), drive.pager.transfers.waited_ns
    taken = drive.run(before_step).passes[before:]
    steps: dict[int, int] = {}
    for one in taken:
        steps[one.step] = steps.get(one.step, 0) + one.elapsed_ns
    return Cycle(
        sum(steps.values()),
        sum(p.compute_ns for p in taken),
        drive.pager.transfers.waited_ns - waited,
        tuple(steps.values()),
    )


class PagedWorkload:
    """A manager with the groups of a workload, and the computation on their pages.

    Args:
        workload: What is needed.
        policy: `EVICTION+PREFETCH`.
        rate: Floating-point operations a ns.
        budget_bytes: For pages; `None` holds all of them.
        home: `host` or `disk`.
        home_dir: Of a disk home; `None`: a temporary one.
        bandwidth: Bytes a second each way of the emulated link; `None`: as fast as it goes.

    Attributes:
        times: For each cycle so far, its computations in order, ns.
        own: For each cycle, the pager's own time before each computation and behind the last, ns.
        log: What the link did.
    """

    def __init__(
        self,
        workload: Workload,
        policy: str,
        rate: float,
        *,
        budget_bytes: int | None = None,
        home: str = "host",
        home_dir: Path | None = None,
        bandwidth: float | None = None,
    ) -> None:
        table = workload.table()
        eviction, prefetch = make_policy(policy, workload)
        self.manager = MemoryManager(
            page_budget=budget_bytes,
            page_size=max(int(table.num_frames.max()), 1) * FRAME_BYTES,
            home=home,
            home_dir=home_dir,
            link_bandwidth=bandwidth,
            eviction=eviction,
            prefetch=prefetch or (lambda library, limits: None),
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
        self.own: list[list[int]] = []
        self._idle_since, self._waited = 0, 0  # when the last computation ended, waits until then
        self._rate = rate
        self._left = np.full((_HEIGHT, _HEIGHT), 1e-3, np.float32)
        widest = max(_HEIGHT, *(p.num_bytes // 4 // _HEIGHT for p in pages))
        self._out = np.empty((_HEIGHT, widest), np.float32)
        self._fill()
        self.manager.set_sink(self.log)
        self.drive = Drive(workload, self.manager, self, self.manager.transfers.engine.now_ns)

    def _fill(self) -> None:
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

    def cycle(self, before_step: int) -> Cycle:
        """Runs on up to a step, from an empty device where not everything fits."""
        if not self.manager.unlimited:
            self.drive.empty()
        self.times.append([])
        self.own.append([])
        self._idle_since, self._waited = perf_counter_ns(), self.manager.transfers.waited_ns
        cycle = run_cycle(self.drive, before_step)
        self._note_own(perf_counter_ns())
        return cycle

    def _note_own(self, until_ns: int) -> None:
        """What passed since the last computation was the pager's, but for waiting."""
        waited = self.manager.transfers.waited_ns
        self.own[-1].append(until_ns - self._idle_since - (waited - self._waited))
        self._waited = waited

    # -- the body --------------------------------------------------------------------------------

    def compute(self, group: int, duration_ns: int) -> None:
        """Multiply by the group's parameters as often as takes this long."""
        start = perf_counter_ns()
        self._note_own(start)
        table = self.manager.table
        views = [self.views[p] for p in table.of(group, Kind.PARAMETER) if table.resident[p]]
        views = views or [self._left.reshape(-1)]  # behind a walk, parts of it may have left
        operations = 2.0 * sum(v.size for v in views)
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
        self._idle_since = end = perf_counter_ns()
        self.times[-1].append(end - start)

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


def _floats(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * (num_bytes // 4)).from_address(address))
