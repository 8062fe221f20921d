"""Groups of a model: which parameters are planned, gathered and reduced together.

A layer is what shares the first prefix that ends in a number, such as `model.layers.7`; what
belongs to none is the root group. Parameter lists come from a CSV file (columns `name`, `shape` as
`4096x128`, `dtype`, and where given `kind` = `param`), or from a model on the meta device.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from odc.errors import ConfigError
from odc.sharding.granularity import GranularityLike, block_numels
from odc.sharding.tensors import TensorSpec

ROOT = "root"
_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")


@dataclass(frozen=True)
class Group:
    """Parameters that communicate together, and how many groups are equal to it but for names."""

    name: str
    tensors: tuple[TensorSpec, ...]
    count: int = 1


def read_shapes(path: str | Path) -> list[TensorSpec]:
    """Reads a parameter list, `.csv` or `.csv.gz`.

    Raises:
        ConfigError: the file is missing or no such list; the message names the line.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    found: list[TensorSpec] = []
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = {"name", "shape", "dtype"} - set(reader.fieldnames or ())
            if missing:
                raise ConfigError(
                    f"{path}: the header lacks {', '.join(sorted(missing))}; expected "
                    "name,shape,dtype"
                )
            found.extend(
                _tensor(row, f"{path}, line {reader.line_num}")
                for row in reader
                if row.get("kind", "param") == "param"
            )
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a parameter list: {error}") from error
    if not found:
        raise ConfigError(f"{path}: no parameters in it")
    return found


def _tensor(row: dict[str, str], where: str) -> TensorSpec:
    try:
        shape = tuple(int(size) for size in row["shape"].split("x")) if row["shape"] else ()
        return TensorSpec(row["name"], shape, row["dtype"])
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}; expected a shape such as 4096x128") from error


def layer_groups(
    tensors: Iterable[TensorSpec], layers: int = 1, granularity: GranularityLike = "element"
) -> list[Group]:
    """Cuts a model into groups of `layers` neighbouring layers and a root group.

    Groups with tensors of equal shapes, dtypes and blocks in equal order are returned once, with
    their `count`.

    Raises:
        ConfigError: `layers` is below 1, or a granularity does not fit a tensor.
    """
    if layers < 1:
        raise ConfigError(f"group: got {layers} layers; allowed: whole numbers from 1")
    by_layer: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        match = _LAYER.match(tensor.fqn)
        by_layer.setdefault(match[0] if match else ROOT, []).append(tensor)
    root = by_layer.pop(ROOT, [])
    found = [(ROOT, root)] if root else []
    stacks: dict[str, list[str]] = {}
    for layer in by_layer:
        stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    for names in stacks.values():
        for first in range(0, len(names), layers):
            some = names[first : first + layers]
            label = some[0] if len(some) == 1 else f"{some[0]}..{some[-1].rpartition('.')[2]}"
            found.append((label, [tensor for name in some for tensor in by_layer[name]]))
    return _merge_equal(found, granularity)


def _merge_equal(
    groups: Sequence[tuple[str, list[TensorSpec]]], granularity: GranularityLike
) -> list[Group]:
    merged: dict[tuple[object, ...], Group] = {}
    for name, tensors in groups:
        blocks = block_numels(tensors, granularity)
        key = (name == ROOT, *((t.shape, t.dtype, b) for t, b in zip(tensors, blocks, strict=True)))
        known = merged.get(key, Group(name, tuple(tensors), 0))
        merged[key] = Group(known.name, known.tensors, known.count + 1)
    return list(merged.values())
