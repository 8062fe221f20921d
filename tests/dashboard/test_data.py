"""What a run directory holds, whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dashboard.catalog import RunCatalog, RunPlace
from dashboard.data import RunData, RunStore
from dashboard.metrics import metrics_from_steps, read_metrics
from profiler import TraceReader

Open = Callable[[Path], RunData]


def test_facts_of_a_run_are_found_in_its_manifest_and_summary(small: RunData) -> None:
    assert small.policy == "lru+none"
    assert small.page_budget == 40 * 2**20
    assert small.corpus_hash.startswith("3f6a9c0d")
    assert small.health.status == "completed"
    assert not small.health.cut and not small.health.corrupt


def test_the_policy_is_read_from_actions_where_nothing_else_names_it(
    record: Callable[..., Path], open_run: Open
) -> None:
    path = record(evict="cost_aware", prefetch="popularity", steps=2)
    manifest = path / "trace" / "manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["memory"]
    manifest.write_text(json.dumps(facts))
    (path / "config.yaml").unlink()
    assert open_run(path).policy == "cost_aware+popularity"


def test_metrics_equal_the_step_file_of_the_trace(small: RunData) -> None:
    from_trace = metrics_from_steps(TraceReader(small.path).steps())
    for name in ("step", "loss", "step_s", "stall_s", "bytes_in", "peak_page_bytes"):
        np.testing.assert_allclose(small.metrics[name], from_trace[name])


def test_a_run_without_metrics_file_takes_them_from_the_trace(
    record: Callable[..., Path], open_run: Open
) -> None:
    path = record(steps=3)
    (path / "metrics.jsonl").unlink()
    assert open_run(path).metrics["step"].tolist() == [1, 2, 3]


def test_the_last_line_of_a_repeated_step_counts_and_a_cut_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    metrics = read_metrics(path)
    assert metrics["loss"].tolist() == [2.0]
    assert metrics.skipped_lines == 1
    assert not metrics.known("stall_s")


def test_a_cut_trace_gives_what_was_flushed(record: Callable[..., Path], open_run: Open) -> None:
    path = record(close=False, status="interrupted")
    need = path / "trace" / "rank00000" / "need-000001.arrows"
    need.write_bytes(need.read_bytes()[:-40])
    run = open_run(path)
    assert run.health.cut and not run.health.corrupt
    assert run.health.events > 0
    assert run.need["step"].max() == 5


def test_a_changed_byte_is_reported_and_what_comes_before_is_kept(
    record: Callable[..., Path], open_run: Open
) -> None:
    path = record()
    actions = path / "trace" / "rank00000" / "actions-000001.arrows"
    content = bytearray(actions.read_bytes())
    content[len(content) // 2] ^= 0xFF
    actions.write_bytes(content)
    run = open_run(path)
    assert any("CRC32" in text for text in run.health.corrupt)
    assert len(run.metrics) == 6


def test_a_foreign_file_leaves_an_error_and_the_metrics(
    record: Callable[..., Path], open_run: Open
) -> None:
    path = record()
    (path / "trace" / "rank00000" / "need-000001.arrows").write_bytes(b"not an arrow stream" * 9)
    run = open_run(path)
    assert "need-000001.arrows" in run.trace_error
    assert run.reader is None and len(run.metrics) == 6


def test_runs_are_found_up_to_two_levels_down(record: Callable[..., Path], tmp_path: Path) -> None:
    record("one", steps=1)
    record("demo/lru+none", steps=1)
    record("too/deep/run", steps=1)
    catalog = RunCatalog(tmp_path / "runs")
    assert [run.name for run in catalog.runs()] == ["demo/lru+none", "one"]
    assert [run.name for run in RunCatalog(tmp_path / "runs" / "one").runs()] == ["one"]


def test_the_store_reads_a_run_anew_when_its_files_grow(record: Callable[..., Path]) -> None:
    path = record(steps=2)
    store, place = RunStore(), RunPlace("run", path)
    first = store.get(place)
    assert store.get(place) is first
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    assert len(store.get(place).metrics) == 3


def test_the_store_keeps_no_more_runs_than_it_may(record: Callable[..., Path]) -> None:
    store = RunStore(capacity=1)
    places = [RunPlace(name, record(name, steps=1)) for name in ("a", "b")]
    first = store.get(places[0])
    store.get(places[1])
    assert store.get(places[0]) is not first
