"""One row a step: from `metrics.jsonl`, or from the trace where there is none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiler.analysis import Table

_SIZES = ("bytes_in", "bytes_out", "page_bytes", "peak_page_bytes", "transient_bytes")
_TIMES = ("step_s", "compute_s", "stall_s", "comm_s")
NAMES = ("step", "epoch", "loss", "tokens", "misses", *_TIMES, *_SIZES)


@dataclass(frozen=True)
class Metrics:
    """Columns (N,) f64 by name, in the order of steps; NaN where a value was not recorded.

    Attributes:
        skipped_lines: Lines of the file that could not be read (the last one of a killed run).
    """

    columns: Table
    skipped_lines: int = 0

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def known(self, name: str) -> bool:
        """Whether any step recorded this value."""
        return bool(np.isfinite(self.columns[name]).any())

    def mean(self, name: str) -> float:
        """Return the mean over the steps that recorded it, NaN if none did."""
        return float(np.nanmean(self.columns[name])) if self.known(name) else float("nan")

    def total(self, name: str) -> float:
        """Return the sum over the steps that recorded it."""
        return float(np.nansum(self.columns[name]))

    @property
    def other_s(self) -> np.ndarray:
        """(N,) step time that is neither compute, stall nor communication."""
        known = [np.nan_to_num(self.columns[n]) for n in ("compute_s", "stall_s", "comm_s")]
        rest: np.ndarray = np.maximum(self.columns["step_s"] - sum(known), 0)
        return rest

    def between(self, first: int, last: int) -> Metrics:
        """Return the steps from `first` to `last`."""
        keep = (self.columns["step"] >= first) & (self.columns["step"] <= last)
        return Metrics({name: column[keep] for name, column in self.columns.items()})


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`; the last line of a step counts (a resumed run repeats steps)."""
    rows: dict[int, dict[str, Any]] = {}
    skipped = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            skipped += 1
    ordered = [rows[step] for step in sorted(rows)]
    columns = {name: np.array([_number(row.get(name)) for row in ordered]) for name in NAMES}
    return Metrics(columns, skipped)


def metrics_from_steps(steps: Table) -> Metrics:
    """Return the same columns from `TraceReader.steps()`."""
    order = np.argsort(steps["step"], kind="stable")
    columns: Table = {}
    for name in NAMES:
        source = f"{name[:-2]}_ns" if name in _TIMES else name
        scale = 1e9 if name in _TIMES else 1.0
        known = source in steps
        columns[name] = (
            steps[source][order].astype(np.float64) / scale
            if known
            else np.full(len(order), np.nan)
        )
    return Metrics(columns)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
