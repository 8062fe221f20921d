"""Traces written by hand, with every value known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profiler.reader import TraceReader
from profiler.writer import TraceWriter

WriteSteps = Callable[..., None]


def write_steps(
    writer: TraceWriter, steps: range, *, rows_per_step: int = 7, seq: int = 0, t_ns: int = 1000
) -> None:
    """Write steps whose needs carry `compute_ns` = step * 1000 + row, one flush each."""
    for step in steps:
        for row in range(rows_per_step):
            t_ns += 10
            writer.need(seq, t_ns, step, 0, 0, 0, row, 0, 0, step * 1000 + row, 5)
            writer.action(t_ns + 1, seq, row, 0, 1, 0, 100, 2, 2, 0)
            seq += 1
        writer.mem(t_ns, step, 0, 0, 10, 20)
        writer.step(t_ns, step, 0, 1.0 / (step + 1), 5, 10, 5, 2, 1, 1, 700, 0, 1, 2, 3)
        writer.flush()


@pytest.fixture
def steps_writer() -> WriteSteps:
    return write_steps


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A closed trace of 10 steps with 7 needs each."""
    with TraceWriter(tmp_path / "run" / "trace", manifest={"metrics": ["access"]}) as writer:
        write_steps(writer, range(10))
    return tmp_path / "run"


@pytest.fixture
def need_file(trace: Path) -> Path:
    return trace / "trace" / "rank00000" / "need-000001.arrows"


@pytest.fixture
def read_needs() -> Callable[..., np.ndarray]:
    """Return the `compute_ns` column: the identity of each row of `write_steps`."""

    def read(run: Path, **options: bool) -> np.ndarray:
        return TraceReader(run, **options).need()["compute_ns"]

    return read
