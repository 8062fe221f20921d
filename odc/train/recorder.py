"""Records a run's trace: when the manager's sink is on, what the files say about themselves."""

import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

import odc
from odc.fsdp.group import num_elements
from odc.fsdp.runtime import Runtime
from odc.memory.events import Account, StepRow, Tier
from odc.memory.manager import MemoryManager
from odc.memory.pages import PageTable
from odc.monitor import TraceSink
from odc.train.checkpoint import Identity
from odc.train.compose import policy_name
from odc.train.config import Config
from profiler.writer import TraceWriter

_FLUSH_NS = 5 * 10**9


class StepRecorder:
    """Records the steps of one process, and in each that is due what `_trace` turns on.

    Args:
        writer: Of the process; `close` closes it.
        config: Section `profiler` is read.
    """

    def __init__(self, writer: TraceWriter, config: Config) -> None:
        self._writer = writer
        self._interval = config.profiler.trace_interval
        self._memory = "mem_footprint" in config.profiler.metrics
        self._sink = TraceSink(writer)
        self._traced = False
        self._flushed_ns = time.monotonic_ns()
        self._profiler_ns = 0

    def _trace(self, step: int, traced: bool) -> None:
        """A step begins, of which all is recorded or the step alone."""

    def begin_step(self, step: int) -> None:
        """A step begins: all of it is recorded if it is one of those to trace."""
        self._traced = step % self._interval == 0
        self._trace(step, self._traced)

    def end_training(self, row: StepRow) -> None:
        """The training of a step is over; an evaluation may follow."""
        row.profiler_ns = self._profiler_ns
        self._sink.step(row)

    def end_step(self, flush: bool = False) -> None:
        """A step and its evaluation are over.

        Args:
            flush: Hand what was recorded to the operating system in any case; the end of a traced
                step does so anyway, others every few seconds.
        """
        start = time.monotonic_ns()
        if flush or self._traced or start - self._flushed_ns > _FLUSH_NS:
            self._writer.flush()
            self._flushed_ns = start
        self._profiler_ns = time.monotonic_ns() - start

    def close(self) -> None:
        """Ends the trace."""
        self._trace(-1, False)
        self._writer.close()


class Recorder(StepRecorder):
    """Turns the manager's sink on and off, step by step.

    Args:
        trace_dir: `RUN/trace`; a trace that is there already is continued.
        config: Sections `profiler` and `memory` are read.
        runtime: The model's runtime.
        identity: Of model and corpus.

    Raises:
        TraceError: The folder cannot be written, or holds a trace of another version.
    """

    def __init__(
        self, trace_dir: Path, config: Config, runtime: Runtime, identity: Identity
    ) -> None:
        self._manager = runtime.manager
        writer = TraceWriter(trace_dir, manifest=trace_facts(config, runtime, identity))
        writer.write_pages(page_rows(self._manager.table))
        super().__init__(writer, config)

    def _trace(self, step: int, traced: bool) -> None:
        if step >= 0:
            self._manager.step = step
        self._manager.set_sink(self._sink if traced else None)

    def write_memory(self) -> None:
        """Writes the accounts; before the manager's counters are taken, which forget the peak."""
        if self._memory:
            self._manager.write_memory()

    def end_training(self, row: StepRow) -> None:
        """The training of a step is over; an evaluation may follow."""
        if self._memory and self._traced:
            # Activations have an account of their own.
            rest = max(row.transient_bytes - self._manager.ledger.activations.peak_bytes, 0)
            self._sink.mem(row.t_ns, row.step, Tier.DEVICE, Account.TRANSIENTS, rest, rest)
        super().end_training(row)


def page_rows(table: PageTable) -> Iterator[dict[str, Any]]:
    """Yields the rows of `pages.arrow`."""
    for page in table.pages:
        group = table.groups[page.group]
        yield {
            "page": page.page,
            "group": page.group,
            "kind": int(page.kind),
            "slot": page.slot,
            "part": page.part,
            "bytes": page.num_bytes,
            "module_path": group.name,
            "layer": group.layer,
            "expert": group.expert,
            "set": group.set_index,
            "home_bytes": page.home_bytes,
        }


def trace_facts(config: Config, runtime: Runtime, identity: Identity) -> dict[str, Any]:
    """Returns what the trace's manifest says about the run."""
    manager: MemoryManager = runtime.manager
    assert manager.pool is not None, "the manager is sealed"
    return common_facts(config, identity) | {
        "model": {
            **model_facts(runtime.model, identity),
            "num_sets": len(manager.stations.sets),
            "num_parameters": num_elements(runtime.groups),
        },
        "memory": {
            "total_mem": config.memory.total_mem,
            "page_budget": manager.pool.num_bytes,
            "home": config.memory.home,
            "host_mem": config.memory.host_mem,
            "link_bandwidth": config.memory.link_bandwidth,
            "page_size": manager.table.page_size,
            "policy": policy_name(config.memory),
        },
    }


def common_facts(config: Config, identity: Identity) -> dict[str, Any]:
    """Returns the facts that do not depend on where the model lies."""
    return {
        "trace_interval": config.profiler.trace_interval,
        "metrics": list(config.profiler.metrics),
        "data": {"corpus_hash": identity.corpus_hash},
        "versions": {
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "torch": str(torch.__version__),
            "odc": odc.__version__,
        },
    }


def model_facts(model: torch.nn.Module, identity: Identity) -> dict[str, Any]:
    """Returns a model's class and structure."""
    original = type(model).__mro__[2]  # behind the paged or sharded class and its mixin
    return {
        "class": f"{original.__module__}.{original.__qualname__}",
        "structure_hash": identity.structure_hash,
    }
