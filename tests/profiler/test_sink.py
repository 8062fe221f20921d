"""`TraceSink` turns the manager's calls into trace rows."""

from __future__ import annotations

import enum
from pathlib import Path

import pytest

from odc.memory import events
from odc.memory.events import Sink, StepRow
from odc.monitor import TraceSink, check_codes
from profiler.reader import TraceReader
from profiler.writer import TraceWriter


def test_a_sink_call_is_a_row(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        sink: Sink = TraceSink(writer)
        sink.need(
            1, 2, 3, 4, events.Phase.BACKWARD, 6, 7, events.Kind.MOMENT, events.Op.WRITE, 8, 9
        )
        sink.action(1, 2, 3, events.Act.STALL, events.Tier.HOST, events.Tier.DEVICE, 7, 8, 9, 19)
        sink.mem(1, 2, events.Tier.DEVICE, events.Account.TRANSIENTS, 5, 6)
        sink.step(StepRow(1, 2, 3, 0.5, *range(5, 16)))
    reader = TraceReader(tmp_path)

    def row(table: dict) -> list:
        return [column[0].item() for name, column in table.items() if name not in added]

    added = {"session", "rank"}
    assert row(reader.need()) == [1, 2, 3, 4, 2, 6, 7, 2, 1, 8, 9]
    assert row(reader.actions()) == [1, 2, 3, 7, 1, 0, 7, 8, 9, 19]
    assert row(reader.mem()) == [1, 2, 0, 3, 5, 6]
    assert row(reader.steps()) == [1, 2, 3, 0.5, *range(5, 16)]


def test_codes_that_disagree_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_codes()
    wrong = enum.IntEnum("Act", {"LOAD": 1})
    monkeypatch.setattr(events, "Act", wrong)
    with (
        TraceWriter(tmp_path / "trace") as writer,
        pytest.raises(AssertionError, match=r"events\.Act and profiler\.schema\.Act disagree"),
    ):
        TraceSink(writer)
