"""One event file on its way to disk: encoding, checksums, side file.

A segment is an Arrow stream. Every batch leaves in one `write` together with its CRC32, which goes
to the side file `NAME.json` right after it: the side file is valid JSON at every moment, because a
new entry overwrites the closing brackets and brings new ones (no rewrite, so the cost of an entry
does not grow with the segment). The order is data first, checksum second: a kill between the two
leaves a batch that can be read but not checked, never a checksum without its batch.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from profiler.schema import Stream

_SIDE_END = b"\n]}\n"


class _Collector:
    """File object that keeps what Arrow writes until the caller takes it."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes | memoryview) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered below this object."""

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


def write_all(fd: int, data: bytes) -> None:
    """Write every byte of `data` (a nearly full disk writes less than asked)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` so that a reader sees the old bytes or the new ones, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class SegmentWriter:
    """Writes one segment; not safe to use from two threads at once.

    Args:
        path: New file, `STREAM-NNNNNN.arrows`; an existing one is never touched.
        stream: Columns of the rows.
        metadata: Added to the schema's metadata (run, rank, session, clock).

    Raises:
        OSError: If the file exists or cannot be written, here and in every method that writes.
    """

    def __init__(self, path: Path, stream: Stream, metadata: dict[str, str]) -> None:
        self.path = path
        self.rows = 0
        self.num_bytes = 0
        self.ended = False  # closed with an END row, not merely let go of
        self._stream = stream
        self._schema = stream.schema(metadata)
        self._batches: list[dict[str, int | None]] = []
        self._collector = _Collector()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._side_fd = -1
        self._side_bytes = 0
        # Columns are small: handing each to a thread pool takes longer than compressing it, and the
        # pool competes with the training threads.
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._arrow = pa.ipc.new_stream(self._collector, self._schema, options=options)
        self._arrow.write_batch(pa.RecordBatch.from_pylist([], self._schema))
        self._write(self._collector.take())

    @property
    def side_path(self) -> Path:
        """Path of the side file."""
        return self.path.with_suffix(".json")

    def append(self, rows: memoryview | bytes) -> None:
        """Write packed rows as one batch."""
        records = np.frombuffer(rows, self._stream.record)
        arrays = [
            pa.array(np.ascontiguousarray(records[column.name])) for column in self._stream.columns
        ]
        self._arrow.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        encoded = self._collector.take()
        first = last = None
        if "step" in self._stream.record.fields and len(records):  # type: ignore[operator]
            first, last = int(records["step"].min()), int(records["step"].max())
        entry: dict[str, int | None] = {
            "offset": self.num_bytes,
            "bytes": len(encoded),
            "rows": len(records),
            "crc32": zlib.crc32(encoded),
            "first_step": first,
            "last_step": last,
        }
        self._write(encoded)
        self.rows += len(records)
        self._append_side(entry)

    def close(self) -> None:
        """End the stream with an END row, sync it, and write the final side file."""
        if self._fd < 0:
            return
        data_rows = self.rows
        self.append(self._stream.end_row)
        self._arrow.close()
        self._write(self._collector.take())
        os.fsync(self._fd)
        self.rows = data_rows
        steps = [b for b in self._batches[:-1] if b["first_step"] is not None]
        head = {
            "stream": self._stream.name,
            "closed": True,
            "rows": data_rows,
            "bytes": self.num_bytes,
            "first_step": min((b["first_step"] or 0 for b in steps), default=None),
            "last_step": max((b["last_step"] or 0 for b in steps), default=None),
        }
        write_atomic(self.side_path, _side_json(head, self._batches))
        self.ended = True
        self.release()

    def release(self) -> None:
        """Let go of the file descriptors without ending the stream."""
        for fd in (self._fd, self._side_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._side_fd = -1

    def _write(self, encoded: bytes) -> None:
        try:
            write_all(self._fd, encoded)
        except OSError:
            # A torn batch would only be noise at the end of the file, and its blocks are needed.
            os.ftruncate(self._fd, self.num_bytes)
            os.lseek(self._fd, self.num_bytes, os.SEEK_SET)
            raise
        self.num_bytes += len(encoded)

    def _append_side(self, entry: dict[str, int | None]) -> None:
        if self._side_fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._side_fd = os.open(self.side_path, flags, 0o644)
        self._batches.append(entry)
        if len(self._batches) == 1:
            text = _side_json({"stream": self._stream.name, "closed": False}, [entry])
            start = 0
        else:
            text = b",\n" + json.dumps(entry).encode() + _SIDE_END
            start = self._side_bytes - len(_SIDE_END)
        if os.pwrite(self._side_fd, text, start) < len(text):
            os.ftruncate(self._side_fd, start)
            os.pwrite(self._side_fd, _SIDE_END if start else b"", start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.side_path))
        self._side_bytes = start + len(text)


def _side_json(head: dict[str, Any], batches: list[dict[str, int | None]]) -> bytes:
    body = ",\n".join(json.dumps(batch) for batch in batches)
    return json.dumps(head)[:-1].encode() + b', "batches": [\n' + body.encode() + _SIDE_END
