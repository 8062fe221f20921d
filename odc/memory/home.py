"""Where a page lives when it is not on the device: host memory or one file on disk.

A home is a flat space of bytes in which every page has an offset. Both kinds copy between that
space and an address, from any thread, without the interpreter lock. The disk home reads and
writes with ``O_DIRECT`` straight into and out of the frames: no staging buffer, no page cache.
Its file has no name once it is open, so that nothing is left behind, however the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Protocol

from odc.errors import BudgetError, ConfigError, PageIOError
from odc.memory.events import Tier
from odc.memory.frames import FRAME_BYTES, PROT_RW, fault_in, map_anonymous, unmap

_IO_BYTES = 16 * 1024 * 1024


class Home(Protocol):
    """A flat space of bytes that pages are loaded from and stored to."""

    tier: Tier

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...

    def close(self) -> None: ...


class HostHome:
    """Home in host memory.

    Args:
        num_bytes: faulted in at once, so that the cost is known and paid at the start.
        spare_bytes: behind them, faulted in when used: gradients that are updated in backward
            never come home.
    """

    tier = Tier.HOST

    def __init__(self, num_bytes: int, spare_bytes: int = 0) -> None:
        self._num_bytes = max(num_bytes + spare_bytes, FRAME_BYTES)
        self._eager_bytes = num_bytes
        self._spare_used: dict[int, int] = {}  # offset -> bytes
        self._base = map_anonymous(self._num_bytes, PROT_RW)
        fault_in(self._base, num_bytes)

    @property
    def used_bytes(self) -> int:
        """Host memory that is taken."""
        return self._eager_bytes + sum(self._spare_used.copy().values())

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self._base + offset, num_bytes)

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        if offset >= self._eager_bytes:
            self._spare_used[offset] = num_bytes
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

    tier = Tier.DISK

    def __init__(
        self,
        num_bytes: int,
        folder: str | os.PathLike[str] | None = None,
        *,
        option: str = "home_dir",
    ) -> None:
        self.folder = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        self.path = self.folder / f"odc-home-{os.getpid()}.pages"
        self.direct = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
            os.posix_fallocate(self._fd, 0, max(num_bytes, 4096))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = os.statvfs(self.folder)
                raise BudgetError(
                    f"{option}: {self.folder} has {free.f_bavail * free.f_frsize} bytes "
                    f"free, the model's state needs {num_bytes}; name another folder"
                ) from error
            raise ConfigError(
                f"{option}: cannot make a file in {self.folder} ({error.strerror}); "
                "name a folder that can be written"
            ) from error

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

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._transfer(os.preadv, "read", page, offset, address, num_bytes)

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._transfer(os.pwritev, "write", page, offset, address, num_bytes)

    def _transfer(self, call, verb, page, offset, address, num_bytes) -> None:  # type: ignore[no-untyped-def]
        done = 0
        while done < num_bytes:
            size = min(_IO_BYTES, num_bytes - done)
            view = memoryview((ctypes.c_uint8 * size).from_address(address + done)).cast("B")
            try:
                moved = call(self._fd, [view], offset + done)
            except OSError as error:
                raise PageIOError(
                    f"cannot {verb} {size} bytes at offset {offset + done}: {error.strerror}",
                    page=page,
                    path=self.path,
                ) from error
            if moved == 0:
                raise PageIOError(
                    f"the file ends at offset {offset + done}", page=page, path=self.path
                )
            done += moved

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
