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

import bisect
import ctypes
import errno
import mmap
import os
import threading

FRAME_BYTES = 2 * 1024 * 1024
Run = tuple[int, int]  # address of the first frame, number of frames that follow each other

PROT_NONE, PROT_RW = 0, 3
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x10, 0x20, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value

# A move takes 10 to 30 us: cheaper than giving the interpreter lock away and waiting to get it
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


def protect(address: int, num_bytes: int) -> None:
    """Give up what is mapped there and let nobody use it.

    A new mapping, not ``mprotect``: that would leave one kernel mapping for every run of frames
    that was ever there, and a process may have 65,530.
    """
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    mapped = _libc.mmap(address, num_bytes, PROT_NONE, flags, -1, 0)
    _check(mapped == address, f"mmap of {num_bytes} bytes without access")


def move_frames(source: int, target: int, num_frames: int) -> None:
    """Move frames that follow each other; what was mapped at ``target`` is gone.

    One call, unless the source is more than one mapping and the kernel is older than 6.17.
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    num_bytes = num_frames * FRAME_BYTES
    if _libc.mremap(source, num_bytes, num_bytes, flags, target) == target:
        return
    _check(num_frames > 1 and ctypes.get_errno() == errno.EFAULT, f"mremap of {num_frames} frames")
    for offset in range(0, num_bytes, FRAME_BYTES):
        moved = _libc.mremap(source + offset, FRAME_BYTES, FRAME_BYTES, flags, target + offset)
        _check(moved == target + offset, "mremap of a frame")


def frames_in(runs: list[Run]) -> int:
    """Number of frames in runs."""
    return sum(count for _, count in runs)


def _length(run: Run) -> int:
    return run[1]


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

    Frames that are neighbours in the pool move together, in one call: the free ones are kept as
    runs, and a page takes the run that fits it best. ``map`` and ``unmap`` may be called from any
    thread; two calls must not name the same address.

    Args:
        num_frames: frames to fault in now.
    """

    def __init__(self, num_frames: int) -> None:
        self.num_frames = 0
        self.num_free = 0
        self._lock = threading.Lock()  # of the free runs; never held over a move
        self._free: list[Run] = []  # in order of address, neighbours joined
        self._mapped: dict[int, list[Run]] = {}  # address -> where its frames came from
        self._arenas: list[tuple[int, int]] = []
        self.grow(num_frames)

    @property
    def num_bytes(self) -> int:
        return self.num_frames * FRAME_BYTES

    @property
    def arena(self) -> tuple[int, int]:
        """(address, bytes) of the frames that were faulted in first."""
        return self._arenas[0]

    def grow(self, num_frames: int) -> None:
        """Fault in ``num_frames`` more frames."""
        if num_frames <= 0:
            return
        num_bytes = num_frames * FRAME_BYTES
        base = map_anonymous(num_bytes, PROT_RW)
        fault_in(base, num_bytes)
        self._arenas.append((base, num_bytes))
        self._put([(base, num_frames)])
        self.num_frames += num_frames

    def shrink(self, num_frames: int) -> None:
        """Give ``num_frames`` free frames back to the system.

        Raises:
            RuntimeError: fewer frames than that are free; evict first.
        """
        for slot, count in self._take(num_frames, "give back"):
            protect(slot, count * FRAME_BYTES)
        self.num_frames -= num_frames

    def map(self, address: int, num_frames: int) -> None:
        """Move ``num_frames`` frames to ``address``. Their content is whatever they held before.

        Raises:
            RuntimeError: the pool has too few frames (an accounting error of the caller).
        """
        runs = self._take(num_frames, "map")
        moved: list[Run] = []
        try:
            for slot, count in runs:
                move_frames(slot, address + frames_in(moved) * FRAME_BYTES, count)
                moved.append((slot, count))
        except OSError:
            self._return(address, moved)
            self._put(runs)
            raise
        self._mapped[address] = runs

    def unmap(self, address: int) -> None:
        """Move the frames at ``address`` back to the pool and protect the range."""
        runs = self._mapped[address]
        self._return(address, runs)
        del self._mapped[address]
        self._put(runs)

    @staticmethod
    def _return(address: int, runs: list[Run]) -> None:
        at = address
        for slot, count in runs:
            move_frames(at, slot, count)
            at += count * FRAME_BYTES
        if at > address:
            protect(address, at - address)

    def _take(self, num_frames: int, verb: str) -> list[Run]:
        """The smallest free run that is long enough, or else the longest ones."""
        taken: list[Run] = []
        with self._lock:
            if num_frames > self.num_free:
                raise RuntimeError(
                    f"cannot {verb} {num_frames} frames: {self.num_free} of {self.num_frames} "
                    "are free; evict first"
                )
            self.num_free -= num_frames
            while num_frames:
                fitting = [run for run in self._free if run[1] >= num_frames]
                slot, count = run = (
                    min(fitting, key=_length) if fitting else max(self._free, key=_length)
                )
                part = min(count, num_frames)
                at = self._free.index(run)
                rest = [(slot + part * FRAME_BYTES, count - part)] if part < count else []
                self._free[at : at + 1] = rest
                taken.append((slot, part))
                num_frames -= part
        return taken

    def _put(self, runs: list[Run]) -> None:
        with self._lock:
            for slot, count in runs:
                self.num_free += count
                at = bisect.bisect(self._free, (slot, 0))
                if at < len(self._free) and slot + count * FRAME_BYTES == self._free[at][0]:
                    count += self._free.pop(at)[1]
                if at and self._free[at - 1][0] + self._free[at - 1][1] * FRAME_BYTES == slot:
                    at -= 1
                    slot, before = self._free.pop(at)
                    count += before
                self._free.insert(at, (slot, count))

    def close(self) -> None:
        """Give every frame back to the system. The ranges they are mapped into must still exist."""
        for address in list(self._mapped):
            self.unmap(address)
        self._free_arenas()

    def _free_arenas(self) -> None:
        for base, num_bytes in getattr(self, "_arenas", ()):
            if _libc is not None:
                _libc.munmap(base, num_bytes)
        self._arenas = []

    def __del__(self) -> None:
        self._free_arenas()


