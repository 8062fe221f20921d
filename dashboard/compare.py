"""Runs of one folder next to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.content import Column, DataTable
from dashboard.data import RunData
from dashboard.theme import Theme, figure

BASELINE_POLICY = "lru+none"


@dataclass(frozen=True)
class RunRow:
    """What is compared of a run; NaN and None are unknown.

    Attributes:
        loss_gap: Largest difference of the loss from the baseline's, over the steps both have.
        comparable: Whether page budget and corpus are the baseline's.
    """

    name: str
    policy: str
    steps: int
    mean_step_s: float
    stall_s: float
    compute_s: float
    misses: float
    bytes_in: float
    bytes_out: float
    loss: float
    page_budget: int | None
    corpus_hash: str
    loss_gap: float = float("nan")
    comparable: bool = True


def run_row(run: RunData, baseline: RunData | None = None) -> RunRow:
    """Return a run's row; times and bytes are per step."""
    metrics = run.metrics
    losses = metrics["loss"][np.isfinite(metrics["loss"])]
    return RunRow(
        name=run.name,
        policy=run.policy,
        steps=len(metrics),
        mean_step_s=metrics.mean("step_s"),
        stall_s=metrics.mean("stall_s"),
        compute_s=metrics.mean("compute_s"),
        misses=run.misses_per_step,
        bytes_in=metrics.mean("bytes_in"),
        bytes_out=metrics.mean("bytes_out"),
        loss=float(losses[-1]) if len(losses) else float("nan"),
        page_budget=run.page_budget,
        corpus_hash=run.corpus_hash,
        loss_gap=_loss_gap(run, baseline),
        comparable=baseline is None or _same_task(run, baseline),
    )


def _same_task(run: RunData, other: RunData) -> bool:
    return (run.page_budget, run.corpus_hash) == (other.page_budget, other.corpus_hash)


def _loss_gap(run: RunData, baseline: RunData | None) -> float:
    if baseline is None:
        return float("nan")
    _, mine, theirs = np.intersect1d(
        run.metrics["step"], baseline.metrics["step"], return_indices=True
    )
    gap = np.abs(run.metrics["loss"][mine] - baseline.metrics["loss"][theirs])
    return float(np.nanmax(gap)) if np.isfinite(gap).any() else float("nan")


def pick_baseline(runs: list[RunData], shown: RunData | None = None) -> RunData | None:
    """Return the run to compare with: demand LRU if there is one, else the first with steps.

    Args:
        runs: The runs of the folder.
        shown: The run whose page it is; one with its page budget and corpus is preferred.
    """
    done = [run for run in runs if len(run.metrics)]
    if shown is not None:
        done = [run for run in done if _same_task(run, shown)] or done
    return next((run for run in done if run.policy == BASELINE_POLICY), done[0] if done else None)


def compare_rows(runs: list[RunData], shown: RunData | None = None) -> list[RunRow]:
    """Return a row a run that has steps: the baseline, comparable runs by step time, the others."""
    baseline = pick_baseline(runs, shown)
    rows = [run_row(run, baseline) for run in runs if len(run.metrics)]
    base = baseline.name if baseline else ""
    return sorted(
        rows, key=lambda row: (row.name != base, not row.comparable, row.mean_step_s, row.name)
    )


def compare_figure(rows: list[RunRow], theme: Theme) -> go.Figure:
    """Draw compute and stall of a step, a bar a run."""
    rows = [row for row in rows if row.comparable]
    fig = figure(theme, height=max(300, 90 + 34 * len(rows)))
    names = np.array([_bar_name(row) for row in rows], object)
    parts = (("compute_s", "compute", "compute", ""), ("stall_s", "stall", "stall", "/"))
    for attribute, name, series, pattern in parts:
        fig.add_bar(
            y=names,
            x=np.array([getattr(row, attribute) for row in rows]),
            orientation="h",
            name=name,
            marker={
                "color": theme.series[series],
                "pattern": {"shape": pattern, "fgcolor": theme.surface, "size": 6, "solidity": 0.2},
            },
            hovertemplate=f"%{{y}}: <b>%{{x:.4~s}}s</b> {name} a step<extra></extra>",
        )
    fig.update_layout(barmode="stack", bargap=0.35)
    fig.update_yaxes(autorange="reversed", type="category", showgrid=False)
    fig.update_xaxes(title_text="mean seconds a step", rangemode="tozero")
    return fig


