"""Records events of one rank with a hot path of one `struct.pack_into`.

Rows are packed into a preallocated buffer per stream. A full buffer, and every `flush()`, becomes
one Arrow batch that is with the operating system when the call returns, so a killed process loses
only what came after its last flush. Buffers are small enough that encoding one costs about a
millisecond; there is no thread, no lock and no allocation per event.

A directory may be opened again (a run resumed from a checkpoint): each opening is a *session* with
new segment numbers, and nothing that was there is changed. Sequence numbers and clocks may restart;
the reader tells sessions apart by the schema's metadata.

A trace must never stop training: after the first failed write (a full disk) recording ends with one
warning and later events are only counted.
"""

from __future__ import annotations

import copy
import datetime
import json
import logging
import platform
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from profiler.errors import TraceError
from profiler.layout import list_segments, rank_dir, read_json, write_pages
from profiler.scan import check_version
from profiler.schema import (
    ACTIONS,
    COMM,
    FORMAT,
    MAX_BATCH_ROWS,
    MEM,
    NEED,
    SEGMENT_BYTES,
    STEP,
    STREAMS,
    Stream,
)
from profiler.segment import SegmentWriter, write_atomic

logger = logging.getLogger("odc.profiler")


class _Buffer:
    """Packed rows of one stream that are not yet in its segment."""

    __slots__ = ("data", "fill", "limit", "pack_into", "row_bytes", "segment", "stream")

    def __init__(self, stream: Stream, rows: int, segment: SegmentWriter) -> None:
        self.stream = stream
        self.segment = segment
        self.row_bytes = stream.packer.size
        self.limit = rows * self.row_bytes
        self.data = bytearray(self.limit)
        self.fill = 0
        self.pack_into = stream.packer.pack_into

    @property
    def rows(self) -> int:
        return self.fill // self.row_bytes


