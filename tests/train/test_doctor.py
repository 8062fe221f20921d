"""`odc doctor` on this machine: what it measures is there, and what it remembers is found again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from odc.cli.main import main
from odc.errors import ConfigError
from odc.memory.events import Tier
from odc.memory.machine import Cgroup, Folder, Machine
from odc.train import doctor, links
from odc.train.doctor import Report, examine, format_report, huge_bytes
from odc.train.findings import Level, ok, problem
from odc.train.links import SLICES, Links, TierLink, load_links, remember
from odc.train.network import read_rings

GIB = 1 << 30
TIER = TierLink(5e9, 4e9, 3e9, 2e9, 1000, ((8 << 20, 5e9, 4e9),) * 3)
SLOW = TierLink(2e9, 1e9, 9e8, 8e8, 50_000, ((8 << 20, 2e9, 1e9),) * 3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ODC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "odc" / "links.json"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures next to nothing: that it works is tested here, not how fast the machine is."""
    monkeypatch.setattr(links, "_PASS_S", 0.0)
    monkeypatch.setattr(links, "_REPEATS", 1)
    monkeypatch.setattr(links, "_SPAN_BYTES", dict.fromkeys(Tier, 64 << 20))
    monkeypatch.setattr(links, "_FRAMES_BYTES", SLICES[-1])


def made(folder: Path) -> Links:
    resolved = str(folder.resolve())
    return Links(resolved, "2026-01-02T03:04:05+00:00", TIER, SLOW, 2000, 3000, 90_000, (4e9, 1e9))


# -- links -----------------------------------------------------------------------------------------


def test_every_link_is_measured_with_the_runtime_s_own_parts(quick: None, tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "home").mkdir()
    found = links.measure_links(tmp_path / "home", told.append)
    for tier in (found.host, found.disk):
        assert [row[0] for row in tier.by_slice] == list(SLICES)
        rates = [r for row in tier.by_slice for r in row[1:]] + [tier.load_both, tier.store_both]
        assert all(rate > 1e6 for rate in rates) and tier.latency_ns > 0
    assert min(found.frame_map_ns, found.frame_unmap_ns, found.handover_ns, *found.together) > 0
    assert found.folder == str((tmp_path / "home").resolve()) and len(told) == 3
    assert not list((tmp_path / "home").iterdir()), "the file is still there"


