"""The array form of a workload: what the bounds and the offline schedule work on.

Time is cut into *accesses*. Access i begins at a moment s_i at which everything it needs must be
resident, and computes for c_i; between s_i + c_i and s_{i+1} there is nothing but stall. What is
needed is told by *holds*: page p is pinned from the start of access ``first`` to the start of
access ``last`` (or to the end of its computation: ``through``). A hold begins with content that
was there before or creates it, may dirty it, and may be the last before the content dies.
An update at home ends the holds of its group: the parameters on the device are old then. That the
gradient is stored for it, and that the next load waits for it, is left out: bounds stay bounds.

Pins are those of the simulator (``simulate._Simulation``): through a bundle of rows and the
computation behind it, part by part where the optimizer walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from odc.memory.events import Kind, Op
from odc.memory.pages import PageTable
from odc.memory.replay.drive import TRAINING_PHASES
from odc.memory.replay.workload import Bundle, RecordedVisit, Workload

NO_STEP = -1  # computation between steps: an evaluation, a save


@dataclass(frozen=True, slots=True)
class Moving:
    """A transfer that runs at the beginning: its page, and the time until it ends."""

    page: int
    left_ns: int


@dataclass(frozen=True, slots=True)
class Residency:
    """What is on the device before the first access.

    Attributes:
        resident: (num_pages,) bool, a page that is being loaded included.
        dirty: (num_pages,) bool; only resident pages can be dirty, one that is being stored is not.
        known: False for "anything may be there, all of it clean": what a bound on the middle of a
            run has to assume.
        loading, storing: what moves. Bounds take it as done, schedules wait for it.
    """

    resident: np.ndarray
    dirty: np.ndarray
    known: bool = True
    loading: Moving | None = None
    storing: Moving | None = None

    @staticmethod
    def cold(num_pages: int) -> Residency:
        """Nothing is there."""
        return Residency(np.zeros(num_pages, bool), np.zeros(num_pages, bool))

    @staticmethod
    def unknown(num_pages: int) -> Residency:
        """Anything may be there."""
        return replace(Residency.cold(num_pages), known=False)


@dataclass(frozen=True, slots=True)
class Accesses:
    """n accesses and m holds, holds sorted by ``first``.

    Attributes:
        compute_ns: (n,) computation of each access.
        step: (n,) training step, or ``NO_STEP``.
        in_pass: (n,) number of the pass.
        fixed: (n,) False within a visit whose bundles may run in another order than recorded.
        page_bytes, page_frames: (num_pages,) what a transfer moves, what residency takes.
        page: (m,) page of each hold.
        first, last: (m,) accesses at whose start the page must be resident: all from first to last.
        through: (m,) the page stays pinned to the end of the computation of ``last``.
        creates: (m,) the content is made here: frames, no load.
        dirties: (m,) the content is changed.
        dies: (m,) the content is not needed after the hold: frames go back, nothing is stored.
    """

    compute_ns: np.ndarray
    step: np.ndarray
    in_pass: np.ndarray
    fixed: np.ndarray
    page_bytes: np.ndarray
    page_frames: np.ndarray
    page: np.ndarray
    first: np.ndarray
    last: np.ndarray
    through: np.ndarray
    creates: np.ndarray
    dirties: np.ndarray
    dies: np.ndarray

    @staticmethod
    def from_workload(workload: Workload) -> Accesses:
        """Walk through a workload as the simulator does, in recorded order."""
        recorder = _Recorder(workload)
        recorder.run()
        return recorder.finish()

    @property
    def num_accesses(self) -> int:
        return len(self.compute_ns)

    @property
    def num_pages(self) -> int:
        return len(self.page_bytes)

    @property
    def compute_s(self) -> float:
        return float(self.compute_ns.sum()) / 1e9

    def pinned_frames(self) -> np.ndarray:
        """(n,) frames of all pages that must be resident together at the start of each access."""
        change = np.zeros(self.num_accesses + 1, np.int64)
        frames = self.page_frames[self.page]
        np.add.at(change, self.first, frames)
        np.add.at(change, self.last + 1, -frames)
        return np.cumsum(change)[:-1]

    def next_hold(self) -> np.ndarray:
        """(m,) the next hold of the same page, -1 for none."""
        order = np.lexsort((self.first, self.page))
        following = np.full(len(self.page), -1)
        same = self.page[order[1:]] == self.page[order[:-1]]
        following[order[:-1][same]] = order[1:][same]
        return following

    def start_from(self, initial: Residency | None) -> Residency:
        """``initial`` without pages that are overwritten before they are read; None is cold."""
        if initial is None:
            return Residency.cold(self.num_pages)
        pages, firsts = np.unique(self.page, return_index=True)
        live = np.ones(self.num_pages, bool)
        live[pages[self.creates[firsts]]] = False
        moving = [m if m and live[m.page] else None for m in (initial.loading, initial.storing)]
        resident, dirty = initial.resident & live, initial.dirty & live
        return Residency(resident, dirty, initial.known, *moving)

    def part(self, start: int, stop: int) -> Accesses:
        """Accesses ``start`` to ``stop`` (exclusive); holds that reach in or out are cut."""
        inside = (self.first < stop) & (self.last >= start)
        begun = self.first[inside] < start
        goes_on = self.last[inside] >= stop
        cut = {name: getattr(self, name)[start:stop] for name in _PER_ACCESS}
        cut |= {name: getattr(self, name)[inside] for name in _PER_HOLD}
        cut["first"] = np.maximum(cut["first"] - start, 0)
        cut["last"] = np.minimum(cut["last"], stop - 1) - start
        cut["through"] = cut["through"] | goes_on
        cut["creates"] = cut["creates"] & ~begun
        cut["dies"] = cut["dies"] & ~goes_on
        return replace(self, **cut)

    def steps(self, wanted: range) -> Accesses:
        """The accesses of some training steps, with what lies between them."""
        found = np.flatnonzero((self.step >= wanted.start) & (self.step < wanted.stop))
        if not len(found):
            raise ValueError(f"no access belongs to steps {wanted.start} to {wanted.stop - 1}")
        return self.part(int(found[0]), int(found[-1]) + 1)


_PER_ACCESS = ("compute_ns", "step", "in_pass", "fixed")
_PER_HOLD = ("page", "first", "last", "through", "creates", "dirties", "dies")
assert len(_PER_ACCESS) + len(_PER_HOLD) + 2 == len(fields(Accesses))


class _Recorder:
    """Pins and computation of a workload, one access after the other."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.table: PageTable = workload.table()
        self.per_access: dict[str, list[int]] = {name: [] for name in _PER_ACCESS}
        self.per_hold: dict[str, list[int]] = {name: [] for name in _PER_HOLD}
        self.open: dict[int, list[int]] = {}  # page -> [pins, hold]
        self.latest: dict[int, int] = {}  # page -> its last hold
        self.released = False  # pins were given back after computation of the last access
        self.step = NO_STEP
        self.pass_number = -1
        self.fixed = True

    def run(self) -> None:
        visits = self.workload.visits
        ends = {v.step: at for at, v in enumerate(visits) if v.phase in TRAINING_PHASES}
        if visits:
            self.step = visits[0].step if ends.get(visits[0].step, -1) >= 0 else NO_STEP
        self._advance(self.workload.lead_ns)
        in_sets = {g for groups in self.workload.sets for g in groups}
        for at, visit in enumerate(visits):
            self.step = visit.step if at <= ends.get(visit.step, -1) else NO_STEP
            self.pass_number += int(visit.begins_pass or self.pass_number < 0)
            free_order = len(visit.bundles) > 1 and visit.bundles[0].group in in_sets
            self.fixed = True
            if free_order:
                self._begin_access()  # a moment at which nothing of the visit is pinned
                self.fixed = False
            self._visit(visit)

    def _visit(self, visit: RecordedVisit) -> None:
        for bundle in visit.bundles:
            self._bundle(bundle)

    def _bundle(self, bundle: Bundle) -> None:
        group, rows = bundle.group, bundle.rows
        pinned: list[Kind] = []
        at = 0
        while at < len(rows):
            kind, op, compute_ns = rows[at]
            self._advance(compute_ns)
            walks = kind == Kind.PARAMETER and op == Op.WRITE and at + 1 < len(rows)
            if walks and rows[at + 1][0] == Kind.MOMENT:
                self._walk(group)
                at += 2
                continue
            if op == Op.UPDATE:
                for held in pinned:
                    self._release(self.table.of(group, held))
                pinned.clear()
                for left in (Kind.PARAMETER, kind):
                    self._let_die(group, left)
            elif op == Op.DROP:
                self._drop(group, kind, pinned)
            elif kind not in pinned:
                if self.table.groups[group].compact and op == Op.CREATE:
                    op = Op.WRITE
                self._access(self.table.of(group, kind), op)
                pinned.append(kind)
            at += 1
        self._advance(bundle.after_ns)  # before the release, as a hook behind a layer
        for kind in pinned:
            self._release(self.table.of(group, kind))

    def _walk(self, group: int) -> None:
        table = self.table
        for part in range(table.parts(group)):
            pages = [p for k in (0, 2) for p in table.of_part(group, k, part)]
            self._access(pages, Op.WRITE)
            self._release(pages)

    def _drop(self, group: int, kind: Kind, pinned: list[Kind]) -> None:
        if kind in pinned:
            pinned.remove(kind)
            self._release(self.table.of(group, kind))
        if not self.table.groups[group].compact:
            self._let_die(group, kind)

    def _let_die(self, group: int, kind: Kind) -> None:
        for page in self.table.of(group, kind):
            if page in self.latest:
                self.per_hold["dies"][self.latest[page]] = True

    def _begin_access(self) -> int:
        self.released = False
        row = self.per_access
        row["compute_ns"].append(0)
        row["step"].append(self.step)
        row["in_pass"].append(max(self.pass_number, 0))
        row["fixed"].append(self.fixed)
        return len(row["step"]) - 1

    def _advance(self, duration_ns: int) -> None:
        if duration_ns <= 0:
            return
        computed = self.per_access["compute_ns"]
        if not computed or self.released:
            self._begin_access()
        computed[-1] += duration_ns

    def _access(self, pages: Sequence[int], op: Op) -> None:
        at = self._begin_access()
        for page in pages:
            pin = self.open.get(page)
            if pin is not None:
                pin[0] += 1
                hold = pin[1]
            else:
                hold = len(self.per_hold["page"])
                self.open[page] = [1, hold]
                self.latest[page] = hold
                for name in _PER_HOLD:
                    self.per_hold[name].append(0)
                self.per_hold["page"][hold] = page
                self.per_hold["first"][hold] = at
                self.per_hold["creates"][hold] = op == Op.CREATE
            self.per_hold["dirties"][hold] |= op != Op.READ

    def _release(self, pages: Sequence[int]) -> None:
        computed = self.per_access["compute_ns"]
        for page in pages:
            pin = self.open[page]
            pin[0] -= 1
            if pin[0]:
                continue
            del self.open[page]
            self.per_hold["last"][pin[1]] = len(computed) - 1
            through = computed[-1] > 0
            self.per_hold["through"][pin[1]] = through
            self.released |= through

    def finish(self) -> Accesses:
        flags = ("fixed", "through", "creates", "dirties", "dies")
        columns = {
            name: np.array(values, bool if name in flags else np.int64)
            for name, values in (self.per_access | self.per_hold).items()
        }
        pages = self.table.pages
        columns["page_bytes"] = np.array([p.home_bytes for p in pages], np.int64)
        columns["page_frames"] = np.array([p.num_frames for p in pages], np.int64)
        made = _forever(Accesses(**columns), self._always_there())
        following = made.next_hold()
        remade = (following >= 0) & made.creates[following]
        return replace(made, dies=made.dies | remade)

    def _always_there(self) -> np.ndarray:
        """(num_pages,) pages of groups of a few KiB: the pager never lets them go."""
        return np.array([self.table.groups[p.group].pinned for p in self.table.pages], bool)


def _forever(accesses: Accesses, pages: np.ndarray) -> Accesses:
    """One hold from the first use to the end of the run for each of ``pages``."""
    held = pages[accesses.page]
    if not held.any():
        return accesses
    firsts = np.zeros(len(held), bool)
    _, where = np.unique(accesses.page, return_index=True)
    firsts[where] = True
    keep = ~held | firsts
    columns = {name: getattr(accesses, name)[keep].copy() for name in _PER_HOLD}
    long = held[keep]
    columns["last"][long] = accesses.num_accesses - 1
    columns["through"][long] = True
    columns["dies"][long] = False
    columns["dirties"][long] = True
    return replace(accesses, **columns)
