"""Finds what can be read in one event file, however it ended.

Arrow itself reads a cut stream silently short and trusts any length it finds, so the messages are
walked here: a message counts if its whole metadata and body lie inside the file, and its checksum
agrees where the side file has one. What follows the last such message is a *tail*, described in a
sentence. A checksum that disagrees is corruption, unless nothing valid follows it in a file that
was never closed: that is how a kill or a lost power supply leaves a file. A closed file was synced
before its side file said so, so whatever it lacks was lost later: that is corruption, too.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from profiler.errors import TraceError
from profiler.schema import END_T_NS, FORMAT, FORMAT_MAJOR, STREAMS

_CONTINUATION = b"\xff\xff\xff\xff"
_RESTORE = (
    "the file was changed or the disk is failing. Restore it from a copy, or read what comes "
    "before with strict=False"
)
MAX_METADATA_BYTES = 1 << 20
"""A longer message header is taken for noise: ours are a few KiB."""


@dataclass(frozen=True)
class Batch:
    """Place of one readable batch; steps are None where the side file does not tell."""

    offset: int
    num_bytes: int
    rows: int
    first_step: int | None = None
    last_step: int | None = None


@dataclass
class Segment:
    """What `scan_segment` found.

    Attributes:
        batches: Readable batches in order, END row and empty ones left out.
        clean_end: Whether the END row was found.
        problem: A sentence for people, or "".
        corrupt: A sentence naming what was lost or changed after it was written, or "".
    """

    path: Path
    schema: pa.Schema | None = None
    batches: list[Batch] = field(default_factory=list)
    clean_end: bool = False
    problem: str = ""
    corrupt: str = ""

    @property
    def session(self) -> int:
        """Number of the opening of the trace that wrote this file."""
        return int(self._text(b"odc.session", "1"))

    @property
    def clock(self) -> dict[str, int]:
        """Monotonic and wall time, taken together when the session began."""
        clock: dict[str, int] = json.loads(self._text(b"odc.clock", "{}"))
        return clock

    def _text(self, key: bytes, missing: str) -> str:
        metadata = (self.schema.metadata if self.schema else None) or {}
        return str(metadata.get(key, missing.encode()), "utf-8")

    def read(self, batch: Batch) -> pa.RecordBatch:
        """Decode one batch."""
        with pa.memory_map(str(self.path)) as source:
            buffer = source.read_buffer(batch.num_bytes + batch.offset)[batch.offset :]
            return pa.ipc.read_record_batch(pa.ipc.read_message(buffer), self.schema)


def scan_segment(path: Path, stream_name: str) -> Segment:
    """Walk the messages of an event file.

    Raises:
        TraceError: If the file is no event file of this stream, or of another major version.
    """
    segment = Segment(path)
    size = path.stat().st_size
    entries = _read_side(segment)
    closed_bytes = entries.get(-1, {}).get("bytes", 0)
    if size < closed_bytes:
        segment.corrupt = (
            f"{path}: expected the {closed_bytes} bytes that it had when it was closed, found "
            f"{size}; {_RESTORE}"
        )
    if size == 0:
        segment.problem = f"{path}: empty file, the run died while opening it"
        return segment
    with pa.memory_map(str(path)) as source:
        data = source.read_buffer()
        offset = _read_schema(segment, data, stream_name)
        if segment.schema is None:
            return segment
        offset = _walk(segment, data, offset, entries)
    if not segment.clean_end and not segment.problem and not segment.corrupt:
        rest = size - offset
        what = f"{rest} bytes of an unfinished batch were left out" if rest else "no END row"
        segment.problem = f"{path}: not closed, still written or killed ({what})"
    return segment


def _read_schema(segment: Segment, data: pa.Buffer, stream_name: str) -> int:
    path = segment.path
    message, offset = _message(data, 0)
    if message is None:
        if not _looks_cut(data):
            raise TraceError(
                f"{path}: expected an Arrow stream written by odc, found other bytes; "
                "remove the file from the trace directory or restore it from a copy"
            )
        segment.problem = f"{path}: cut inside the schema, nothing can be read"
        return 0
    try:
        schema = pa.ipc.read_schema(message)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            f"{path}: expected an Arrow schema first, got {error}; remove or restore the file"
        ) from error
    name = (schema.metadata or {}).get(b"odc.schema", b"").decode(errors="replace")
    expected = f"trace.{stream_name}/{FORMAT_MAJOR}"
    check_version(path, name, expected)
    segment.schema = schema
    _check_schema(segment, stream_name, exact=name == expected)
    return offset


def _check_schema(segment: Segment, stream_name: str, exact: bool) -> None:
    """Refuse a schema whose columns are not those of its version, or whose facts are no facts.

    Raises:
        TraceError: Then: no checksum covers the schema.
    """
    try:
        same = not exact or STREAMS[stream_name].schema().equals(segment.schema)
        _ = segment.session, [int(ns) for ns in segment.clock.values()]
    except (ValueError, TypeError, AttributeError):
        same = False
    if not same:
        raise TraceError(
            f"{segment.path}: expected the columns of odc's {stream_name} events, "
            "found others; the file was changed or the disk is failing. Remove it or restore it "
            "from a copy"
        )


def _looks_cut(data: pa.Buffer) -> bool:
    """Whether a file without a whole first message may be the beginning of one of ours."""
    head = data[:8].to_pybytes()
    if not any(head):
        return True
    if len(head) < 8:
        return bool(_CONTINUATION.startswith(head[:4]))
    return bool(head.startswith(_CONTINUATION)) and _announced(head) > 0


def check_version(path: Path, found: str, expected: str = FORMAT) -> None:
    """Accept the same name and major version, any minor one.

    Raises:
        TraceError: Otherwise.
    """
    name, _, version = found.partition("/")
    expected_name, _, major = expected.partition("/")
    if name != expected_name:
        raise TraceError(
            f"{path}: expected {expected!r}, found {found or 'no format name'!r}; "
            "this file is not part of an odc trace, remove it from the directory"
        )
    if version.split(".")[0] != major:
        raise TraceError(
            f"{path}: expected format {expected!r}, found {found!r}; "
            "read it with the version of odc that wrote it"
        )


def _announced(head: bytes) -> int:
    """Return the bytes a message header promises, or 0 for an implausible one."""
    length = int(struct.unpack("<i", head[4:8])[0])
    return 8 + length if 0 < length <= MAX_METADATA_BYTES else 0


def _message(data: pa.Buffer, offset: int) -> tuple[pa.Message | None, int]:
    """Return the message at `offset` and where it ends; (None, offset) if there is no whole one."""
    head = data[offset : offset + 8].to_pybytes()
    if len(head) < 8 or head[:4] != _CONTINUATION:
        return None, offset
    announced = _announced(head)
    if not announced or offset + announced > data.size:
        return None, offset
    source = pa.BufferReader(data[offset:])
    try:
        message = pa.ipc.read_message(source)
    except (pa.ArrowException, OSError, EOFError):
        return None, offset
    return message, offset + source.tell()


def _read_side(segment: Segment) -> dict[int, dict[str, Any]]:
    """Return the side file's entries by offset (none if there is no side file)."""
    path = segment.path.with_suffix(".json")
    try:
        side = json.loads(path.read_bytes())
        return {
            -1: {"closed": bool(side["closed"]), "bytes": int(side.get("bytes", 0))},
            **{int(entry["offset"]): entry for entry in side["batches"]},
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        segment.problem = f"{path}: side file cannot be read, checksums were not compared"
        return {}


def _walk(
    segment: Segment, data: pa.Buffer, offset: int, entries: dict[int, dict[str, Any]]
) -> int:
    """Collect batches from `offset` on; return where the readable part ends."""
    while True:
        entry = entries.get(offset)
        if entry is not None and not _intact(data, entry):
            _judge_mismatch(segment, data, entry, entries)
            return offset
        message, end = _message(data, offset)
        if message is None or message.type != "record batch":
            return offset
        try:
            batch = pa.ipc.read_record_batch(message, segment.schema)
            if entry is None:
                batch.validate(full=True)
        except (pa.ArrowException, OSError):
            return offset
        if batch.num_rows == 1 and batch.column("t_ns")[0].as_py() == END_T_NS:
            segment.clean_end = True
            return end
        if batch.num_rows:
            steps = (entry["first_step"], entry["last_step"]) if entry else (None, None)
            segment.batches.append(Batch(offset, end - offset, batch.num_rows, *steps))
        offset = end


def _intact(data: pa.Buffer, entry: dict[str, Any]) -> bool:
    end = int(entry["offset"]) + int(entry["bytes"])
    if end > data.size:
        return False
    return zlib.crc32(data[int(entry["offset"]) : end]) == int(entry["crc32"])


def _judge_mismatch(
    segment: Segment, data: pa.Buffer, bad: dict[str, Any], entries: dict[int, dict[str, Any]]
) -> None:
    """Say whether a batch that does not match its checksum was cut or corrupted."""
    start = int(bad["offset"])
    later = [entry for offset, entry in entries.items() if offset > start]
    if not entries[-1]["closed"] and not any(_intact(data, entry) for entry in later):
        segment.problem = f"{segment.path}: cut inside the batch at byte {start}"
    elif not segment.corrupt:
        segment.corrupt = (
            f"{segment.path}: the batch at byte {start} does not match its CRC32; {_RESTORE}"
        )