class FaultingPool(FramePool):
    """The same budget where frames cannot be moved (Linux before 5.7, some sandboxes).

    A frame is memory that the kernel hands out and takes back, zeroed anew each time: four to
    five times slower, and the rules are the same.
    """

    def grow(self, num_frames: int) -> None:
        """Allow ``num_frames`` more frames."""
        self.num_frames += max(num_frames, 0)
        self.num_free += max(num_frames, 0)

    def shrink(self, num_frames: int) -> None:
        """Allow ``num_frames`` fewer frames."""
        self._count(-num_frames, "give back")
        self.num_frames -= num_frames

    def map(self, address: int, num_frames: int) -> None:
        """Give ``num_frames`` frames of zeros to ``address``."""
        self._count(-num_frames, "map")
        num_bytes = num_frames * FRAME_BYTES
        failed = _libc.mprotect(address, num_bytes, PROT_RW)
        _check(failed == 0, f"mprotect of {num_bytes} bytes")
        fault_in(address, num_bytes)
        self._mapped[address] = [(address, num_frames)]

    def unmap(self, address: int) -> None:
        """Take the frames at ``address`` back and protect the range."""
        num_frames = frames_in(self._mapped.pop(address))
        protect(address, num_frames * FRAME_BYTES)
        self._count(num_frames, "unmap")

    def _count(self, change: int, verb: str) -> None:
        with self._lock:
            if self.num_free + change < 0:
                raise RuntimeError(
                    f"cannot {verb} {-change} frames: {self.num_free} of {self.num_frames} "
                    "are free; evict first"
                )
            self.num_free += change


def frames_can_move() -> bool:
    """Whether this kernel moves memory and keeps both addresses mapped."""
    source = map_anonymous(FRAME_BYTES, PROT_RW)
    target = map_anonymous(FRAME_BYTES, PROT_NONE)
    try:
        move_frames(source, target, 1)
    except OSError:
        return False
    finally:
        _libc.munmap(source, FRAME_BYTES)
        _libc.munmap(target, FRAME_BYTES)
    return True


def make_pool(num_frames: int) -> FramePool:
    """A pool of frames that are moved, or faulted in anew where they cannot be."""
    return FramePool(num_frames) if frames_can_move() else FaultingPool(num_frames)
