"""Records and reads what a training run did: events, Arrow files, analysis, `Profiler`.

Importing this package does not import torch; starting a `Profiler` does.
"""

from __future__ import annotations

from profiler.errors import TraceError
from profiler.reader import TraceReader, find_runs, read_runs
from profiler.session import Profiler
from profiler.writer import TraceWriter

__all__ = ["Profiler", "TraceError", "TraceReader", "TraceWriter", "find_runs", "read_runs"]
