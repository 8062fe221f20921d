"""The simulator: the shipped pager on a virtual clock, over a recorded workload.

Nothing of the scheduler is rewritten here; a simulated number is a statement about the product as
long as the workload's compute times and the link's figures are those of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from odc.errors import BudgetError
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import FORWARD_PHASES, Kind, Op, Phase, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.pager import Pager, Tuning
from odc.memory.plan import Limits, Prefetcher
from odc.memory.replay.workload import Bundle, RecordedVisit, Workload
from odc.memory.orders import OrderLibrary
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy

_TRAINING_PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)
PrefetchFactory = Callable[[OrderLibrary, Limits], Prefetcher | None]


@dataclass(frozen=True, slots=True)
class Link:
    """The way between device and home.

    Attributes:
        bandwidth_in, bandwidth_out: bytes/s each way.
        latency_ns: fixed cost of a transfer.
        frame_move_ns: cost of mapping or unmapping a frame.
    """

    bandwidth_in: float
    bandwidth_out: float | None = None
    latency_ns: int = 100_000
    frame_move_ns: int = 15_000


@dataclass(slots=True)
class SimResult:
    """One entry a training step, in order of ``steps``; times in ns, sizes in bytes."""

    steps: list[int] = field(default_factory=list)
    compute_ns: list[int] = field(default_factory=list)
    stall_ns: list[int] = field(default_factory=list)
    bytes_in: list[int] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    accesses: list[int] = field(default_factory=list)

    def after(self, step: int) -> SimResult:
        """Only the steps from ``step`` on."""
        keep = [i for i, s in enumerate(self.steps) if s >= step]
        return SimResult(
            *(
                [getattr(self, name)[i] for i in keep]
                for name in (
                    "steps",
                    "compute_ns",
                    "stall_ns",
                    "bytes_in",
                    "bytes_out",
                    "misses",
                    "accesses",
                )
            )
        )

    @property
    def stall_s(self) -> float:
        return sum(self.stall_ns) / 1e9

    @property
    def compute_s(self) -> float:
        return sum(self.compute_ns) / 1e9


class _Simulation:
    def __init__(self, workload: Workload, pager: Pager, engine: VirtualEngine) -> None:
        self.workload = workload
        self.pager = pager
        self.engine = engine
        self.result = SimResult()
        self.forward_order: dict[int, list[int]] = {}
        self.set_of = {g: s for s, groups in enumerate(workload.sets) for g in groups}
        self.member_of = {g: m for groups in workload.sets for m, g in enumerate(groups)}

    def run(self) -> SimResult:
        visits = self.workload.visits
        ends = {v.step: at for at, v in enumerate(visits) if v.phase in _TRAINING_PHASES}
        self.engine.advance(self.workload.lead_ns)
        for at, visit in enumerate(visits):
            self.pager.step = visit.step
            self.pager.micro = visit.micro
            if visit.begins_pass:
                self.pager.begin_pass(visit.ctx, visit.tokens)
            for bundle in self._ordered(visit):
                self._run_bundle(bundle, visit.phase)
            end = ends.get(visit.step, -1)
            if at == end:
                self.pager.end_update()
                self._close_step(visit.step)
            elif at > end:
                # As in a run: what evaluating and saving move and wait for is not the step's.
                self.pager.take()
        return self.result

    def _close_step(self, step: int) -> None:
        counters = self.pager.take()
        result = self.result
        result.steps.append(step)
        result.compute_ns.append(counters.compute_ns)
        result.stall_ns.append(counters.stall_ns)
        result.bytes_in.append(counters.bytes_in)
        result.bytes_out.append(counters.bytes_out)
        result.misses.append(counters.misses)
        result.accesses.append(counters.accesses)

    def _ordered(self, visit: RecordedVisit) -> list[Bundle]:
        """The bundles of a visit in the order in which this run takes them."""
        set_index = self.set_of.get(visit.bundles[0].group, -1)
        if set_index < 0:
            return visit.bundles
        by_member = {self.member_of[b.group]: b for b in visit.bundles}
        if visit.phase in FORWARD_PHASES:
            order = self.pager.open_set(set_index, sorted(by_member), visit.phase)
            self.forward_order[set_index] = order
        else:
            order = self.forward_order.get(set_index, list(by_member))
            if visit.phase == Phase.BACKWARD:
                order = order[::-1]
        known = [m for m in order if m in by_member]
        return [by_member[m] for m in [*known, *(m for m in by_member if m not in known)]]

    def _run_bundle(self, bundle: Bundle, phase: Phase) -> None:
        pager = self.pager
        group = bundle.group
        pinned: list[Kind] = []
        rows = bundle.rows
        at = 0
        while at < len(rows):
            kind, op, compute_ns = rows[at]
            self.engine.advance(compute_ns)
            walks = kind == Kind.PARAMETER and op == Op.WRITE and at + 1 < len(rows)
            if walks and rows[at + 1][0] == Kind.MOMENT:
                self._walk(group, phase)
                at += 2
                continue
            if op == Op.DROP:
                if kind in pinned:
                    pinned.remove(kind)
                    pager.drop(group, kind)
                else:
                    pager.forget(group, kind)
            elif kind not in pinned:
                pager.access(group, [(kind, op)], phase)
                pinned.append(kind)
            at += 1
        for kind in pinned:
            pager.release(group, kind)
        self.engine.advance(bundle.after_ns)

    def _walk(self, group: int, phase: Phase) -> None:
        """The optimizer's walk: part by part, parameters with their moments."""
        pager = self.pager
        for part in range(pager.table.parts(group)):
            needs = [(Kind.PARAMETER, Op.WRITE), (Kind.MOMENT, Op.WRITE)]
            pager.access(group, needs, phase, part)
            pager.release(group, Kind.PARAMETER, part)
            pager.release(group, Kind.MOMENT, part)


def simulate(
    workload: Workload,
    *,
    budget_bytes: int,
    link: Link,
    eviction: EvictionPolicy,
    prefetch: PrefetchFactory | None = None,
    tuning: Tuning | None = None,
    limits: Limits | None = None,
) -> SimResult:
    """Run a workload under a policy and a budget.

    Args:
        workload: what is needed, and when.
        budget_bytes: bytes for pages.
        link: the way between device and home.
        eviction: victim order.
        prefetch: makes the prefetcher, or None for demand paging.
        tuning: knobs of the scheduler.
        limits: how far ahead pages may be loaded.

    Raises:
        BudgetError: something that is needed at once does not fit.
    """
    table = workload.table()
    if budget_bytes < FRAME_BYTES:
        raise BudgetError(f"budget: {budget_bytes} bytes hold no frame of {FRAME_BYTES}")
    engine = VirtualEngine(
        link.bandwidth_in, link.bandwidth_out, link.latency_ns, link.frame_move_ns
    )
    frames = min(budget_bytes // FRAME_BYTES, int(table.num_frames.sum()))
    transfers = Transfers(table, engine, frames, Tier.HOST)
    library = OrderLibrary(Stations(table, workload.sets))
    prefetcher = None
    if prefetch is not None:
        prefetcher = prefetch(library, limits or Limits())
    pager = Pager(table, library, transfers, eviction, prefetcher, tuning)
    pager.hold_pinned()
    return _Simulation(workload, pager, engine).run()
