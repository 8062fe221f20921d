"""What the thread engine costs on top of the bytes, and how true its emulated link is.

`python benchmarks/engine.py` prints medians of interleaved repeats. *Handover* is a command that
moves nothing: what a worker's wake-up and the report of its end cost. *Pace* is the time of a
train of pages over an emulated link, relative to bytes / bandwidth, and relative to the virtual
engine's time for the same commands.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch

from odc.memory.engines.base import CommandKind, Ticket
from odc.memory.engines.threads import ThreadEngine
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind
from odc.memory.frames import FRAME_BYTES, AddressRange, FramePool
from odc.memory.home import HostHome
from odc.memory.pages import Page

REPEATS = 9
COMMANDS = 40
FRAMES = 4  # a page


class NoHome(HostHome):
    """A home that moves nothing."""

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None: ...


def pages_at(address: int, count: int) -> list[Page]:
    size = FRAMES * FRAME_BYTES
    return [
        Page(i, i, Kind.PARAMETER, 0, 0, size, FRAMES, address + i * size, i * size)
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
    stop = threading.Event()

    def compute() -> None:
        matrix = torch.ones(512, 512)
        while not stop.is_set():
            matrix = (matrix @ matrix).clamp_(0, 1)

    worker = threading.Thread(target=compute)
    if busy:
        worker.start()
    taken = train_ns(engine, pages)
    stop.set()
    if busy:
        worker.join()
    engine.close()
    home.close()
    # 8 stores and, one page behind them, 8 loads
    least = (count // 2 + 1) * FRAMES * FRAME_BYTES / bandwidth * 1e9
    virtual = train_ns(VirtualEngine(bandwidth, frame_move_ns=5_000), pages)
    return {"of the least": taken / least, "of the virtual": taken / virtual}


def main() -> dict[str, Any]:
    """Measure, print a table, and return it all."""
    torch.set_num_threads(1)
    samples: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        rows = {f"handover us: {k}": v for k, v in handover_us().items()}
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
