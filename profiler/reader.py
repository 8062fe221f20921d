"""Reads traces: every readable batch of every segment as numpy columns.

A directory may hold several *sessions* (a run killed and resumed from a checkpoint). The reader
makes one history of them: sequence numbers are shifted so that they stay unique, clocks are brought
onto the first session's, and a step that was done twice is taken from the session that did it last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import TraceError
from profiler.layout import (
    empty_pages,
    list_pages,
    list_segments,
    rank_dir,
    read_json,
    read_pages,
)
from profiler.merge import Table, action_steps, concatenate, latest_rows, num_rows, select
from profiler.scan import Batch, Segment, check_version, scan_segment
from profiler.schema import (
    ACTIONS,
    COMM,
    MEM,
    NEED,
    STEP,
    STREAMS,
    Stream,
)

_REBOOT_NS = 60 * 10**9


class TraceReader:
    """Reads the trace of one run.

    Tables come as dictionaries of equally long numpy arrays in the order of recording, with the
    columns of `profiler.schema` and two more: `session` and `rank` (i16). END rows are removed.

    Args:
        path: A run directory or its `trace` folder.
        strict: Raise where something was lost or changed after it was written (a checksum does
            not match, a file is gone or cut); otherwise keep what comes before.
        keep_replaced: Also return steps that a later session did again.

    Raises:
        TraceError: If there is no trace, or one of another major version. Methods raise it too:
            for a file that is no event file and, if strict, for a damaged one.
    """

    def __init__(
        self, path: str | Path, *, strict: bool = True, keep_replaced: bool = False
    ) -> None:
        given = Path(path)
        self.trace_dir = given / "trace" if (given / "trace").is_dir() else given
        self.run_dir = self.trace_dir.parent if self.trace_dir.name == "trace" else self.trace_dir
        self.strict = strict
        self.keep_replaced = keep_replaced
        self._notes: list[str] = []
        self._scans: dict[Path, tuple[int, Segment]] = {}
        self.ranks = sorted(
            int(folder.name[4:])
            for folder in (self.trace_dir.glob("rank[0-9]*") if self.trace_dir.is_dir() else [])
            if folder.name[4:].isdigit()
        )
        self.manifest = self._read_manifest()
        if not self.ranks:
            raise TraceError(
                f"{given}: expected a trace (manifest.json and rank00000/ under trace/), found "
                "none; give the directory of a run recorded with odc train, odc profile or Profiler"
            )

    # Tables.

    def need(
        self,
        steps: Collection[int] | None = None,
        *,
        rank: int | None = 0,
        columns: Sequence[str] | None = None,
    ) -> Table:
        """Return what the computation needed.

        Args:
            steps: Only these steps; batches without them are not decoded.
            rank: One rank, or None for all.
            columns: Only these columns (and `session`, `rank`): a long trace takes less memory.
        """
        return self._table(NEED, rank, steps, columns)

    def actions(self, *, rank: int | None = 0, columns: Sequence[str] | None = None) -> Table:
        """Return what the memory manager did."""
        return self._table(ACTIONS, rank, None, columns)

    def comm(self, steps: Collection[int] | None = None, *, rank: int | None = None) -> Table:
        """Return collectives and transfers, of all ranks unless one is given."""
        return self._table(COMM, rank, steps, None)

    def mem(self, steps: Collection[int] | None = None, *, rank: int | None = 0) -> Table:
        """Return the bytes of every account over time."""
        return self._table(MEM, rank, steps, None)

    def steps(self, *, rank: int | None = 0) -> Table:
        """Return one row per finished step."""
        return self._table(STEP, rank, None, None)

    @cached_property
    def pages(self) -> Table:
        """Columns of `pages.arrow` (rank 0), ordered by page; no rows if the run has no pages."""
        return self.pages_of(0)

    def pages_of(self, rank: int) -> Table:
        """Return the newest page table of a rank (its own one, else rank 0's)."""
        found = list_pages(rank_dir(self.trace_dir, rank)) if rank else []
        found = found or list_pages(self.trace_dir)
        if not found:
            return empty_pages()
        return read_pages(found[-1][1])

    # Health.

    @property
    def clean_end(self) -> dict[str, bool]:
        """Whether each event file (by its path in the trace) was closed by its writer."""
        return {self._name(s.path): s.clean_end for s in self._all_segments()}

    def check(self) -> None:
        """Look at every file, also those that no table was asked of.

        Raises:
            TraceError: Names the first that was damaged after it was written.
        """
        _ = self.pages
        for segment in self._all_segments():
            if segment.corrupt:
                raise TraceError(segment.corrupt)

    @property
    def problems(self) -> list[str]:
        """Sentences about cut, unreadable or unchecked files and about lost events."""
        found = [s.problem for s in self._all_segments() if s.problem]
        found += [s.corrupt for s in self._all_segments() if s.corrupt]
        dropped = self.dropped_events
        if dropped:
            found.append(f"{self.trace_dir}: {dropped} events were dropped by the recorder")
        expected = set(self.manifest.get("ranks", []))
        found += [f"rank {rank}: no event files" for rank in sorted(expected - set(self.ranks))]
        return [*self._notes, *found]

    @property
    def dropped_events(self) -> int:
        """Events that the recorders of all ranks could not keep."""
        return sum(int(m.get("dropped_events", 0)) for m in self._manifests())

    @property
    def process_groups(self) -> dict[str, list[int]]:
        """Ranks of each `pg` number of the `comm` table, gathered from all ranks."""
        found: dict[str, list[int]] = {}
        for manifest in self._manifests():
            found.update(manifest.get("process_groups", {}))
        return found

    def _manifests(self) -> list[dict[str, Any]]:
        own = [rank_dir(self.trace_dir, rank) / "manifest.json" for rank in self.ranks if rank]
        return [self.manifest, *(read_json(path) or {} for path in own)]

    def _all_segments(self) -> list[Segment]:
        return [
            self._scan(path, name)
            for rank in self.ranks
            for name, _, path in list_segments(rank_dir(self.trace_dir, rank))
        ]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.trace_dir).as_posix()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _read_manifest(self) -> dict[str, Any]:
        path = self.trace_dir / "manifest.json"
        manifest = read_json(path)
        if manifest is None:
            if self.strict and path.exists():
                raise TraceError(
                    f"{path}: expected a JSON object, found other bytes; restore it from a copy, "
                    "or remove it to read the events without the run's facts"
                )
            self._note(f"{path}: missing or unreadable, the run's facts are unknown")
            return {}
        check_version(path, str(manifest.get("format", "")))
        return manifest

    def _scan(self, path: Path, stream_name: str) -> Segment:
        """Scan a file, again only if it has grown."""
        size = path.stat().st_size
        known = self._scans.get(path)
        if known is None or known[0] != size:
            known = (size, scan_segment(path, stream_name))
            self._scans[path] = known
        return known[1]

    # Assembly.

    def _table(
        self,
        stream: Stream,
        rank: int | None,
        steps: Collection[int] | None,
        columns: Sequence[str] | None,
    ) -> Table:
        names = [c.name for c in stream.columns]
        if columns is not None and not set(columns) <= set(names):
            raise ValueError(f"columns must be among {', '.join(names)}, got {list(columns)}")
        wanted = [name for name in names if columns is None or name in columns]
        keep = None if steps is None else np.unique(np.array(list(steps), np.int64))
        ranks = self.ranks if rank is None else [rank]
        parts = [self._history(stream, r, keep, wanted) for r in ranks]
        return parts[0] if len(parts) == 1 else concatenate(parts, _empty(stream, wanted))

    def _history(
        self, stream: Stream, rank: int, steps: np.ndarray | None, wanted: list[str]
    ) -> Table:
        """Return a rank's rows as one history of all sessions."""
        sessions = self._sessions(rank)
        if len(sessions) < 2:
            return self._load(stream, rank, steps, wanted)
        helpers = {"t_ns", "seq", "step"} & {c.name for c in stream.columns}
        table = self._load(stream, rank, steps, sorted({*wanted, *helpers}))
        if not self.keep_replaced:
            table = select(table, self._valid_rows(stream, rank, table))
        if stream in (NEED, ACTIONS):
            shift = self._seq_shifts(rank)[table["session"]]
            table["seq"] = np.where(table["seq"] >= 0, table["seq"] + shift, table["seq"])
        table["t_ns"] += self._clock_shifts(rank)[table["session"]]
        return {name: table[name] for name in [*wanted, "session", "rank"]}

    def _valid_rows(self, stream: Stream, rank: int, table: Table) -> np.ndarray:
        """Return a mask of the rows that no later session replaced."""
        done = self._load(STEP, rank, None, ["step"])
        finished = done["step"], done["session"]
        if stream is not ACTIONS:
            return latest_rows(table["step"], table["session"], finished)
        need = self._load(NEED, rank, None, ["seq", "t_ns", "step"])
        last = latest_rows(need["step"], need["session"], finished)
        span = int(need["session"].max(initial=0)) + 1
        kept = np.unique(need["step"][last].astype(np.int64) * span + need["session"][last])
        step = action_steps(table, need)
        keep = (step < 0) | np.isin(step * span + table["session"], kept)
        tables = list_pages(rank_dir(self.trace_dir, rank) if rank else self.trace_dir)
        if len(tables) > 1:
            self._note(
                f"{tables[-1][1]}: the page table changed at session {tables[-1][0]}; "
                "actions of earlier sessions are left out"
            )
            keep &= table["session"] >= tables[-1][0]
        return keep

    def _load(
        self, stream: Stream, rank: int, steps: np.ndarray | None, wanted: list[str]
    ) -> Table:
        """Return a rank's rows as they were written."""
        parts = []
        self._check_present(stream, rank)
        for segment in self._segments(rank, stream.name):
            if segment.corrupt and self.strict:
                raise TraceError(segment.corrupt)
            for batch in segment.batches:
                if steps is not None and not _may_hold(batch, steps):
                    continue
                part = self._decode(segment, batch, stream, wanted, steps)
                part["session"] = np.full(num_rows(part), segment.session, np.int16)
                part["rank"] = np.full(num_rows(part), rank, np.int16)
                parts.append(part)
        return concatenate(parts, _empty(stream, wanted))

    def _check_present(self, stream: Stream, rank: int) -> None:
        """The manifest lists a file only once it is there."""
        start = f"{rank_dir(self.trace_dir, rank).name}/{stream.name}-"
        for listed in (s for m in self._manifests() for s in m.get("segments", [])):
            path = self.trace_dir / str(listed["file"])
            if self.strict and str(listed["file"]).startswith(start) and not path.exists():
                raise TraceError(
                    f"{path}: expected the event file that manifest.json lists, found none; "
                    "restore it from a copy, or read the others with strict=False"
                )

    def _decode(
        self,
        segment: Segment,
        batch: Batch,
        stream: Stream,
        wanted: list[str],
        steps: np.ndarray | None,
    ) -> Table:
        record_batch = segment.read(batch)
        present = set(record_batch.schema.names)
        known = {c.name for c in stream.columns}
        if present - known:
            self._note(f"{segment.path}: unknown columns ignored: {sorted(present - known)}")
        if known - present:
            self._note(f"{segment.path}: missing columns filled: {sorted(known - present)}")
        table: Table = {}
        for column in stream.columns:
            if column.name not in wanted:
                continue
            if column.name in present:
                found = record_batch.column(column.name).to_numpy(zero_copy_only=False)
                table[column.name] = found.astype(column.numpy_type, copy=False)
            else:
                table[column.name] = np.full(batch.rows, column.missing, column.numpy_type)
        if steps is not None and "step" in present:
            rows = np.isin(record_batch.column("step").to_numpy(), steps)
            return table if rows.all() else select(table, rows)
        return table

    def _segments(self, rank: int, stream_name: str) -> list[Segment]:
        if rank not in self.ranks:
            raise TraceError(
                f"{self.trace_dir}: expected event files of rank {rank}, found ranks "
                f"{self.ranks}; copy the folder of that rank or ask for another"
            )
        listed = list_segments(rank_dir(self.trace_dir, rank))
        return [self._scan(path, name) for name, _, path in listed if name == stream_name]

    def _sessions(self, rank: int) -> dict[int, Segment]:
        """Return one segment of every session."""
        found: dict[int, Segment] = {}
        for stream in STREAMS:
            for segment in self._segments(rank, stream):
                if segment.schema is not None:
                    found.setdefault(segment.session, segment)
        return dict(sorted(found.items()))

    def _seq_shifts(self, rank: int) -> np.ndarray:
        """Return by session what makes its sequence numbers follow the ones before."""
        need = self._load(NEED, rank, None, ["seq"])
        shifts = np.zeros(max(self._sessions(rank)) + 1, np.int64)
        following = 0
        for session in range(len(shifts)):
            shifts[session] = following
            seqs = need["seq"][need["session"] == session]
            following += int(seqs.max(initial=-1)) + 1
        return shifts

    def _clock_shifts(self, rank: int) -> np.ndarray:
        """Return by session what brings its clock onto the first one's (0 unless rebooted)."""
        sessions = self._sessions(rank)
        shifts = np.zeros(max(sessions) + 1, np.int64)
        offsets = {
            number: segment.clock["wall_ns"] - segment.clock["monotonic_ns"]
            for number, segment in sessions.items()
            if segment.clock
        }
        first = next(iter(offsets.values()), 0)
        for number, offset in offsets.items():
            # Wall clocks are corrected by less than this while a machine is up.
            if abs(offset - first) > _REBOOT_NS:
                shifts[number] = offset - first
        return shifts


def read_runs(paths: Iterable[str | Path], *, strict: bool = True) -> list[TraceReader]:
    """Open several runs."""
    return [TraceReader(path, strict=strict) for path in paths]


def find_runs(root: str | Path) -> list[Path]:
    """Return the run directories at or below `root` (two levels) that hold a trace, by name."""
    base = Path(root)
    patterns = ("trace/rank*", "*/trace/rank*", "*/*/trace/rank*")
    return sorted({path.parents[1] for pattern in patterns for path in base.glob(pattern)})


def _empty(stream: Stream, wanted: Sequence[str]) -> Table:
    table = {name: column for name, column in stream.empty().items() if name in wanted}
    return {**table, "session": np.empty(0, np.int16), "rank": np.empty(0, np.int16)}


def _may_hold(batch: Batch, steps: np.ndarray) -> bool:
    if batch.first_step is None or batch.last_step is None:
        return True
    at = int(np.searchsorted(steps, batch.first_step))
    return at < len(steps) and int(steps[at]) <= batch.last_step
