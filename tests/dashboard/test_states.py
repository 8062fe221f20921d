"""Empty, partial and damaged runs: every page says what is missing, none breaks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard.content import PageContent
from dashboard.pages import Pages
from dashboard.registry import VIEWS
from dashboard.theme import LIGHT

Record = Callable[..., Path]


def all_pages(root: Path, query: str = "") -> list[PageContent]:
    pages = Pages(root)
    return [pages.content(view.path, query, LIGHT) for view in VIEWS]


def texts(pages: list[PageContent]) -> str:
    return " ".join(
        " ".join([page.verdict, *(n.text for n in page.notices), *page.explanation])
        for page in pages
    )


@pytest.fixture(autouse=True)
def no_view_fails(caplog: pytest.LogCaptureFixture):
    """A state that is designed for is no exception."""
    yield
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR and r.exc_info]


def test_an_empty_folder_shows_how_to_record(tmp_path: Path) -> None:
    for page in all_pages(tmp_path):
        assert page.title == "No run found"
        assert "odc demo" in page.code and "Profiler(" in page.code


def test_a_missing_folder_is_an_empty_one(tmp_path: Path) -> None:
    assert all_pages(tmp_path / "nowhere")[0].title == "No run found"


def test_a_run_without_trace_still_has_its_overview(tmp_path: Path) -> None:
    run = tmp_path / "plain"
    run.mkdir()
    rows = [{"step": i, "loss": 3 - i / 10, "step_s": 0.1, "tokens": 8} for i in range(5)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overview, residency, access, memory, communication = all_pages(tmp_path)
    assert overview.panels and "loss fell" in overview.verdict
    for page in (residency, access, memory):
        assert "has no trace" in page.verdict and "trace_interval" in page.code
    assert "one rank" in communication.verdict


def test_a_run_that_has_not_finished_a_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "has not finished a step yet" in all_pages(tmp_path)[0].verdict


def test_a_cut_trace_says_how_many_events_were_recovered(record: Record) -> None:
    path = record(close=False, status="interrupted")
    text = texts(all_pages(path))
    assert "The trace has no clean end" in text
    assert "events up to step 6 were recovered" in text
    assert "did not reach its end" in text


def test_a_running_run_is_told_from_a_killed_one(record: Record) -> None:
    path = record(close=False, status="")
    assert "still being written" in texts(all_pages(path))


def test_a_corrupt_trace_names_the_file_and_the_app_stays_alive(record: Record) -> None:
    path = record()
    file = path / "trace" / "rank00000" / "actions-000001.arrows"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    pages = all_pages(path)
    errors = [n for page in pages for n in page.notices if n.severity == "error"]
    assert errors and all("actions-000001.arrows" in notice.text for notice in errors)
    assert pages[0].panels


def test_a_trace_of_a_newer_version_is_named(record: Record) -> None:
    path = record(steps=2)
    manifest = path / "trace" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("odc-trace/1", "odc-trace/9"))
    overview, residency, *_ = all_pages(path)
    assert "odc-trace/9" in residency.notices[0].text
    assert overview.panels


def test_a_foreign_file_in_the_trace_is_named(record: Record) -> None:
    path = record(steps=2)
    (path / "trace" / "pages.arrow").write_bytes(b"something else entirely")
    overview, residency, *_ = all_pages(path)
    assert "pages.arrow" in residency.notices[0].text
    assert overview.panels


def test_traced_steps_are_counted_when_not_all_were(record: Record) -> None:
    path = record(steps=9, trace_interval=4)
    assert "3 of 9 steps were traced" in texts(all_pages(path))


def test_an_unknown_run_lists_the_known_ones(record: Record, tmp_path: Path) -> None:
    record("mine", steps=1)
    page = all_pages(tmp_path / "runs", "?run=yours")[0]
    assert page.title == "No such run" and "mine" in page.explanation[0]


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "%2e%2e/secret", "mine/../../secret"])
def test_no_name_leads_out_of_the_folder(record: Record, tmp_path: Path, name: str) -> None:
    record("mine", steps=1)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "metrics.jsonl").write_text('{"step": 1, "loss": 42.0}\n')
    for page in all_pages(tmp_path / "runs", f"?run={name}"):
        assert page.title == "No such run" and not page.tables


def test_a_step_window_outside_the_run_shows_its_nearest_steps(record: Record) -> None:
    path = record(steps=4)
    for page in all_pages(path, "?step0=900&step1=1000")[:4]:
        assert "step 4" in page.verdict.lower()


def test_an_unexpected_error_becomes_a_page_that_names_it(
    record: Record, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dashboard.views import memory

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(memory, "group_bytes", broken)
    page = all_pages(record(steps=1))[3]
    assert "by design" in page.notices[0].text
    assert "view Memory failed" in caplog.text
    caplog.clear()
