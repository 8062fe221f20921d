"""What a trace file holds: codes, columns, Arrow schemas, format version.

Every number in a trace that stands for a word is defined here, once. The same codes travel in the
metadata of every Arrow schema (as JSON), so that a file explains itself without this package. An
event is a row of fixed width: the writer packs it with the `struct` format of its stream, and the
numpy record type with the same layout turns a filled buffer into columns without a Python loop.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

FORMAT_NAME = "odc-trace"
FORMAT_MAJOR = 1
FORMAT = f"{FORMAT_NAME}/{FORMAT_MAJOR}"

END_T_NS = -1
"""`t_ns` of the row that closes a file; every other column of that row is 0."""

MAX_BATCH_ROWS = 65_536
SEGMENT_BYTES = 64 * 1024 * 1024


class Phase(enum.IntEnum):
    """What the computation was doing when it needed a group."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVALUATION = 4
    GENERATION = 5
    OTHER = 6


class Kind(enum.IntEnum):
    """What a page holds."""

    PARAMETER = 0
    GRADIENT = 1
    MOMENT = 2


class Op(enum.IntEnum):
    """How a need uses its group."""

    READ = 0
    WRITE = 1
    CREATE = 2  # fresh content: a frame is needed, nothing is loaded
    DROP = 3
    UPDATE = 4  # the gradient goes home, the optimizer runs there, parameters must be loaded anew


class Act(enum.IntEnum):
    """What the memory manager did to a page."""

    LOAD = 0  # on demand; `seq` is the need it served
    PREFETCH = 1
    WRITE_BACK = 2
    EARLY_WRITE_BACK = 3
    EVICT = 4  # frames given back
    CANCEL = 5
    DROP = 6  # died without being stored
    STALL = 7  # `wait_ns` spent waiting for `page` on behalf of need `seq`
    UPDATE = 8  # the optimizer ran at home over `page`, which holds parameters


class Tier(enum.IntEnum):
    """Where bytes live."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Account(enum.IntEnum):
    """Whom bytes belong to."""

    PAGES = 0
    GATHERED = 1
    ACTIVATIONS = 2
    TRANSIENTS = 3
    # The whole process or allocator, for programs that keep no accounts (profiler/capture.py).
    PROCESS = 4


class Evict(enum.IntEnum):
    """Eviction half of a policy."""

    LRU = 0
    COST_AWARE = 1
    BELADY = 2
    MRU = 3
    FIFO = 4
    LFU = 5
    GDSF = 6
    AUTO = 7


class Prefetch(enum.IntEnum):
    """Prefetch half of a policy."""

    NONE = 0
    NEXT_K = 1
    REPLAY = 2
    POPULARITY = 3
    PREDICTOR = 4
    ORACLE = 5
    MARKOV = 6
    AUTO = 7


class CommOp(enum.IntEnum):
    """A collective, or one end of a point-to-point transfer."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    SEND = 5
    RECV = 6
    BARRIER = 7
    OTHER = 8


CODES: dict[str, type[enum.IntEnum]] = {
    "phase": Phase,
    "kind": Kind,
    "op": Op,
    "act": Act,
    "tier": Tier,
    "account": Account,
    "evict": Evict,
    "prefetch": Prefetch,
    "comm_op": CommOp,
}


def policy_code(evict: Evict | str, prefetch: Prefetch | str) -> int:
    """Return the `policy` byte of an eviction and a prefetch strategy.

    Args:
        evict: Member or lower-case name, e.g. `"cost_aware"`.
        prefetch: Member or lower-case name, e.g. `"popularity"`.

    Raises:
        ValueError: If a name is unknown; the text lists the known ones.
    """
    return _member(Evict, evict) * 16 + _member(Prefetch, prefetch)


def policy_name(code: int) -> str:
    """Return `EVICTION+PREFETCH` (e.g. `"lru+none"`) of a `policy` byte."""
    try:
        return f"{Evict(code // 16).name.lower()}+{Prefetch(code % 16).name.lower()}"
    except ValueError:
        raise ValueError(f"policy code must be evict * 16 + prefetch, got {code}") from None


def _member(codes: type[enum.IntEnum], value: enum.IntEnum | str) -> int:
    name = value.name if isinstance(value, enum.IntEnum) else value.upper()
    if name not in codes.__members__:
        known = ", ".join(m.lower() for m in codes.__members__)
        raise ValueError(f"{codes.__name__.lower()} must be one of {known}, got {value!r}")
    return int(codes[name])


@dataclass(frozen=True)
class Column:
    """A column of a stream; `missing` fills it where an older file does not have it."""

    name: str
    numpy_type: str  # little endian, e.g. "<i8"
    missing: float = 0


