"""What this machine and this process may use: memory, limits, the folder of a disk home.

``gather`` reads it from the kernel's files; everything else here and all that judges it is a pure
function of the record, so that tests describe machines instead of finding them. Paths are read
below ``root``, which is ``/`` but for tests.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_UNLIMITED = 1 << 60  # what cgroups without a limit say is above this


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder for a file of pages.

    Attributes:
        path: where it is, or would be made.
        free_bytes: that this user may take.
        filesystem: its type, as in ``mount``.
        direct: whether files in it can be read and written past the page cache; None: not tried.
        exists: False where it would be made.
    """

    path: Path
    free_bytes: int
    filesystem: str
    direct: bool | None
    exists: bool = True

    @property
    def is_memory(self) -> bool:
        """Whether what is written there takes memory."""
        return self.filesystem in _MEMORY_FILESYSTEMS


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The tightest memory limit of the control groups around this process.

    Attributes:
        path: of the group that has it.
        limit_bytes: for all processes in it together.
        used_bytes: of that, without what the kernel can take back (page cache).
    """

    path: str
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource limit (``ulimit``) and how much of it is used."""

    limit_bytes: int
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be used. ``None`` is no limit.

    Attributes:
        total_bytes, available_bytes: memory, and what of it is free or can be made free.
        swap_bytes: free swap.
        cgroup: memory limit of the control group.
        address_space, data, locked, file_size: RLIMIT_AS, _DATA, _MEMLOCK, _FSIZE.
        folder: of a disk home, where one is asked for.
    """

    total_bytes: int
    available_bytes: int
    swap_bytes: int = 0
    cgroup: Cgroup | None = None
    address_space: Limit | None = None
    data: Limit | None = None
    locked: Limit | None = None
    file_size: Limit | None = None
    folder: Folder | None = None

    @property
    def free_bytes(self) -> int:
        """Memory that this process can take without swapping or being killed."""
        if self.cgroup is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup.free_bytes)


def gather(folder: Path | None = None, root: Path = _ROOT) -> Machine:
    """Ask the kernel.

    Args:
        folder: where a disk home would be; a file is made in it and removed, to try it.
        root: where ``proc`` and ``sys`` are.
    """
    memory = meminfo(root)
    status = proc_status(root)
    return Machine(
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
        swap_bytes=memory.get("SwapFree", 0),
        cgroup=find_cgroup(root),
        address_space=_rlimit(resource.RLIMIT_AS, status.get("VmSize", 0)),
        data=_rlimit(resource.RLIMIT_DATA, status.get("VmData", 0)),
        locked=_rlimit(resource.RLIMIT_MEMLOCK, status.get("VmLck", 0)),
        file_size=_rlimit(resource.RLIMIT_FSIZE, 0),
        folder=None if folder is None else look_at(folder, root),
    )


def _rlimit(which: int, used_bytes: int) -> Limit | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else Limit(soft, used_bytes)


def meminfo(root: Path = _ROOT) -> dict[str, int]:
    """``/proc/meminfo``; sizes in bytes, counts of huge pages as they are."""
    return _sizes(_read(root / "proc/meminfo"))


def proc_status(root: Path = _ROOT) -> dict[str, int]:
    """The sizes in ``/proc/self/status``, in bytes."""
    return _sizes(_read(root / "proc/self/status"))


def _sizes(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _read(path: Path) -> str:
    """What a file of the kernel says, or nothing where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def find_cgroup(root: Path = _ROOT) -> Cgroup | None:
    """The tightest memory limit of control groups of version 1 or 2, or None."""
    found = [*_cgroups_v1(root), *_cgroups_v2(root)]
    return min(found, key=lambda group: group.free_bytes) if found else None


def _cgroups_v2(root: Path) -> Iterator[Cgroup]:
    for folder, name in _levels(root / "sys/fs/cgroup", _own_path(root, "")):
        limit = _number(folder / "memory.max")
        if limit is not None:
            used = _number(folder / "memory.current") or 0
            yield Cgroup(name, limit, max(used - _reclaimable(folder, "inactive_file"), 0))


def _cgroups_v1(root: Path) -> Iterator[Cgroup]:
    for folder, name in _levels(root / "sys/fs/cgroup/memory", _own_path(root, "memory")):
        limit = _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _UNLIMITED:
            used = _number(folder / "memory.usage_in_bytes") or 0
            yield Cgroup(name, limit, max(used - _reclaimable(folder, "total_inactive_file"), 0))


def _own_path(root: Path, controller: str) -> str:
    """This process's group in a hierarchy, from ``/proc/self/cgroup``."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _levels(base: Path, path: str) -> Iterator[tuple[Path, str]]:
    """A group and those around it. In a container the path may not be visible: then the root."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count]), "/" + "/".join(parts[:count])


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path, name: str) -> int:
    """Page cache that was not used lately: the kernel takes it back before it kills anybody."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def look_at(folder: Path, root: Path = _ROOT) -> Folder:
    """Space, file system and direct I/O of a folder, or of the one that it would be made in."""
    there = nearest_folder(folder)
    free = os.statvfs(there)
    return Folder(
        folder,
        free.f_bavail * free.f_frsize,
        filesystem_of(there, root),
        _takes_direct(there),
        exists=os.path.exists(folder),
    )


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest around it that exists: where it would be made."""
    there = folder.absolute()
    while not os.path.exists(there) and there != there.parent:  # also where it may not be asked
        there = there.parent
    return there


def filesystem_of(path: Path, root: Path = _ROOT) -> str:
    """Type of the file system that a path lies on, from ``/proc/self/mountinfo``."""
    resolved = str(path.resolve())
    best, kind = "", "unknown"
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two on one point the later one is on top
            best, kind = point, after.split()[0]
    return kind


def _takes_direct(folder: Path) -> bool | None:
    try:
        descriptor, name = tempfile.mkstemp(prefix="odc-probe-", dir=folder)
    except OSError:
        return None  # DiskHome says what is wrong
    os.close(descriptor)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        os.unlink(name)
    return True
