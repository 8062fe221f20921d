"""`Profiler`: traces any PyTorch training loop that says where its steps end.

    with Profiler(trace_interval=100) as profiler:
        for batch in loader:
            loss = train_step(batch)
            profiler.step(loss=loss, tokens=batch.numel())

Every step leaves a row; every `trace_interval`-th step (the first one included) also leaves its
collectives and the memory footprint. The result is a run directory that `odc` and the dashboard
read like any other.
"""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from profiler.reader import TraceReader
from profiler.schema import Account
from profiler.segment import write_atomic
from profiler.traffic import comm_matrix
from profiler.writer import TraceWriter

if TYPE_CHECKING:
    from profiler.capture import CommCapture

logger = logging.getLogger("odc.profiler")

METRICS = ("comm_vol", "mem_footprint")
_FLUSH_NS = 5 * 10**9


class Profiler:
    """Records steps, communication volume and memory footprint of a training loop.

    Args:
        trace_interval: Steps from one traced step to the next; 1 traces every step.
        metrics: Any of `"comm_vol"` (collectives) and `"mem_footprint"`.
        run_dir: Where to write; `runs/profile-<timestamp>` by default, the same on all ranks.
        first_step: Number of the first step; a resumed loop goes on counting with it.

    Raises:
        ValueError: If a metric is unknown or the interval is not positive.
    """

    def __init__(
        self,
        trace_interval: int = 100,
        metrics: Sequence[str] = METRICS,
        run_dir: str | Path | None = None,
        *,
        first_step: int = 1,
    ) -> None:
        unknown = sorted(set(metrics) - set(METRICS))
        if unknown:
            raise ValueError(f"metrics must be among {', '.join(METRICS)}, got {unknown}")
        if trace_interval < 1:
            raise ValueError(f"trace_interval must be at least 1, got {trace_interval}")
        self.trace_interval = trace_interval
        self.metrics = tuple(metrics)
        self.rank = 0
        self.world_size = 1
        self._wanted_dir = Path(run_dir) if run_dir is not None else None
        self._run_dir: Path | None = None
        self._first_step = first_step
        self._step = first_step
        self._writer: TraceWriter | None = None
        self._capture: CommCapture | None = None
        self._metrics_file: IO[str] | None = None
        self._step_seconds: list[float] = []

    @property
    def run_dir(self) -> Path:
        """The run directory; known once started."""
        if self._run_dir is None:
            raise RuntimeError("the Profiler has not been started; call start() or use `with`")
        return self._run_dir

    @property
    def running(self) -> bool:
        """Whether steps are being recorded."""
        return self._writer is not None

    def start(self) -> Self:
        """Open the run directory and begin the first step.

        Raises:
            RuntimeError: If it is running, or if ranks cannot agree on a directory.
            TraceError: If the directory cannot be written to.
        """
        if self.running:
            raise RuntimeError("the Profiler is running; call stop() before start()")
        from profiler.capture import CommCapture

        self.rank, self.world_size, self._run_dir = self._place()
        self._writer = TraceWriter(
            self._run_dir / "trace",
            self.rank,
            self.world_size,
            {"trace_interval": self.trace_interval, "metrics": list(self.metrics)},
        )
        if self.rank == 0:
            metrics = self._run_dir / "metrics.jsonl"
            self._metrics_file = open(metrics, "a", encoding="utf-8")  # noqa: SIM115 (stop closes)
        if "comm_vol" in self.metrics:
            self._capture = CommCapture()
            self._capture.start()
        atexit.register(self.stop)
        self._profiler_ns = 0
        self._waited_ns = 0
        self._flushed_ns = self._begun_ns = time.monotonic_ns()
        self._begin_step()
        return self

    def stop(self, status: str = "completed") -> None:
        """End the trace, write `summary.json` and put torch's functions back."""
        if self._writer is None:
            return
        atexit.unregister(self.stop)
        if self._capture is not None:
            self._capture.stop()
            self._write_transfers(self._capture, everything=True)
            self._capture = None
        self._writer.close()
        self._writer = None
        if self._metrics_file is not None:
            self._metrics_file.close()
            self._metrics_file = None
            self._write_summary(status)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop("completed" if kind is None else "failed")

    def step(self, loss: Any = None, tokens: int | None = None) -> None:
        """Mark the end of a training step.

        Args:
            loss: A number, or a tensor of one element (reading it waits for its device).
            tokens: Tokens or samples of the step.
        """
        writer = self._writer
        if writer is None:
            raise RuntimeError("the Profiler is not running; call start() before step()")
        now = time.monotonic_ns()
        step_ns = now - self._begun_ns
        comm_ns = self._waited()
        compute_ns = max(step_ns - comm_ns - self._profiler_ns, 0)
        # A tensor that still has a graph warns when it is converted as it is.
        value = math.nan if loss is None else float(getattr(loss, "detach", lambda: loss)())
        writer.step(
            now, self._step, 0, value, tokens or 0, step_ns, compute_ns, 0, comm_ns,
            self._profiler_ns, 0, 0, 0, 0, 0,
        )  # fmt: skip
        self._write_metrics(value, tokens or 0, step_ns, compute_ns, comm_ns)
        self._step_seconds.append(step_ns / 1e9)
        if self._capture is not None:
            self._write_transfers(self._capture)
        if self._traced and "mem_footprint" in self.metrics:
            self._write_memory(writer)
        if self._traced or now - self._flushed_ns > _FLUSH_NS:
            writer.flush()
            self._flushed_ns = now
        self._step += 1
        self._begun_ns = now
        self._begin_step()
        self._profiler_ns = time.monotonic_ns() - now

    @property
    def comm_matrix(self) -> np.ndarray:
        """(world_size, world_size) i64 bytes sent from rank (row) to rank (column) so far.

        Collectives are spread over a ring (see `profiler.traffic`); only traced steps count. Ranks
        whose folders this process cannot see have empty rows.
        """
        if self._writer is not None:
            self._writer.flush()
        reader = TraceReader(self.run_dir)
        groups = reader.process_groups
        return comm_matrix(reader.comm(), self.world_size, process_groups=groups).dense()

    def visualize(
        self, show: bool = True, path: str | Path | None = None, block: bool | None = None
    ) -> str | None:
        """Show the run in the dashboard.

        While the profiler runs, training goes on beside the server. After it has stopped, the
        server keeps a script alive until Ctrl-C; a notebook or an interactive session goes on.

        Args:
            show: Start a local server and print its address.
            path: Also write a report that needs no server to this file.
            block: Whether to stay in the call while the server runs; None decides as above.

        Returns:
            The address, or the report's path if there is no server; None outside rank 0.
        """
        run_dir = self.run_dir
        if self.rank != 0:
            logger.info("rank %d: visualize() does its work on rank 0 only", self.rank)
            return None
        if self._writer is not None:
            self._writer.flush()
        shown: str | None = None
        if path is not None:
            from dashboard.report import write_report

            write_report(run_dir, path)
            shown = str(path)
        if show:
            from dashboard.app import serve

            if block is None:
                block = not self.running and not _interactive()
            shown = str(serve(run_dir, block=block))
            if not block:  # a server that blocks has said so itself
                print(f"odc dashboard: {shown}")
        return shown

    # Details.

    def _place(self) -> tuple[int, int, Path]:
        """Return rank, world size and run directory."""
        from profiler.capture import agree_on, world

        known = world()
        environment = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        rank, world_size = known or environment
        if self._wanted_dir is not None:
            return rank, world_size, self._wanted_dir
        if known is None and world_size > 1:
            raise RuntimeError(
                "the ranks of a distributed run must write to one directory; start the Profiler "
                "after torch.distributed.init_process_group, or give run_dir"
            )
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name, number = f"profile-{stamp}", 1
        while (Path("runs") / name).exists():
            number += 1
            name = f"profile-{stamp}-{number}"
        return rank, world_size, Path("runs") / agree_on(name)

    def _begin_step(self) -> None:
        self._traced = (self._step - self._first_step) % self.trace_interval == 0
        if self._capture is not None:
            self._capture.step = self._step
            self._capture.recording = self._traced

    def _waited(self) -> int:
        """Return the host time spent waiting for collectives since the last call."""
        total = self._capture.wait_ns if self._capture is not None else 0
        waited, self._waited_ns = total - self._waited_ns, total
        return waited

    def _write_transfers(self, capture: CommCapture, everything: bool = False) -> None:
        writer = self._writer
        assert writer is not None, "transfers are written while running"
        for t in capture.drain(everything):
            writer.comm(
                t.t_ns, t.step, t.seq, t.op, t.src, t.dst, t.pg, -1, t.num_bytes, t.dur_ns,
                t.wait_ns,
            )  # fmt: skip
        if capture.process_groups != writer.manifest.get("process_groups", {}):
            writer.update_manifest({"process_groups": capture.process_groups})

    def _write_memory(self, writer: TraceWriter) -> None:
        from profiler.capture import sample_memory

        for found in sample_memory():
            writer.mem(
                time.monotonic_ns(), self._step, found.tier, Account.PROCESS, found.allocated,
                found.peak,
            )  # fmt: skip

    def _write_metrics(
        self, loss: float, tokens: int, step_ns: int, compute_ns: int, comm_ns: int
    ) -> None:
        if self._metrics_file is None or self._metrics_file.closed:
            return
        line = {
            "step": self._step,
            "epoch": 0,
            "loss": loss if math.isfinite(loss) else None,
            "tokens": tokens,
            "step_s": step_ns / 1e9,
            "compute_s": compute_ns / 1e9,
            "stall_s": 0.0,
            "comm_s": comm_ns / 1e9,
            "bytes_in": 0,
            "bytes_out": 0,
            "page_bytes": 0,
            "peak_page_bytes": 0,
            "transient_bytes": 0,
        }
        try:
            self._metrics_file.write(json.dumps(line) + "\n")
            self._metrics_file.flush()
        except OSError as error:
            logger.warning("%s: metrics.jsonl ends here: %s", self._run_dir, error)
            self._metrics_file.close()

    def _write_summary(self, status: str) -> None:
        seconds = self._step_seconds
        summary = {
            "status": status,
            "steps": len(seconds),
            "total_s": sum(seconds),
            "median_step_s": statistics.median(seconds) if seconds else None,
            "machine": {
                "platform": platform.platform(),
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
            },
        }
        try:
            write_atomic(self.run_dir / "summary.json", json.dumps(summary, indent=1).encode())
        except OSError as error:
            logger.warning("%s: summary.json was not written: %s", self._run_dir, error)


def _interactive() -> bool:
    """Whether a person is at a prompt, or a notebook runs this."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
