"""Safetensors files written and read as a stream, straight from and into memory that is paged.

The library's own functions want all tensors of a file at once, and its reader maps the file, which
counts as resident memory of the process. Here tensors pass one after the other as raw bytes, and
the file's SHA-256 is taken on the way. Any safetensors reader can read what is written.
"""

import hashlib
import json
import os
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odc.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_MAX_HEADER_BYTES = 100 << 20

# A generator, closed at the end: its `finally` blocks release pages, also after an error.
Buffers = Generator[memoryview, None, None]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size and the SHA-256 of its bytes."""

    num_bytes: int
    sha256: str


def write_tensors(path: Path, specs: Sequence[TensorSpec], buffers: Buffers) -> FileRecord:
    """Writes a file and syncs it.

    Args:
        path: Where to write.
        specs: The tensors, in order.
        buffers: For each of them its bytes, `num_bytes` of format B; each is used before the next
            is asked for.

    Raises:
        OSError: The file cannot be written.
    """
    header = json.dumps(_header(specs)).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file, closing(buffers):
        for piece in _pieces(header, specs, buffers):
            _write_all(file.fileno(), piece)
            digest.update(piece)
        os.fsync(file.fileno())
        return FileRecord(file.tell(), digest.hexdigest())


def read_tensors(
    path: Path, specs: Sequence[TensorSpec], buffers: Buffers, record: FileRecord
) -> None:
    """Reads a file into memory, checking it on the way.

    Args:
        path: File that `write_tensors` wrote.
        specs: The tensors that it must hold, in order.
        buffers: For each of them the memory to fill, likewise.
        record: What `write_tensors` returned.

    Raises:
        CheckpointError: The file is missing, damaged, or holds other tensors.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file, closing(buffers):
            size = os.fstat(file.fileno()).st_size
            if size != record.num_bytes:
                raise _damaged(path, f"has {size} bytes, expected {record.num_bytes}")
            _check_header(path, file, specs, digest)
            for buffer in buffers:
                _read_all(path, file, buffer)
                digest.update(buffer)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if digest.hexdigest() != record.sha256:
        raise _damaged(path, "fails its checksum")


def _header(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return header


def _pieces(header: bytes, specs: Sequence[TensorSpec], buffers: Buffers) -> Iterator[memoryview]:
    yield memoryview(struct.pack("<Q", len(header)))
    yield memoryview(header)
    for spec, buffer in zip(specs, buffers, strict=True):
        assert buffer.nbytes == spec.num_bytes, f"{spec.name}: {buffer.nbytes} bytes"
        yield buffer


def _check_header(path: Path, file: Any, specs: Sequence[TensorSpec], digest: Any) -> None:
    length = bytearray(8)
    _read_all(path, file, memoryview(length))
    (num_bytes,) = struct.unpack("<Q", length)
    if num_bytes > _MAX_HEADER_BYTES:
        raise _damaged(path, "has no safetensors header")
    raw = bytearray(num_bytes)
    _read_all(path, file, memoryview(raw))
    digest.update(length)
    digest.update(raw)
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise _damaged(path, "has no safetensors header") from error
    if found != _header(specs):
        raise CheckpointError(
            f"{path}: holds other tensors than this part of the model has "
            f"({', '.join(spec.name for spec in specs[:3])}, ...); "
            "resume with the model that wrote it"
        )


def _write_all(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def _read_all(path: Path, file: Any, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise _damaged(path, "ends too early")
        view = view[count:]


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; delete this checkpoint to go on from the one before")
