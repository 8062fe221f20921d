"""Whatever happens to a file, what was written before is read, and damage is told from a cut."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiler.errors import TraceError
from profiler.reader import TraceReader
from profiler.scan import scan_segment
from profiler.schema import NEED, PAGE_COLUMNS
from profiler.writer import TraceWriter

ROWS = 7
FIXTURES = [HealthCheck.function_scoped_fixture]


def batch_ends(need_file: Path) -> list[int]:
    """Return where the data batches of a file end."""
    side = json.loads(need_file.with_suffix(".json").read_text())
    return [b["offset"] + b["bytes"] for b in side["batches"][:-1]]


def damaged(need_file: Path, data: bytes, *, side: bool, closed: bool = False) -> Path:
    """Return a copy of the file's run with other bytes, with or without its side file.

    Unless `closed`, the side file is that of a writer that was killed.
    """
    run = need_file.parents[2]
    copy = run.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    target = copy / need_file.relative_to(run)
    target.write_bytes(data)
    if not side:
        target.with_suffix(".json").unlink()
    elif not closed:
        head = json.loads(target.with_suffix(".json").read_text())
        open_head = {"stream": "need", "closed": False, "batches": head["batches"]}
        target.with_suffix(".json").write_text(json.dumps(open_head))
    return copy


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(where=st.floats(0, 1), side=st.booleans())
def test_a_cut_file_gives_exactly_its_whole_batches(
    need_file: Path, read_needs, where: float, side: bool
) -> None:
    data = need_file.read_bytes()
    cut = int(where * len(data))
    whole = sum(end <= cut for end in batch_ends(need_file))
    run = damaged(need_file, data[:cut], side=side)
    found = read_needs(run)
    assert found.tolist() == [s * 1000 + r for s in range(whole) for r in range(ROWS)]
    reader = TraceReader(run)
    if cut < batch_ends(need_file)[-1]:
        assert not reader.clean_end["rank00000/need-000001.arrows"]
        assert any("need-000001" in problem for problem in reader.problems)


@pytest.mark.parametrize("cut", range(13))
def test_a_file_cut_in_its_first_bytes_is_empty(need_file: Path, read_needs, cut: int) -> None:
    run = damaged(need_file, need_file.read_bytes()[:cut], side=False)
    assert not len(read_needs(run))


@settings(max_examples=30, deadline=None, suppress_health_check=FIXTURES)
@given(where=st.floats(0.3, 1), zeros=st.integers(1, 5000), side=st.booleans())
def test_a_tail_of_zeros_is_a_cut(
    need_file: Path, read_needs, where: float, zeros: int, side: bool
) -> None:
    data = need_file.read_bytes()
    cut = int(where * len(data))
    whole = sum(end <= cut for end in batch_ends(need_file))
    found = read_needs(damaged(need_file, data[:cut] + bytes(zeros), side=side))
    # Zeros may happen to be the bytes that were cut off (padding), then one batch more is whole.
    assert len(found) in (whole * ROWS, (whole + 1) * ROWS)
    assert found.tolist() == [s * 1000 + r for s in range(len(found) // ROWS) for r in range(ROWS)]


@settings(max_examples=30, deadline=None, suppress_health_check=FIXTURES)
@given(whole=st.integers(1, 9), tail=st.binary(min_size=1, max_size=4000))
def test_a_random_tail_does_not_cost_what_comes_before(
    need_file: Path, read_needs, whole: int, tail: bytes
) -> None:
    data = need_file.read_bytes()[: batch_ends(need_file)[whole - 1]]
    found = read_needs(damaged(need_file, data + tail, side=False))
    assert found.tolist() == [s * 1000 + r for s in range(whole) for r in range(ROWS)]


def test_an_absurd_length_is_not_trusted(need_file: Path, read_needs) -> None:
    data = need_file.read_bytes()[: batch_ends(need_file)[3]]
    tail = b"\xff\xff\xff\xff" + (539_856_380).to_bytes(4, "little") + b"x" * 64
    assert len(read_needs(damaged(need_file, data + tail, side=False))) == 4 * ROWS


@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURES)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_by_its_checksum(
    need_file: Path, read_needs, where: float, bit: int
) -> None:
    ends = batch_ends(need_file)
    start = json.loads(need_file.with_suffix(".json").read_text())["batches"][0]["offset"]
    at = start + int(where * (ends[-1] - start))
    data = bytearray(need_file.read_bytes())
    data[at] ^= 1 << bit
    run = damaged(need_file, bytes(data), side=True, closed=True)
    with pytest.raises(TraceError, match="need-000001.arrows.*CRC32.*strict=False"):
        read_needs(run)
    before = sum(end <= at for end in ends)
    assert len(read_needs(run, strict=False)) == before * ROWS
    assert any("CRC32" in problem for problem in TraceReader(run).problems)


@settings(max_examples=20, deadline=None, suppress_health_check=FIXTURES)
@given(where=st.floats(0, 1, exclude_max=True), zeros=st.booleans())
def test_a_cut_after_the_file_was_closed_is_damage(
    need_file: Path, read_needs, where: float, zeros: bool
) -> None:
    data = need_file.read_bytes()
    cut = int(where * batch_ends(need_file)[-1])
    left = data[:cut] + bytes(len(data) - cut if zeros and cut > 3000 else 0)
    run = damaged(need_file, left, side=True, closed=True)
    with pytest.raises(TraceError, match="need-000001.arrows"):
        read_needs(run)
    only_padding = zeros and not any(data[cut : batch_ends(need_file)[-1]])
    assert len(read_needs(run, strict=False)) < 70 + only_padding


def test_a_lost_event_file_is_named(need_file: Path, trace: Path, read_needs) -> None:
    need_file.unlink()
    with pytest.raises(TraceError, match="need-000001.arrows: expected the event file"):
        read_needs(trace)
    assert len(read_needs(trace, strict=False)) == 0
    assert len(TraceReader(trace).steps()["step"]) == 10


@pytest.mark.parametrize(("name", "offset"), [("group", 0), ("odc.session", -8)])
def test_a_changed_schema_is_refused(
    need_file: Path, trace: Path, read_needs, name: str, offset: int
) -> None:
    data = bytearray(need_file.read_bytes())
    data[data.index(name.encode()) + offset] ^= 0x55  # the session's number stands before its name
    need_file.write_bytes(data)
    with pytest.raises(TraceError, match="need-000001.arrows: expected the columns"):
        read_needs(trace)


def test_a_check_finds_damage_in_a_file_that_was_not_asked_for(trace: Path) -> None:
    file = trace / "trace" / "rank00000" / "step-000001.arrows"
    data = bytearray(file.read_bytes())
    data[-400] ^= 1
    file.write_bytes(data)
    assert len(TraceReader(trace).need()["seq"]) == 70
    with pytest.raises(TraceError, match="step-000001.arrows.*CRC32"):
        TraceReader(trace).check()


def test_a_changed_page_table_is_refused(tmp_path: Path) -> None:
    row = dict.fromkeys(PAGE_COLUMNS, 0)
    rows = [{**row, "page": n, "bytes": 77_777, "module_path": f"layers.{n}"} for n in range(9)]
    with TraceWriter(tmp_path / "run" / "trace") as writer:
        writer.write_pages(rows)
    assert TraceReader(tmp_path / "run").pages["module_path"].tolist()[8] == "layers.8"
    file = tmp_path / "run" / "trace" / "pages.arrow"
    data = file.read_bytes()
    for at in (data.index((77_777).to_bytes(8, "little")), data.index(b"layers.3")):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x91]) + data[at + 1 :])
        with pytest.raises(TraceError, match="pages.arrow: expected the page table"):
            _ = TraceReader(tmp_path / "run").pages


@pytest.mark.parametrize("content", ["", '{"format": "odc', "[]"])
def test_a_damaged_manifest_is_refused(trace: Path, read_needs, content: str) -> None:
    (trace / "trace" / "manifest.json").write_text(content)
    with pytest.raises(TraceError, match="manifest.json: expected a JSON object"):
        read_needs(trace)
    assert len(read_needs(trace, strict=False)) == 70


def open_segment(tmp_path: Path, steps_writer) -> Path:
    """Return the need file of a run that was never closed."""
    writer = TraceWriter(tmp_path / "run" / "trace")
    steps_writer(writer, range(5))
    return tmp_path / "run" / "trace" / "rank00000" / "need-000001.arrows"


def test_a_torn_last_batch_of_an_open_segment_is_a_cut(
    tmp_path: Path, steps_writer, read_needs
) -> None:
    file = open_segment(tmp_path, steps_writer)
    data = file.read_bytes()
    file.write_bytes(data[:-100] + os.urandom(100))
    assert len(read_needs(tmp_path / "run")) == 4 * ROWS


def test_a_changed_batch_in_the_middle_of_an_open_segment_is_corruption(
    tmp_path: Path, steps_writer, read_needs
) -> None:
    file = open_segment(tmp_path, steps_writer)
    side = json.loads(file.with_suffix(".json").read_text())["batches"]
    data = bytearray(file.read_bytes())
    data[side[2]["offset"] + 400] ^= 1
    file.write_bytes(data)
    with pytest.raises(TraceError, match="CRC32"):
        read_needs(tmp_path / "run")


def test_a_broken_side_file_is_reported_and_the_events_are_read(
    need_file: Path, trace: Path, read_needs
) -> None:
    need_file.with_suffix(".json").write_text('{"closed": tr')
    assert len(read_needs(trace)) == 70
    assert any("checksums were not compared" in p for p in TraceReader(trace).problems)


def test_another_kind_of_file_is_refused(need_file: Path, trace: Path, read_needs) -> None:
    need_file.write_bytes(b"PAR1 this is something else entirely")
    with pytest.raises(TraceError, match="expected an Arrow stream written by odc"):
        read_needs(trace)
    with pa.OSFile(str(need_file), "wb") as file:
        table = pa.table({"a": [1]})
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(TraceError, match="not part of an odc trace"):
        read_needs(trace)


def test_a_file_of_another_stream_is_refused(need_file: Path, trace: Path, read_needs) -> None:
    shutil.copy(need_file.with_name("mem-000001.arrows"), need_file)
    with pytest.raises(TraceError, match="expected 'trace.need/1', found 'trace.mem/1'"):
        read_needs(trace)


def rewrite(path: Path, change) -> None:
    """Rewrite a segment through `change(table, metadata) -> (table, metadata)`."""
    with pa.OSFile(str(path), "rb") as file:
        table = pa.ipc.open_stream(file).read_all()
    table, metadata = change(table, dict(table.schema.metadata))
    table = table.replace_schema_metadata(metadata)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    path.with_suffix(".json").unlink()


def test_a_minor_version_with_other_columns_is_read(need_file: Path, trace: Path) -> None:
    def change(table: pa.Table, metadata: dict) -> tuple[pa.Table, dict]:
        table = table.drop_columns(["group", "tokens"])
        table = table.append_column("new", pa.array(np.arange(table.num_rows)))
        return table, {**metadata, b"odc.schema": b"trace.need/1.7"}

    rewrite(need_file, change)
    reader = TraceReader(trace)
    need = reader.need()
    assert set(need["group"].tolist()) == {-1} and set(need["tokens"].tolist()) == {0}
    assert any("unknown columns ignored: ['new']" in p for p in reader.problems)
    assert any("missing columns filled: ['group', 'tokens']" in p for p in reader.problems)


def test_another_major_version_is_refused(need_file: Path, trace: Path, read_needs) -> None:
    rewrite(need_file, lambda t, m: (t, {**m, b"odc.schema": b"trace.need/2"}))
    with pytest.raises(TraceError, match="read it with the version of odc that wrote it"):
        read_needs(trace)
    manifest = trace / "trace" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "odc-trace/2"}))
    with pytest.raises(TraceError, match="odc-trace/1"):
        TraceReader(trace)
    with pytest.raises(TraceError, match="odc-trace/1"):
        TraceWriter(trace / "trace")


def test_a_lost_manifest_does_not_hide_the_events(trace: Path, read_needs) -> None:
    (trace / "trace" / "manifest.json").unlink()
    assert len(read_needs(trace)) == 70
    assert any("manifest.json" in p for p in TraceReader(trace).problems)


def test_an_empty_file_is_a_cut(need_file: Path) -> None:
    need_file.write_bytes(b"")
    segment = scan_segment(need_file, NEED.name)
    assert segment.batches == [] and "empty" in segment.problem


CHILD = textwrap.dedent("""
    import sys
    from profiler.writer import TraceWriter
    writer = TraceWriter(sys.argv[1], segment_bytes=60_000, buffer_rows=64)
    for step in range(1_000_000):
        for row in range(100):
            writer.need(step, step * 1000 + row, step, 0, 0, 0, row, 0, 0, step * 1000 + row, 5)
        writer.flush()
        sys.stdout.write(f"{step}\\n")
        sys.stdout.flush()
""")


def kill_at_random(tmp_path: Path, seed: int) -> None:
    """Run a writer, kill it, and require every acknowledged step."""
    run = tmp_path / f"run{seed}"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(run / "trace")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(random.Random(seed).uniform(0, 0.4))
    child.send_signal(signal.SIGKILL)
    acknowledged = [0, *(int(line) for line in child.stdout.read().split("\n")[:-1])]
    child.wait()
    found = TraceReader(run).need()
    count = np.bincount(found["step"])
    assert (count[: acknowledged[-1] + 1] == 100).all()
    assert len(count) <= acknowledged[-1] + 2
    rows = np.arange(len(found["step"]))
    assert (found["compute_ns"] == rows // 100 * 1000 + rows % 100).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_keeps_every_flushed_step(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_killed_runs_keep_every_flushed_step(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed)
