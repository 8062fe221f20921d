"""`odc simulate`: policies on a virtual clock, beside what no schedule can beat and the best known.

What counts are the *measured* steps, behind some of warm-up in which recorded orders and popularity
form. At their first moment every page is evicted, off the clock. So all rows of a table and all its
bounds answer the same question: these accesses, from an empty device, with all that was learned.
(Residency at that moment would differ from policy to policy, and with it the bound; over the whole
run, warm-up included, the bound would be held against steps in which nobody knows the order.) What
is still to be written back at the end is nobody's cost.

The link has a bandwidth each way and nothing else: no latency, free moves of frames, as in the
bounds.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from odc.errors import ConfigError
from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Link, PassResult, Workload, simulate
from odc.memory.replay.accesses import Accesses
from odc.memory.replay.best_found import best_found
from odc.memory.replay.bounds import window_bound
from odc.memory.replay.lp import MOST_ACCESSES, fluid_bound
from odc.memory.replay.ratios import budget_for, link_for, managed_bytes, ratio_of
from odc.memory.replay.synthetic import find, synthetic
from odc.train.policies import make_policy
from odc.train.recorded import recorded_bandwidth, recorded_update_rate, unbroken_steps
from profiler.reader import TraceReader

WARM_UP, MEASURED = 4, 6  # steps of a recorded run
SMALL = 7000  # accesses x pages up to which the linear program takes a second: solved unasked


@dataclass(frozen=True)
class Case:
    """A workload, and from which of its steps on it counts.

    Attributes:
        name: Of the workload, or the run's path.
        workload: Warm-up and measured steps.
        first: The first measured step.
        bandwidth: Bytes a second that the run recorded; `None` for a made workload.
        update_rate: Bytes a second of parameters that it updated at home.
    """

    name: str
    workload: Workload
    first: int
    bandwidth: float | None = None
    update_rate: float = math.inf

    @cached_property
    def measured(self) -> Workload:
        """The measured steps alone."""
        return self.workload.part(self.first)

    @cached_property
    def accesses(self) -> Accesses:
        """The same as the bounds take it."""
        return Accesses.from_workload(self.measured)

    @property
    def num_steps(self) -> int:
        return len(self.measured.steps)


def made_case(name: str, *, seed: int, warm_up: int | None, steps: int | None) -> Case:
    """Returns a workload made from its name; its own warm-up and steps where none are given.

    Raises:
        ConfigError: There is no workload of this name.
    """
    chosen = find(name)
    first = chosen.warm_up if warm_up is None else warm_up
    count = chosen.measured if steps is None else steps
    return Case(name, synthetic(name, seed=seed, steps=first + count), first)


def recorded_case(run_dir: Path, *, warm_up: int | None, steps: int | None) -> Case:
    """Returns the last steps of a run that were traced one after the other.

    Raises:
        ConfigError: There are too few of them.
        TraceError: The trace is missing or damaged.
    """
    reader = TraceReader(run_dir)
    traced = unbroken_steps(reader)
    before = WARM_UP if warm_up is None else warm_up
    count = max(min(MEASURED, len(traced) - before), 1) if steps is None else steps
    if len(traced) < before + count:
        raise ConfigError(
            f"{run_dir}: has {len(traced)} steps traced in a row, {before} of warm-up and {count} "
            "measured are asked for; record more with odc profile, or name fewer (--warm-up, "
            "--steps)"
        )
    first = traced[-count]
    wanted = range(first - before, traced[-1] + 1)
    workload = Workload.from_trace(reader.need(wanted), reader.pages)
    try:
        bandwidth = recorded_bandwidth(reader)
    except ConfigError:
        bandwidth = None  # asked for only where no link is named
    return Case(str(run_dir), workload, first, bandwidth, recorded_update_rate(reader))


@dataclass(frozen=True)
class Setting:
    """A budget and a link.

    Attributes:
        budget: C, see `odc.memory.replay.ratios`.
        budget_bytes: In whole frames.
        r: Of the measured steps on this link.
    """

    budget: float
    budget_bytes: int
    r: float
    link: Link


def make_setting(
    case: Case,
    *,
    budget: float | int,
    r: float | None = None,
    bandwidth: float | None = None,
) -> Setting:
    """Returns the setting of a case.

    Args:
        case: C and r are those of its measured steps.
        budget: A share (`float`) or bytes (`int`).
        r: Chooses the link. Without it `bandwidth` does, else what the run recorded.

    Raises:
        ConfigError: There is neither.
        BudgetError: A group does not fit the budget.
    """
    total = managed_bytes(case.workload.table())
    share = budget / total if isinstance(budget, int) else budget
    budget_bytes = budget_for(case.workload, share)
    if r is not None:
        link = replace(link_for(case.measured, r), update_rate=case.update_rate)
        return Setting(share, budget_bytes, r, link)
    chosen = bandwidth or case.bandwidth
    if chosen is None:
        raise ConfigError(f"{case.name}: has no link of its own; name one (--r or --link)")
    link = Link(chosen, latency_ns=0, frame_move_ns=0, update_rate=case.update_rate)
    return Setting(share, budget_bytes, ratio_of(case.measured, chosen), link)


@dataclass(frozen=True)
class Floors:
    """What rows are held against; seconds for all measured steps, `None` where not computed.

    Attributes:
        window_bound_s, lp_bound_s: No schedule is faster.
        best_found_s: A schedule that is this fast exists; it knows the whole future.
        best_found_pass_s: Each measured pass of that schedule.
    """

    window_bound_s: float
    best_found_s: float | None
    best_found_pass_s: list[float] | None
    lp_bound_s: float | None


def find_floors(
    case: Case, setting: Setting, *, moves: int, seed: int, lp: bool | None = None
) -> Floors:
    """Returns the bounds and the best schedule found.

    Args:
        moves: Of the search; 0 leaves it out.
        lp: Whether to solve the linear program; `None`: where it is small.

    Raises:
        OdcError: scipy is missing.
    """
    accesses, link = case.accesses, setting.link
    frames = setting.budget_bytes // FRAME_BYTES
    speed = (link.bandwidth_in, link.bandwidth_out or link.bandwidth_in)
    window = window_bound(accesses, setting.budget_bytes, *speed)
    found = best_found(accesses, frames, *speed, moves=moves, seed=seed) if moves else None
    solves = accesses.num_accesses * accesses.num_pages <= SMALL if lp is None else lp
    solves = solves and accesses.num_accesses <= MOST_ACCESSES
    fluid = fluid_bound(accesses, frames, *speed) if solves else None
    return Floors(
        window.elapsed_s,
        None if found is None else found.elapsed_s,
        None if found is None else found.pass_s,
        None if fluid is None else fluid.elapsed_s,
    )


@dataclass(frozen=True)
class SimRow:
    """A policy under a setting; times in s, all measured steps together.

    Attributes:
        budget, budget_bytes, r, link_bandwidth: The setting.
        steps: Measured ones.
        stall_s: All that is not compute.
        passes: Each measured pass.
    """

    workload: str
    policy: str
    budget: float
    budget_bytes: int
    r: float
    link_bandwidth: float
    steps: int
    compute_s: float
    stall_s: float
    elapsed_s: float
    window_bound_s: float
    best_found_s: float | None
    best_found_pass_s: list[float] | None
    lp_bound_s: float | None
    bytes_in: int
    bytes_out: int
    passes: list[PassResult]

    def as_json(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        return vars(self) | {"passes": [_pass_json(p) for p in self.passes]}


def run_policy(case: Case, setting: Setting, policy: str, floors: Floors) -> SimRow:
    """Returns the row of a policy."""
    eviction, prefetch = make_policy(policy, case.workload)
    result = simulate(
        case.workload,
        budget_bytes=setting.budget_bytes,
        link=setting.link,
        eviction=eviction,
        prefetch=prefetch,
        empty_before=case.first,
    )
    passes = result.after(case.first).passes
    elapsed = sum(p.elapsed_ns for p in passes)
    compute = sum(p.compute_ns for p in passes)
    return SimRow(
        workload=case.name,
        policy=policy,
        budget=setting.budget,
        budget_bytes=setting.budget_bytes,
        r=setting.r,
        link_bandwidth=setting.link.bandwidth_in,
        steps=case.num_steps,
        compute_s=compute / 1e9,
        stall_s=(elapsed - compute) / 1e9,
        elapsed_s=elapsed / 1e9,
        **asdict(floors),
        bytes_in=sum(p.bytes_in for p in passes),
        bytes_out=sum(p.bytes_out for p in passes),
        passes=passes,
    )


@dataclass(frozen=True)
class ContextRow:
    """The passes of one context, means of a pass in s.

    Attributes:
        first_elapsed_s: Of the passes before which another context ran; `None`: there is none.
        best_found_s: Of the same passes in the best schedule found.
    """

    ctx: int
    passes: int
    compute_s: float
    elapsed_s: float
    first_elapsed_s: float | None
    best_found_s: float | None


def by_context(row: SimRow) -> Iterator[ContextRow]:
    """Yields what each context took, contexts in ascending order."""
    best = row.best_found_pass_s
    for ctx in sorted({p.ctx for p in row.passes}):
        own = [(at, p) for at, p in enumerate(row.passes) if p.ctx == ctx]
        firsts = [p.elapsed_ns / 1e9 for _, p in own if p.first]
        yield ContextRow(
            ctx,
            len(own),
            fmean(p.compute_ns / 1e9 for _, p in own),
            fmean(p.elapsed_ns / 1e9 for _, p in own),
            fmean(firsts) if firsts else None,
            fmean(best[at] for at, _ in own) if best is not None else None,
        )


def _pass_json(one: PassResult) -> dict[str, Any]:
    return {
        "step": one.step,
        "micro": one.micro,
        "ctx": one.ctx,
        "tokens": one.tokens,
        "first": one.first,
        "elapsed_s": one.elapsed_ns / 1e9,
        "compute_s": one.compute_ns / 1e9,
        "stall_s": one.stall_ns / 1e9,
        "bytes_in": one.bytes_in,
        "bytes_out": one.bytes_out,
        "misses": one.misses,
    }
