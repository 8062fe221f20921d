"""The report is one file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dashboard import report
from dashboard.report import write_report


class _Links(HTMLParser):
    """Collects what a browser would load or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for name, v in attrs if name in ("src", "href", "srcset", "action")]


@pytest.fixture
def folder(record: Callable[..., Path]) -> Path:
    record("lru+none")
    record("popularity", prefetch="popularity", hit_rate=0.8)
    return record("last", steps=2).parent


def test_a_run_becomes_one_file_that_links_to_nothing(small_path: Path, tmp_path: Path) -> None:
    path = write_report(small_path, tmp_path / "new" / "report.html")
    text = path.read_text()
    links = _Links()
    links.feed(text)
    assert links.found == []
    assert "default-src &#x27;none&#x27;" in text
    assert len(text) < 6_000_000


def test_plotly_is_inlined_once_and_uploads_nothing(folder: Path, tmp_path: Path) -> None:
    text = write_report(folder, tmp_path / "r.html").read_text()
    assert text.count("plotly.js v") == 1
    config = re.search(r"const config = (\{.*?\});", text)
    assert config and '"showSendToCloud": false' in config[1]


def test_a_folder_gets_the_comparison_and_every_run(folder: Path, tmp_path: Path) -> None:
    text = write_report(folder, tmp_path / "r.html").read_text()
    assert "Runs compared" in text and "“popularity” is the fastest of" in text
    for name in ("last", "lru+none", "popularity"):
        assert f"Run {name}" in text
    figures = set(re.findall(r'data-figure="([^"]+)"', text))
    data = set(re.findall(r'type="application/json" id="([^"]+)"', text))
    assert figures == data and len(figures) > 20


def test_the_limit_of_the_size_is_kept(
    record: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = [record(name, steps=1) for name in "ab"][0].parent
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly.js v0 */")
    monkeypatch.setattr(report, "_SCALES", (512, 64))
    whole = write_report(folder, tmp_path / "whole.html").stat().st_size
    small = write_report(folder, tmp_path / "small.html", max_bytes=whole // 2)
    assert small.stat().st_size <= whole // 2
    assert "Left out to keep the file small" in small.read_text()
    monkeypatch.setattr(report, "_SCALES", (64,))
    with pytest.raises(ValueError, match="max_bytes must be at least"):
        write_report(folder, tmp_path / "none.html", max_bytes=1000)


def test_names_are_escaped(record: Callable[..., Path], tmp_path: Path) -> None:
    path = record("<script>alert(1)<", steps=1)
    text = write_report(path, tmp_path / "r.html").read_text()
    assert "<script>alert(1)" not in text


def test_an_empty_folder_gives_a_report_that_says_how_to_record(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = write_report(tmp_path / "empty", tmp_path / "r.html").read_text()
    assert "No run found" in text and "odc demo" in text
