"""What is on disk: batches, sides, segments, sessions, full disks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from profiler import segment as segment_module
from profiler.errors import TraceError
from profiler.reader import TraceReader, find_runs, read_runs
from profiler.schema import FORMAT, STREAMS
from profiler.writer import TraceWriter


def test_everything_written_is_read_back(trace: Path) -> None:
    reader = TraceReader(trace)
    need = reader.need()
    assert need["compute_ns"].tolist() == [s * 1000 + r for s in range(10) for r in range(7)]
    assert need["step"].dtype == np.int32 and need["phase"].dtype == np.uint8
    assert reader.steps()["loss"].tolist() == [1.0 / (s + 1) for s in range(10)]
    assert len(reader.actions()["page"]) == 70
    assert reader.mem()["peak"].tolist() == [20] * 10
    assert len(reader.comm()["src"]) == 0
    assert reader.problems == []
    assert set(reader.clean_end.values()) == {True} and len(reader.clean_end) == len(STREAMS)


def test_steps_and_columns_can_be_chosen(trace: Path) -> None:
    reader = TraceReader(trace)
    need = reader.need([3, 8, 99], columns=["compute_ns"])
    assert need["compute_ns"].tolist() == [s * 1000 + r for s in (3, 8) for r in range(7)]
    assert set(need) == {"compute_ns", "session", "rank"}
    assert len(reader.need([])["step"]) == 0
    with pytest.raises(ValueError, match="columns must be among"):
        reader.need(columns=["nothing"])


def test_arrow_alone_can_read_a_segment(need_file: Path) -> None:
    with pa.OSFile(str(need_file), "rb") as file, pa.ipc.open_stream(file) as stream:
        batches = list(stream)
    assert batches[0].num_rows == 0, "the schema is on disk before the first event"
    assert [b.num_rows for b in batches[1:]] == [7] * 10 + [1]
    end = batches[-1].to_pylist()[0]
    assert end["t_ns"] == -1 and all(v == 0 for k, v in end.items() if k != "t_ns")
    assert batches[1].schema.metadata[b"odc.schema"] == b"trace.need/1"


def test_the_side_file_holds_the_checksum_of_every_batch(need_file: Path) -> None:
    side = json.loads(need_file.with_suffix(".json").read_text())
    data = need_file.read_bytes()
    assert side["closed"] and side["rows"] == 70 and side["last_step"] == 9
    assert len(side["batches"]) == 11
    for batch in side["batches"]:
        piece = data[batch["offset"] : batch["offset"] + batch["bytes"]]
        assert zlib.crc32(piece) == batch["crc32"]


def test_the_side_file_of_an_open_segment_is_valid_after_every_flush(
    tmp_path: Path, steps_writer
) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        side = tmp_path / "trace" / "rank00000" / "need-000001.json"
        assert not side.exists()
        for step in range(5):
            steps_writer(writer, range(step, step + 1))
            found = json.loads(side.read_text())
            assert not found["closed"] and len(found["batches"]) == step + 1


def test_a_full_buffer_is_written_without_a_flush(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", buffer_rows=16) as writer:
        for row in range(40):
            writer.mem(row, 0, 0, 0, row, row)
        assert TraceReader(tmp_path).mem()["allocated"].tolist() == list(range(32))
    assert TraceReader(tmp_path).mem()["allocated"].tolist() == list(range(40))


def test_segments_roll_and_read_as_one(tmp_path: Path, steps_writer, read_needs) -> None:
    with TraceWriter(tmp_path / "run" / "trace", segment_bytes=8_000) as writer:
        steps_writer(writer, range(20))
    folder = tmp_path / "run" / "trace" / "rank00000"
    numbers = sorted(p.name for p in folder.glob("need-*.arrows"))
    assert len(numbers) > 2 and numbers[1] == "need-000002.arrows"
    assert len(read_needs(tmp_path / "run")) == 140
    reader = TraceReader(tmp_path / "run")
    assert all(reader.clean_end.values())
    listed = [s for s in reader.manifest["segments"] if "/need-" in s["file"]]
    assert [s["state"] for s in listed] == ["closed"] * len(numbers)
    assert sum(s["rows"] for s in listed) == 140


def test_the_manifest_is_there_from_the_start(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", 0, 2, {"model": {"class": "MoE"}}):
        manifest = TraceReader(tmp_path).manifest
    assert manifest["format"] == FORMAT and manifest["world_size"] == 2
    assert manifest["ranks"] == [0, 1] and manifest["model"] == {"class": "MoE"}
    assert {"monotonic_ns", "wall_ns"} == set(manifest["clock"])
    assert {"run_id", "created", "dropped_events", "segments", "versions"} <= set(manifest)


def test_ranks_are_read_apart_and_together(tmp_path: Path) -> None:
    for rank in range(2):
        with TraceWriter(tmp_path / "trace", rank, 3) as writer:
            writer.comm(1, 0, 0, 5, rank, 1 - rank, 0, -1, 100 + rank, 1, 1)
    reader = TraceReader(tmp_path)
    assert reader.ranks == [0, 1]
    assert reader.comm()["rank"].tolist() == [0, 1]
    assert reader.comm(rank=1)["bytes"].tolist() == [101]
    assert reader.problems == ["rank 2: no event files"]
    with pytest.raises(TraceError, match="rank 2"):
        reader.comm(rank=2)


PAGE = {
    "page": 0, "group": 0, "kind": 0, "slot": 0, "part": 0, "bytes": 64, "module_path": "a.b",
    "layer": 0, "expert": -1, "set": -1,
}  # fmt: skip


def test_pages_are_read_in_page_order(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        writer.write_pages([{**PAGE, "page": 1, "module_path": "c"}, PAGE])
    pages = TraceReader(tmp_path).pages
    assert pages["page"].tolist() == [0, 1]
    assert pages["module_path"].tolist() == ["a.b", "c"]
    assert pages["expert"].dtype == np.int16


def test_a_trace_without_pages_has_an_empty_table(trace: Path) -> None:
    pages = TraceReader(trace).pages
    assert len(pages["page"]) == 0 and "module_path" in pages


def test_a_resumed_trace_keeps_what_was_there(trace: Path, need_file: Path, steps_writer) -> None:
    before = {p.name: p.read_bytes() for p in need_file.parent.iterdir() if p.is_file()}
    run_id = TraceReader(trace).manifest["run_id"]
    with TraceWriter(trace / "trace") as writer:
        steps_writer(writer, range(10, 12))
    after = {p.name: p.read_bytes() for p in need_file.parent.iterdir() if p.is_file()}
    assert before.items() <= after.items()
    assert "need-000002.arrows" in after
    manifest = TraceReader(trace).manifest
    assert manifest["run_id"] == run_id and len(manifest["sessions"]) == 2
    assert TraceReader(trace).need()["step"][-1] == 11


def test_a_step_done_again_is_taken_from_the_later_session(trace: Path, steps_writer) -> None:
    with TraceWriter(trace / "trace") as writer:
        steps_writer(writer, range(6, 8), rows_per_step=3, t_ns=5000)
    reader = TraceReader(trace)
    steps = reader.steps()
    assert sorted(steps["step"].tolist()) == list(range(10))
    replaced = np.isin(steps["step"], [6, 7])
    assert set(steps["session"][replaced]) == {2} and set(steps["session"][~replaced]) == {1}
    need = reader.need()
    assert np.bincount(need["step"]).tolist() == [7] * 6 + [3, 3] + [7, 7]
    assert len(reader.actions()["page"]) == len(need["step"])
    assert len(reader.need([6])["step"]) == 3
    every = TraceReader(trace, keep_replaced=True)
    assert len(every.need()["step"]) == 76 and len(every.actions()["page"]) == 76


def test_sequence_numbers_stay_unique_over_sessions(trace: Path, steps_writer) -> None:
    with TraceWriter(trace / "trace") as writer:
        steps_writer(writer, range(10, 12), t_ns=5000)
    reader = TraceReader(trace)
    need, actions = reader.need(), reader.actions()
    assert len(np.unique(need["seq"])) == len(need["seq"]) == 84
    step_of = dict(zip(need["seq"].tolist(), need["step"].tolist(), strict=True))
    assert [step_of[s] for s in actions["seq"].tolist()] == need["step"].tolist()


def test_an_unfinished_repeat_does_not_replace_a_finished_step(trace: Path) -> None:
    with TraceWriter(trace / "trace") as writer:
        writer.need(0, 9000, 4, 0, 0, 0, 0, 0, 0, 1, 1)  # killed before its step row
        writer.flush()
        assert np.bincount(TraceReader(trace).need()["step"]).tolist() == [7] * 10


def test_a_new_page_table_serves_the_sessions_from_its_own_on(tmp_path: Path, steps_writer) -> None:
    for size in (64, 64, 128):
        with TraceWriter(tmp_path / "trace") as writer:
            writer.write_pages([{**PAGE, "page": p, "bytes": size} for p in range(7)])
            start = writer.session * 10
            steps_writer(writer, range(start, start + 2), t_ns=start * 1000)
    assert sorted(p.name for p in (tmp_path / "trace").glob("pages*")) == [
        "pages-000003.arrow",
        "pages.arrow",
    ]
    reader = TraceReader(tmp_path)
    assert set(reader.pages["bytes"].tolist()) == {128}
    assert set(reader.actions()["session"].tolist()) == {3}
    assert len(reader.need()["step"]) == 42
    assert any("page table changed at session 3" in p for p in reader.problems)


def test_a_full_disk_stops_recording_with_one_warning_and_counts_the_loss(
    tmp_path: Path, steps_writer, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    writer = TraceWriter(tmp_path / "trace")
    steps_writer(writer, range(3))
    real_write, left = os.write, [100]

    def nearly_full(fd: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        written = real_write(fd, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(segment_module.os, "write", nearly_full)
    with caplog.at_level(logging.WARNING):
        steps_writer(writer, range(3, 6), t_ns=2000)
        writer.close()
    assert len(caplog.records) == 1 and "training goes on" in caplog.text
    for file in (tmp_path / "trace" / "rank00000").glob("need-*.arrows"):
        last = json.loads(file.with_suffix(".json").read_text())["batches"][-1]
        assert file.stat().st_size == last["offset"] + last["bytes"], "no torn batch takes space"
    reader = TraceReader(tmp_path)
    assert reader.need()["step"].tolist() == [s for s in range(3) for _ in range(7)]
    assert reader.dropped_events == 3 * 16
    assert f"{reader.trace_dir}: 48 events were dropped by the recorder" in reader.problems


def test_the_systems_own_write_limit_does_not_stop_the_program(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import resource, signal, sys
        from profiler.writer import TraceWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = TraceWriter(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for step in range(100):
            for row in range(50):
                writer.mem(step * 1_000_003 + row * 7919, step, 0, 0, row * 104729, step)
            writer.flush()
        writer.close()
        print("trained", writer.dropped_events)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "trace")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("trained ")
    assert done.stderr.count("recording stopped") == 1
    reader = TraceReader(tmp_path)
    kept = len(reader.mem()["step"])
    assert 0 < kept < 5000 and kept + int(done.stdout.split()[1]) == 5000


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    with pytest.raises(TraceError, match="give a directory that can be written"):
        TraceWriter(tmp_path / "trace")


def test_no_trace_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"{tmp_path}.*expected a trace"):
        TraceReader(tmp_path)
    with pytest.raises(TraceError, match="expected a trace"):
        TraceReader(tmp_path / "missing")


def test_runs_are_found_below_a_root(trace: Path) -> None:
    root = trace.parent
    assert find_runs(root) == [trace] and find_runs(trace) == [trace]
    assert [r.run_dir for r in read_runs(find_runs(root))] == [trace]
