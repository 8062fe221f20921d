"""Connects the memory manager to the trace: `TraceSink`, and `Profiler` for any program.

The manager speaks to a `Sink` and knows no file; the profiler writes files and knows no manager.
Both define the codes for themselves (neither may import the other), so the adapter compares them.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from odc.memory import events
from odc.memory.events import StepRow
from profiler import schema
from profiler.session import Profiler
from profiler.writer import TraceWriter

__all__ = ["Profiler", "TraceSink", "check_codes"]


class TraceSink:
    """The manager's `Sink`, writing to a `TraceWriter`.

    `need`, `action` and `mem` are the writer's own methods: an adapter's call would cost as much as
    the event itself.

    Args:
        writer: Where events go. The sink does not flush or close it.
    """

    def __init__(self, writer: TraceWriter) -> None:
        check_codes()
        self.writer = writer
        self.need = writer.need
        self.action = writer.action
        self.mem = writer.mem
        self._columns = attrgetter(*(column.name for column in schema.STEP.columns))

    def step(self, row: StepRow) -> None:
        """Record a finished step."""
        self.writer.step(*self._columns(row))


def check_codes() -> None:
    """Compare the manager's codes and step row with the trace schema.

    The schema may know more codes than the manager (it also serves other programs), never other
    numbers.
    """
    for name in ("Phase", "Kind", "Op", "Act", "Tier", "Account"):
        ours = {member.name: int(member) for member in getattr(events, name)}
        theirs = {member.name: int(member) for member in getattr(schema, name)}
        assert ours.items() <= theirs.items(), (
            f"odc.memory.events.{name} and profiler.schema.{name} disagree: {ours} and {theirs}"
        )
    columns = [column.name for column in schema.STEP.columns]
    row = [field.name for field in fields(StepRow)]
    assert row == columns, f"StepRow has fields {row}, the step file columns {columns}"
