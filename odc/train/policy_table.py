"""Policies side by side: the held-out steps of a trace, run again under each of them.

Needs are the trace's own, so every policy faces the same computation; the scheduler is the one that
trains, on a virtual clock. Learned models see what they would see in the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc.errors import ConfigError
from odc.memory.events import Act
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import PrefetchFactory
from odc.memory.replay import Link, SimResult, Workload, oracle_factory, simulate
from odc.memory.victims import Belady, CostAware, EvictionPolicy, Lru
from odc.sizes import format_bytes, parse_rate, parse_size
from odc.train.compose import predictor_factory, prefetch_factory
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
    """A comparison of policies on one run."""

    run: str
    budget_bytes: int
    link_bandwidth: float
    first_step: int
    num_steps: int
    rows: list[PolicyRow]

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
    bandwidth = _bandwidth(run_dir, reader, memory, link)
    steps, first = _held_out(run_dir, reader)
    workload = Workload.from_trace(reader.need(), reader.pages, steps)
    rows = []
    for policy, eviction, prefetch in _policies(workload, models):
        result = simulate(
            workload,
            budget_bytes=budget_bytes,
            link=Link(bandwidth),
            eviction=eviction,
            prefetch=prefetch,
        )
        rows.append(_row(policy, result.after(first)))
    return PolicyTable(
        str(run_dir), budget_bytes, bandwidth, first, len(range(first, steps.stop)), rows
    )


def format_table(table: PolicyTable) -> str:
    """Returns the comparison as text, a line for each policy."""
    lines = [
        f"{table.run}: steps {table.first_step} to {table.first_step + table.num_steps - 1}, "
        f"budget {format_bytes(table.budget_bytes)}, link {table.link_bandwidth / 1e9:.2f}GB/s; "
        "means of a step",
        f"{'policy':<24}{'misses':>9}{'bytes in':>11}{'bytes out':>11}"
        f"{'stall s':>10}{'step s':>10}",
    ]
    lines += [
        f"{row.policy:<24}{row.misses:>9.1f}{format_bytes(round(row.bytes_in)):>11}"
        f"{format_bytes(round(row.bytes_out)):>11}{row.stall_s:>10.4f}{row.step_s:>10.4f}"
        for row in table.rows
    ]
    return "\n".join(lines)


def _policies(
    workload: Workload, models: Sequence[Path]
) -> Iterator[tuple[str, EvictionPolicy, PrefetchFactory | None]]:
    yield "lru+none", Lru(), None
    yield "lru+next_k", Lru(), prefetch_factory("next_k")
    yield "lru+replay", Lru(), prefetch_factory("replay")
    yield "cost_aware+popularity", CostAware(), prefetch_factory("popularity")
    for path in models:
        yield f"cost_aware+{_kind(path)}", CostAware(), predictor_factory(path)
    yield "belady+oracle", Belady(), oracle_factory(workload)


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
    traced = np.unique(reader.need(columns=("step",))["step"])
    # Only an unbroken stretch can be run again: take the last one.
    breaks = np.flatnonzero(np.diff(traced) != 1)
    traced = traced[breaks[-1] + 1 :] if len(breaks) else traced
    if len(traced) < 4:
        raise ConfigError(
            f"{run_dir}: has {len(traced)} steps traced in a row, at least 4 are needed; record "
            "a run with odc profile"
        )
    count = max(round(len(traced) * HELD_OUT), 1)
    first = int(traced[-count])
    start = max(int(traced[0]), first - _WARMUP_STEPS)
    return range(start, int(traced[-1]) + 1), first


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


def _bandwidth(
    run_dir: Path, reader: TraceReader, memory: dict[str, Any], link: int | str | None
) -> float:
    """Bytes a second: as named, as the run emulated, or as its loads went."""
    if link is not None:
        return float(parse_rate(link))
    if memory.get("link_bandwidth"):
        return float(memory["link_bandwidth"])
    actions = reader.actions(columns=("act", "bytes", "dur_ns"))
    loads = np.isin(actions["act"], (Act.LOAD, Act.PREFETCH))
    duration = int(actions["dur_ns"][loads].sum())
    if not duration:
        raise ConfigError(f"{run_dir}: has no loads to measure the link by; name it (--link 2GB/s)")
    return float(actions["bytes"][loads].sum()) / duration * 1e9
