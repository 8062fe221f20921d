"""The fluid bound: a linear program in which pages can be there, and move, in part.

Each access has two phases of time: the *stall* before it, whose length is a variable and in which
only what stays pinned from the access before is pinned, and its *computation*, of known length.
(Pinning the pages of an access through its stall would cut off schedules that load one of them
while another waits to leave.) Phases in which nothing can change are left out.

Between two holds of a page its share x on the device is a variable at the end of each phase, and so
is the share y of its content that has been stored since it was last dirtied:

    loads  >= x - x before             sum of page_bytes * loads  <= bandwidth_in  * length
    stores  = y - y before >= 0        sum of page_bytes * stores <= bandwidth_out * length
    x + y  >= 1                        sum of page_frames * x     <= frames not held

and the sum of the stalls is least. Any schedule of whole pages, in slices or not, with any order of
transfers, gives a point of it, so the optimum is a lower bound. The value reported is that of a
dual solution, evaluated here: it is a bound however inexact the solver was.

Albers, Garg and Leonardi (2000) solve the unit-size problem without stores exactly by a linear
program; sizes, dirty, created and dead pages make this one a relaxation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from odc.errors import OdcError
from odc.memory.replay.accesses import Accesses, Residency
from odc.memory.replay.bounds import check_capacity

MOST_ACCESSES = 400


@dataclass(frozen=True, slots=True)
class FluidBound:
    """What no schedule can beat.

    Attributes:
        elapsed_s: least time from the start to the end of the last computation.
        compute_s: the part of it that is computation.
        num_variables, num_rows: size of the program.
    """

    elapsed_s: float
    compute_s: float
    num_variables: int
    num_rows: int

    @property
    def stall_s(self) -> float:
        return self.elapsed_s - self.compute_s


def fluid_bound(
    accesses: Accesses,
    capacity_frames: int,
    bandwidth_in: float,
    bandwidth_out: float,
    half_duplex: bool = False,
    initial: Residency | None = None,
) -> FluidBound:
    """Lower bound on the elapsed time of every schedule, for short runs.

    Args:
        accesses: what is needed, and when; at most 400 accesses.
        capacity_frames: frames for pages.
        bandwidth_in, bandwidth_out: bytes/s each way.
        half_duplex: the two directions share one line.
        initial: what is on the device at the start; nothing where not given.

    Raises:
        OdcError: scipy is missing, the run is too long, or the solver gave up.
        BudgetError: something that is needed at once does not fit.
    """
    if accesses.num_accesses > MOST_ACCESSES:
        raise OdcError(
            f"the linear program is for at most {MOST_ACCESSES} accesses and these are "
            f"{accesses.num_accesses}; use window_bound, or a part of them"
        )
    initial = accesses.start_from(initial)
    check_capacity(accesses, capacity_frames, initial)
    rates = (bandwidth_in, bandwidth_out)
    program = _Program(accesses, capacity_frames, rates, half_duplex, initial)
    stall_s = program.solve()
    size = len(program.cost), len(program.limit)
    return FluidBound(accesses.compute_s + max(stall_s, 0.0), accesses.compute_s, *size)


# A share: a variable, or -1 and a constant.
_Level = tuple[int, float]
_HELD: _Level = (-1, 1.0)
_ABSENT: _Level = (-1, 0.0)
_UNSTORED: _Level = (-1, 0.0)


@dataclass(slots=True)
class _Sum:
    """A sum of variables and a constant."""

    terms: list[tuple[int, float]] = field(default_factory=list)
    constant: float = 0.0

    def add(self, level: _Level, factor: float) -> None:
        variable, constant = level
        if variable >= 0:
            self.terms.append((variable, factor))
        else:
            self.constant += factor * constant


@dataclass(slots=True)
class _Phases:
    """The phases of time, in order.

    Attributes:
        length: of each phase in s; -1 where it is a variable.
        stall_of, compute_of: (n,) phase of each access' stall and computation; -1 for none.
        after: (n + 1,) first phase at or after the start of each access' computation.
    """

    length: list[float] = field(default_factory=list)
    stall_of: list[int] = field(default_factory=list)
    compute_of: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    @staticmethod
    def of(accesses: Accesses) -> _Phases:
        phases = _Phases()
        begins = np.zeros(accesses.num_accesses, bool)
        begins[accesses.first] = True
        for waits, duration_ns in zip(begins, accesses.compute_ns.tolist(), strict=True):
            phases.stall_of.append(phases._add(-1.0) if waits else -1)
            phases.after.append(len(phases.length))
            phases.compute_of.append(phases._add(duration_ns / 1e9) if duration_ns else -1)
        return phases

    def _add(self, length: float) -> int:
        self.length.append(length)
        return len(self.length) - 1


class _Program:
    """Rows ``sum of coefficient * variable <= limit``, and variables within [0, upper]."""

    def __init__(
        self,
        accesses: Accesses,
        capacity_frames: int,
        rates: tuple[float, float],
        half_duplex: bool,
        initial: Residency,
    ) -> None:
        self.accesses = accesses
        self.initial = initial
        self.half_duplex = half_duplex
        self.phases = _Phases.of(accesses)
        # Time in units of the mean time of a load: all coefficients are near 1.
        self.unit = max(float(accesses.page_bytes.mean()) / rates[0], 1e-12)
        self.load_time = (accesses.page_bytes / rates[0] / self.unit).tolist()
        self.store_time = (accesses.page_bytes / rates[1] / self.unit).tolist()
        self.frames = accesses.page_frames.tolist()
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.limit: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        lengths = self.phases.length
        every = sum(self.load_time[p] + self.store_time[p] for p in accesses.page.tolist())
        longest = every + sum(self.store_time)  # a stall in which everything moves, one by one
        self.stall = [self._variable(1.0, longest) if n < 0 else -1 for n in lengths]
        self.loads, self.stores, self.takes = ([_Sum() for _ in lengths] for _ in range(3))
        self._hold_frames()
        self._add_pages(capacity_frames)
        for share in self.takes:
            if share.terms:
                self._row(share.terms, capacity_frames - share.constant)
        self._add_lines()

    def solve(self) -> float:
        """Lower bound on the sum of the stalls in s."""
        try:
            from scipy import sparse
            from scipy.optimize import linprog
        except ImportError as error:
            raise OdcError(
                "the linear program needs scipy, which comes with scikit-learn: "
                "pip install scikit-learn"
            ) from error
        if not self.limit:
            return 0.0
        rows, columns, values = zip(*self.entries, strict=True)
        shape = len(self.limit), len(self.cost)
        matrix = sparse.csr_array((values, (rows, columns)), shape)
        cost, limit, upper = (np.array(v) for v in (self.cost, self.limit, self.upper))
        bounds = np.column_stack([np.zeros(len(upper)), upper])
        # The simplex method crawls where both directions share the rows of one line.
        method = "highs-ipm" if self.half_duplex else "highs-ds"
        found: Any = linprog(cost, A_ub=matrix, b_ub=limit, bounds=bounds, method=method)
        if found.ineqlin is None or found.ineqlin.marginals is None:
            raise OdcError(f"the linear program was not solved: {found.message}")
        # Weak duality: any prices >= 0 give a lower bound.
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        reduced = cost + matrix.T @ prices
        return float((np.minimum(reduced, 0.0) * upper).sum() - prices @ limit) * self.unit

    # -- variables and rows ----------------------------------------------------------------------

    def _variable(self, cost: float = 0.0, upper: float = 1.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def _row(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        row = len(self.limit)
        self.limit.append(limit)
        self.entries += [(row, variable, value) for variable, value in terms]

    def _at_most(self, left: _Level, *right: _Level) -> None:
        """Level ``left`` is at most the sum of the levels ``right``."""
        total = _Sum()
        total.add(left, 1.0)
        for level in right:
            total.add(level, -1.0)
        self._row(total.terms, -total.constant)

    def _hold_frames(self) -> None:
        """Frames of what is pinned at the end of each phase."""
        accesses = self.accesses
        at_start = accesses.pinned_frames()
        given_back = np.zeros(accesses.num_accesses, np.int64)
        ends = ~accesses.through
        np.add.at(given_back, accesses.last[ends], accesses.page_frames[accesses.page[ends]])
        for access, (stall, compute) in enumerate(
            zip(self.phases.stall_of, self.phases.compute_of, strict=True)
        ):
            if stall >= 0:
                self.takes[stall].constant += float(at_start[access])
            if compute >= 0:
                self.takes[compute].constant += float(at_start[access] - given_back[access])

    def _add_lines(self) -> None:
        for phase, length in enumerate(self.phases.length):
            loads, stores = self.loads[phase], self.stores[phase]
            if self.half_duplex:
                both = _Sum(loads.terms + stores.terms, loads.constant + stores.constant)
            for line in (both,) if self.half_duplex else (loads, stores):
                if not line.terms and line.constant <= 0.0:
                    continue
                if length < 0:
                    self._row([*line.terms, (self.stall[phase], -1.0)], -line.constant)
                else:
                    self._row(line.terms, length / self.unit - line.constant)

    # -- pages -----------------------------------------------------------------------------------

    def _add_pages(self, capacity_frames: int) -> None:
        holds: list[list[int]] = [[] for _ in self.frames]
        for hold, page in enumerate(self.accesses.page.tolist()):
            holds[page].append(hold)
        at_start = _Sum()
        for page, own in enumerate(holds):
            before = _HELD if self.initial.resident[page] else _ABSENT
            if not self.initial.known and own:
                before = (self._variable(), 0.0)
                at_start.add(before, self.frames[page])
            dirty = bool(self.initial.resident[page] and self.initial.dirty[page])
            self._add_page(page, own, before, _UNSTORED if dirty else None)
        if at_start.terms:
            self._row(at_start.terms, capacity_frames)

    def _add_page(self, page: int, holds: list[int], there: _Level, stored: _Level | None) -> None:
        """``there``: x at the start; ``stored``: y, or None while home has the content."""
        accesses, phases = self.accesses, self.phases
        start = 0
        for hold in holds:
            arrival = phases.stall_of[accesses.first[hold]]
            last = accesses.last[hold]
            through = accesses.through[hold] and phases.compute_of[last] >= 0
            release = phases.after[last] + int(through)
            if accesses.creates[hold]:
                stored = None
            else:
                stored = self._gap(page, range(start, arrival + 1), there, stored)
            there, start = _HELD, release
            if accesses.dies[hold]:
                there, stored = _ABSENT, None
            elif accesses.dirties[hold]:
                stored = _UNSTORED
            elif stored is not None:
                for phase in range(arrival + 1, release):
                    stored = self._store(page, phase, stored)
        if stored is None:
            return
        for phase in range(start, len(phases.length)):
            stored = self._store(page, phase, stored)
            self.takes[phase].add(stored, -self.frames[page])
            self.takes[phase].constant += self.frames[page]

    def _gap(self, page: int, gap: range, there: _Level, stored: _Level | None) -> _Level | None:
        """From the phase after a release to the stall at whose end the page is needed again."""
        for phase in gap:
            last = phase == gap[-1]
            now = _HELD if last else (self._variable(), 0.0)
            if stored is not None:
                stored = self._store(page, phase, stored)
                self._load(page, phase, there, now)
                if not last:
                    self._at_most(_HELD, now, stored)
            elif phase > gap[0] or there != _HELD:
                # A clean page that goes may as well go at once: from then on x only grows.
                self.loads[phase].add(now, self.load_time[page])
                self.loads[phase].add(there, -self.load_time[page])
                self._at_most(there, now)
            if not last:
                self.takes[phase].add(now, self.frames[page])
            there = now
        return stored

    def _load(self, page: int, phase: int, before: _Level, now: _Level) -> None:
        loaded = (self._variable(), 0.0)
        self._at_most(now, before, loaded)
        self.loads[phase].add(loaded, self.load_time[page])

    def _store(self, page: int, phase: int, before: _Level) -> _Level:
        stored = (self._variable(), 0.0)
        self._at_most(before, stored)
        self.stores[phase].add(stored, self.store_time[page])
        self.stores[phase].add(before, -self.store_time[page])
        return stored
