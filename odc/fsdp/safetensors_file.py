"""Safetensors files, by byte ranges: what a header says, and any elements of a tensor.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
begin and end) and the tensors' bytes one after another. A tensor is contiguous in row-major order,
so a flat span of it is one byte range, which the `safetensors` package cannot ask for (it slices
whole rows); hence this reader and writer of its own. Nothing here knows of models or ranks.

Source: the format's specification, github.com/huggingface/safetensors, README.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odc.errors import CheckpointError

CHUNK_BYTES = 4 * 1024 * 1024  # of scratch where bytes cannot go straight between file and tensor
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    Attributes:
        path: of the file.
        dtype, shape: of the tensor.
        begin: where its bytes start, from the start of the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


# -- reading -------------------------------------------------------------------------------------


def find_files(folder: Path) -> list[Path]:
    """The weight files of a folder: the single one, else those that the index names.

    Raises:
        CheckpointError: there are none, or the index is damaged.
    """
    if folder.is_file():
        return [folder]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    try:
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged: {error!r}") from error
    return [folder / name for name in sorted(set(names))]


def read_entries(paths: Iterable[Path]) -> dict[str, Entry]:
    """The tensors of some files, by name.

    Raises:
        CheckpointError: a file is missing, damaged or cut short.
    """
    found: dict[str, Entry] = {}
    for path in paths:
        try:
            found.update(_read_header(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no safetensors file: {error!r}") from error
    return found


def _read_header(path: Path) -> Iterator[tuple[str, Entry]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    for name, told in header.items():
        if name == "__metadata__":
            continue
        if told["dtype"] not in DTYPES:
            raise ValueError(f"{name} has the dtype {told['dtype']}, which torch has not")
        entry = Entry(
            path, DTYPES[told["dtype"]], tuple(told["shape"]), 8 + length + told["data_offsets"][0]
        )
        end = 8 + length + told["data_offsets"][1]
        if end > size or end - entry.begin != entry.numel * entry.dtype.itemsize:
            raise ValueError(f"{name} ends at byte {end} of {size}: cut short, or another shape")
        yield name, entry


def read_span(entry: Entry, low: int, out: Tensor) -> None:
    """Reads `out.numel()` elements from `low` on, converting their dtype.

    Args:
        entry: the tensor.
        low: the first element, flat.
        out: 1-D and contiguous; on the CPU and of the file's dtype, bytes go straight into it.

    Raises:
        CheckpointError: the file ends early.
    """
    if not out.numel():
        return
    size = entry.dtype.itemsize
    with open(entry.path, "rb", buffering=0) as file:
        file.seek(entry.begin + low * size)
        if out.dtype == entry.dtype and out.device.type == "cpu":
            _fill(file, out)
            return
        step = CHUNK_BYTES // size
        scratch = torch.empty(min(step, out.numel()), dtype=entry.dtype)
        for start in range(0, out.numel(), step):
            part = scratch[: min(step, out.numel() - start)]
            _fill(file, part)
            out[start : start + part.numel()].copy_(part)


def _fill(file: Any, tensor: Tensor) -> None:
    view = _bytes_of(tensor)
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{file.name} ended {len(view)} bytes early")
        view = view[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


# -- writing -------------------------------------------------------------------------------------


def lay_out(path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> _Layout:
    """Where the tensors of a new file will lie, and its header.

    Wide dtypes come first, so that every tensor starts at a multiple of its item size.
    """
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {
        name: Entry(path, *tensors[name], start + header[name]["data_offsets"][0]) for name in order
    }
    return _Layout(path, len(text).to_bytes(8, "little") + text, start + at, entries)


@dataclass(frozen=True, slots=True)
class _Layout:
    path: Path
    head: bytes
    size: int
    entries: dict[str, Entry]

    def create(self) -> None:
        """Makes the file with its header; the tensors' bytes are holes."""
        with self.path.open("xb") as file:
            file.write(self.head)
            file.truncate(self.size)


def write_span(file: int, entry: Entry, low: int, span: Tensor) -> None:
    """Writes a flat span of a tensor to where it lies in an open file.

    Args:
        file: a descriptor.
        entry: the tensor.
        low: its first element.
        span: 1-D and contiguous; of another device or dtype it travels in chunks.
    """
    straight = span.device.type == "cpu" and span.dtype == entry.dtype
    step = span.numel() if straight else CHUNK_BYTES // entry.dtype.itemsize
    for start in range(0, span.numel(), max(step, 1)):
        view = _bytes_of(span[start : start + step].to("cpu", entry.dtype))
        at = entry.begin + (low + start) * entry.dtype.itemsize
        while view:
            count = os.pwrite(file, view, at)
            view, at = view[count:], at + count
