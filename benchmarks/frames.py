"""What it costs to get memory, fill it and give it back, in the ways a machine without a GPU has.

Every way is asked for the same: memory at an address that does not change, a copy into it, and
the memory given back. Runs of all ways are interleaved, so that a busy machine disturbs all alike.
Run it with `python benchmarks/frames.py`; the figures stand in docs/decisions/0001-frames.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from odc.memory import frames
from odc.memory.frames import FRAME_BYTES, AddressRange, FaultingPool, FramePool, fault_in
from odc.memory.home import DiskHome

REPEATS = 9
SIZES_MB = (4, 16, 64)
MB = 2**20
_MAP_SHARED, _MAP_FIXED, _MAP_POPULATE = 0x01, 0x10, 0x8000
Cycle = Callable[[int], None]


def pool_way(pool: FramePool, room: AddressRange, source: int) -> Cycle:
    """Frames moved (or faulted in) into a reserved range."""

    def cycle(size: int) -> None:
        pool.map(room.address, size // FRAME_BYTES)
        ctypes.memmove(room.address, source, size)
        pool.unmap(room.address)

    return cycle


def resize_way(source: int) -> Cycle:
    """A torch storage, resized to nothing and back."""
    storage = torch.empty(0, dtype=torch.uint8).untyped_storage()

    def cycle(size: int) -> None:
        storage.resize_(size)
        ctypes.memmove(storage.data_ptr(), source, size)
        storage.resize_(0)

    return cycle


def memfd_way(room: AddressRange, source: int, most: int) -> Cycle:
    """Pages of a memory file mapped into a reserved range."""
    fd = os.memfd_create("frames")
    os.ftruncate(fd, most)
    os.posix_fallocate(fd, 0, most)
    flags = _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE

    def cycle(size: int) -> None:
        frames._libc.mmap(room.address, size, frames.PROT_RW, flags, fd, 0)
        ctypes.memmove(room.address, source, size)
        frames.protect(room.address, size)

    return cycle


def mmap_way(source: int) -> Cycle:
    """Fresh anonymous memory; the address changes."""

    def cycle(size: int) -> None:
        block = mmap.mmap(-1, size)
        view = (ctypes.c_uint8 * size).from_buffer(block)
        ctypes.memmove(view, source, size)
        del view
        block.close()

    return cycle


def measure_ways() -> dict[str, dict[str, float]]:
    """GB/s of every way at every size: median, lowest, highest."""
    most = max(SIZES_MB) * MB
    source = AddressRange(most)
    frames._libc.mprotect(source.address, most, frames.PROT_RW)
    fault_in(source.address, most)
    rooms = [AddressRange(most) for _ in range(3)]
    ways = {
        "frames moved": pool_way(FramePool(most // FRAME_BYTES), rooms[0], source.address),
        "frames faulted": pool_way(FaultingPool(most // FRAME_BYTES), rooms[1], source.address),
        "resize_": resize_way(source.address),
        "memfd": memfd_way(rooms[2], source.address, most),
        "fresh mmap": mmap_way(source.address),
    }
    rates: dict[str, list[float]] = {f"{n} {mb} MiB": [] for n in ways for mb in SIZES_MB}
    for repeat in range(REPEATS + 1):
        for name, cycle in ways.items():
            for mb in SIZES_MB:
                count = 64 // mb
                start = time.perf_counter()
                for _ in range(count):
                    cycle(mb * MB)
                if repeat:  # the first is warm-up
                    taken = time.perf_counter() - start
                    rates[f"{name} {mb} MiB"].append(count * mb * MB / taken / 1e9)
    return {name: spread(values) for name, values in rates.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def move_times(pool: FramePool, room: AddressRange, count: int, step: int) -> float:
    """us for ``count`` frames there and back, ``step`` in a call."""
    start = time.perf_counter()
    for at in range(0, count, step):
        pool.map(room.address + at * FRAME_BYTES, step)
    for at in range(0, count, step):
        pool.unmap(room.address + at * FRAME_BYTES)
    return (time.perf_counter() - start) * 1e6


def measure_moves() -> dict[str, dict[str, float]]:
    """us for a page of 1 to 32 frames there and back: in one call, frame by frame, when busy."""
    stop = threading.Event()

    def compute() -> None:
        matrix = torch.ones(512, 512)
        while not stop.is_set():
            matrix = (matrix @ matrix).clamp_(0, 1)

    times: dict[str, list[float]] = {}
    for load in ("alone", "busy"):
        worker = threading.Thread(target=compute)
        if load == "busy":
            worker.start()
        pool, room = FramePool(32), AddressRange(32 * FRAME_BYTES)
        for _ in range(REPEATS):
            for count in (1, 4, 32):
                for name, step in (("in one call", count), ("one by one", 1)):
                    taken = move_times(pool, room, count, step)
                    times.setdefault(f"{load}: {count} frames {name}", []).append(taken)
        stop.set()
        if worker.is_alive():
            worker.join()
    return {name: spread(values) for name, values in times.items()}


def measure_disk() -> dict[str, dict[str, float]]:
    """GB/s of reading 64 MiB with O_DIRECT: into frames, and through a buffer."""
    size = 64 * MB
    results: dict[str, list[float]] = {"into frames": [], "through a buffer": []}
    with tempfile.TemporaryDirectory(dir=os.environ.get("ODC_HOME_DIR")) as folder:
        home = DiskHome(size, folder)
        pool, rooms = FramePool(64), [AddressRange(size), AddressRange(size)]
        for room in rooms:
            pool.map(room.address, 32)
        ctypes.memset(rooms[0].address, 1, size)
        home.store(0, 0, rooms[0].address, size)
        for _ in range(REPEATS):
            start = time.perf_counter()
            home.load(0, 0, rooms[0].address, size)
            results["into frames"].append(size / (time.perf_counter() - start) / 1e9)
            start = time.perf_counter()
            home.load(0, 0, rooms[1].address, size)
            ctypes.memmove(rooms[0].address, rooms[1].address, size)
            results["through a buffer"].append(size / (time.perf_counter() - start) / 1e9)
        direct = home.direct
        home.close()
    return {f"{name}, direct={direct}": spread(values) for name, values in results.items()}


def huge_share() -> float:
    """Share of a resident range that the kernel backs with huge pages."""
    pool, room = FramePool(16), AddressRange(16 * FRAME_BYTES)
    pool.map(room.address, 16)
    inside, rss, huge = False, 0, 0
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            head = line.split(None, 1)[0]
            if not head.endswith(":"):
                low, high = (int(part, 16) for part in head.split("-"))
                inside = low < room.address + room.num_bytes and room.address < high
            elif inside and head in ("Rss:", "AnonHugePages:"):
                kib = int(line.split()[1])
                rss, huge = (rss + kib, huge) if head == "Rss:" else (rss, huge + kib)
    pool.unmap(room.address)
    return huge / rss if rss else 0.0


def mappings_per_frame() -> dict[str, float]:
    """Kernel mappings that lone resident frames take, and that are left when they are gone."""

    def count() -> int:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
            return sum(1 for _ in lines)

    pool, room = FramePool(64), AddressRange(128 * FRAME_BYTES)
    before = count()
    for at in range(64):  # every other frame of the range: none is another's neighbour
        pool.map(room.address + 2 * at * FRAME_BYTES, 1)
    resident = count() - before
    for at in range(64):
        pool.unmap(room.address + 2 * at * FRAME_BYTES)
    return {"resident": resident / 64, "evicted": (count() - before) / 64}


def main() -> dict[str, Any]:
    """Measure, print a table, and return it all."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "GB/s: get memory, copy, give back": measure_ways(),
        "us: a page there and back": measure_moves(),
        "GB/s: read 64 MiB from disk": measure_disk(),
    }
    for title, rows in results.items():
        print(f"\n{title:40} {'median':>9} {'min':>9} {'max':>9}")
        for name, row in rows.items():
            print(f"{name:40} {row['median']:9.2f} {row['min']:9.2f} {row['max']:9.2f}")
    results["huge page share"] = huge_share()
    results["mappings per frame"] = mappings_per_frame()
    print(f"\nhuge page share {results['huge page share']:.2f}")
    print(f"mappings per frame {results['mappings per frame']}")
    return results


if __name__ == "__main__":
    main()
