"""Driving a pager through a workload: the loop that the simulator and the measured run share.

The pager is the shipped one. Its engine decides what a transfer is (a moving clock, or bytes that
are copied), a ``Body`` what computing is. So a simulated and a measured run ask for the same pages
in the same order by the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from odc.memory.events import FORWARD_PHASES, Kind, Op, Phase
from odc.memory.pager import Counters, Pager
from odc.memory.replay.results import PassResult, SimResult
from odc.memory.replay.workload import Bundle, RecordedVisit, Workload

TRAINING_PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)


class Body(Protocol):
    """What computes between accesses."""

    def compute(self, group: int, duration_ns: int) -> None:
        """Compute what the workload spends ``duration_ns`` on, while ``group`` is resident."""

    def touch(self, group: int, kind: Kind, op: Op, part: int | None) -> None:
        """Pages of a group became resident for ``op``; one part of them, or all."""


class Drive:
    """Takes a pager through a workload, in as many goes as the caller likes.

    Args:
        workload: what is needed, and when.
        pager: pages the workload's groups, under the same ids.
        body: computes.
        now_ns: the clock in which the pager lives.

    Attributes:
        result: what the steps and passes done so far took.
    """

    def __init__(
        self, workload: Workload, pager: Pager, body: Body, now_ns: Callable[[], int]
    ) -> None:
        self.workload = workload
        self.pager = pager
        self.body = body
        self.result = SimResult()
        self._now_ns = now_ns
        self._at = 0  # the next visit
        self._ends = {v.step: i for i, v in enumerate(workload.visits) if _trains(v)}
        self._step = _Sums()  # since the last step ended
        self._pass: _Pass | None = None
        self._last_ctx: int | None = None
        self._compute_ns = 0  # of the pass that runs
        self._forward_order: dict[int, list[int]] = {}
        self._set_of = {g: s for s, groups in enumerate(workload.sets) for g in groups}
        self._member_of = {g: m for groups in workload.sets for m, g in enumerate(groups)}

    def run(self, before_step: int | None = None) -> SimResult:
        """Run on, up to the first visit of ``before_step`` or of a later step; None: to the end.

        What passes between two calls counts for neither.
        """
        visits = self.workload.visits
        self.pager.take()
        while self._at < len(visits):
            visit = visits[self._at]
            if before_step is not None and visit.step >= before_step:
                break
            if self._at == 0:
                self._compute(visit.bundles[0].group, self.workload.lead_ns)
            self._visit(visit)
            self._at += 1
        self._end_pass()
        return self.result

    def empty(self) -> None:
        """Write back what is dirty and evict every page that is not in use; nothing is counted.

        What the pager knows stays: the next step starts with recorded orders and an empty device.
        """
        transfers = self.pager.transfers
        self.pager.take()
        transfers.drain()
        for page in np.flatnonzero(self.pager.table.evictable).tolist():
            transfers.evict(page)
        transfers.drain()
        self.pager.pause()
        self.pager.take()

    # -- books -----------------------------------------------------------------------------------

    def _visit(self, visit: RecordedVisit) -> None:
        end = self._ends.get(visit.step, -1)
        if visit.begins_pass:
            self._end_pass()
        self.pager.step = visit.step
        self.pager.micro = visit.micro
        if visit.begins_pass:
            self._begin_pass(visit)
            self.pager.begin_pass(visit.ctx, visit.tokens)
        for bundle in self._ordered(visit):
            self._run_bundle(bundle, visit.phase)
        if self._at == end:
            self.pager.end_update()
            self._collect()
            self._end_step(visit.step)
        elif self._at > end:
            # As in a run: what evaluating and saving move and wait for is not the step's.
            self._collect()
            self._step = _Sums()

    def _begin_pass(self, visit: RecordedVisit) -> None:
        first = visit.ctx != self._last_ctx
        self._last_ctx = visit.ctx
        self._compute_ns = 0
        self._pass = _Pass(visit, first, self._now_ns())

    def _end_pass(self) -> None:
        """Close the pass that runs, at the clock of now."""
        self._collect()
        if self._pass is None:
            return
        visit, sums = self._pass.visit, self._pass.sums
        self.result.passes.append(
            PassResult(
                visit.step,
                visit.micro,
                visit.ctx,
                visit.tokens,
                self._pass.first,
                self._now_ns() - self._pass.start_ns,
                self._compute_ns,
                sums.stall_ns,
                sums.bytes_in,
                sums.bytes_out,
                sums.misses,
            )
        )
        self._pass = None

    def _collect(self) -> None:
        """Take the pager's counters, for the step and for the pass."""
        counters = self.pager.take()
        self._step.add(counters)
        if self._pass is not None:
            self._pass.sums.add(counters)

    def _end_step(self, step: int) -> None:
        sums, result = self._step, self.result
        result.steps.append(step)
        result.compute_ns.append(sums.compute_ns)
        result.stall_ns.append(sums.stall_ns)
        result.bytes_in.append(sums.bytes_in)
        result.bytes_out.append(sums.bytes_out)
        result.misses.append(sums.misses)
        result.accesses.append(sums.accesses)
        self._step = _Sums()

    # -- accesses --------------------------------------------------------------------------------

    def _ordered(self, visit: RecordedVisit) -> list[Bundle]:
        """The bundles of a visit in the order in which this run takes them."""
        set_index = self._set_of.get(visit.bundles[0].group, -1)
        if set_index < 0:
            return visit.bundles
        by_member = {self._member_of[b.group]: b for b in visit.bundles}
        if visit.phase in FORWARD_PHASES:
            order = self.pager.open_set(set_index, sorted(by_member), visit.phase)
            self._forward_order[set_index] = order
        else:
            order = self._forward_order.get(set_index, list(by_member))
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
            self._compute(group, compute_ns)
            walks = kind == Kind.PARAMETER and op == Op.WRITE and at + 1 < len(rows)
            if walks and rows[at + 1][0] == Kind.MOMENT:
                self._walk(group, phase)
                at += 2
                continue
            if op == Op.UPDATE:
                for held in pinned:
                    pager.release(group, held)
                pinned.clear()
                pager.update(group, phase, lambda part: _nothing)
            elif op == Op.DROP:
                if kind in pinned:
                    pinned.remove(kind)
                    pager.drop(group, kind)
                else:
                    pager.forget(group, kind)
            elif kind not in pinned:
                pager.access(group, [(kind, op)], phase)
                pinned.append(kind)
                self.body.touch(group, kind, op, None)
            at += 1
        self._compute(group, bundle.after_ns)  # before the release, as a hook behind a layer
        for kind in pinned:
            pager.release(group, kind)

    def _walk(self, group: int, phase: Phase) -> None:
        """The optimizer's walk: part by part, parameters with their moments."""
        pager = self.pager
        for part in range(pager.table.parts(group)):
            needs = [(Kind.PARAMETER, Op.WRITE), (Kind.MOMENT, Op.WRITE)]
            pager.access(group, needs, phase, part)
            for kind, op in needs:
                self.body.touch(group, kind, op, part)
            pager.release(group, Kind.PARAMETER, part)
            pager.release(group, Kind.MOMENT, part)

    def _compute(self, group: int, duration_ns: int) -> None:
        if duration_ns <= 0:
            return
        start = self._now_ns()
        self.body.compute(group, duration_ns)
        self._compute_ns += self._now_ns() - start


class _Sums:
    """Counters of several ``take`` calls, added up."""

    def __init__(self) -> None:
        self.compute_ns = self.stall_ns = self.accesses = self.misses = 0
        self.bytes_in = self.bytes_out = 0

    def add(self, counters: Counters) -> None:
        self.compute_ns += counters.compute_ns
        self.stall_ns += counters.stall_ns
        self.accesses += counters.accesses
        self.misses += counters.misses
        self.bytes_in += counters.bytes_in
        self.bytes_out += counters.bytes_out


class _Pass:
    """The pass that runs."""

    def __init__(self, visit: RecordedVisit, first: bool, start_ns: int) -> None:
        self.visit = visit
        self.first = first
        self.start_ns = start_ns
        self.sums = _Sums()


def _nothing() -> None:
    """What an update at home computes where pages have no bytes, or bytes that mean nothing."""


def _trains(visit: RecordedVisit) -> bool:
    return visit.phase in TRAINING_PHASES
