"""Overview: is the run healthy, and what does a step's time go to?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.binning import edges, mean_bins
from dashboard.compare import (
    baseline_words,
    compare_figure,
    compare_rows,
    compare_table,
    compare_verdict,
)
from dashboard.content import Column, DataTable, How, Notice, PageContent, Panel, Tile
from dashboard.data import RunData
from dashboard.metrics import Metrics
from dashboard.state import ViewState
from dashboard.theme import Theme, figure
from dashboard.views.frame import trace_notices, window_text
from dashboard.views.memory import add_budget

TITLE = "Overview"
QUESTION = "Is the run healthy, and where does a step's time go?"
_MAX_BARS = 240
_MIB = 1024 * 1024


def loss_figure(metrics: Metrics, theme: Theme) -> go.Figure:
    """Draw the loss, with a moving mean once there are enough steps."""
    fig = figure(theme, height=280)
    loss, step = metrics["loss"], metrics["step"]
    many = len(step) > 40
    fig.add_scatter(
        x=step,
        y=loss,
        mode="lines" if many else "lines+markers",
        name="loss",
        line=theme.line("other" if many else "loss", 1 if many else 1.8),
        marker={"size": 5},
        hovertemplate="step %{x}: <b>%{y:.4f}</b><extra></extra>",
    )
    if many:
        width = max(5, len(step) // 20)
        fig.add_scatter(
            x=step,
            y=_moving_mean(loss, width),
            mode="lines",
            name=f"mean of {width} steps",
            line=theme.line("loss", 2.4),
            hovertemplate="step %{x}: <b>%{y:.4f}</b> (mean)<extra></extra>",
        )
    fig.update_xaxes(title_text="step", zeroline=False)
    fig.update_yaxes(title_text="loss (nats per token)", zeroline=False)
    fig.update_layout(showlegend=many)
    return fig


def _moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of the known values in about `width` places around each."""
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    high = np.minimum(place + width // 2 + 1, len(values))
    low = np.maximum(place - width // 2, 0)
    total, number = total[high] - total[low], count[high] - count[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = np.where(number > 0, total / number, np.nan)
    return mean


def step_time_figure(metrics: Metrics, theme: Theme) -> go.Figure:
    """Draw a step's time as stacked compute, stall, communication and the rest."""
    fig = figure(theme, height=300)
    borders = edges(len(metrics), _MAX_BARS)
    step = metrics["step"][borders[:-1]]
    merged = len(borders) - 1 < len(metrics)
    parts = [
        ("compute", "compute", metrics["compute_s"], ""),
        ("stall", "stall (waiting for pages)", metrics["stall_s"], "/"),
        ("comm", "communication", metrics["comm_s"], "x"),
        ("other", "other", metrics.other_s, ""),
    ]
    for series, name, values, pattern in parts:
        heights = mean_bins(values, borders)
        if not np.nansum(heights) > 1e-3 * metrics.total("step_s"):
            continue
        hatch = {"shape": pattern, "fgcolor": theme.surface, "size": 6, "solidity": 0.2}
        fig.add_bar(
            x=step,
            y=heights,
            name=name,
            marker={
                "color": theme.series[series],
                "line": {"width": 0},
                # On narrow bars a pattern is only noise.
                "pattern": hatch if len(step) <= 60 else {},
            },
            hovertemplate=f"step %{{x}}: <b>%{{y:.4~s}}s</b> {name}<extra></extra>",
        )
    fig.update_layout(barmode="stack", bargap=0.15 if len(step) <= 60 else 0)
    width = f" (means of {len(metrics) / len(step):.1f} steps)" if merged else ""
    fig.update_xaxes(title_text=f"step{width}", zeroline=False)
    fig.update_yaxes(title_text="seconds", rangemode="tozero")
    return fig


def page_bytes_figure(metrics: Metrics, budget: int | None, theme: Theme) -> go.Figure:
    """Draw the bytes of resident pages at the end of steps and their peaks, with the budget."""
    fig = figure(theme, height=280)
    for name, title, series, dash in (
        ("page_bytes", "at the end of the step", "compute", "solid"),
        ("peak_page_bytes", "peak within the step", "peak", "dot"),
        ("transient_bytes", "transients", "transients", "dash"),
    ):
        if not metrics.known(name):
            continue
        fig.add_scatter(
            x=metrics["step"],
            y=metrics[name] / _MIB,
            name=title,
            mode="lines" if len(metrics) > 40 else "lines+markers",
            line=theme.line(series, dash=dash),
            marker={"size": 5},
            hovertemplate=f"step %{{x}}: <b>%{{y:,.1f}} MiB</b> {title}<extra></extra>",
        )
    if budget:
        add_budget(fig, metrics["step"][[0, -1]], budget, theme)
    fig.update_xaxes(title_text="step", zeroline=False)
    fig.update_yaxes(title_text="MiB", rangemode="tozero")
    return fig


def tiles(run: RunData, metrics: Metrics) -> tuple[Tile, ...]:
    """Return the numbers on top of the page."""
    stall, spent = metrics.total("stall_s"), metrics.total("step_s")
    corpus = run.corpus_hash
    return (
        Tile("Policy", run.policy or units.UNKNOWN, run.health.status),
        Tile("Steps", units.count(len(metrics)), f"{units.seconds(spent)} in all"),
        Tile("Mean step", units.seconds(metrics.mean("step_s")), _rate(metrics)),
        Tile(
            "Stall",
            units.seconds(stall) if metrics.known("stall_s") else units.UNKNOWN,
            f"{units.share(stall / spent if spent else None)} of step time",
        ),
        Tile("In / step", units.size(metrics.mean("bytes_in")), "home → device, mean"),
        Tile("Out / step", units.size(metrics.mean("bytes_out")), "device → home, mean"),
        *_tier_tiles(run),
        Tile(
            "Corpus",
            corpus[:8] if corpus else units.UNKNOWN,
            "start of its hash" if corpus else "no hash recorded",
        ),
    )


def _tier_tiles(run: RunData) -> tuple[Tile, ...]:
    """With a home of several tiers, how much of what moved went through each of them."""
    if len(run.tiers) < 2:
        return ()
    moved = {name: t.get("bytes_in", 0) + t.get("bytes_out", 0) for name, t in run.tiers.items()}
    total = sum(moved.values())
    shares = ", ".join(f"{units.share(n / total if total else None)} {k}" for k, n in moved.items())
    held = ", ".join(f"{k} {units.size(t.get('home_bytes', 0))}" for k, t in run.tiers.items())
    return (Tile("Traffic by tier", shares, f"of {units.size(total)}; homes: {held}"),)


def _rate(metrics: Metrics) -> str:
    spent = metrics.total("step_s")
    tokens = metrics.total("tokens")
    return f"{tokens / spent:,.0f} tokens/s" if spent and tokens else "tokens not recorded"


def step_table(metrics: Metrics) -> DataTable:
    """Return a row a step, the last first."""
    columns = (
        Column("step", "Step", units.count),
        Column("loss", "Loss", units.number),
        Column("step_s", "Step time", units.seconds),
        Column("compute_s", "Compute", units.seconds),
        Column("stall_s", "Stall", units.seconds),
        Column("bytes_in", "In", units.size),
        Column("bytes_out", "Out", units.size),
        Column("page_bytes", "Pages", units.size),
        Column("peak_page_bytes", "Peak pages", units.size),
        Column("transient_bytes", "Transients", units.size),
    )
    rows = np.stack([metrics[column.key] for column in columns], axis=1)[::-1].tolist()
    return DataTable("steps", "Steps, the last first", columns, rows)


def build(
    run: RunData, state: ViewState, theme: Theme, others: Callable[[], list[RunData]] | None = None
) -> PageContent:
    """Return the page; with `others` (gives all runs of the folder) it compares them."""
    metrics = run.metrics
    if not len(metrics):
        return _no_steps(run)
    window = state.window(int(metrics["step"].min()), int(metrics["step"].max()))
    shown = metrics.between(*window)
    if not len(shown):
        shown = metrics
    rows = compare_rows(others() if others else [], run)
    panels = _panels(run, shown, theme)
    tables = [step_table(shown)]
    if sum(row.comparable for row in rows) > 1:
        comparison = compare_verdict(rows)
        panels.insert(0, Panel("runs", "Runs compared", compare_figure(rows, theme), comparison))
    if len(rows) > 1:
        tables.insert(0, compare_table(rows))
    return PageContent(
        TITLE,
        QUESTION,
        _verdict(run, shown, window),
        notices=_notices(run),
        tiles=tiles(run, shown),
        panels=panels,
        how=_how(),
        tables=tables,
    )


def comparison(runs: list[RunData], theme: Theme) -> PageContent | None:
    """Return a page that compares runs, None if there are not two with steps."""
    rows = compare_rows(runs)
    if len(rows) < 2:
        return None
    verdict = compare_verdict(rows)
    return PageContent(
        "Runs compared",
        "Which run takes the shortest steps, and are its losses the same?",
        verdict,
        explanation=(baseline_words(rows),),
        panels=(Panel("runs", "Where a step's time goes", compare_figure(rows, theme), verdict),),
        how=_how(),
        tables=(compare_table(rows),),
    )


def _panels(run: RunData, metrics: Metrics, theme: Theme) -> list[Panel]:
    found = [
        Panel(
            "steps",
            "Step time",
            step_time_figure(metrics, theme),
            f"Compute and stall of {units.plural(len(metrics), 'step')}, stacked.",
        ),
    ]
    if metrics.known("loss"):
        found.append(Panel("loss", "Loss", loss_figure(metrics, theme), _loss_text(metrics)))
    if metrics.known("page_bytes") and np.nansum(metrics["peak_page_bytes"]) > 0:
        peak = units.size(float(np.nanmax(metrics["peak_page_bytes"])))
        found.append(
            Panel(
                "pages",
                "Resident pages against the budget",
                page_bytes_figure(metrics, run.page_budget, theme),
                f"Resident page bytes; the highest peak is {peak}.",
            )
        )
    return found


def _no_steps(run: RunData) -> PageContent:
    live = run.health.status == "running"
    return PageContent(
        TITLE,
        QUESTION,
        f"Run “{run.name}” has not finished a step yet."
        if live
        else f"Run “{run.name}” recorded no step.",
        notices=_notices(run),
        explanation=(
            "This page fills as soon as the first step is written."
            if live
            else "metrics.jsonl and the step file of the trace are empty or missing: the run "
            "ended before its first step was done.",
        ),
    )


def _notices(run: RunData) -> tuple[Notice, ...]:
    found = list(trace_notices(run))
    if run.reader is None and not run.trace_error:
        found.append(
            Notice(
                "info",
                "This run has no trace: residency, access, memory and "
                "communication cannot be shown.",
            )
        )
    if run.metrics.skipped_lines:
        lines = units.plural(run.metrics.skipped_lines, "line")
        found.append(Notice("warning", f"{lines} of metrics.jsonl could not be read."))
    if run.health.status in ("failed", "interrupted"):
        found.append(Notice("warning", f"The run {_ENDS[run.health.status]}."))
    return tuple(found)


_ENDS = {"failed": "ended with an error", "interrupted": "did not reach its end"}


def _loss_text(metrics: Metrics) -> str:
    known = metrics["loss"][np.isfinite(metrics["loss"])]
    if len(known) < 2:
        return f"loss {units.number(float(known[-1]) if len(known) else None)}"
    count = max(1, len(known) // 10)
    first, last = float(known[:count].mean()), float(known[-count:].mean())
    word = "fell" if last < first else "rose"
    return f"loss {word} from {units.number(first)} to {units.number(last)}"


def _verdict(run: RunData, metrics: Metrics, window: tuple[int, int]) -> str:
    spent, stall = metrics.total("step_s"), metrics.total("stall_s")
    mean = units.seconds(metrics.mean("step_s"))
    parts = [f"{window_text(window).capitalize()}: a step takes {mean} (mean)"]
    if metrics.known("stall_s") and spent:
        parts.append(
            f"{units.share(stall / spent)} of the time ({units.seconds(stall)}) is spent waiting "
            "for pages"
            if stall
            else "none of it waiting for pages"
        )
    peak = float(np.nanmax(metrics["peak_page_bytes"])) if metrics.known("peak_page_bytes") else 0.0
    if run.page_budget and peak:
        over = peak > run.page_budget
        parts.append(
            f"pages peak at {units.size(peak)}, {'ABOVE' if over else 'within'} their budget of "
            f"{units.size(run.page_budget)}"
        )
    if metrics.known("loss"):
        parts.append(_loss_text(metrics))
    return "; ".join(parts) + "."


def _how() -> tuple[How, ...]:
    return (
        How("compute", "time between hooks in which no page was waited for", "s", "measured"),
        How("stall", "time in which compute waited for a page", "s", "measured"),
        How("other", "max(0, step − compute − stall − communication)", "s", "measured"),
        How(
            "in, out per step",
            "mean bytes moved home → device and device → home",
            "MiB (2^20 bytes)",
            "measured",
        ),
        How(
            "pages",
            "frames held by pages at the end of a step, and their peak within it",
            "MiB (2^20 bytes)",
            "measured",
        ),
        How("page budget", "memory.page_budget of the run", "MiB", "configured"),
        How(
            "misses / step",
            "demand loads a step: misses of metrics.jsonl, else loads / traced steps",
            "pages",
            "measured",
        ),
        How(
            "Max |Δ loss|",
            "largest difference of the loss from the first run's, same steps; 0 is "
            "equal to the last bit",
            "nats",
            "measured",
        ),
    )
