"""Records and reads what a training run did: events, Arrow files, analysis, `Profiler`."""

from __future__ import annotations

from profiler.errors import TraceError
from profiler.reader import TraceReader, find_runs, read_runs
from profiler.writer import TraceWriter

__all__ = ["TraceError", "TraceReader", "TraceWriter", "find_runs", "read_runs"]
