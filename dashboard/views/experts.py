"""Experts: which members of a set each step used, and how evenly."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.binning import MAX_ROWS, sum_bins
from dashboard.content import Column, DataTable, How, PageContent, Panel
from dashboard.data import RunData
from dashboard.theme import Theme, colorbar, figure, quantity_scale
from dashboard.views.frame import (
    column_names,
    group_ticks,
    label_rows,
    row_names,
    show_steps,
    trace_notices,
    window_text,
)
from profiler.analysis import SetUse, SetVisits, select, set_use, set_visits

TITLE = "Access: experts"
QUESTION = "How many experts does a pass touch, and is their use even?"


# Single visits of many steps are a bar code; fewer columns show how often.
_MAX_COLUMNS = 60


def window_visits(run: RunData, window: tuple[int, int]) -> SetVisits:
    """Return the forward visits of expert sets in a window of steps."""
    keep = (run.need["step"] >= window[0]) & (run.need["step"] <= window[1])
    return set_visits(select(run.need, keep), run.pages)


def expert_counts(visits: SetVisits) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Count visits that used each expert.

    Returns:
        (E,) groups by layer and expert, (S,) steps, (E, S) uses, (E, S) visits of the expert's set.
    """
    real = visits.groups >= 0
    steps, column = np.unique(visits.step, return_inverse=True)
    uses = np.zeros((*visits.groups.shape, len(steps)), np.int64)
    visit, member = np.nonzero(visits.used)
    np.add.at(uses, (visits.set[visit], member, column[visit]), 1)
    seen = np.zeros((len(visits.groups), len(steps)), np.int64)
    np.add.at(seen, (visits.set, column), 1)
    return visits.groups[real], steps, uses[real], seen[np.nonzero(real)[0]]


def experts_figure(
    run: RunData, visits: SetVisits, theme: Theme, max_rows: int = MAX_ROWS
) -> go.Figure:
    """Draw experts, grouped by layer, x steps; colour is the share of visits that used them."""
    groups, steps, uses, seen = expert_counts(visits)
    total, rows, columns = sum_bins(uses, max_rows, _MAX_COLUMNS)
    with np.errstate(invalid="ignore", divide="ignore"):
        cells = total / sum_bins(seen, max_rows, _MAX_COLUMNS)[0]
    names = row_names(run, groups, rows)
    fig = figure(theme, height=max(300, min(700, 130 + 14 * len(cells))))
    fig.add_heatmap(
        z=cells.astype(np.float32),
        x=column_names(steps, columns),
        y=names,
        zmin=0,
        zmax=1,
        colorscale=quantity_scale(theme, 1e3),
        colorbar=colorbar(100),
        hoverongaps=False,
        hovertemplate="%{y}<br>step %{x}: used in <b>%{z:.0%}</b> of the visits<extra></extra>",
    )
    ticks, labels = group_ticks(run.groups, groups[rows[:-1]])
    label_rows(fig, ticks, labels, names)
    for border in np.flatnonzero(np.diff(_layers(run, groups[rows[:-1]]))).tolist():
        fig.add_hline(y=border + 0.5, line={"color": theme.surface, "width": 2})
    show_steps(fig, cells.shape[1])
    return fig


def _layers(run: RunData, groups: np.ndarray) -> np.ndarray:
    layer = dict(zip(run.groups.group.tolist(), run.groups.layer.tolist(), strict=True))
    return np.array([layer.get(group, -1) for group in groups.tolist()])


def evenness_figure(visits: SetVisits, use: SetUse, theme: Theme) -> go.Figure:
    """Draw touched share and popularity entropy of each layer."""
    layers = np.array([f"layer {layer}" for layer in visits.layers.tolist()], object)
    fig = figure(theme, height=280)
    for values, name, series in (
        (use.touched, "touched share of a visit", "compute"),
        (use.entropy, "popularity entropy (1 is even)", "gradient"),
    ):
        fig.add_bar(
            x=layers,
            y=values,
            name=name,
            marker={"color": theme.series[series], "pattern": {"shape": ""}},
            hovertemplate=f"%{{x}}: <b>%{{y:.3f}}</b> {name}<extra></extra>",
        )
    fig.update_layout(barmode="group", bargap=0.3)
    fig.update_yaxes(range=[0, 1.02], title_text="share, entropy (0 to 1)")
    return fig