_STRUCT_CODES = {"<i8": "q", "<i4": "i", "<i2": "h", "|u1": "B", "<f8": "d"}
_ARROW_TYPES = {
    "<i8": pa.int64(),
    "<i4": pa.int32(),
    "<i2": pa.int16(),
    "|u1": pa.uint8(),
    "<f8": pa.float64(),
}


@dataclass(frozen=True)
class Stream:
    """One kind of event file: its name and its columns in order."""

    name: str
    columns: tuple[Column, ...]

    @cached_property
    def record(self) -> np.dtype:
        """Packed record type, the same bytes as `packer` writes."""
        return np.dtype([(c.name, c.numpy_type) for c in self.columns])

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs one row."""
        return struct.Struct("<" + "".join(_STRUCT_CODES[c.numpy_type] for c in self.columns))

    @cached_property
    def end_row(self) -> bytes:
        """The row that tells a clean end from a cut."""
        return self.packer.pack(*(END_T_NS if c.name == "t_ns" else 0 for c in self.columns))

    def schema(self, metadata: dict[str, str] | None = None) -> pa.Schema:
        """Return the Arrow schema with codes and version in its metadata."""
        fields = [pa.field(c.name, _ARROW_TYPES[c.numpy_type], False) for c in self.columns]
        return pa.schema(fields, metadata=_metadata(self.name, metadata))

    def empty(self) -> dict[str, np.ndarray]:
        """Return the columns with no row."""
        return {c.name: np.empty(0, c.numpy_type) for c in self.columns}


def _metadata(name: str, extra: dict[str, str] | None) -> dict[str, str]:
    codes = {
        key: {member.name.lower(): int(member) for member in members}
        for key, members in CODES.items()
    }
    return {
        "odc.schema": f"trace.{name}/{FORMAT_MAJOR}",
        "odc.codes": json.dumps(codes, separators=(",", ":")),
        **dict(extra or {}),
    }


def _stream(name: str, columns: str) -> Stream:
    """Build a stream from `name:type` words; `name:type:missing` sets the filler."""
    types = {"i64": "<i8", "i32": "<i4", "i16": "<i2", "u8": "|u1", "f64": "<f8"}
    parsed = []
    for word in columns.split():
        column, kind, *missing = word.split(":")
        parsed.append(Column(column, types[kind], float(missing[0]) if missing else 0))
    return Stream(name, tuple(parsed))


NEED = _stream(
    "need",
    "seq:i64 t_ns:i64 step:i32 micro:i16 phase:u8 ctx:i32 group:i32:-1 kind:u8 op:u8"
    " compute_ns:i64 tokens:i32",
)
ACTIONS = _stream(
    "actions",
    "t_ns:i64 seq:i64:-1 page:i32:-1 act:u8 src:u8 dst:u8 bytes:i64 dur_ns:i64 wait_ns:i64"
    " policy:u8",
)
COMM = _stream(
    "comm",
    "t_ns:i64 step:i32 seq:i64 op:u8 src:i32:-1 dst:i32:-1 pg:i16 group:i32:-1 bytes:i64"
    " dur_ns:i64 wait_ns:i64",
)
MEM = _stream("mem", "t_ns:i64 step:i32 tier:u8 account:u8 allocated:i64 peak:i64")
STEP = _stream(
    "step",
    "t_ns:i64 step:i32 epoch:i32 loss:f64:nan tokens:i64 step_ns:i64 compute_ns:i64 stall_ns:i64"
    " comm_ns:i64 profiler_ns:i64 bytes_in:i64 bytes_out:i64 page_bytes:i64 peak_page_bytes:i64"
    " transient_bytes:i64",
)
STREAMS = {stream.name: stream for stream in (NEED, ACTIONS, COMM, MEM, STEP)}

PAGE_COLUMNS: dict[str, pa.DataType] = {
    "page": pa.int32(),
    "group": pa.int32(),
    "kind": pa.uint8(),
    "slot": pa.uint8(),
    "part": pa.int16(),
    "bytes": pa.int64(),
    "module_path": pa.utf8(),
    "layer": pa.int16(),
    "expert": pa.int16(),
    "set": pa.int32(),
    "home_bytes": pa.int64(),
}


def pages_schema(metadata: dict[str, str] | None = None) -> pa.Schema:
    """Return the Arrow schema of `pages.arrow`."""
    fields = [pa.field(name, kind, False) for name, kind in PAGE_COLUMNS.items()]
    return pa.schema(fields, metadata=_metadata("pages", metadata))
