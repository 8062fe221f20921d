"""A workload: what a computation needed, as recorded, in the form in which it can run again.

Rows of a ``need`` trace become visits (rows with one ``seq``) of bundles (rows of one group). The
computation between rows travels with the bundle that it follows, so that the members of a set can
run in another order than they did when they were recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from odc.memory.events import FORWARD_PHASES, Kind, Op, Phase
from odc.memory.pages import PageTable

Columns = dict[str, np.ndarray]


@dataclass(slots=True)
class Bundle:
    """What one group needed in a visit.

    Attributes:
        group: group id.
        rows: (kind, op, compute_ns before it, within the bundle).
        after_ns: compute between the bundle's last row and the next bundle's first.
    """

    group: int
    rows: list[tuple[Kind, Op, int]] = field(default_factory=list)
    after_ns: int = 0


@dataclass(slots=True)
class RecordedVisit:
    """Bundles with one ``seq``."""

    step: int
    micro: int
    phase: Phase
    ctx: int
    tokens: int
    bundles: list[Bundle]
    begins_pass: bool = False


@dataclass(slots=True)
class Workload:
    """Visits in order, and the pages behind them.

    Attributes:
        pages: columns of ``pages.arrow``.
        visits: what was needed.
        sets: groups of each set, by member.
        lead_ns: compute before the first visit.
    """

    pages: Columns
    visits: list[RecordedVisit]
    sets: list[tuple[int, ...]]
    lead_ns: int = 0

    @staticmethod
    def from_trace(need: Columns, pages: Columns, steps: range | None = None) -> Workload:
        """Build from the columns of a trace.

        Args:
            need: columns of ``need``, in order of time.
            pages: columns of ``pages.arrow``.
            steps: only these steps.

        Raises:
            ValueError: no rows are left.
        """
        if steps is not None:
            wanted = (need["step"] >= steps.start) & (need["step"] < steps.stop)
            need = {name: values[wanted] for name, values in need.items()}
        if not len(need["seq"]):
            raise ValueError("the trace has no need rows for these steps; record with odc profile")
        visits, lead = _visits(need)
        _mark_passes(visits)
        return Workload(pages, visits, _sets(pages), lead)

    def table(self) -> PageTable:
        """A fresh page table."""
        return PageTable.of_trace(self.pages)

    @property
    def steps(self) -> list[int]:
        """The steps it covers."""
        return sorted({v.step for v in self.visits})

    def part(self, first: int, end: int | None = None) -> Workload:
        """The steps from ``first`` on, up to ``end`` (exclusive) where it is given."""
        visits = [v for v in self.visits if v.step >= first and (end is None or v.step < end)]
        lead_ns = self.lead_ns if visits and visits[0] is self.visits[0] else 0
        return Workload(self.pages, visits, self.sets, lead_ns)

    def repeated(self, times: int) -> Workload:
        """The same steps ``times`` over, numbered on."""
        span = self.steps[-1] + 1
        visits = [
            replace(visit, step=visit.step + turn * span)
            for turn in range(times)
            for visit in self.visits
        ]
        return Workload(self.pages, visits, self.sets, self.lead_ns)

    def with_updates_at_home(self) -> Workload:
        """The same needs with every group updated at home: what its update computed is left out."""
        visits = [
            replace(visit, bundles=[_at_home(bundle) for bundle in visit.bundles])
            for visit in self.visits
        ]
        return Workload(self.pages, visits, self.sets, self.lead_ns)

    def with_compute_of(self, other: Workload) -> Workload:
        """The same needs with another run's compute times: the median of each kind of bundle."""
        durations: dict[tuple[int, int, int], list[int]] = {}
        for visit in other.visits:
            for bundle in visit.bundles:
                for place, ns in enumerate([*(r[2] for r in bundle.rows), bundle.after_ns]):
                    durations.setdefault(_key(visit, bundle, place), []).append(ns)
        medians = {key: int(np.median(values)) for key, values in durations.items()}
        visits = [_retimed(visit, medians) for visit in self.visits]
        return Workload(self.pages, visits, self.sets, self.lead_ns)


def _at_home(bundle: Bundle) -> Bundle:
    """A bundle with its gradient's way home in place of its update."""
    walk = next((at for at, row in enumerate(bundle.rows) if row[0] == Kind.MOMENT), 0) - 1
    if walk < 0:
        return bundle
    kept = [row for row in bundle.rows[:walk] if row[:2] != (Kind.GRADIENT, Op.READ)]
    waited = sum(row[2] for row in bundle.rows[: walk + 1]) - sum(row[2] for row in kept)
    return Bundle(bundle.group, [*kept, (Kind.GRADIENT, Op.UPDATE, waited)], bundle.after_ns)


def _key(visit: RecordedVisit, bundle: Bundle, place: int) -> tuple[int, int, int]:
    return bundle.group, int(visit.phase), place


def _retimed(visit: RecordedVisit, medians: dict[tuple[int, int, int], int]) -> RecordedVisit:
    bundles = []
    for bundle in visit.bundles:
        rows = [
            (kind, op, medians.get(_key(visit, bundle, place), ns))
            for place, (kind, op, ns) in enumerate(bundle.rows)
        ]
        after = medians.get(_key(visit, bundle, len(rows)), bundle.after_ns)
        bundles.append(Bundle(bundle.group, rows, after))
    return RecordedVisit(
        visit.step, visit.micro, visit.phase, visit.ctx, visit.tokens, bundles, visit.begins_pass
    )


def _visits(need: Columns) -> tuple[list[RecordedVisit], int]:
    visits: list[RecordedVisit] = []
    by_group: dict[int, Bundle] = {}
    last: Bundle | None = None
    lead = 0
    seq = None
    columns = [need[n].tolist() for n in ("seq", "step", "micro", "phase", "ctx", "tokens")]
    details = [need[n].tolist() for n in ("group", "kind", "op", "compute_ns")]
    for (number, step, micro, phase, ctx, tokens), (group, kind, op, ns) in zip(
        zip(*columns, strict=True), zip(*details, strict=True), strict=True
    ):
        if number != seq:
            seq = number
            by_group = {}
            visits.append(RecordedVisit(step, micro, Phase(phase), ctx, tokens, []))
        bundle = by_group.get(group)
        if bundle is None:
            bundle = by_group[group] = Bundle(group)
            visits[-1].bundles.append(bundle)
        if bundle is last:
            bundle.rows.append((Kind(kind), Op(op), ns))
        else:
            bundle.rows.append((Kind(kind), Op(op), 0))
            if last is None:
                lead = ns
            else:
                last.after_ns += ns
        last = bundle
    return visits, lead


def _mark_passes(visits: list[RecordedVisit]) -> None:
    """A pass begins where step, micro-step or context change, or the model starts again."""
    key: tuple[int, int, int] | None = None
    first = -1
    for visit in visits:
        now = (visit.step, visit.micro, visit.ctx)
        group = visit.bundles[0].group
        restarts = visit.phase in FORWARD_PHASES and group == first
        if now != key or restarts:
            key, first = now, group
            visit.begins_pass = True


def _sets(pages: Columns) -> list[tuple[int, ...]]:
    members: dict[int, dict[int, int]] = {}
    for set_index, expert, group in zip(
        pages["set"].tolist(), pages["expert"].tolist(), pages["group"].tolist(), strict=True
    ):
        if set_index >= 0:
            members.setdefault(set_index, {})[expert] = group
    return [tuple(members[s][e] for e in sorted(members[s])) for s in sorted(members)]
