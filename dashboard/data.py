"""What a run directory holds, read once and kept until its files change.

Every property is computed on first use. Damage never raises here: a trace that cannot be read
leaves `trace_error`, a cut or corrupt one leaves `problems` and what could be recovered.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dashboard.catalog import Revision, RunPlace, revision
from dashboard.groups import Groups, make_groups, named_groups
from dashboard.metrics import Metrics, metrics_from_steps, read_metrics
from profiler import TraceError, TraceReader
from profiler.analysis import Intervals, Table, num_rows, residency_intervals
from profiler.layout import empty_pages, read_json
from profiler.schema import ACTIONS, COMM, MEM, NEED, Act, Op, Stream, Tier, policy_name

LIVE_SECONDS = 60.0
FRAME_BYTES = 2 * 1024 * 1024
"""A page takes whole frames on the device, and the budget counts those."""
_NEED_COLUMNS = ("seq", "t_ns", "step", "micro", "phase", "group", "kind", "op", "tokens")


@dataclass(frozen=True)
class Health:
    """How far the recording can be trusted.

    Attributes:
        status: `completed`, `failed`, `running` or `interrupted`, or what the run says of itself.
        events: Events that could be read.
        last_step: Last step with an event, None without any.
        cut: Sentences about files without a clean end.
        corrupt: Sentences about files that were changed.
    """

    status: str
    events: int
    last_step: int | None
    cut: tuple[str, ...]
    corrupt: tuple[str, ...]


class RunData:
    """A run directory.

    Args:
        place: Directory and name.
        run_revision: `catalog.revision` of the moment.
    """

    def __init__(self, place: RunPlace, run_revision: Revision | None = None) -> None:
        self.name = place.name
        self.path = place.path
        self.revision = run_revision or revision(place.path)
        self.summary: dict[str, Any] = read_json(self.path / "summary.json") or {}
        self.config = _read_config(self.path / "config.yaml")
        self.trace_error = ""
        self._problems: list[str] = []
        self.reader = self._open_trace()

    def _open_trace(self) -> TraceReader | None:
        if not (self.path / "trace").is_dir():
            return None
        try:
            reader = TraceReader(self.path, strict=False)
            self._problems = reader.problems
            self.pages = reader.pages
        except (TraceError, OSError, ValueError) as error:
            self.trace_error = str(error)
            return None
        return reader

    # Tables of rank 0; without a trace they have no rows.

    @cached_property
    def pages(self) -> Table:
        """The page table."""
        return empty_pages()

    @cached_property
    def need(self) -> Table:
        """What the computation needed."""
        if self.reader is None:
            return _empty(NEED)
        return self.reader.need(columns=_NEED_COLUMNS)

    @cached_property
    def actions(self) -> Table:
        """What the memory manager did."""
        return _empty(ACTIONS) if self.reader is None else self.reader.actions()

    @cached_property
    def comm(self) -> Table:
        """Collectives and transfers of all ranks."""
        return _empty(COMM) if self.reader is None else self.reader.comm()

    @cached_property
    def mem(self) -> Table:
        """Bytes of every account over time."""
        return _empty(MEM) if self.reader is None else self.reader.mem()

    @cached_property
    def metrics(self) -> Metrics:
        """One row a step."""
        found = read_metrics(self.path / "metrics.jsonl")
        if len(found) or self.reader is None:
            return found
        return metrics_from_steps(self.reader.steps())

    @cached_property
    def frame_bytes(self) -> np.ndarray:
        """(P,) bytes of the frames that each page takes on the device."""
        frames: np.ndarray = -(-self.pages["bytes"] // FRAME_BYTES) * FRAME_BYTES
        return frames

    @cached_property
    def groups(self) -> Groups:
        """The groups of the page table; without pages, those that the manifest names."""
        named = self.manifest.get("model", {}).get("groups", [])
        return make_groups(self.pages) if num_rows(self.pages) else named_groups(named)

    @cached_property
    def intervals(self) -> Intervals:
        """Where each page was and when.

        A page that was used and never moved was on the device all the time (small groups are
        pinned, and in a large budget nothing moves).
        """
        found = residency_intervals(self.actions, need=self.need, pages=self.pages)
        if not num_rows(self.need) or self.health.corrupt:
            return found
        key = self.pages["group"].astype(np.int64) * 256 + self.pages["kind"]
        reads = self.need["op"] <= Op.WRITE
        used = self.need["group"][reads].astype(np.int64) * 256 + self.need["kind"][reads]
        still = np.isin(key, used) & ~np.isin(self.pages["page"], found.page)
        return _with_still_pages(found, self.pages["page"][still], self.need["t_ns"])

    @cached_property
    def step_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """(S,) traced steps and (S,) the time of the first need of each."""
        steps, first = np.unique(self.need["step"], return_index=True)
        return steps, self.need["t_ns"][first]

    # Facts.

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The trace's facts."""
        return self.reader.manifest if self.reader is not None else {}

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return int(self.manifest.get("world_size", 1))

    @cached_property
    def policy(self) -> str:
        """`EVICTION+PREFETCH`, or `""` if the run says nothing."""
        memory = self.config.get("memory", {})
        named = _first(self.manifest.get("memory", {}), "policy", "policy_name")
        named = named or _first(self.summary, "policy") or _first(memory, "policy")
        if named:
            return str(named)
        if memory.get("evict_strategy"):
            rung = memory.get("prefetch", "none")
            model = memory.get("predictor")
            rung = model if rung == "predictor" and model not in (None, "none") else rung
            return f"{memory['evict_strategy']}+{rung}"
        codes = Counter(self.actions["policy"].tolist())
        try:
            return policy_name(codes.most_common(1)[0][0]) if codes else ""
        except ValueError:
            return ""

    @cached_property
    def page_budget(self) -> int | None:
        """Bytes that pages may take, None if not limited or not known."""
        for source in (self.manifest.get("memory", {}), self.summary, self.config.get("memory")):
            value = _first(source, "page_budget", "page_budget_bytes")
            if isinstance(value, str):
                value = _parse_size(value)
            if isinstance(value, int | float) and value > 0:
                return int(value)
        return None

    @cached_property
    def tiers(self) -> dict[str, dict[str, int]]:
        """What each tier of the home held and moved, by its name; empty if the run says nothing."""
        told = self.summary.get("tiers")
        return told if isinstance(told, dict) else {}

    @cached_property
    def corpus_hash(self) -> str:
        """Hash of what was trained on, `""` if the run says nothing."""
        for source in (self.manifest.get("data", {}), self.summary, self.summary.get("data")):
            value = _first(source, "corpus_hash", "hash")
            if value:
                return str(value)
        return ""

    @cached_property
    def misses_per_step(self) -> float:
        """Demand loads a step: from the metrics, else of the traced steps; NaN if unknown."""
        if self.metrics.known("misses"):
            return self.metrics.mean("misses")
        if self.reader is None or not num_rows(self.actions):
            return float("nan")
        return float((self.actions["act"] == Act.LOAD).sum() / max(len(self.step_starts[0]), 1))

    @cached_property
    def health(self) -> Health:
        """How far the recording can be trusted."""
        tables = (self.need, self.actions, self.comm, self.mem)
        steps = [t["step"].max() for t in (self.need, self.comm, self.mem) if num_rows(t)]
        corrupt = tuple(text for text in self._problems if "CRC32" in text)
        return Health(
            status=self._status(),
            events=sum(num_rows(table) for table in tables),
            last_step=int(max(steps)) if steps else None,
            cut=tuple(text for text in self._problems if text not in corrupt),
            corrupt=corrupt,
        )

    def _status(self) -> str:
        said = str(self.summary.get("status", ""))
        if said and said != "running":
            return said
        age = time.time() - self.revision[2] / 1e9
        return "running" if age < LIVE_SECONDS else "interrupted"


