"""Names for groups and pages: short labels for axes, full paths for hovering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dashboard import units
from profiler.analysis import Table
from profiler.schema import Kind


@dataclass(frozen=True)
class Groups:
    """The groups of a run (G), by number.

    Attributes:
        group: (G,) i64.
        path: Module path of each.
        label: Short name of each, unique.
        layer: (G,) i64, -1 for none.
        expert: (G,) i64, -1 for none.
        bytes: (G,) i64, all pages of the group.
    """

    group: np.ndarray
    path: list[str]
    label: list[str]
    layer: np.ndarray
    expert: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    def names(self, groups: np.ndarray) -> list[str]:
        """Return the labels of group numbers; a group without pages is called by its number."""
        known = dict(zip(self.group.tolist(), self.label, strict=True))
        return [known.get(group, f"group {group}") for group in groups.tolist()]

    def paths(self, groups: np.ndarray) -> list[str]:
        """Return the module paths of group numbers."""
        known = dict(zip(self.group.tolist(), self.path, strict=True))
        return [known.get(group) or f"group {group}" for group in groups.tolist()]


def named_groups(paths: Sequence[str]) -> Groups:
    """Return groups of which only the module paths are known: those of a run without pages."""
    last = [path.rsplit(".", 1)[-1] for path in paths]
    layer = np.array([int(text) if text.isdigit() else -1 for text in last], np.int64)
    none = np.full(len(paths), -1, np.int64)
    return _labelled(np.arange(len(paths)), list(paths), layer, none, np.zeros(len(paths), int))


def make_groups(pages: Table) -> Groups:
    """Return the groups of a page table."""
    number, first, inverse = np.unique(pages["group"], return_index=True, return_inverse=True)
    size = np.zeros(len(number), np.int64)
    np.add.at(size, inverse, pages["bytes"])
    path = [str(text) for text in pages["module_path"][first]]
    layer = pages["layer"][first].astype(np.int64)
    expert = pages["expert"][first].astype(np.int64)
    return _labelled(number.astype(np.int64), path, layer, expert, size)


def _labelled(
    number: np.ndarray, path: list[str], layer: np.ndarray, expert: np.ndarray, size: np.ndarray
) -> Groups:
    short = [_short(*row) for row in zip(path, layer.tolist(), expert.tolist(), strict=True)]
    repeated = Counter(short)
    label = [
        text if text and repeated[text] == 1 else f"{text} #{group}".strip()
        for text, group in zip(short, number.tolist(), strict=True)
    ]
    return Groups(number, path, label, layer, expert, size)


def _short(path: str, layer: int, expert: int) -> str:
    last = path.rsplit(".", 1)[-1]
    if expert >= 0:
        return f"L{layer} E{expert}"
    if layer >= 0:
        return f"L{layer}" if last.isdigit() else f"L{layer} {last}"
    return last


def page_names(pages: Table, groups: Groups) -> list[str]:
    """Return one unique name a page: group, kind, part, module path."""
    label = groups.names(pages["group"])
    names = []
    columns = (pages[name].tolist() for name in ("page", "kind", "slot", "part", "module_path"))
    for text, page, kind, slot, part, path in zip(label, *columns, strict=True):
        word = units.code(Kind, kind)
        word = f"{word} {slot}" if kind == Kind.MOMENT else word
        piece = f", part {part}" if part else ""
        names.append(f"{text} · {word}{piece} · page {page}<br>{path}")
    return names