def test_links_are_remembered_by_machine_and_folder(tmp_path: Path, cache: Path) -> None:
    assert load_links(tmp_path) is None
    one, other = made(tmp_path / "a"), made(tmp_path / "b")
    assert remember(one) == cache
    remember(other)
    newer = dataclasses.replace(one, handover_ns=7)
    remember(newer)
    assert load_links(tmp_path / "a") == newer and load_links(tmp_path / "b") == other
    assert load_links(tmp_path) is None
    assert (cache.stat().st_mode & 0o777) == 0o644


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "odc-links/2", "links": {}}', '{"format": "odc-links/1"}'],
)
def test_a_file_that_says_nothing_counts_as_none(text: str, tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert load_links(tmp_path) is None
    remember(made(tmp_path))
    assert load_links(tmp_path) == made(tmp_path)


def test_a_measurement_that_makes_no_sense_counts_as_none(tmp_path: Path, cache: Path) -> None:
    remember(made(tmp_path))
    content = json.loads(cache.read_text())
    for entry in content["links"].values():
        entry["host"]["load_both"] = 0
    cache.write_text(json.dumps(content))
    assert load_links(tmp_path) is None


def test_links_become_link_models(tmp_path: Path) -> None:
    found = made(tmp_path)
    host, disk = found.link("host"), found.link("disk")
    assert (host.bandwidth_in, host.bandwidth_out, host.latency_ns) == (3e9, 2e9, 91_000)
    assert (disk.bandwidth_in, disk.bandwidth_out, disk.frame_move_ns) == (9e8, 8e8, 2500)
    assert found.link("host+disk") == disk
    assert found.speeds()[Tier.DISK].bandwidth_in == 9e8


@pytest.mark.parametrize("room, where", [("memory", "memory: "), ("disk", "/small: ")])
def test_too_little_room_to_measure_is_refused(
    room: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, 1 << 20 if room == "disk" else GIB, "ext4", True)
    (tmp_path / "small").mkdir()
    small = Machine(GIB, 1 << 20 if room == "memory" else GIB, folder=folder)
    monkeypatch.setattr(links, "gather", lambda path: small)
    with pytest.raises(ConfigError, match=f"{where}a quarter of what is free"):
        links.measure_links(tmp_path / "small", lambda text: None)


# -- the report ------------------------------------------------------------------------------------


def test_smaps_of_a_range_are_added_up() -> None:
    smaps = (
        "1000-3000 rw-p 0 00:00 0\nRss: 8 kB\nAnonHugePages:  4 kB\n"
        "3000-5000 rw-p 0 00:00 0\nAnonHugePages:  6 kB\n"
        "9000-a000 rw-p 0 00:00 0\nAnonHugePages:  100 kB\n"
    )
    assert huge_bytes(smaps, 0x2000, 0x2000) == 10 * 1024
    assert huge_bytes(smaps, 0x5000, 0x1000) == 0


def test_drivers_that_do_not_tell_are_left_out() -> None:
    assert read_rings(["lo", "no-such-card"]) == {}


def test_the_command_examines_this_machine(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--home-dir", str(tmp_path / "home"), "--measure-links", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    subjects = [found["subject"] for found in report["findings"]]
    for subject in ("memory", "huge pages", "frames", "disk", "cores", "NUMA", "PyTorch", "links"):
        assert subject in subjects
    assert {found["level"] for found in report["findings"]} <= {"OK", "ADVICE"}
    assert all(f["why"] and f["how"] for f in report["findings"] if f["level"] == "ADVICE")
    assert report["links"]["disk"]["load"] > 0 and not report["has_problem"]
    assert load_links(tmp_path / "home") is not None
    assert "odc: measuring disk: loads and stores" in captured.err


def test_a_second_look_finds_the_links_of_the_first(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remember(made(tmp_path))
    assert main(["doctor", "--home-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "measured 2026-01-02T03:04:05+00:00" in told and "0 PROBLEM" in told
    assert "% of a pool of frames are huge" in told


def test_a_machine_on_which_nothing_trains_ends_with_3(
    quick: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Folder(tmp_path, GIB, "ext4", True)
    boxed = Machine(GIB, GIB, cgroup=Cgroup("/box", 100, 90), folder=folder)
    monkeypatch.setattr(doctor, "gather", lambda path: boxed)
    assert main(["doctor", "--home-dir", str(tmp_path)]) == 3
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("PROBLEM")]
    assert "memory" in line and "10 B free of 1.00 GiB" in line


def test_a_folder_that_cannot_be_written_is_advice_and_no_crash(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["doctor", "--home-dir", str(tmp_path / "file"), "--measure-links"]) == 0
    told = capsys.readouterr().out
    assert told.count("cannot make a file in") == 2, "the disk, and the links"


def test_reports_are_lines_with_reasons_and_a_count(tmp_path: Path) -> None:
    findings = [ok("a", "fine"), problem("bb", "broken", "because", "mend it")]
    told = format_report(Report(findings, made(tmp_path), measured_now=True))
    lines = told.splitlines()
    assert lines[:4] == [
        "OK       a   fine",
        "PROBLEM  bb  broken",
        "             why: because",
        "             set: mend it",
    ]
    assert "disk store" in told and lines[-1] == "1 OK, 0 ADVICE, 1 PROBLEM"
    assert Report(findings, None, False).has_problem
    assert findings[1].level == Level.PROBLEM


def test_remembered_links_are_shown(quick: None, tmp_path: Path, cache: Path) -> None:
    remember(made(tmp_path))
    told = format_report(examine(tmp_path))
    rates = f"host {TIER.load / 1e9:.2f} in, {TIER.store / 1e9:.2f} out, disk {SLOW.load / 1e9:.2f}"
    assert f"measured 2026-01-02T03:04:05+00:00; GB/s: {rates} in" in told


def test_a_folder_that_does_not_exist_is_not_made(quick: None, tmp_path: Path) -> None:
    told = format_report(examine(tmp_path / "new" / "home", measure=True))
    assert "does not exist yet" in told and "measured now" in told
    assert not (tmp_path / "new").exists()


def test_examining_leaves_nothing_behind(quick: None, tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert not list(tmp_path.glob("odc-*")) and not report.has_problem
