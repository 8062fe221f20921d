"""The one exception of the trace files."""

from __future__ import annotations


class TraceError(Exception):
    """A trace cannot be written or read; the text names the file, what was expected, what to do."""
