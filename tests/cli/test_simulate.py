"""`odc simulate`: rows, table and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odc.cli.main import main

DATA = Path(__file__).parent.parent / "data"
SHORT = ["--warm-up", "2", "--steps", "2", "--moves", "1"]
QUICK = [*SHORT, "--no-lp"]
ROW = {
    *("workload", "policy", "budget", "budget_bytes", "r", "link_bandwidth", "steps"),
    *("compute_s", "stall_s", "elapsed_s", "window_bound_s", "best_found_s", "lp_bound_s"),
    *("bytes_in", "bytes_out", "passes", "best_found_pass_s"),
}


def rows(capsys, *words: str) -> list[dict]:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_a_row_for_each_workload_budget_r_and_policy(capsys):
    words = ["--workload", "W1,W3-uneven", "--budget", "25%,96MB", "--r", "0.5,2"]
    found = rows(capsys, *words, "--policy", "lru+none,cost_aware+replay", *QUICK)
    assert len(found) == 2 * 2 * 2 * 2
    assert all(set(row) == ROW for row in found)
    assert [(r["workload"], r["budget"], r["r"], r["policy"]) for r in found[:8]] == [
        ("W1", budget, r, policy)
        for budget in (0.25, 0.5)
        for r in (0.5, 2.0)
        for policy in ("lru+none", "cost_aware+replay")
    ]
    for row in found:
        assert row["window_bound_s"] <= row["elapsed_s"] * (1 + 1e-6)
        assert row["elapsed_s"] == pytest.approx(row["compute_s"] + row["stall_s"])
        assert sum(p["elapsed_s"] for p in row["passes"]) == pytest.approx(row["elapsed_s"])
    even = [row for row in found if row["workload"] == "W1"]
    assert even[0]["link_bandwidth"] == pytest.approx(4 * even[2]["link_bandwidth"])


def test_bounds_are_the_same_for_all_policies_and_null_where_not_computed(capsys):
    found = rows(capsys, "--workload", "W1", "--budget", "50%", "--r", "1", *SHORT)
    assert len(found) > 5
    assert len({(r["window_bound_s"], r["best_found_s"], r["lp_bound_s"]) for r in found}) == 1
    assert sum(found[0]["best_found_pass_s"]) == pytest.approx(found[0]["best_found_s"])
    assert found[0]["lp_bound_s"] >= found[0]["window_bound_s"] * (1 - 1e-6)
    words = ["--workload", "W2", "--budget", "50%", "--r", "1", "--policy", "lru+none"]
    (row,) = rows(capsys, *words, "--moves", "0", "--warm-up", "1", "--steps", "3")
    assert row["best_found_s"] is None and row["lp_bound_s"] is None


def test_the_defaults_are_two_budgets_and_three_ratios(capsys):
    found = rows(capsys, "--workload", "W3", "--policy", "lru+none", "--moves", "0", "--no-lp")
    assert [(r["budget"], r["r"]) for r in found] == [
        (budget, r) for budget in (0.25, 0.5) for r in (0.5, 1, 2)
    ]
    assert {r["steps"] for r in found} == {6}


def test_a_family_is_all_of_its_workloads(capsys):
    words = ["--workload", "W5", "--budget", "50%", "--r", "1", "--policy", "lru+none", *QUICK]
    assert [r["workload"] for r in rows(capsys, *words)] == ["W5p10", "W5p20", "W5p30", "W5b"]


def test_a_budget_above_the_state_is_told_in_bytes(capsys):
    words = ["--workload", "W1", "--budget", "400MB", "--r", "1", "--policy", "lru+none"]
    assert main(["simulate", *words, *QUICK]) == 0
    told = capsys.readouterr().out
    assert "W1: budget 400 MiB (208%, more than the state of 192 MiB), r 1" in told


def test_the_table_has_ratios_to_the_bound_and_to_the_best(capsys):
    words = ["--workload", "W1", "--budget", "50%", "--r", "2", "--policy", "lru+none"]
    assert main(["simulate", *words, *QUICK]) == 0
    told = capsys.readouterr().out
    assert "W1: budget 50% (96.0 MiB), r 2 (0.42GB/s), 2 steps" in told
    header, line = told.splitlines()[2:4]
    assert header.split() == [
        *("policy", "elapsed", "s", "stall", "s", "bytes", "in", "bytes", "out"),
        *("/compute", "/window", "/LP", "/best"),
    ]
    (row,) = rows(capsys, *words, *QUICK)
    assert line.split()[0] == "lru+none"
    assert float(line.split()[1]) == pytest.approx(row["elapsed_s"], abs=1e-3)
    assert line.split()[-4] == f"{row['elapsed_s'] / row['compute_s']:.3f}"
    assert line.split()[-3] == f"{row['elapsed_s'] / row['window_bound_s']:.3f}"
    assert line.split()[-1] == f"{row['elapsed_s'] / row['best_found_s']:.3f}"


def test_contexts_have_lines_of_their_own(capsys):
    words = ["--workload", "W4", "--budget", "50%", "--r", "1", "--policy", "lru+none"]
    assert main(["simulate", *words, "--warm-up", "4", "--steps", "4", "--moves", "0"]) == 0
    assert "no gradient" not in capsys.readouterr().out
    assert (
        main(["simulate", *words, "--warm-up", "4", "--steps", "4", "--moves", "0", "--contexts"])
        == 0
    )
    told = capsys.readouterr().out
    assert all(
        f"  {kind}: " in told for kind in ("training", "no gradient", "no gradient, model 2")
    )


def test_a_run_is_simulated_on_its_recorded_link(capsys):
    words = ["--budget", "50%", "--policy", "lru+none", *QUICK]
    (row,) = rows(capsys, str(DATA / "W1"), *words)
    assert row["workload"] == str(DATA / "W1") and row["r"] == pytest.approx(1.0, rel=0.02)
    (faster,) = rows(capsys, str(DATA / "W1"), *words, "--link", "4GB/s")
    assert faster["link_bandwidth"] == 4e9 and faster["r"] < 0.3
    assert [r["r"] for r in rows(capsys, str(DATA / "W1"), *words, "--r", "1,2")] == [1, 2]


def test_a_linear_program_that_is_too_large_is_told_and_left_out(capsys):
    words = ["--workload", "W2", "--budget", "50%", "--r", "1", "--policy", "lru+none", "--lp"]
    assert main(["simulate", *words, "--moves", "0", "--steps", "6", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)[0]["lp_bound_s"] is None
    assert "W2: no linear program, " in told.err and "name fewer --steps" in told.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name one of RUN and --workload"),
        (["runs/a", "--workload", "W1"], "name one of RUN and --workload"),
        (["runs/nowhere"], "runs/nowhere: no such folder"),
        (["--workload", "W9"], "workload: got 'W9'; allowed: W1, W1a"),
        (["--workload", "W1", "--policy", "magic"], "policy: got 'magic'; allowed: all, or"),
        (["--workload", "W1", "--policy", "belady+replay"], "allowed: belady+oracle"),
        (["--workload", "W1", "--budget", "1%"], "needs 4; use at least 4.2%"),
        (
            ["--workload", "W1", "--budget", "200%"],
            "got '200%'; allowed: above 0% and up",
        ),
        (["--workload", "W1", "--budget", "half"], "'half' is no size"),
        (["--workload", "W1", "--budget=-5%"], "--budget: got '-5%'; allowed: above 0% and up"),
        (["--workload", "W1", "--budget", "x%"], "--budget: got 'x%'; allowed: above 0% and up"),
        (["--workload", "W1", "--link", "0"], "--link: got '0'; allowed: rates above 0"),
        (["--workload", "W1", "--r", "0"], "--r: got '0'; allowed: numbers above 0"),
        (["--workload", "W1", "--r", "1", "--link", "1GB/s"], "--r and --link both choose"),
        (["--workload", "W1", "--link", "fast"], "'fast' is no rate"),
        (["--workload", "W1", "--steps", "0"], "--steps: got 0; allowed: whole numbers from 1"),
        ([str(DATA / "W1"), "--steps", "9"], "10 steps traced in a row"),
        ([str(DATA)], "expected a trace"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line_and_ends_with_2(words, told, capsys):
    assert main(["simulate", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("odc: ")]
    assert len(lines) == 1 and told in lines[0]
