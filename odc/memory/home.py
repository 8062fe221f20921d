"""Where a page lives when it is not on the device: host memory, one file on disk, or both.

A home is a flat space of bytes in which every page has an offset. It copies between that
space and an address, from any thread, without the interpreter lock. The disk home reads and
writes with ``O_DIRECT`` straight into and out of the frames: no staging buffer, no page cache.
Its file has no name once it is open, so that nothing is left behind, however the process ends.

The home of two tiers (device <- host <- disk) keeps some pages in host memory and the others on
disk, each whole, for as long as the process lives; which ones says ``placement.py``. Every home
counts what it moved, so that each tier can show that it was used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from odc.errors import BudgetError, ConfigError, PageIOError
from odc.memory.events import Tier
from odc.memory.frames import FRAME_BYTES, PROT_RW, fault_in, map_anonymous, unmap
from odc.memory.pages import BLOCK_BYTES, Page
from odc.sizes import exact_size, format_bytes

_IO_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class Traffic:
    """What a tier of a home has done since the start.

    Loads and stores of one tier are one thread each, so that every number has one writer.

    Attributes:
        num_bytes: room for the pages that live there.
        bytes_in, bytes_out: loaded from it, and stored to it.
        read_bytes, written_bytes: by updates at home, over no link to the device.
    """

    num_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Home(Protocol):
    """A flat space of bytes that pages are loaded from and stored to.

    Attributes:
        tiers: what it consists of.
        traffic: bytes moved, for each of them.
    """

    tiers: tuple[Tier, ...]
    traffic: dict[Tier, Traffic]

    def tier_of(self, page: int) -> Tier:
        """Where a page lives."""

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...

    def address(self, page: int, offset: int) -> int:
        """Where a place of the home lies in memory; 0 if it does not."""

    def read(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        """As ``load``, where nothing goes to the device."""

    def write(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        """As ``store``, where nothing comes from the device."""

    @property
    def used_bytes(self) -> int:
        """Host memory that is taken."""

    def close(self) -> None: ...


class HostHome:
    """Home in host memory.

    Args:
        num_bytes: faulted in at once, so that the cost is known and paid at the start.
        spare_bytes: behind them, faulted in when used: gradients that are updated in backward
            never come home, and nothing does where the device has room for all.
    """

    tiers: tuple[Tier, ...] = (Tier.HOST,)

    def __init__(self, num_bytes: int, spare_bytes: int = 0) -> None:
        self.traffic = {Tier.HOST: Traffic(num_bytes + spare_bytes)}
        self._num_bytes = max(num_bytes + spare_bytes, FRAME_BYTES)
        self._eager_bytes = num_bytes
        self._spare_used: dict[int, int] = {}  # offset -> bytes
        self._base = map_anonymous(self._num_bytes, PROT_RW)
        fault_in(self._base, num_bytes)

    @property
    def used_bytes(self) -> int:
        """Host memory that is taken."""
        return self._eager_bytes + sum(self._spare_used.copy().values())

    def tier_of(self, page: int) -> Tier:
        """Host memory."""
        return Tier.HOST

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self._base + offset, num_bytes)
        self.traffic[Tier.HOST].bytes_in += num_bytes

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        if offset >= self._eager_bytes:
            self._spare_used[offset] = num_bytes
        ctypes.memmove(self._base + offset, address, num_bytes)
        self.traffic[Tier.HOST].bytes_out += num_bytes

    def address(self, page: int, offset: int) -> int:
        """Where a place of the home lies in memory."""
        return self._base + offset

    def read(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self._base + offset, num_bytes)

    def write(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(self._base + offset, address, num_bytes)

    def close(self) -> None:
        if self._base:
            unmap(self._base, self._num_bytes)
            self._base = 0


class DiskHome:
    """Home in one file.

    Args:
        num_bytes: size of the file; it is reserved at once, so that a full disk shows now.
        folder: where the file goes (default: the system's folder for temporary files).
        option: what errors call ``folder``.

    Raises:
        ConfigError: the folder cannot be written.
        BudgetError: it has too little space.
    """

    tiers: tuple[Tier, ...] = (Tier.DISK,)
    used_bytes = 0

    def __init__(
        self,
        num_bytes: int,
        folder: str | os.PathLike[str] | None = None,
        *,
        option: str = "home_dir",
    ) -> None:
        self.traffic = {Tier.DISK: Traffic(num_bytes)}
        self.folder = default_folder(folder)
        self.path = self.folder / f"odc-home-{os.getpid()}.pages"
        self.direct = True
        self._fd = -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
            os.posix_fallocate(self._fd, 0, max(num_bytes, BLOCK_BYTES))
        except OSError as error:
            self.close()
            raise self._refusal(error, num_bytes, option) from error

    def _refusal(self, error: OSError, num_bytes: int, option: str) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = os.statvfs(self.folder)
            return BudgetError(
                f"{option}: {self.folder} has {format_bytes(free.f_bavail * free.f_frsize)} free, "
                f"the model's state needs {exact_size(num_bytes)}; name another folder"
            )
        if error.errno == errno.EFBIG:
            return BudgetError(
                f"{option}: a file of {exact_size(num_bytes)} is more than this process may write "
                f"in {self.folder}; raise the limit (ulimit -f), or name a folder on another "
                "file system"
            )
        return ConfigError(
            f"{option}: cannot make a file in {self.folder} ({error.strerror}); "
            "name a folder that can be written"
        )

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor, name = tempfile.mkstemp(prefix="odc-home-", suffix=".pages", dir=self.folder)
        os.close(descriptor)
        os.unlink(name)
        self.path = Path(name)
        try:
            fd = os.open(name, flags | os.O_DIRECT, 0o600)
        except OSError as error:  # tmpfs before Linux 6.6 and some network file systems
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            fd = os.open(name, flags, 0o600)
        os.unlink(name)
        return fd

    def tier_of(self, page: int) -> Tier:
        """Disk."""
        return Tier.DISK

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._transfer(os.preadv, "read", page, offset, address, num_bytes)
        self.traffic[Tier.DISK].bytes_in += num_bytes

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._transfer(os.pwritev, "write", page, offset, address, num_bytes)
        self.traffic[Tier.DISK].bytes_out += num_bytes

    def address(self, page: int, offset: int) -> int:
        """0: it lies on disk."""
        return 0

    def read(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._transfer(os.preadv, "read", page, offset, address, num_bytes)
        self.traffic[Tier.DISK].read_bytes += num_bytes

    def write(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._transfer(os.pwritev, "write", page, offset, address, num_bytes)
        self.traffic[Tier.DISK].written_bytes += num_bytes

    def _transfer(self, call, verb, page, offset, address, num_bytes) -> None:  # type: ignore[no-untyped-def]
        done = 0
        while done < num_bytes:
            size = min(_IO_BYTES, num_bytes - done)
            view = memoryview((ctypes.c_uint8 * size).from_address(address + done)).cast("B")
            try:
                moved = call(self._fd, [view], offset + done)
            except OSError as error:
                raise PageIOError(
                    f"cannot {verb} {size} bytes at offset {offset + done}: {_explain(error)}",
                    page=page,
                    path=self.path,
                ) from error
            if moved < size:
                # Direct I/O goes on from whole blocks only.
                moved -= moved % BLOCK_BYTES
            if moved == 0:
                raise PageIOError(
                    f"the file ends at offset {offset + done}", page=page, path=self.path
                )
            done += moved

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_CAUSES = {
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "free space, or have the quota raised",
    errno.EBADF: "the file is gone from this process",
    errno.ESTALE: "the file vanished from its server",
    errno.ENODEV: "the device is gone",
    errno.EIO: "the device failed; the kernel's log says more",
}


def _explain(error: OSError) -> str:
    more = _CAUSES.get(error.errno or 0)
    return f"{error.strerror}" if more is None else f"{error.strerror} ({more})"


def default_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Where a disk home goes: ``folder``, or the system's folder for temporary files."""
    return Path(folder) if folder is not None else Path(tempfile.gettempdir())


class TieredHome:
    """Home of two tiers: some pages in host memory, the others on disk.

    Args:
        pages: all pages, by number.
        on_host: (num_pages,) bool, the pages that live in host memory.
        spare: (num_pages,) bool, pages whose host memory is taken when they first come home.
        folder: for the file on disk.
        option: what errors call ``folder``.

    Raises:
        ConfigError: the folder cannot be written.
        BudgetError: it has too little space.
    """

    tiers: tuple[Tier, ...] = (Tier.HOST, Tier.DISK)

    def __init__(
        self,
        pages: list[Page],
        on_host: np.ndarray,
        spare: np.ndarray,
        folder: str | os.PathLike[str] | None = None,
        *,
        option: str = "home_dir",
    ) -> None:
        sizes = np.array([p.room_bytes for p in pages], np.int64)
        eager = on_host & ~spare
        # Spare host memory lies behind the rest, as HostHome has it.
        self._shift = np.zeros(len(pages), np.int64)  # from a page's offset to that in its tier
        offsets = np.array([p.offset for p in pages], np.int64)
        end_of_host = 0
        for chosen, begin in ((eager, 0), (on_host & spare, int(sizes[eager].sum()))):
            self._shift[chosen] = begin + _starts(sizes[chosen]) - offsets[chosen]
            end_of_host = begin + int(sizes[chosen].sum())
        self._shift[~on_host] = _starts(sizes[~on_host]) - offsets[~on_host]
        self._shifts: list[int] = self._shift.tolist()
        self._on_host: list[bool] = on_host.tolist()
        self.host_bytes, self.disk_bytes = end_of_host, int(sizes[~on_host].sum())
        eager_bytes = int(sizes[eager].sum())
        self.disk = DiskHome(self.disk_bytes, folder, option=option)
        try:
            self.host = HostHome(eager_bytes, end_of_host - eager_bytes)
        except BaseException:
            self.disk.close()
            raise
        self.traffic = {**self.host.traffic, **self.disk.traffic}

    @property
    def used_bytes(self) -> int:
        """Host memory that is taken."""
        return self.host.used_bytes

    def tier_of(self, page: int) -> Tier:
        """Where a page lives."""
        return Tier.HOST if self._on_host[page] else Tier.DISK

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._home(page).load(page, offset + self._shifts[page], address, num_bytes)

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._home(page).store(page, offset + self._shifts[page], address, num_bytes)

    def address(self, page: int, offset: int) -> int:
        """Where a place of the home lies in memory; 0 if it lies on disk."""
        return self._home(page).address(page, offset + self._shifts[page])

    def read(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._home(page).read(page, offset + self._shifts[page], address, num_bytes)

    def write(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._home(page).write(page, offset + self._shifts[page], address, num_bytes)

    def _home(self, page: int) -> HostHome | DiskHome:
        return self.host if self._on_host[page] else self.disk

    def close(self) -> None:
        self.host.close()
        self.disk.close()


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of them begins, one behind the other."""
    starts: np.ndarray = np.cumsum(sizes) - sizes
    return starts
