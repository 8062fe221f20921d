"""Policies side by side: the held-out steps of a trace, run again under each of them.

Needs are the trace's own, so every policy faces the same computation; the scheduler is the one that
trains, on a virtual clock. Learned models see what they would see in the run. Beside them stands
what the run itself measured over the same steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odc.errors import ConfigError
from odc.memory.auto_eviction import Auto
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import PrefetchFactory
from odc.memory.replay import Link, SimResult, Workload, oracle_factory, simulate
from odc.memory.victims import Belady, CostAware, EvictionPolicy
from odc.sizes import format_bytes, parse_rate, parse_size
from odc.train.compose import predictor_factory
from odc.train.policies import EVICTIONS, PREFETCHES, make_policy
from odc.train.recorded import recorded_bandwidth, recorded_update_rate, unbroken_steps
from odc.train.run_dir import RunDir
from profiler.reader import TraceReader

HELD_OUT = 0.3
# Steps before the held-out ones on which recorded orders and popularity form.
_WARMUP_STEPS = 50


@dataclass(frozen=True)
class PolicyRow:
    """A policy's means over the held-out steps, a step each.

    Attributes:
        policy: `EVICTION+PREFETCH`.
        misses: Loads that compute had to ask for.
        bytes_in: Bytes loaded.
        bytes_out: Bytes written back.
        stall_s: Time that compute waited.
        step_s: Compute and waiting.
    """

    policy: str
    misses: float
    bytes_in: float
    bytes_out: float
    stall_s: float
    step_s: float


@dataclass(frozen=True)
class PolicyTable:
    """A comparison of policies on one run.

    Attributes:
        rows: Simulated, a policy each.
        measured: What the run measured over the same steps, under its own policy, budget and link;
            `None` where it has no `metrics.jsonl`.
        measured_budget_bytes: Bytes for pages that the run had.
    """

    run: str
    budget_bytes: int
    link_bandwidth: float
    first_step: int
    num_steps: int
    rows: list[PolicyRow]
    measured: PolicyRow | None
    measured_budget_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        """Returns the table as JSON values."""
        return asdict(self)


def compare_policies(
    run_dir: Path,
    models: Sequence[Path] = (),
    *,
    budget: int | str | None = None,
    link: int | str | None = None,
) -> PolicyTable:
    """Runs the held-out steps of a run under each policy.

    Args:
        run_dir: A run with a trace of every step (`odc profile`).
        models: Predictor folders; each adds a row.
        budget: Bytes for pages; the run's own where not given.
        link: Bytes a second each way; the run's own, or measured in it, where not given.

    Raises:
        ConfigError: The budget or the link cannot be told, or the trace has too few steps.
        PredictorError: A predictor is damaged or was made for another model.
        TraceError: The trace is missing or damaged.
    """
    reader = TraceReader(run_dir)
    memory = reader.manifest.get("memory", {})
    budget_bytes = _budget(run_dir, reader, memory, budget)
    bandwidth = float(parse_rate(link)) if link is not None else recorded_bandwidth(reader)
    steps, first = _held_out(run_dir, reader)
    workload = Workload.from_trace(reader.need(), reader.pages, steps)
    own = str(memory.get("policy", ""))
    rows = []
    for policy, eviction, prefetch in _policies(workload, models, own):
        result = simulate(
            workload,
            budget_bytes=budget_bytes,
            link=Link(bandwidth, update_rate=recorded_update_rate(reader)),
            eviction=eviction,
            prefetch=prefetch,
        )
        rows.append(_row(policy, result.after(first)))
    return PolicyTable(
        run=str(run_dir),
        budget_bytes=budget_bytes,
        link_bandwidth=bandwidth,
        first_step=first,
        num_steps=len(range(first, steps.stop)),
        rows=rows,
        measured=_measured(run_dir, own, range(first, steps.stop)),
        measured_budget_bytes=memory.get("page_budget"),
    )


def format_table(table: PolicyTable) -> str:
    """Returns the comparison as text: a line for each policy, the measured one beside its like."""
    lines = [
        f"{table.run}: steps {table.first_step} to {table.first_step + table.num_steps - 1}, "
        f"budget {format_bytes(table.budget_bytes)}, link {table.link_bandwidth / 1e9:.2f}GB/s; "
        "means of a step",
        f"{'policy':<34}{'misses':>8}{'bytes in':>10}{'bytes out':>10}{'stall s':>9}{'step s':>9}",
    ]
    measured = table.measured
    for row in table.rows:
        lines.append(_format_row(row, row.policy))
        if measured is not None and measured.policy == row.policy:
            lines.append(_format_row(measured, f"{row.policy} (measured)"))
    if measured is None:
        return "\n".join(lines)
    if all(row.policy != measured.policy for row in table.rows):
        lines.append(_format_row(measured, f"{measured.policy} (measured)"))
    own = table.measured_budget_bytes
    budget = (
        f" with its own budget of {format_bytes(own)}" if own != table.budget_bytes and own else ""
    )
    lines.append(
        f"measured: what the run itself took over these steps{budget}, the scheduler's own time "
        "included;\nall other rows are simulated: computing as recorded, and waiting"
    )
    return "\n".join(lines)


def _format_row(row: PolicyRow, label: str) -> str:
    return (
        f"{label:<34}{row.misses:>8.1f}{format_bytes(round(row.bytes_in)):>10}"
        f"{format_bytes(round(row.bytes_out)):>10}{row.stall_s:>9.4f}{row.step_s:>9.4f}"
    )


def _policies(
    workload: Workload, models: Sequence[Path], own: str
) -> Iterator[tuple[str, EvictionPolicy, PrefetchFactory | None]]:
    names = ["lru+none", "lru+next_k", "lru+replay", "cost_aware+popularity", "cost_aware+markov"]
    eviction, _, prefetch = own.partition("+")
    # So that what was measured has its like, where no model and no future is needed for it.
    if own not in names and eviction in EVICTIONS and prefetch in PREFETCHES:
        names.append(own)
    for name in names:
        yield name, *make_policy(name, workload)
    for path in models:
        yield f"cost_aware+{_kind(path)}", CostAware(), predictor_factory(path)
    yield "auto+auto", *make_policy("auto+auto", workload)
    for path in models:
        yield f"auto+auto({_kind(path)})", Auto(), predictor_factory(path, with_rungs=True)
    yield "belady+oracle", Belady(), oracle_factory(workload)


def _measured(run_dir: Path, policy: str, steps: range) -> PolicyRow | None:
    taken = [m for m in RunDir(run_dir).read_metrics() if m["step"] in steps]
    if not taken:
        return None
    names = ("misses", "bytes_in", "bytes_out", "stall_s", "step_s")
    return PolicyRow(policy, *(sum(m.get(name) or 0 for m in taken) / len(taken) for name in names))


def _kind(path: Path) -> str:
    from predictor import load_predictor

    return load_predictor(path).kind


def _row(policy: str, result: SimResult) -> PolicyRow:
    count = max(len(result.steps), 1)
    return PolicyRow(
        policy=policy,
        misses=sum(result.misses) / count,
        bytes_in=sum(result.bytes_in) / count,
        bytes_out=sum(result.bytes_out) / count,
        stall_s=result.stall_s / count,
        step_s=(result.stall_s + result.compute_s) / count,
    )


def _held_out(run_dir: Path, reader: TraceReader) -> tuple[range, int]:
    """The steps to run, warmup included, and the first of those that count."""
    traced = unbroken_steps(reader)
    if len(traced) < 4:
        raise ConfigError(
            f"{run_dir}: has {len(traced)} steps traced in a row, at least 4 are needed; record "
            "a run with odc profile"
        )
    count = max(round(len(traced) * HELD_OUT), 1)
    first = traced[-count]
    return range(max(traced[0], first - _WARMUP_STEPS), traced[-1] + 1), first


def _budget(
    run_dir: Path, reader: TraceReader, memory: dict[str, Any], budget: int | str | None
) -> int:
    if budget is not None:
        return parse_size(budget)
    own = memory.get("page_budget")
    all_frames = int((-(-reader.pages["bytes"] // FRAME_BYTES)).sum())
    if not isinstance(own, int) or own >= all_frames * FRAME_BYTES:
        raise ConfigError(
            f"{run_dir}: all pages fit the budget that it ran with; name a smaller one (--budget)"
        )
    return own