def set_table(visits: SetVisits, use: SetUse, window: tuple[int, int]) -> DataTable:
    """Return a row a layer."""
    columns = (
        Column("layer", "Layer"),
        Column("experts", "Experts"),
        Column("visits", "Forward visits", units.count),
        Column("touched_share", "Touched share", units.share),
        Column("entropy", "Popularity entropy", units.number),
        Column("most_used", "Most used", numeric=False),
        Column("most_used_share", "Its share of uses", units.share),
        Column("never_used", "Never used", units.count),
    )
    rows = []
    for index, layer in enumerate(visits.layers.tolist()):
        size = int(visits.num_members[index])
        counts = use.counts[index, :size]
        total = int(counts.sum())
        top = int(counts.argmax()) if total else 0
        rows.append(
            (
                layer,
                size,
                int(use.visits[index]),
                float(use.touched[index]),
                float(use.entropy[index]),
                f"E{top}" if total else "none",
                counts[top] / total if total else float("nan"),
                int((counts == 0).sum()),
            )
        )
    return DataTable("sets", f"Expert sets in {window_text(window)}", columns, rows)


def build(run: RunData, window: tuple[int, int], theme: Theme, max_rows: int) -> PageContent:
    """Return the page; the caller adds the choice of modes."""
    visits = window_visits(run, window)
    if not len(visits):
        return PageContent(
            TITLE,
            QUESTION,
            f"No expert set was visited in {window_text(window)}.",
            notices=trace_notices(run),
        )
    use = set_use(visits)
    verdict = _verdict(visits, use, window)
    panels = (
        Panel(
            "experts",
            "Experts by layer and step",
            experts_figure(run, visits, theme, max_rows),
            verdict,
            legend="Colour: share of the layer's forward visits that used the expert; grey is none",
            hatched=True,
            wide=True,
        ),
        Panel(
            "evenness",
            "How wide and how even each layer's use is",
            evenness_figure(visits, use, theme),
            "Touched share and popularity entropy of each layer; the table below has the same "
            "numbers.",
            wide=True,
        ),
    )
    return PageContent(
        TITLE,
        QUESTION,
        verdict,
        notices=trace_notices(run),
        panels=panels,
        how=_how(),
        tables=(set_table(visits, use, window),),
    )


def _verdict(visits: SetVisits, use: SetUse, window: tuple[int, int]) -> str:
    touched, entropy = float(np.nanmean(use.touched)), float(np.nanmean(use.entropy))
    seen = np.flatnonzero(use.visits > 0)
    skewed = int(seen[np.nanargmin(use.entropy[seen])])
    words = "almost even" if entropy > 0.95 else "uneven" if entropy > 0.8 else "very uneven"
    experts = units.plural(int(visits.num_members.max()), "expert")
    return (
        f"In {window_text(window)}, a forward visit touched {units.share(touched)} of a layer's "
        f"{experts}; use is {words} (entropy {entropy:.2f} of 1), least even in layer "
        f"{visits.layers[skewed]} ({use.entropy[skewed]:.2f})."
    )


def _how() -> tuple[How, ...]:
    return (
        How(
            "visit",
            "one forward pass of a micro-batch through a layer's expert set (rows of "
            "need with one seq)",
            "count",
            "measured",
        ),
        How(
            "touched share",
            "mean over visits of experts used / experts of the layer",
            "share",
            "measured",
        ),
        How(
            "popularity entropy",
            "−Σ p log2 p / log2(experts), p the expert's share of all uses",
            "0 (one expert only) to 1 (even)",
            "measured",
        ),
    )
