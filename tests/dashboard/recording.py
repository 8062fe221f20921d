"""Makes a realistic run without training: an LRU cache of pages driven by a small MoE's accesses.

The run is what `odc train` would leave: config.yaml, metrics.jsonl, summary.json and a trace with
accesses, loads, prefetches, write-backs, evictions and stalls that fit each other. Its clock is
simulated, so two runs of one seed are equal.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from profiler.schema import Account, Act, CommOp, Kind, Op, Phase, Tier, policy_code
from profiler.writer import TraceWriter

MIB = 1 << 20
LINK = 2e9  # bytes a second each way


@dataclass
class Recording:
    """What to record; `ranks` > 1 adds collectives."""

    steps: int = 6
    layers: int = 2
    experts: int = 4
    top: int = 2
    budget: int = 40 * MIB
    expert_bytes: int = 2 * MIB
    evict: str = "lru"
    prefetch: str = "none"
    hit_rate: float = 0.0  # share of loads that the prefetcher foresees
    ranks: int = 1
    seed: int = 0
    close: bool = True
    trace_interval: int = 1
    status: str = "completed"
    corpus: str = "3f6a9c0d7be24411aa0c"

    def write(self, path: Path) -> Path:
        """Write the run directory and return it."""
        path.mkdir(parents=True, exist_ok=True)
        policy = f"{self.evict}+{self.prefetch}"
        memory = {"page_budget": self.budget, "policy": policy, "home": "host"}
        (path / "config.yaml").write_text(
            yaml.safe_dump({"memory": {"page_budget": self.budget, "evict_strategy": self.evict}})
        )
        manifest = {
            "memory": memory,
            "trace_interval": self.trace_interval,
            "data": {"corpus_hash": self.corpus},
            "metrics": ["comm_vol", "mem_footprint"],
        }
        rows = []
        for rank in range(self.ranks):
            writer = TraceWriter(path / "trace", rank, self.ranks, manifest)
            if rank:
                _write_collectives(writer, self)
            else:
                rows = _Machine(self, writer).run()
            if self.close:
                writer.close()
            else:
                writer.flush()
        lines = [json.dumps(row) for row in rows]
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        if self.status:
            summary = {"status": self.status, "steps": self.steps, "corpus_hash": self.corpus}
            (path / "summary.json").write_text(json.dumps(summary))
        return path


def _write_collectives(writer: TraceWriter, recording: Recording, t_ns: int = 10**9) -> None:
    for step in range(1, recording.steps + 1):
        for group in range(recording.layers):
            size = 4 * MIB * (group + 1)
            for op in (CommOp.ALL_GATHER, CommOp.REDUCE_SCATTER):
                t_ns += 1_000_000
                writer.comm(t_ns, step, 0, op, writer.rank, -1, 0, group, size, 900_000, 100_000)
        writer.comm(t_ns, step, 0, CommOp.ALL_REDUCE, writer.rank, -1, 0, -1, 4096, 50_000, 0)


@dataclass
class _Machine:
    """The simulated device: pages, their order of use, a clock."""

    recording: Recording
    writer: TraceWriter
    t_ns: int = 1_000_000_000
    seq: int = 0
    step_number: int = 1
    pages: list[dict] = field(default_factory=list)
    of: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    resident: OrderedDict[int, bool] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        r = self.recording
        self.rng = np.random.default_rng(r.seed)
        self.policy = policy_code(r.evict, r.prefetch)
        self.held = self.peak = self.bytes_in = self.bytes_out = self.stall = 0
        self.born: set[int] = set()
        self.groups: list[tuple[str, int, int]] = [("embed_tokens", -1, -1)]
        for layer in range(r.layers):
            self.groups.append((f"layers.{layer}.attention", layer, -1))
            self.groups += [
                (f"layers.{layer}.moe.experts.{expert}", layer, expert)
                for expert in range(r.experts)
            ]
        self.groups.append(("lm_head", -1, -1))
        for group, (name, layer, expert) in enumerate(self.groups):
            self._add_group(group, name, layer, expert)
        self.writer.write_pages(self.pages)
        # Popular experts, another order in every layer, drifting slowly.
        self.taste = self.rng.gumbel(size=(r.layers, r.experts)) * 1.2

    def _add_group(self, group: int, name: str, layer: int, expert: int) -> None:
        size = self.recording.expert_bytes * (2 if expert < 0 else 1)
        for kind, slots in ((Kind.PARAMETER, 1), (Kind.GRADIENT, 1), (Kind.MOMENT, 2)):
            for slot in range(slots):
                page = len(self.pages)
                self.of.setdefault((group, kind), []).append(page)
                self.pages.append(
                    {"page": page, "group": group, "kind": int(kind), "slot": slot, "part": 0,
                     "bytes": size, "module_path": name, "layer": layer, "expert": expert,
                     "set": layer if expert >= 0 else -1}
                )  # fmt: skip

    def run(self) -> list[dict]:
        return [self._step(step) for step in range(1, self.recording.steps + 1)]

    def _step(self, step: int) -> dict:
        r = self.recording
        begin, self.stall, self.bytes_in, self.bytes_out, self.peak = self.t_ns, 0, 0, 0, 0
        self.traced = (step - 1) % r.trace_interval == 0
        self.taste += 0.1 * self.rng.gumbel(size=self.taste.shape)
        tape: list[list[int]] = [[0]]
        for layer in range(r.layers):
            first = 1 + layer * (r.experts + 1)
            scores = self.taste[layer] + self.rng.gumbel(size=r.experts)
            chosen = np.sort(np.argsort(-scores)[: max(r.top, int(r.experts * 0.6))])
            tape += [[first], [first + 1 + int(expert) for expert in chosen]]
        tape.append([len(self.groups) - 1])
        for station in tape:
            self._need(step, Phase.FORWARD, station, Kind.PARAMETER, Op.READ, 400_000)
        for station in reversed(tape):
            self._need(step, Phase.BACKWARD, station, Kind.PARAMETER, Op.READ, 300_000)
            for group in station:
                self._need(step, Phase.BACKWARD, [group], Kind.GRADIENT, Op.CREATE, 200_000)
                self._need(step, Phase.OPTIMIZER, [group], Kind.MOMENT, Op.WRITE, 80_000)
                self._need(step, Phase.OPTIMIZER, [group], Kind.PARAMETER, Op.WRITE, 20_000)
                self._need(step, Phase.OPTIMIZER, [group], Kind.GRADIENT, Op.DROP, 1_000)
        return self._finish(step, begin)

    def _need(
        self, step: int, phase: Phase, station: list[int], kind: Kind, op: Op, compute_ns: int
    ) -> None:
        self.seq += 1
        for group in station:
            if self.traced:
                self.writer.need(
                    self.seq, self.t_ns, step, 0, phase, 0, group, kind, op, compute_ns, 64
                )
            for page in self.of[group, kind]:
                if op == Op.DROP:
                    self._forget(page)
                else:
                    self._bring(page, op)
            self.t_ns += compute_ns

    def _bring(self, page: int, op: Op) -> None:
        size = self.pages[page]["bytes"]
        if page not in self.resident:
            while self.held + size > self.recording.budget:
                self._evict()
            self.held += size
            self.resident[page] = False
            if op != Op.CREATE:
                self._load(page, size)
        self.resident.move_to_end(page)
        self.resident[page] |= op != Op.READ
        self.peak = max(self.peak, self.held)
        if self.seq % 3 == 0 and self.traced:
            self._account(Account.PAGES, self.held)

    def _load(self, page: int, size: int) -> None:
        duration = int(size / LINK * 1e9)
        self.bytes_in += size
        if self.rng.random() < self.recording.hit_rate:
            self._act(self.t_ns, -1, page, Act.PREFETCH, size, duration)
            return
        self._act(self.t_ns, self.seq, page, Act.LOAD, size, duration)
        self._act(self.t_ns, self.seq, page, Act.STALL, 0, 0, duration)
        self.t_ns += duration
        self.stall += duration

    def _evict(self) -> None:
        page, dirty = self.resident.popitem(last=False)
        size = self.pages[page]["bytes"]
        self.held -= size
        if dirty:
            self.bytes_out += size
            self._act(self.t_ns, -1, page, Act.WRITE_BACK, size, int(size / LINK * 1e9), out=True)
        self._act(self.t_ns, -1, page, Act.EVICT, 0, 0, out=True)

    def _forget(self, page: int) -> None:
        if self.resident.pop(page, None) is not None:
            self.held -= self.pages[page]["bytes"]
            if self.traced:
                self.writer.action(
                    self.t_ns, -1, page, Act.DROP, Tier.DEVICE, Tier.DEVICE, 0, 0, 0, self.policy
                )

    def _act(
        self, t_ns: int, seq: int, page: int, act: Act, size: int, dur: int, wait: int = 0,
        *, out: bool = False,
    ) -> None:  # fmt: skip
        ends = (Tier.DEVICE, Tier.HOST) if out else (Tier.HOST, Tier.DEVICE)
        if self.traced:
            self.writer.action(t_ns, seq, page, act, *ends, size, dur, wait, self.policy)

    def _account(self, account: Account, allocated: int) -> None:
        peak = self.peak if account == Account.PAGES else allocated
        self.writer.mem(self.t_ns, self.step_number, Tier.DEVICE, account, allocated, peak)

    def _finish(self, step: int, begin: int) -> dict:
        transient = 3 * MIB + int(self.rng.integers(MIB))
        self._account(Account.TRANSIENTS, transient)
        self.step_number = step + 1
        spent = self.t_ns - begin
        loss = 5.5 * float(np.exp(-step / 80)) + 2.6 + 0.05 * float(np.sin(step * 1.7))
        self.writer.step(
            self.t_ns, step, 0, loss, 512, spent, spent - self.stall, self.stall, 0, 0,
            self.bytes_in, self.bytes_out, self.held, self.peak, transient,
        )  # fmt: skip
        if self.recording.ranks > 1 and step == self.recording.steps:
            _write_collectives(self.writer, self.recording)
        self.writer.flush()
        return {
            "step": step, "epoch": 0, "loss": loss, "tokens": 512, "step_s": spent / 1e9,
            "compute_s": (spent - self.stall) / 1e9, "stall_s": self.stall / 1e9,
            "bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "page_bytes": self.held,
            "peak_page_bytes": self.peak, "transient_bytes": transient,
        }  # fmt: skip
