"""Frames: the device memory of a machine without a device, and the budget made exact.

A frame is 2 MiB of memory that is faulted in once. A range is an address range that a group's
bytes occupy for the life of the process. Loading a page *moves* frames from the pool into the
range with ``mremap``; evicting it moves them back. Nothing is copied, faulted or zeroed by a move,
a tensor's address never changes, and the bytes in use can never exceed the pool because there
is nothing else to map.

A range without frames is protected: using a page after its eviction is a fault, never a wrong
number. ``docs/decisions/0001-frames.md`` has the measurements behind the choice.

This is not an allocator: it knows neither pages nor who owns them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque

FRAME_BYTES = 2 * 1024 * 1024

PROT_NONE, PROT_RW = 0, 3
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x10, 0x20, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value

# A move takes about 10 us: cheaper than giving the interpreter lock away and waiting to get it
# back. Copies and reads, which take longer, release it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]


def frames_for(num_bytes: int) -> int:
    """Number of frames that hold ``num_bytes``."""
    return -(-num_bytes // FRAME_BYTES)


def _check(ok: bool, call: str) -> None:
    if not ok:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def map_anonymous(num_bytes: int, prot: int) -> int:
    """Map ``num_bytes`` aligned to a frame; returns the address."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    padded = num_bytes + FRAME_BYTES
    base: int = _libc.mmap(None, padded, prot, flags, -1, 0)
    _check(base != _MAP_FAILED, f"mmap of {padded} bytes")
    start = -(-base // FRAME_BYTES) * FRAME_BYTES
    if start > base:
        _libc.munmap(base, start - base)
    tail = base + padded - (start + num_bytes)
    if tail:
        _libc.munmap(start + num_bytes, tail)
    return start


def unmap(address: int, num_bytes: int) -> None:
    """Give a mapping back to the system."""
    _libc.munmap(address, num_bytes)


def fault_in(address: int, num_bytes: int) -> None:
    """Ask for huge pages and touch every page once."""
    _libc.madvise(address, num_bytes, _MADV_HUGEPAGE)
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) != 0:  # before Linux 5.14
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            ctypes.c_char.from_address(address + offset).value = b"\0"


class AddressRange:
    """A reserved address range of whole frames. Without frames it can be neither read nor written.

    Args:
        num_bytes: bytes to reserve; rounded up to whole frames.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = frames_for(num_bytes) * FRAME_BYTES
        self.address = map_anonymous(self.num_bytes, PROT_NONE)

    def buffer(self) -> ctypes.Array[ctypes.c_uint8]:
        """The range as a writable buffer. The buffer keeps the range alive."""
        array = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        array._range = self  # type: ignore[attr-defined]
        return array

    def __del__(self) -> None:
        address = getattr(self, "address", None)
        if address is not None and _libc is not None:
            _libc.munmap(address, self.num_bytes)


class FramePool:
    """A fixed number of frames, each either in the pool or mapped into a range.

    ``map`` and ``unmap`` may be called from any thread; two calls must not name the same frames.

    Args:
        num_frames: frames to fault in now.
    """

    def __init__(self, num_frames: int) -> None:
        self.num_frames = 0
        self._free: deque[int] = deque()  # slot addresses; append and pop are atomic
        self._slots: dict[int, list[int]] = {}  # mapped address -> slot addresses
        self._arenas: list[tuple[int, int]] = []
        self.grow(num_frames)

    @property
    def num_bytes(self) -> int:
        return self.num_frames * FRAME_BYTES

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_frames: int) -> None:
        """Fault in ``num_frames`` more frames."""
        if num_frames <= 0:
            return
        num_bytes = num_frames * FRAME_BYTES
        base = map_anonymous(num_bytes, PROT_RW)
        fault_in(base, num_bytes)
        self._arenas.append((base, num_bytes))
        self._free.extend(base + i * FRAME_BYTES for i in range(num_frames))
        self.num_frames += num_frames

    def shrink(self, num_frames: int) -> None:
        """Give ``num_frames`` free frames back to the system.

        Raises:
            RuntimeError: fewer frames than that are free; evict first.
        """
        if num_frames > len(self._free):
            raise RuntimeError(
                f"cannot give back {num_frames} frames: {len(self._free)} are free; evict first"
            )
        for _ in range(num_frames):
            slot = self._free.pop()
            _libc.mmap(
                slot, FRAME_BYTES, PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED, -1, 0
            )
        self.num_frames -= num_frames

    def map(self, address: int, num_frames: int) -> None:
        """Move ``num_frames`` frames to ``address``. Their content is whatever they held before.

        Raises:
            RuntimeError: the pool has too few frames (an accounting error of the caller).
        """
        if num_frames > len(self._free):
            raise RuntimeError(f"{num_frames} frames asked for, {len(self._free)} are free")
        slots = [self._free.popleft() for _ in range(num_frames)]
        for i, slot in enumerate(slots):
            self._move(slot, address + i * FRAME_BYTES)
        self._slots[address] = slots

    def unmap(self, address: int) -> None:
        """Move the frames at ``address`` back to the pool and protect the range."""
        slots = self._slots.pop(address)
        for i, slot in enumerate(slots):
            self._move(address + i * FRAME_BYTES, slot)
        failed = _libc.mprotect(address, len(slots) * FRAME_BYTES, PROT_NONE)
        _check(failed == 0, "mprotect")
        self._free.extend(slots)

    @staticmethod
    def _move(source: int, target: int) -> None:
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        moved = _libc.mremap(source, FRAME_BYTES, FRAME_BYTES, flags, target)
        _check(moved == target, "mremap of a frame")

    def __del__(self) -> None:
        for base, num_bytes in getattr(self, "_arenas", ()):
            if _libc is not None:
                _libc.munmap(base, num_bytes)
