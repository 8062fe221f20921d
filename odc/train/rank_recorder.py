"""Records one rank of a run: its steps, its collectives, its gathered memory.

Every rank writes a folder of its own, `trace/rank00001`; the manifest is rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from odc.fsdp.comm import GroupComm
from odc.fsdp.sharded_runtime import ShardedRuntime
from odc.memory.events import Tier
from odc.train.checkpoint import Identity
from odc.train.config import Config
from odc.train.ranks import Ranks
from odc.train.recorder import StepRecorder, common_facts, model_facts
from profiler.capture import sample_memory
from profiler.schema import Account, CommOp
from profiler.writer import TraceWriter

POLICY = "sharded"


@dataclass(frozen=True)
class Moved:
    """What collectives came to since it was asked last.

    Attributes:
        wait_ns: Time that this rank stood still.
        sent_bytes: Payload that it sent.
    """

    wait_ns: int
    sent_bytes: int


class RankRecorder(StepRecorder):
    """Turns the observer of the collectives on and off, step by step.

    Args:
        trace_dir: `RUN/trace`; a trace that is there already is continued.
        config: Section `profiler` is read.
        shards: The model's groups.
        comm: Their collectives.
        identity: Of model and corpus.
        ranks: All of them make one.

    Raises:
        TraceError: The folder cannot be written, or holds a trace of another version.
    """

    def __init__(
        self,
        trace_dir: Path,
        config: Config,
        shards: ShardedRuntime,
        comm: GroupComm,
        identity: Identity,
        ranks: Ranks,
    ) -> None:
        self._shards, self._comm, self._ranks = shards, comm, ranks
        self._observes = "comm_vol" in config.profiler.metrics
        self._step = self._seq = 0
        self._before = Moved(0, 0)
        facts = rank_facts(config, shards, identity, ranks)
        super().__init__(_open_writer(trace_dir, ranks, facts), config)

    def _trace(self, step: int, traced: bool) -> None:
        self._step = step
        observer = self._observe if traced and self._observes else None
        self._comm.options = replace(self._comm.options, observer=observer)

    def _observe(
        self, op: str, pg: int, num_bytes: int, group: int, dur_ns: int, wait_ns: int
    ) -> None:
        begun = time.monotonic_ns() - dur_ns
        code = CommOp[op.upper()]
        self._writer.comm(
            begun, self._step, self._seq, code, self._ranks.rank, -1, pg, group, num_bytes, dur_ns,
            wait_ns,
        )  # fmt: skip
        self._seq += 1

    def take(self) -> Moved:
        """What was waited for and sent since the last call."""
        counts = self._comm.counters.values()
        now = Moved(
            int(sum(count.wait_seconds for count in counts) * 1e9),
            sum(count.sent_bytes for count in counts),
        )
        before, self._before = self._before, now
        return Moved(now.wait_ns - before.wait_ns, now.sent_bytes - before.sent_bytes)

    def write_memory(self) -> None:
        """Writes what is gathered and what the process takes, and peaks since the last call."""
        pool = self._shards.pool
        if self._memory and self._traced:
            self._sink.mem(
                time.monotonic_ns(), self._step, Tier.DEVICE, Account.GATHERED, pool.taken_bytes,
                pool.peak_bytes,
            )  # fmt: skip
            for found in sample_memory():
                self._sink.mem(
                    time.monotonic_ns(), self._step, found.tier, Account.PROCESS, found.allocated,
                    found.peak,
                )  # fmt: skip
        pool.peak_bytes = pool.taken_bytes

    def end(self) -> None:
        """Ends this rank's trace, whatever the others do."""
        super().close()

    def close(self) -> None:
        """Ends the trace of all ranks; rank 0's manifest names the files of all."""
        if self._writer.closed:
            return
        found = self._ranks.together(self._end)
        if self._ranks.is_root:
            for segments, dropped in found[1:]:
                self._writer.adopt(segments, dropped)

    def _end(self) -> tuple[list[dict[str, Any]], int]:
        self.end()
        return self._writer.manifest["segments"], self._writer.dropped_events


def _open_writer(trace_dir: Path, ranks: Ranks, facts: dict[str, Any]) -> TraceWriter:
    """The ranks' folders bear the name of one run, which rank 0 gives."""
    made: list[TraceWriter] = []

    def opening(known: dict[str, Any]) -> Callable[[], str]:
        def act() -> str:
            writer = TraceWriter(
                trace_dir, ranks.rank, ranks.size, known, keeps_manifest=ranks.is_root
            )
            made.append(writer)
            return str(writer.manifest["run_id"])

        return act

    run_id = ranks.on_root(opening(facts))
    if not ranks.is_root:
        facts = {**facts, "run_id": run_id}
    ranks.together(lambda: None if ranks.is_root else opening(facts)())
    return made[0]


def rank_facts(
    config: Config, shards: ShardedRuntime, identity: Identity, ranks: Ranks
) -> dict[str, Any]:
    """Returns what the trace's manifest says about the run."""
    model = model_facts(shards.model, identity)
    root = {type(shards.model).__name__: model["class"].rpartition(".")[2]}
    return common_facts(config, identity) | {
        "model": {
            **model,
            "num_sets": 0,
            "num_parameters": sum(p.numel() for group in shards.groups for p in group.sharded),
            "groups": [root.get(group.name, group.name) for group in shards.groups],
        },
        "memory": {"policy": POLICY},
        "process_groups": {"0": list(range(ranks.size))},
    }