class RunStore:
    """Keeps the runs that were looked at last; a run whose files changed is read anew."""

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self._runs: OrderedDict[Path, RunData] = OrderedDict()
        self._lock = threading.Lock()  # the server answers requests in several threads

    def get(self, place: RunPlace) -> RunData:
        """Return the run as its files are now."""
        current = revision(place.path)
        with self._lock:
            run = self._runs.pop(place.path, None)
            if run is None or run.revision != current:
                run = RunData(place, current)
            self._runs[place.path] = run
            while len(self._runs) > self.capacity:
                self._runs.popitem(last=False)
        return run


def _with_still_pages(moved: Intervals, still: np.ndarray, t_ns: np.ndarray) -> Intervals:
    """Add pages that stay on the device from the first to the last event."""
    begin = int(min(t_ns.min(), moved.start_ns.min(initial=np.iinfo(np.int64).max)))
    end = int(max(t_ns.max() + 1, moved.end_ns.max(initial=0)))
    count = len(still)
    page = np.concatenate([moved.page, still.astype(np.int64)])
    order = np.argsort(page, kind="stable")
    added = (np.full(count, int(Tier.DEVICE)), np.full(count, begin), np.full(count, end))
    known = (moved.tier, moved.start_ns, moved.end_ns)
    columns = (np.concatenate(pair)[order] for pair in zip(known, added, strict=True))
    return Intervals(page[order], *columns)


def _empty(stream: Stream) -> Table:
    helpers = {"session": np.empty(0, np.int16), "rank": np.empty(0, np.int16)}
    return {**stream.empty(), **helpers}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _first(source: Any, *keys: str) -> Any:
    """Return the value of the first key that a mapping has, None otherwise."""
    if not isinstance(source, Mapping):
        return None
    return next((source[key] for key in keys if source.get(key) not in (None, "")), None)


def _parse_size(text: str) -> int | None:
    """Return the bytes of `64MiB` or `256MB`, None for anything else."""
    digits = text.strip().rstrip("iBKMGTbkmgt ")
    unit = text.strip()[len(digits) :].strip().upper().rstrip("B")
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    try:
        # Sizes in odc's configuration are binary whether or not they say so.
        return int(float(digits) * 1024 ** powers[unit.rstrip("I")])
    except (ValueError, KeyError):
        return None
