"""What an event costs: the recorder's methods, with encoding, checksum and writing included.

Each repeat records `EVENTS` events of one kind in traced steps of `EVENTS_PER_STEP`, each ended by
a flush, and divides the wall time by the number of events. `loop` is the cost of the loop itself,
contained in the other numbers. Run it with `python benchmarks/tracer.py`.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from profiler.reader import TraceReader
from profiler.writer import TraceWriter

EVENTS = 40_000
EVENTS_PER_STEP = 4_000
REPEATS = 9

Event = Callable[[int], None]


def events(writer: TraceWriter) -> dict[str, Event]:
    """Return one recorder per kind of event, with values that vary as real ones do."""
    need, action, comm, mem = writer.need, writer.action, writer.comm, writer.mem
    return {
        "need": lambda i: need(i, i * 977, i >> 12, 0, 0, 3, i % 300, 0, 0, i * 31 % 90_007, 512),
        "action": lambda i: action(i * 977, i, i % 900, 0, 1, 0, 1 << 21, i % 70_001, 55, 19),
        "comm": lambda i: comm(i * 977, i >> 12, i, 0, 0, -1, 0, i % 40, 1 << 24, i % 70_001, 9),
        "mem": lambda i: mem(i * 977, i >> 12, 0, i % 4, i * 4099, 1 << 30),
    }


def time_per_event(record: Event, flush: Callable[[], None]) -> float:
    """Return ns per event over one repeat."""
    start = time.perf_counter_ns()
    for first in range(0, EVENTS, EVENTS_PER_STEP):
        for i in range(first, first + EVENTS_PER_STEP):
            record(i)
        flush()
    return (time.perf_counter_ns() - start) / EVENTS


def main() -> dict[str, dict[str, float]]:
    """Measure, print, and return median, lowest and highest ns per event, and bytes per event."""
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("loop", "need", "action", "comm", "mem"):
            trace_dir = Path(folder) / name
            with TraceWriter(trace_dir) as writer:
                known = events(writer)
                record = known.get(name, lambda i: None)
                times = []
                for _ in range(REPEATS):
                    gc.collect()
                    times.append(time_per_event(record, writer.flush))
            size = sum(p.stat().st_size for p in trace_dir.glob("rank*/*.arrows"))
            results[name] = {
                "median_ns": statistics.median(times),
                "min_ns": min(times),
                "max_ns": max(times),
                "bytes_per_event": 0.0 if name == "loop" else size / (REPEATS * EVENTS),
            }
            assert name == "loop" or TraceReader(trace_dir).dropped_events == 0
    print(f"{'event':8} {'median':>9} {'min':>9} {'max':>9}  ns per event    bytes per event")
    for name, row in results.items():
        print(
            f"{name:8} {row['median_ns']:9.0f} {row['min_ns']:9.0f} {row['max_ns']:9.0f}"
            f"{row['bytes_per_event']:30.1f}"
        )
    return results


if __name__ == "__main__":
    main()
