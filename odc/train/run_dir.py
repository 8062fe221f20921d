"""A run's folder: what lies in it, and the two files that the trainer writes itself.

RUN/config.yaml      resolved configuration
RUN/metrics.jsonl    one line a step, each step once, written as it ends
RUN/summary.json     status, totals and medians, machine; replaced whole
RUN/trace/, RUN/checkpoints/
RUN/adapter/         the adapter when the run ended, if one was trained, in peft's format
"""

import datetime
import fcntl
import json
import math
import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from odc.errors import ConfigError, OdcError
from odc.train.files import atomic_path

METRIC_KEYS = (
    "step",
    "epoch",
    "loss",
    "tokens",
    "step_s",
    "compute_s",
    "stall_s",
    "bytes_in",
    "bytes_out",
    "page_bytes",
    "peak_page_bytes",
    "transient_bytes",
    "activation_bytes",
    "activation_bytes_in",
    "activation_bytes_out",
)
_TOTALS = (
    "tokens",
    "step_s",
    "compute_s",
    "stall_s",
    "comm_s",
    "sent_bytes",
    "bytes_in",
    "bytes_out",
    "activation_bytes_in",
    "activation_bytes_out",
    "misses",
)
_MEDIANS = ("step_s", "compute_s", "stall_s", "bytes_in", "bytes_out", "misses")


class RunWriteError(OdcError, RuntimeError):
    """A file of the run could not be written."""


class RunDir:
    """The files of one run.

    Args:
        path: The run's folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.trace = path / "trace"
        self.checkpoints = path / "checkpoints"
        self.adapter = path / "adapter"
        self._metrics_file: IO[str] | None = None
        self._lock: int | None = None  # the folder, held open and locked

    def check_unused(self) -> None:
        """Refuses a folder that holds something already.

        Raises:
            ConfigError: It does; or its name belongs to a file.
        """
        if self.path.is_file():
            raise ConfigError(f"run directory {self.path}: is a file; name a folder")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(
                f"run directory {self.path}: is not empty; name another one (--run-dir), or go on "
                "with the run in it (--resume)"
            )

    def open(self, first_step: int) -> None:
        """Makes the folder and opens `metrics.jsonl`, without lines of `first_step` and later.

        Raises:
            ConfigError: The folder cannot be written, or another process writes to it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            kept = [line for line in self.read_metrics() if line["step"] < first_step]
            with atomic_path(self.metrics) as temporary:
                temporary.write_text("".join(_line(m) for m in kept), encoding="utf-8")
            self._metrics_file = open(self.metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path}: cannot be written ({error.strerror}); "
                "name another one (--run-dir)"
            ) from error

    def _take_lock(self) -> None:
        """One process writes to a run; the kernel lets go of the lock however that one ends."""
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"run directory {self.path}: another process is training in it; name another one "
                "(--run-dir)"
            ) from None

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Writes the line of a finished step.

        Raises:
            RunWriteError: The disk is full or gone.
        """
        assert self._metrics_file is not None, "open comes first"
        try:
            self._metrics_file.write(_line(metrics))
            self._metrics_file.flush()
        except OSError as error:
            raise RunWriteError(f"{self.metrics}: cannot be written: {error.strerror}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the finished steps; a line that a killed run left half-written is left out."""
        if not self.metrics.is_file():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                metrics = json.loads(line)
            except ValueError:
                continue
            if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
                found.append(metrics)
        return found

    def write_summary(self, status: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces `summary.json` by totals over `metrics.jsonl` and `facts`; returns its content.

        Raises:
            RunWriteError: The disk is full or gone.
        """
        summary = {"status": status, **summarize(self.read_metrics()), **facts}
        try:
            with atomic_path(self.summary) as temporary:
                temporary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunWriteError(f"{self.summary}: cannot be written: {error.strerror}") from error
        return summary

    def close(self) -> None:
        """Closes `metrics.jsonl` and lets go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._metrics_file is not None:
            self._metrics_file.close()
            self._metrics_file = None


def default_run_dir(config_name: str, root: Path = Path("runs")) -> Path:
    """Returns `runs/<config>-<timestamp>`, a folder that does not exist yet."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = root / f"{config_name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = root / f"{config_name}-{stamp}-{number}"
    return path


def newest_run_dir(config_name: str, root: Path = Path("runs")) -> Path:
    """Returns the newest run of a configuration under its default name.

    Raises:
        ConfigError: There is none.
    """
    found = [p for p in root.glob(f"{config_name}-*") if (p / "config.yaml").is_file()]
    if not found:
        raise ConfigError(
            f"--resume: {root} holds no run of {config_name}; name the run with --run-dir"
        )
    return max(found, key=lambda path: (path / "config.yaml").stat().st_mtime_ns)


def resume_command(path: Path, ranks: int = 1) -> str:
    """Returns the command that goes on with a run; its `config.yaml` says the rest."""
    command = "odc" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m odc"
    return f"{command} train --run-dir {shlex.quote(str(path))} --resume"


def summarize(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns totals and medians over the lines of `metrics.jsonl`."""
    evaluated = [m["eval_loss"] for m in metrics if "eval_loss" in m]
    return {
        "steps": metrics[-1]["step"] + 1 if metrics else 0,
        "recorded_steps": len(metrics),
        "final_loss": metrics[-1]["loss"] if metrics else None,
        "final_eval_loss": evaluated[-1] if evaluated else None,
        "totals": {key: sum(m.get(key) or 0 for m in metrics) for key in _TOTALS},
        "medians": {
            key: statistics.median(m.get(key) or 0 for m in metrics) if metrics else None
            for key in _MEDIANS
        },
        "max_peak_page_bytes": max((m.get("peak_page_bytes") or 0 for m in metrics), default=0),
    }


def machine() -> dict[str, Any]:
    """Returns what a reader needs to judge the times of a run."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _line(metrics: Mapping[str, Any]) -> str:
    finite = {k: _json_number(v) for k, v in metrics.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _json_number(value: Any) -> Any:
    """JSON has no NaN; a loss that is none is `null`."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