class TraceWriter:
    """Writes one rank's trace. One thread at a time may call it.

    Args:
        trace_dir: `RUN/trace`; made if missing. Opening an existing trace starts a new session.
        rank: This process.
        world_size: Number of processes of the run.
        manifest: Facts for `manifest.json`, laid over what the writer knows itself.
        keeps_manifest: Whether it writes a manifest; otherwise rank 0's names its files (`adopt`).
        buffer_rows: Rows of a stream kept before a batch is written without a flush.
        segment_bytes: A segment that has grown to this is closed and the next one begun.

    Raises:
        TraceError: If the directory cannot be written to.
    """

    def __init__(
        self,
        trace_dir: str | Path,
        rank: int = 0,
        world_size: int = 1,
        manifest: Mapping[str, Any] | None = None,
        *,
        keeps_manifest: bool = True,
        buffer_rows: int = 4_096,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        if not 1 <= buffer_rows <= MAX_BATCH_ROWS:
            raise ValueError(f"buffer_rows must be in 1..{MAX_BATCH_ROWS}, got {buffer_rows}")
        self.trace_dir = Path(trace_dir)
        self.rank = rank
        self.dropped_events = 0
        self.failed = False
        self.closed = False
        self._keeps_manifest = keeps_manifest
        self._segment_bytes = segment_bytes
        self._folder = rank_dir(self.trace_dir, rank)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._earlier_segments: list[dict[str, Any]] = []
            self.manifest = self._begin_session(world_size, manifest or {})
            self._buffers = {
                name: _Buffer(stream, buffer_rows, self._open_segment(stream))
                for name, stream in STREAMS.items()
            }
            self._write_manifest()
        except OSError as error:
            raise TraceError(
                f"{self.trace_dir}: cannot start a trace ({error}); "
                "give a directory that can be written, with free space"
            ) from error
        self._need = self._buffers[NEED.name]
        self._actions = self._buffers[ACTIONS.name]
        self._comm = self._buffers[COMM.name]
        self._mem = self._buffers[MEM.name]
        self._step = self._buffers[STEP.name]

    # Events. Arguments are plain integers, in the order of the stream's columns.

    def need(
        self,
        seq: int,
        t_ns: int,
        step: int,
        micro: int,
        phase: int,
        ctx: int,
        group: int,
        kind: int,
        op: int,
        compute_ns: int,
        tokens: int,
    ) -> None:
        """Record that the computation needed a group."""
        b = self._need
        i = b.fill
        b.pack_into(
            b.data, i, seq, t_ns, step, micro, phase, ctx, group, kind, op, compute_ns, tokens
        )
        b.fill = i = i + b.row_bytes
        if i == b.limit:
            self._spill(b)

    def action(
        self,
        t_ns: int,
        seq: int,
        page: int,
        act: int,
        src: int,
        dst: int,
        num_bytes: int,
        dur_ns: int,
        wait_ns: int,
        policy: int,
    ) -> None:
        """Record what the manager did to a page."""
        b = self._actions
        i = b.fill
        b.pack_into(b.data, i, t_ns, seq, page, act, src, dst, num_bytes, dur_ns, wait_ns, policy)
        b.fill = i = i + b.row_bytes
        if i == b.limit:
            self._spill(b)

    def comm(
        self,
        t_ns: int,
        step: int,
        seq: int,
        op: int,
        src: int,
        dst: int,
        pg: int,
        group: int,
        num_bytes: int,
        dur_ns: int,
        wait_ns: int,
    ) -> None:
        """Record a collective (`dst` -1) or one end of a point-to-point transfer."""
        b = self._comm
        i = b.fill
        b.pack_into(b.data, i, t_ns, step, seq, op, src, dst, pg, group, num_bytes, dur_ns, wait_ns)
        b.fill = i = i + b.row_bytes
        if i == b.limit:
            self._spill(b)

    def mem(self, t_ns: int, step: int, tier: int, account: int, allocated: int, peak: int) -> None:
        """Record the bytes of an account."""
        b = self._mem
        i = b.fill
        b.pack_into(b.data, i, t_ns, step, tier, account, allocated, peak)
        b.fill = i = i + b.row_bytes
        if i == b.limit:
            self._spill(b)

    def step(
        self,
        t_ns: int,
        step: int,
        epoch: int,
        loss: float,
        tokens: int,
        step_ns: int,
        compute_ns: int,
        stall_ns: int,
        comm_ns: int,
        profiler_ns: int,
        bytes_in: int,
        bytes_out: int,
        page_bytes: int,
        peak_page_bytes: int,
        transient_bytes: int,
    ) -> None:
        """Record a finished step."""
        b = self._step
        i = b.fill
        b.pack_into(
            b.data, i, t_ns, step, epoch, loss, tokens, step_ns, compute_ns, stall_ns, comm_ns,
            profiler_ns, bytes_in, bytes_out, page_bytes, peak_page_bytes, transient_bytes,
        )  # fmt: skip
        b.fill = i = i + b.row_bytes
        if i == b.limit:
            self._spill(b)

    # Files.

    def write_pages(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the page table, one mapping of the `pages.arrow` columns per page.

        A table that equals the one on disk is left alone. One that differs (a run resumed with
        another page size) is written beside it for the sessions from this one on.
        """
        folder = self.trace_dir if self.rank == 0 else self._folder
        try:
            write_pages(folder, rows, self.session)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Hand every recorded event to the operating system; call it at the end of a traced step.

        What was flushed survives the death of the process (not of the machine: a segment is synced
        when it is closed).
        """
        for buffer in self._buffers.values():
            if buffer.fill:
                self._spill(buffer)

    def update_manifest(self, facts: Mapping[str, Any]) -> None:
        """Lay more facts over the manifest and write it."""
        self.manifest.update(copy.deepcopy(dict(facts)))
        self._try_manifest()

    def adopt(self, segments: Iterable[Mapping[str, Any]], dropped_events: int) -> None:
        """Name the files of a rank that keeps no manifest; to be called when it has closed them.

        Args:
            segments: That writer's `manifest["segments"]`.
            dropped_events: Its `dropped_events`.
        """
        listed = [dict(segment) for segment in segments]
        names = {segment["file"] for segment in listed}
        kept = [s for s in self._earlier_segments if s["file"] not in names]
        self._earlier_segments = [*kept, *listed]
        self._earlier_dropped += dropped_events
        self._try_manifest()

    def close(self) -> None:
        """Flush, end every file with an END row, write the side files and the manifest."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        for buffer in self._buffers.values():
            try:
                if self.failed:
                    buffer.segment.release()
                else:
                    buffer.segment.close()
            except OSError as error:
                self._fail(error)
        self._try_manifest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _spill(self, buffer: _Buffer) -> None:
        """Write a buffer's rows as one batch and empty it, whatever happens."""
        rows = buffer.rows
        if self.failed or self.closed:
            self.dropped_events += rows
            buffer.fill = 0
            return
        try:
            buffer.segment.append(memoryview(buffer.data)[: buffer.fill])
        except OSError as error:
            self.dropped_events += rows
            self._fail(error)
        finally:
            buffer.fill = 0
        if not self.failed and buffer.segment.num_bytes >= self._segment_bytes:
            self._roll(buffer)

    def _roll(self, buffer: _Buffer) -> None:
        try:
            buffer.segment.close()
            buffer.segment = self._open_segment(buffer.stream)
            self._write_manifest()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            logger.warning(
                "%s: recording stopped, training goes on: %s. Events are counted as dropped; "
                "free space and start the run again to record.",
                self.trace_dir,
                error,
            )
        self._try_manifest()

    # Manifest and sessions.

    def _begin_session(self, world_size: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        earlier = [number for _, number, _ in list_segments(self._folder)]
        self._first_number = max(earlier, default=0) + 1
        self._next_numbers = dict.fromkeys(STREAMS, self._first_number)
        manifest = self._read_earlier_manifest()
        sessions = list(manifest.get("sessions", []))
        # Numbers grow from session to session even if an old manifest was lost.
        self.session = max(self._first_number, len(sessions) + 1)
        self._clock = {"monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        started = {"session": self.session, "created": now, "clock": self._clock}
        known: dict[str, Any] = {
            "format": FORMAT,
            "run_id": uuid.uuid4().hex[:12],
            "created": now,
            "trace_interval": 1,
            "metrics": [],
            "model": {},
            "memory": {},
            "data": {},
            "versions": {"python": platform.python_version(), "pyarrow": pa.__version__},
            **manifest,
            **copy.deepcopy(dict(facts)),
            "world_size": world_size,
            "ranks": list(range(world_size)),
            "clock": self._clock,
            "sessions": [*sessions, started],
        }
        self._earlier_dropped = int(manifest.get("dropped_events", 0))
        self._segments: list[SegmentWriter] = []
        self._earlier_segments = list(manifest.get("segments", []))
        return known

    @property
    def manifest_path(self) -> Path:
        """`manifest.json` of the run (rank 0), or of this rank inside its folder."""
        return (self.trace_dir if self.rank == 0 else self._folder) / "manifest.json"

    def _read_earlier_manifest(self) -> dict[str, Any]:
        found = read_json(self.manifest_path)
        if found is None:
            return {}
        check_version(self.manifest_path, str(found.get("format", "")))
        return {**found, "format": FORMAT}

    def _open_segment(self, stream: Stream) -> SegmentWriter:
        number = self._next_numbers[stream.name]
        self._next_numbers[stream.name] = number + 1
        metadata = {
            "odc.run": str(self.manifest["run_id"]),
            "odc.rank": str(self.rank),
            "odc.session": str(self.session),
            "odc.clock": json.dumps(self._clock),
        }
        path = self._folder / f"{stream.name}-{number:06d}.arrows"
        segment = SegmentWriter(path, stream, metadata)
        self._segments.append(segment)
        return segment

    def _write_manifest(self) -> None:
        segments = [
            {
                "file": f"{self._folder.name}/{segment.path.name}",
                "state": "closed" if segment.ended else "open",
                "rows": segment.rows,
            }
            for segment in self._segments
        ]
        self.manifest["segments"] = [*self._earlier_segments, *segments]
        self.manifest["dropped_events"] = self._earlier_dropped + self.dropped_events
        if not self._keeps_manifest:
            return
        write_atomic(self.manifest_path, json.dumps(self.manifest, indent=1).encode())

    def _try_manifest(self) -> None:
        try:
            self._write_manifest()
        except OSError as error:
            if not self.failed:
                self._fail(error)
