"""Names of the files in a trace directory, and its two small tables: manifest and pages."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from profiler.errors import TraceError
from profiler.merge import Table, select
from profiler.scan import check_version
from profiler.schema import FORMAT_MAJOR, PAGE_COLUMNS, STREAMS, pages_schema
from profiler.segment import write_atomic

_SEGMENT_NAME = re.compile(r"^([a-z]+)-(\d{6})\.arrows$")
_CHECKSUM = b"odc.crc32"  # in the page table's metadata
_PAGES_NAME = re.compile(r"^pages(?:-(\d{6}))?\.arrow$")


def rank_dir(trace_dir: Path, rank: int) -> Path:
    """Return the folder of a rank's event files."""
    return trace_dir / f"rank{rank:05d}"


def list_segments(folder: Path) -> list[tuple[str, int, Path]]:
    """Return (stream, number, path) of the event files in a rank's folder, by stream and number."""
    if not folder.is_dir():
        return []
    found = [(_SEGMENT_NAME.match(path.name), path) for path in folder.iterdir()]
    return sorted((m[1], int(m[2]), path) for m, path in found if m and m[1] in STREAMS)


def list_pages(folder: Path) -> list[tuple[int, Path]]:
    """Return (first session, path) of the page tables in a folder, by session."""
    if not folder.is_dir():
        return []
    found = [(_PAGES_NAME.match(path.name), path) for path in folder.iterdir()]
    return sorted((int(m[1] or 1), path) for m, path in found if m)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_pages(folder: Path, rows: Iterable[Mapping[str, Any]], session: int) -> None:
    """Write the page table, unless it equals the newest one in the folder.

    Raises:
        OSError: If it cannot be written.
    """
    listed = [{"home_bytes": row["bytes"], **row} for row in rows]  # at home as on the device
    columns = {name: [row[name] for row in listed] for name in PAGE_COLUMNS}
    table = pa.table(columns, schema=pages_schema())
    earlier = list_pages(folder)
    if earlier and _same_pages(earlier[-1][1], table):
        return
    name = "pages.arrow" if not earlier and session == 1 else f"pages-{session:06d}.arrow"
    sink = pa.BufferOutputStream()
    schema = pages_schema({_CHECKSUM.decode(): _checksum(table)})
    with pa.ipc.new_file(sink, schema) as file:
        file.write_table(table.replace_schema_metadata(schema.metadata))
    write_atomic(folder / name, sink.getvalue().to_pybytes())


def _same_pages(path: Path, table: pa.Table) -> bool:
    try:
        with pa.OSFile(str(path), "rb") as file:
            return bool(pa.ipc.open_file(file).read_all().equals(table))
    except (OSError, pa.ArrowException):
        return False


def _checksum(table: pa.Table) -> str:
    """CRC32 of the values, column by column."""
    crc = 0
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            values = "\n".join(column.to_pylist()).encode()
        else:
            values = column.to_numpy().tobytes()
        crc = zlib.crc32(values, crc)
    return f"{crc:08x}"


def empty_pages() -> Table:
    """Return the columns of a page table without rows."""
    return {name: np.empty(0, _page_dtype(kind)) for name, kind in PAGE_COLUMNS.items()}


def read_pages(path: Path) -> Table:
    """Return a page table, ordered by page.

    Raises:
        TraceError: If the file cannot be read, was changed, or has another version.
    """
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        table.validate(full=True)
        metadata = table.schema.metadata or {}
        if metadata.get(_CHECKSUM, b"").decode() not in ("", _checksum(table)):
            raise pa.ArrowInvalid("values that do not match their CRC32")
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: expected the page table as an Arrow file, got {error}; "
            "restore the file from a copy or record the run again"
        ) from error
    name = metadata.get(b"odc.schema", b"").decode(errors="replace")
    check_version(path, name, f"trace.pages/{FORMAT_MAJOR}")
    columns: Table = {}
    for column, kind in PAGE_COLUMNS.items():
        dtype = _page_dtype(kind)
        if column in table.column_names:
            columns[column] = table[column].to_numpy().astype(dtype)
        else:
            columns[column] = np.full(table.num_rows, "" if dtype.hasobject else -1).astype(dtype)
    if "home_bytes" not in table.column_names:
        columns["home_bytes"] = columns["bytes"]  # pages lay at home as on the device
    return select(columns, np.argsort(columns["page"], kind="stable"))


def _page_dtype(kind: pa.DataType) -> np.dtype:
    return np.dtype(object if pa.types.is_string(kind) else kind.to_pandas_dtype())
