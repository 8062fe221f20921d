"""Which runs a folder holds. Names from a URL are looked up here and never joined to a path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MARKS = ("metrics.jsonl", "summary.json", "trace")
_LEVELS = ("*", "*/*")

Revision = tuple[int, int, int]


@dataclass(frozen=True)
class RunPlace:
    """A run directory and its name in the folder."""

    name: str
    path: Path


def is_run(path: Path) -> bool:
    """Whether a directory looks like a run."""
    return path.is_dir() and any((path / mark).exists() for mark in _MARKS)


class RunCatalog:
    """Finds runs at or up to two levels below a folder.

    Args:
        root: One run directory, or a folder of runs.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def runs(self) -> list[RunPlace]:
        """Return the runs by name. A run directory stands for itself alone."""
        if is_run(self.root):
            return [RunPlace(self.root.name, self.root)]
        found = {path for level in _LEVELS for path in self.root.glob(level) if is_run(path)}
        # What lies inside a run (its checkpoints, say) is no run of its own.
        tops = [path for path in found if path.parent not in found]
        named = [RunPlace(path.relative_to(self.root).as_posix(), path) for path in tops]
        return sorted(named, key=lambda run: run.name)

    def find(self, name: str | None) -> RunPlace | None:
        """Return the run of that name, the first one for None; None if there is none."""
        runs = self.runs()
        if name is None:
            return runs[0] if runs else None
        return next((run for run in runs if run.name == name), None)


def revision(path: Path) -> Revision:
    """Return what changes when files of a run grow: number, total size and newest time (ns)."""
    number, size, newest = 0, 0, 0
    patterns = ("*.json", "*.jsonl", "*.yaml", "trace/*", "trace/rank*/*")
    for pattern in patterns:
        for file in path.glob(pattern):
            try:
                stat = file.stat()
            except FileNotFoundError:  # replaced between the listing and here
                continue
            number, size = number + 1, size + stat.st_size
            newest = max(newest, stat.st_mtime_ns)
    return number, size, newest
