"""Numbers and figures of the views against counts made by hand from the same trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from dashboard.data import RunData
from dashboard.report import run_pages
from dashboard.state import ViewState
from dashboard.theme import DARK, LIGHT
from dashboard.views import access, communication, experts, memory, overview, residency
from profiler.residency import Residency
from profiler.schema import Act, Kind, Op

Open = Callable[[Path], RunData]
ALL = (1, 6)


def numeric_properties(fig: go.Figure) -> Iterator[tuple[str, object]]:
    for trace in fig.data:
        for name in ("x", "y", "z", "customdata"):
            if name in trace and trace[name] is not None:
                yield f"{trace.type}.{name}", trace[name]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_page_has_verdict_figure_method_and_table(small: RunData, theme) -> None:
    for page in run_pages(small, theme, 512):
        assert any(digit.isdigit() for digit in page.verdict), page.title
        if page.title == "Communication":  # one rank: explained instead of drawn
            assert not page.panels and page.explanation
            continue
        assert page.panels and page.how and page.tables, page.title
        assert all(table.rows for table in page.tables), page.title


def test_figures_hold_numpy_arrays_and_no_lists(small: RunData) -> None:
    for page in run_pages(small, LIGHT, 512):
        for panel in page.panels:
            for name, values in numeric_properties(panel.figure):
                assert isinstance(values, np.ndarray), f"{page.title}/{panel.key}: {name}"


def test_tables_hold_raw_values_that_csv_keeps(small: RunData) -> None:
    table = overview.step_table(small.metrics)
    lines = table.to_csv().splitlines()
    assert lines[0].startswith("step,loss,step_s,compute_s,stall_s")
    assert len(lines) == 7
    assert float(lines[1].split(",")[2]) == pytest.approx(small.metrics["step_s"][-1])


# Overview.


def test_a_home_of_two_tiers_shows_how_much_each_of_them_moved(
    record: Callable[..., Path], open_run: Open
) -> None:
    path = record()
    plain = open_run(path)
    assert all(tile.label != "Traffic by tier" for tile in overview.tiles(plain, plain.metrics))
    told = json.loads((path / "summary.json").read_text())
    told["tiers"] = {
        "host": {"home_bytes": 4 << 30, "bytes_in": 2 << 20, "bytes_out": 1 << 20},
        "disk": {"home_bytes": 8 << 30, "bytes_in": 1 << 20, "bytes_out": 0},
    }
    (path / "summary.json").write_text(json.dumps(told))
    run = open_run(path)
    (tile,) = (t for t in overview.tiles(run, run.metrics) if t.label == "Traffic by tier")
    assert tile.value == "75 % host, 25 % disk"
    assert "homes: host 4.00 GiB, disk 8.00 GiB" in tile.note


def test_the_overview_verdict_adds_up_the_stall(small: RunData) -> None:
    stall, spent = small.metrics.total("stall_s"), small.metrics.total("step_s")
    page = overview.build(small, ViewState(), LIGHT)
    assert f"{100 * stall / spent:.0f} %" in page.verdict
    assert "within their budget of 40.0 MiB" in page.verdict


def test_step_bars_add_up_to_the_step_time(small: RunData) -> None:
    fig = overview.step_time_figure(small.metrics, LIGHT)
    total = sum(np.asarray(trace.y) for trace in fig.data)
    np.testing.assert_allclose(total, small.metrics["step_s"])
    assert [trace.name.split()[0] for trace in fig.data] == ["compute", "stall"]


def test_the_step_window_limits_the_overview(small: RunData) -> None:
    page = overview.build(small, ViewState(step0=2, step1=4), LIGHT)
    steps = next(table for table in page.tables if table.key == "steps")
    assert [row[0] for row in steps.rows] == [4, 3, 2]


def test_runs_are_compared_against_demand_lru_of_the_same_budget(
    record: Callable[..., Path], open_run: Open
) -> None:
    runs = [
        open_run(record("popularity", prefetch="popularity", hit_rate=0.8)),
        open_run(record("lru+none")),
        open_run(record("bigger", budget=80 * 2**20)),
    ]
    page = overview.comparison(runs, LIGHT)
    assert page is not None
    assert "“popularity” is the fastest of 2 runs" in page.verdict
    assert "with the same losses" in page.verdict
    assert "against “lru+none”, which loads pages only when" in page.explanation[0]
    names = [row[0] for row in page.tables[0].rows]
    assert names == ["lru+none", "popularity", "bigger"]
    changes = [row[4] for row in page.tables[0].rows]
    assert np.isnan(changes[0]) and changes[1] < -0.1 and np.isnan(changes[2])
    assert len(page.panels[0].figure.data[0].y) == 2  # bars only for what can be compared


# Residency.


def test_residency_bytes_never_exceed_the_budget(small: RunData) -> None:
    found = residency.residency_map(small, ALL, "group")
    size = small.pages["bytes"][found.page_rows]
    held = (size[:, None] * (found.codes == Residency.DEVICE)).sum(axis=0)
    assert 0 < held.max() <= small.page_budget


def test_gradients_that_do_not_exist_are_not_called_unknown(small: RunData) -> None:
    found = residency.residency_map(small, ALL, "group")
    kinds = small.pages["kind"][found.page_rows]
    assert (found.codes[kinds == Kind.GRADIENT] == residency.ABSENT).any()
    assert not (found.codes[kinds == Kind.GRADIENT] == Residency.HOME).any()


def test_orders_show_every_page_once(small: RunData) -> None:
    for order in ("first_use", "group"):
        rows = residency.page_order(small, order)
        assert sorted(rows.tolist()) == list(range(len(small.pages["page"])))
    by_use = residency.page_order(small, "first_use")
    assert (np.diff(small.pages["kind"][by_use].astype(int)) >= 0).all()
    assert small.pages["module_path"][by_use[0]] == "embed_tokens"


def test_the_residency_heatmap_is_capped(small: RunData) -> None:
    found = residency.residency_map(small, ALL, "group", 1024)
    fig = residency.residency_figure(small, found, LIGHT, max_rows=16)
    heatmap = fig.data[0]
    assert heatmap.z.shape == (16, 1024) and heatmap.z.dtype == np.uint8
    assert set(np.unique(heatmap.z)) <= {0, 1, 2, residency.ABSENT}
    assert len(set(heatmap.y)) == 16


def test_hovering_names_group_kind_and_module(small: RunData) -> None:
    fig = residency.build(small, ViewState(), LIGHT).panels[0].figure
    text = " ".join(fig.data[0].y)
    assert "L1 E3 · moment 1 · page" in text and "layers.1.moe.experts.3" in text


def test_a_page_that_is_used_and_never_moves_is_on_the_device(
    record: Callable[..., Path], open_run: Open
) -> None:
    run = open_run(record(steps=2))
    page = int(run.pages["page"][0])
    keep = run.actions["page"] != page
    run.actions = {name: column[keep] for name, column in run.actions.items()}
    found = residency.residency_map(run, (1, 2), "group")
    row = np.flatnonzero(run.pages["page"][found.page_rows] == page)[0]
    assert (found.codes[row] == Residency.DEVICE).all()


def test_page_rows_count_the_loads_of_the_trace(small: RunData) -> None:
    rows = residency.page_rows(small, ALL)
    assert sum(row[5] for row in rows) == int((small.actions["act"] == Act.LOAD).sum())
    assert sum(row[9] for row in rows) == int(small.actions["wait_ns"].sum())
    assert all(0 <= row[10] <= 1 for row in rows)


# Access.


def test_access_counts_equal_the_rows_of_need(small: RunData) -> None:
    found = access.window_steps(small, ALL)
    assert found.accesses.sum() == len(small.need["seq"])
    assert found.misses.sum() == (small.actions["act"] == Act.LOAD).sum()
    assert found.steps.tolist() == [1, 2, 3, 4, 5, 6]


def test_groups_stand_in_model_order(small: RunData) -> None:
    labels = small.groups.names(access.window_steps(small, ALL).groups)
    assert labels[0] == "embed_tokens" and labels[-1] == "lm_head"
    assert labels[1:6] == ["L0 attention", "L0 E0", "L0 E1", "L0 E2", "L0 E3"]


def test_dots_mark_exactly_the_cells_with_demand_loads(small: RunData) -> None:
    found = access.window_steps(small, ALL)
    fig = access.access_figure(small, found, "accesses", LIGHT)
    assert fig.data[1].type == "scatter"
    assert len(fig.data[1].x) == (found.misses > 0).sum()
    assert fig.data[1].customdata.sum() == found.misses.sum()


def test_merged_cells_keep_the_sums(small: RunData) -> None:
    found = access.window_steps(small, ALL)
    fig = access.access_figure(small, found, "misses", LIGHT, max_rows=5)
    assert fig.data[0].z.shape[0] == 5
    assert fig.data[0].z.sum() == found.misses.sum()


def test_zero_has_a_colour_of_its_own(small: RunData) -> None:
    fig = access.access_figure(small, access.window_steps(small, ALL), "misses", LIGHT)
    scale = fig.data[0].colorscale
    assert scale[0][1] == scale[1][1] == LIGHT.zero
    assert scale[2][1] != LIGHT.zero and scale[-1][0] == 1


def test_expert_counts_match_the_needs(small: RunData) -> None:
    visits = experts.window_visits(small, ALL)
    groups, steps, uses, seen = experts.expert_counts(visits)
    in_set = np.isin(small.need["group"], groups)
    forward = in_set & (small.need["phase"] == 0) & (small.need["op"] == Op.READ)
    assert uses.sum() == forward.sum()
    assert seen.shape == uses.shape == (8, 6) and (uses <= seen).all()


def test_the_expert_page_tells_touched_share_and_entropy(small: RunData) -> None:
    page = access.build(small, ViewState(mode="experts"), LIGHT)
    assert "touched 50 % of a layer's 4 experts" in page.verdict
    assert "entropy" in page.verdict
    assert [row[0] for row in page.tables[0].rows] == [0, 1]


def test_a_dense_model_offers_no_expert_mode(record: Callable[..., Path], open_run: Open) -> None:
    run = open_run(record(steps=2))
    run.pages["set"][:] = -1
    page = access.build(run, ViewState(mode="experts"), LIGHT)
    assert "experts" not in dict(page.choices[0].options)
    assert page.title == "Access"


# Memory.


def test_resident_bytes_agree_with_the_account(small: RunData) -> None:
    resident = memory.resident_bytes(small, ALL, 4096)
    _, allocated, peak = memory.account_series(small, 0, ALL)
    assert resident.total.max() == peak.max() == allocated.max() <= small.page_budget


def test_mean_bytes_by_group_sum_to_the_mean_of_the_total(small: RunData) -> None:
    held = memory.group_bytes(small, ALL)
    resident = memory.resident_bytes(small, ALL, 20_000)
    assert held.sum() == pytest.approx(resident.total.mean(), rel=0.01)


def test_long_series_keep_their_peaks(small: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory.account_series(small, 0, ALL)
    monkeypatch.setattr(memory, "MAX_POINTS", 10)
    merged = memory.account_series(small, 0, ALL)
    assert len(merged[0]) == 10
    assert merged[1].max() == whole[1].max() and merged[2].max() == whole[2].max()


# Communication.


def test_one_rank_is_explained(small: RunData) -> None:
    page = communication.build(small, ViewState(), LIGHT)
    assert "has one rank" in page.verdict and not page.panels
    assert "torchrun" in page.code


@pytest.fixture
def eight(record: Callable[..., Path], open_run: Open) -> RunData:
    return open_run(record("eight", ranks=8, steps=3))


def test_the_matrix_sums_to_the_bytes_sent(eight: RunData) -> None:
    matrix = communication.matrix_of(eight, communication.filtered(eight, (1, 3), None))
    cells, _ = communication.rank_cells(eight, matrix)
    assert np.nansum(cells) == matrix.bytes.sum() > 0
    assert np.isnan(np.diag(cells)).all()
    assert matrix.modelled


def test_the_page_says_that_rings_are_modelled(eight: RunData) -> None:
    page = communication.build(eight, ViewState(), LIGHT)
    assert "modelled as a ring" in page.verdict
    assert "modelled" in page.panels[0].title


def test_one_operation_can_be_picked(eight: RunData) -> None:
    everything = communication.build(eight, ViewState(), LIGHT)
    one = communication.build(eight, ViewState(mode="all_reduce"), LIGHT)
    assert len(everything.tables[1].rows) == 3
    assert [row[0] for row in one.tables[1].rows] == ["all_reduce"]


def test_missing_ranks_are_unknown_and_not_zero(
    record: Callable[..., Path], open_run: Open
) -> None:
    path = record("part", ranks=4, steps=2)
    shutil.rmtree(path / "trace" / "rank00002")
    run = open_run(path)
    matrix = communication.matrix_of(run, run.comm)
    cells, _ = communication.rank_cells(run, matrix)
    assert np.isnan(cells[2]).all() and not np.isnan(cells[1]).all()
    page = communication.build(run, ViewState(), LIGHT)
    assert any("3 of 4 ranks" in notice.text for notice in page.notices)


def test_many_ranks_are_merged(eight: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "MAX_RANKS", 4)
    matrix = communication.matrix_of(eight, eight.comm)
    cells, borders = communication.rank_cells(eight, matrix)
    assert cells.shape == (4, 4) and cells.sum() == matrix.bytes.sum()
    assert borders.tolist() == [0, 2, 4, 6, 8]
