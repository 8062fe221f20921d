"""What the thread engine costs on top of the bytes, and how true its emulated link is.

`python benchmarks/engine.py` prints medians of interleaved repeats. *Handover* is a command that
moves nothing: what a worker's wake-up and the report of its end cost. *Pace* is the time of a
train of pages over an emulated link, relative to bytes / bandwidth, and relative to the virtual
engine's time for the same commands. *Slices* is the rate of loads of 64 MiB pages by the size of
the slices that they move in, idle and beside a computing thread. *Virtual* is the time of the
virtual engine for a command, from submit to end, behind a queue of others, and of a poll.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from odc.memory.engines.base import CommandKind, Ticket
from odc.memory.engines.threads import ThreadEngine
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind
from odc.memory.frames import FRAME_BYTES, AddressRange, FramePool
from odc.memory.home import DiskHome, Home, HostHome
from odc.memory.pages import Page

REPEATS = 9
COMMANDS = 40
FRAMES = 4  # a page
PAGE_MIB = 64  # of the pages that are moved in slices
LARGE_PAGES = 4


class NoHome(HostHome):
    """A home that moves nothing."""

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...


def pages_at(address: int, count: int, frames: int = FRAMES) -> list[Page]:
    size = frames * FRAME_BYTES
    return [
        Page(i, i, Kind.PARAMETER, 0, 0, size, frames, address + i * size, i * size)
        for i in range(count)
    ]


def handover_us() -> dict[str, float]:
    """us of a load that copies nothing, waited for; of a queue of them; of submit alone."""
    pool, room = FramePool(COMMANDS * FRAMES), AddressRange(COMMANDS * FRAMES * FRAME_BYTES)
    engine = ThreadEngine(pool, NoHome(0))
    pages = pages_at(room.address, COMMANDS)

    def submit(kind: CommandKind) -> list[Ticket]:
        return [engine.submit(kind, page) for page in pages]

    start = time.perf_counter()
    for page in pages:
        engine.wait(engine.submit(CommandKind.LOAD, page))
    waited = time.perf_counter() - start
    start = time.perf_counter()
    for ticket in submit(CommandKind.RELEASE):
        engine.wait(ticket)
    queued = time.perf_counter() - start
    start = time.perf_counter()
    tickets = submit(CommandKind.LOAD)
    submitted = time.perf_counter() - start
    for ticket in tickets:
        engine.wait(ticket)
    engine.close()
    parts = {"load, waited for": waited, "release, queued": queued, "submit": submitted}
    return {name: seconds / COMMANDS * 1e6 for name, seconds in parts.items()}


def train_ns(engine: ThreadEngine | VirtualEngine, pages: list[Page]) -> int:
    """Stores of half the pages, and loads of the other half behind them, pairwise."""
    half = len(pages) // 2
    start = engine.now_ns()
    for page in pages[:half]:
        engine.submit(CommandKind.CREATE, page)
    loads: list[Ticket] = []
    for old, new in zip(pages[:half], pages[half:], strict=True):
        store = engine.submit(CommandKind.STORE, old)
        release = engine.submit(CommandKind.RELEASE, old, (store,))
        loads.append(engine.submit(CommandKind.LOAD, new, (release,)))
    for load in loads:
        engine.wait(load)
    return loads[-1].done_ns - start


def pace(bandwidth: float, busy: bool) -> dict[str, float]:
    """Time of a train over the emulated link against the bytes and against the virtual engine."""
    count = 16
    pool, room = FramePool(count * FRAMES), AddressRange(count * FRAMES * FRAME_BYTES)
    home = HostHome(count * FRAMES * FRAME_BYTES)
    engine = ThreadEngine(pool, home, bandwidth)
    pages = pages_at(room.address, count)
    with computing(busy):
        taken = train_ns(engine, pages)
    engine.close()
    home.close()
    # 8 stores and, one page behind them, 8 loads
    least = (count // 2 + 1) * FRAMES * FRAME_BYTES / bandwidth * 1e9
    virtual = train_ns(VirtualEngine(bandwidth, frame_move_ns=5_000), pages)
    return {"of the least": taken / least, "of the virtual": taken / virtual}


class Slices:
    """Loads of large pages from both tiers, in slices of a given size."""

    def __init__(self) -> None:
        size = PAGE_MIB << 20
        self.pool = FramePool(LARGE_PAGES * size // FRAME_BYTES)
        self.room = AddressRange(LARGE_PAGES * size)
        self.pages = pages_at(self.room.address, LARGE_PAGES, size // FRAME_BYTES)
        self.homes: dict[str, Home] = {
            "host": HostHome(LARGE_PAGES * size),
            "disk": DiskHome(LARGE_PAGES * size),
        }
        for home in self.homes.values():
            engine = ThreadEngine(self.pool, home)
            for kind in (CommandKind.CREATE, CommandKind.STORE, CommandKind.RELEASE):
                run_all(engine, kind, self.pages)
            engine.close()

    def gb_per_s(self) -> dict[str, float]:
        rates = {}
        for name, home in self.homes.items():
            for mib in (1, 2, 4, 8, 16, 64):
                engine = ThreadEngine(self.pool, home, slice_bytes=mib << 20)
                start = time.perf_counter()
                run_all(engine, CommandKind.LOAD, self.pages)
                taken = time.perf_counter() - start
                run_all(engine, CommandKind.RELEASE, self.pages)
                engine.close()
                rates[f"{name}, {mib} MiB"] = LARGE_PAGES * (PAGE_MIB << 20) / taken / 1e9
        return rates


def run_all(engine: ThreadEngine, kind: CommandKind, pages: list[Page]) -> None:
    for ticket in [engine.submit(kind, page) for page in pages]:
        engine.wait(ticket)


@contextmanager
def computing(busy: bool) -> Iterator[None]:
    """A thread that multiplies matrices, if ``busy``."""
    stop = threading.Event()

    def compute() -> None:
        matrix = torch.ones(512, 512)
        while not stop.is_set():
            matrix = (matrix @ matrix).clamp_(0, 1)

    worker = threading.Thread(target=compute)
    if busy:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        if busy:
            worker.join()


def virtual_us(queued: int) -> dict[str, float]:
    """us for each of three dependent commands behind ``queued`` others, and for a poll."""
    pages = pages_at(0, 64)
    engine = VirtualEngine(1e9, frame_move_ns=1000)
    loads = [engine.submit(CommandKind.LOAD, pages[n % 64]) for n in range(queued)]
    count, page_ns = 2000, int(FRAMES * FRAME_BYTES / 1e9 * 1e9)
    start = time.perf_counter()
    for n in range(count):
        store = engine.submit(CommandKind.STORE, pages[n % 64])
        release = engine.submit(CommandKind.RELEASE, pages[n % 64], (store,))
        loads.append(engine.submit(CommandKind.LOAD, pages[(n + 1) % 64], (release,)))
        engine.advance(page_ns)
    middle = time.perf_counter()
    for _ in range(count):
        engine.poll(loads[-1])
    end = time.perf_counter()
    return {"command": (middle - start) / 3 / count * 1e6, "poll": (end - middle) / count * 1e6}


def main() -> dict[str, Any]:
    """Measure, print a table, and return it all."""
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    samples: dict[str, list[float]] = {}
    slices = Slices()
    for _ in range(REPEATS):
        rows = {f"handover us: {k}": v for k, v in handover_us().items()}
        for queued in (0, 100, 1000):
            rows |= {f"virtual us, {queued} queued: {k}": v for k, v in virtual_us(queued).items()}
        for busy in (False, True):
            with computing(busy):
                found = slices.gb_per_s()
            rows |= {f"slices GB/s{' busy' if busy else ''}: {k}": v for k, v in found.items()}
        for bandwidth in (1.5e9, 4e9):
            for busy in (False, True):
                name = f"pace {bandwidth / 1e9:g} GB/s{' busy' if busy else ''}"
                rows |= {f"{name}: {k}": v for k, v in pace(bandwidth, busy).items()}
        for name, value in rows.items():
            samples.setdefault(name, []).append(value)
    results = {
        name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
        for name, v in samples.items()
    }
    print(f"{'':44} {'median':>9} {'min':>9} {'max':>9}")
    for name, row in results.items():
        print(f"{name:44} {row['median']:9.3f} {row['min']:9.3f} {row['max']:9.3f}")
    return results


if __name__ == "__main__":
    main()
