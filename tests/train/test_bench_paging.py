"""`odc bench paging`: real pages, checked, beside their simulation over the same needs."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from odc.cli.main import main
from odc.errors import OdcError
from odc.memory.events import Kind, Op
from odc.memory.replay import Workload, budget_for, synthetic
from odc.memory.replay.ratios import compute_ns
from odc.memory.replay.synthetic import Shape
from odc.train.bench_paging import (
    Figures,
    PagingRow,
    Task,
    make_tasks,
    measure,
    timed_by,
    with_own_time,
)
from odc.train.paged_workload import PagedWorkload, prepared

TINY = Shape(layers=4, compute_ns=100_000)


def tiny(name: str, **options: object) -> Task:
    return Task(name, layers=4, steps=2, compute_ns=100_000, **options)  # type: ignore[arg-type]


def paged(workload: Workload, rate: float, **options: object) -> PagedWorkload:
    return PagedWorkload(
        workload,
        "cost_aware+popularity",
        rate,
        budget_bytes=budget_for(workload, 0.5),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ["W1r", "W2", "W2s-uneven", "W4", "W5b"])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_pages_come_back_as_they_left(name: str, home: str, tmp_path: Path) -> None:
    """Every read checks the number that the last write left: the body raises if one is wrong."""
    workload = synthetic(name, steps=4, shape=TINY)
    with prepared() as rate:
        one = paged(workload, rate, home=home, home_dir=tmp_path)
        with closing(one):
            taken = [one.cycle(step) for step in (1, 2, 4)]
            one.manager.transfers.drain()
            one.manager.transfers.check()
            assert sum(len(t) for t in one.times) == sum(
                ns > 0
                for v in workload.visits
                for b in v.bundles
                for ns in (b.after_ns, *(r[2] for r in b.rows))
            )
            assert all(cycle.compute_ns > 0 and cycle.own_ns > 0 for cycle in taken)
            assert [len(cycle.steps_ns) for cycle in taken] == [1, 1, 2]
            for cycle, times, own in zip(taken, one.times, one.own, strict=True):
                assert sum(cycle.steps_ns) == cycle.elapsed_ns
                assert len(own) == len(times) + 1 and min(own) >= 0
                parts = sum(times) + sum(own) + cycle.waited_ns
                assert parts >= cycle.elapsed_ns, "nothing is left out"
            result = one.drive.result
            assert sum(p.bytes_in for p in result.passes) > 0
            written = max(one.right)
            updates = sum(r[1] == Op.WRITE for v in workload.visits for r in v.bundles[0].rows)
            assert written > 1 if updates else written == 1


def test_a_page_with_other_bytes_is_an_error() -> None:
    workload = synthetic("W1", steps=2, shape=TINY)
    with prepared() as rate, closing(paged(workload, rate)) as one:
        one.cycle(1)
        (page,) = one.manager.table.of(0, Kind.PARAMETER)
        one.right[page] = 7.0
        with pytest.raises(OdcError, match=r"page 0 of layers\.0 came with 1\.0 and 1\.0 at"):
            one.cycle(2)


def test_a_row_tells_measured_and_simulated_figures_and_their_distance() -> None:
    row = measure(tiny("W2"), repeats=3, moves=1)
    assert (row.workload, row.home, row.policy) == ("W2", "host", "cost_aware+popularity")
    measured, simulated = row.measured, row.simulated
    assert len(row.steps) == 3 and min(row.steps) <= measured.step_s <= max(row.steps)
    assert 0 < row.window_bound_s <= simulated.step_s * (1 + 1e-6)
    assert row.best is not None and row.best[0] >= row.window_bound_s * (1 - 1e-6)
    assert simulated.step_s >= simulated.stall_s >= 0
    assert simulated.own_s == 0, "it is computed on the virtual clock"
    assert min(row.r, row.bandwidth_in, row.bandwidth_out, measured.own_s) > 0
    assert min(row.compute_s, row.alone_s, row.spread) > 0
    apart = simulated.stall_s - measured.stall_s
    assert row.difference == pytest.approx(apart / measured.step_s)
    assert row.over_best is not None
    assert row.over_best[0] == pytest.approx(measured.step_s / row.best[0])
    told = row.as_json()
    assert told["difference"] == row.difference and told["counts"] == row.counts
    assert told["over_best"] == row.over_best
    json.dumps(told)


def test_steps_of_the_best_schedule_hold_evaluation_passes_too() -> None:
    row = measure(tiny("W3"), repeats=1, moves=1)
    assert row.best is not None
    whole, first, later = row.best
    assert whole * 2 == pytest.approx(first + later)


def test_no_transfer_is_faster_than_the_emulated_link() -> None:
    workload = synthetic("W2", steps=2, shape=TINY)
    with prepared() as rate, closing(paged(workload, rate, bandwidth=2e9)) as one:
        one.cycle(2)
        link = one.log.link()
        assert link.bandwidth_out is not None
        assert max(link.bandwidth_in, link.bandwidth_out) <= 2e9 * (1 + 1e-6)
        one.log.clear()
        with pytest.raises(OdcError, match="nothing was loaded"):
            one.log.link()


def test_a_disk_has_its_own_ratio(tmp_path: Path) -> None:
    row = measure(tiny("W3", r=None, home="disk", home_dir=tmp_path), repeats=1, moves=0)
    assert row.home == "disk" and row.r > 0
    assert row.best is None and row.over_best is None and row.spread == 0.0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_rows_count_if_their_repeats_are_close() -> None:
    def row(spread: float) -> PagingRow:
        of = Figures(1.0, 0.2, 0.1, 1.0, 1.0)
        simulated = Figures(1.0, 0.3, 0.0, 1.0, 1.0)
        return PagingRow(
            "W1", "host", "", 0.5, 1.0, 1.0, of, simulated, spread, 1, 1, 1, None, 1, 1, []
        )

    assert row(0.05).counts and not row(0.051).counts
    assert row(0.0).difference == pytest.approx(0.1)


def test_a_workload_is_timed_in_the_order_of_its_computations() -> None:
    cycle = synthetic("W2", steps=1, shape=Shape(layers=2))
    count = 2 + 2 * 2  # forward; backward and update
    timed = timed_by(cycle, [20 + i for i in range(count)])
    assert compute_ns(timed) == sum(20 + i for i in range(count))
    rows = [[r[:2] for r in v.bundles[0].rows] for v in timed.visits]
    assert rows == [[r[:2] for r in v.bundles[0].rows] for v in cycle.visits]


def test_the_pager_s_own_time_follows_each_computation() -> None:
    assert with_own_time([10, 20, 30], [1, 2, 3, 4]) == [1 + 10 + 2, 20 + 3, 30 + 4]


def test_tasks_are_workloads_times_ratios_and_one_on_disk() -> None:
    made = make_tasks(["W1", "W5"], [0.5, 2.0], ["host", "disk"], policy="lru+none")
    assert [(t.workload, t.r) for t in made[:3]] == [("W1", 0.5), ("W1", 2.0), ("W1", None)]
    assert [t.home for t in made[:3]] == ["host", "host", "disk"]
    assert len(made) == 5 * 3 and {t.policy for t in made} == {"lru+none"}
    assert make_tasks(["W4"], [1.0], ["host"], policy="")[0].steps == 4


def test_the_command_prints_a_table_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "odc.train.bench_paging.make_tasks", lambda *args, **options: [tiny("W1"), tiny("W3")]
    )
    path = tmp_path / "paging.md"
    assert main(["bench", "paging", "--repeats", "1", "--moves", "0", "-o", str(path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in told] == ["workload", "---", "W1", "W3"]
    written = path.read_text()
    assert all(line in written for line in told) and '"cpu"' in written


def test_the_command_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("odc.train.bench_paging.make_tasks", lambda *args, **options: [tiny("W1")])
    assert main(["bench", "paging", "--repeats", "1", "--moves", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["workload"] == "W1" and row["best"] is None
    assert {"measured", "spread", "simulated", "difference", "counts"} <= set(row)
    assert {"step_s", "stall_s", "own_s"} <= set(row["measured"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--home", "tape"], "--home: got 'tape'; allowed: host, disk"),
        (["--r", "x"], "--r: got 'x'; allowed: numbers above 0"),
        (["--policy", "all"], "--policy: got 'all'; allowed: one policy"),
        (["--workload", "W0"], "workload: got 'W0'; allowed: W1"),
    ],
)
def test_what_does_not_fit_ends_with_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "paging", *words]) == 2
    assert told in capsys.readouterr().err