def _bar_name(row: RunRow) -> str:
    last = row.name.rsplit("/", 1)[-1]
    same = row.policy in ("", last) or last.split("+")[0] == row.policy.split("+")[0]
    return last if same else f"{last}<br>{row.policy}"


def compare_table(rows: list[RunRow]) -> DataTable:
    """Return the comparison; changes are against the first row."""
    columns = (
        Column("run", "Run", numeric=False),
        Column("policy", "Policy", lambda text: text or units.UNKNOWN, numeric=False),
        Column("steps", "Steps", units.count),
        Column("mean_step_s", "Mean step", units.seconds),
        Column("step_change", "Step change", _change),
        Column("stall_s_per_step", "Stall / step", units.seconds),
        Column("stall_change", "Stall change", _change),
        Column("misses_per_step", "Misses / step", units.count),
        Column("bytes_in_per_step", "In / step", units.size),
        Column("bytes_out_per_step", "Out / step", units.size),
        Column("page_budget", "Page budget", _budget),
        Column("final_loss", "Final loss", units.number),
        Column("max_loss_difference", "Largest loss difference", _gap),
    )
    base = rows[0] if rows else None
    table = [
        (
            row.name,
            row.policy,
            row.steps,
            row.mean_step_s,
            _change_from(base, row, "mean_step_s"),
            row.stall_s,
            _change_from(base, row, "stall_s"),
            row.misses,
            row.bytes_in,
            row.bytes_out,
            row.page_budget,
            row.loss,
            row.loss_gap,
        )
        for row in rows
    ]
    caption = "All runs of the folder: means of their steps, changes against the first row"
    return DataTable("runs", caption, columns, table)


def _change_from(base: RunRow | None, row: RunRow, name: str) -> float:
    if base is None or row is base or not row.comparable:
        return float("nan")
    return _ratio(getattr(row, name), getattr(base, name))


def _ratio(value: float, base: float) -> float:
    return value / base - 1 if base else float("nan")


def _change(value: float) -> str:
    return f"{100 * value:+.0f} %" if np.isfinite(value) else "–"


def _gap(value: float) -> str:
    return units.number(value) if value else "0 (same)"


def _budget(value: int | None) -> str:
    return "none" if value is None else units.size(value)


def compare_verdict(rows: list[RunRow]) -> str:
    """Say in one sentence which policy did best against the baseline."""
    if len(rows) < 2:
        return ""
    base = rows[0]
    comparable = [row for row in rows[1:] if row.comparable]
    if not comparable:
        return (
            f"None of the {len(rows) - 1} other runs has the page budget and corpus of "
            f"“{base.name}”, so their times cannot be compared."
        )
    best = min(comparable, key=lambda row: row.mean_step_s)
    change = _ratio(best.mean_step_s, base.mean_step_s)
    own, against = units.seconds(best.mean_step_s), units.seconds(base.mean_step_s)
    same = "with the same page budget and corpus"
    if change > -0.005 and len(comparable) == 1:
        return (
            f"“{best.name}” is no faster than “{base.name}”, {same}: "
            f"its mean step takes {own} against {against}."
        )
    if change > -0.005:
        return (
            f"None of {len(comparable)} other runs {same} is faster than “{base.name}”, whose mean "
            f"step takes {against}; the next, “{best.name}”, takes {own}."
        )
    return (
        f"“{best.name}” is the fastest of {len(comparable) + 1} runs {same}: its mean step takes "
        f"{own}, {units.share(-change)} less than that of “{base.name}” ({against}), and waits for "
        f"pages {units.seconds(best.stall_s)} instead of {units.seconds(base.stall_s)}"
        f"{_loss_words(best)}."
    )


def baseline_words(rows: list[RunRow]) -> str:
    """Say which run the others are compared with, and why that one."""
    base = rows[0]
    why = (
        "which loads pages only when they are needed (policy lru+none)"
        if base.policy == BASELINE_POLICY
        else "the first run, as none here has the policy lru+none"
    )
    return f"Changes and loss differences are against “{base.name}”, {why}."


def _loss_words(row: RunRow) -> str:
    if not np.isfinite(row.loss_gap):
        return ""
    if row.loss_gap == 0:
        return ", with the same losses"
    return f", with losses within {units.number(row.loss_gap)}"
