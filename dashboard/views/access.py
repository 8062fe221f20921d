"""Access: which groups were used in which step, and which uses had to wait for a load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.binning import MAX_COLUMNS, MAX_ROWS, robust_max, sum_bins
from dashboard.content import Choice, Column, DataTable, How, PageContent, Panel
from dashboard.data import RunData
from dashboard.state import ViewState
from dashboard.theme import Theme, colorbar, figure, quantity_scale
from dashboard.views import experts
from dashboard.views.frame import (
    column_names,
    group_ticks,
    label_rows,
    no_pages,
    row_names,
    show_steps,
    trace_notices,
    window_text,
)
from profiler.analysis import GroupSteps, group_steps, num_rows, select

TITLE = "Access"
QUESTION = "What did each step use, and which uses found their page at home?"
MODES = (
    ("accesses", "accesses"),
    ("misses", "demand loads"),
    ("stall", "stall"),
    ("experts", "experts"),
)
_MAX_MARKS = 4_000


def window_steps(run: RunData, window: tuple[int, int]) -> GroupSteps:
    """Count accesses, demand loads and stall by group and step, groups in model order."""
    keep = (run.need["step"] >= window[0]) & (run.need["step"] <= window[1])
    found = group_steps(select(run.need, keep), run.actions, run.pages)
    order = _model_order(run, found.groups)
    return replace(
        found,
        groups=found.groups[order],
        accesses=found.accesses[order],
        misses=found.misses[order],
        stall_ns=found.stall_ns[order],
    )


def _model_order(run: RunData, groups: np.ndarray) -> np.ndarray:
    """Order groups by their first use, so that layers run from top to bottom."""
    used, first = np.unique(run.need["group"], return_index=True)
    if not len(used):
        return np.arange(len(groups))
    at = np.minimum(np.searchsorted(used, groups), len(used) - 1)
    by_group = dict(zip(run.groups.group.tolist(), run.groups.layer.tolist(), strict=True))
    layer = np.array([by_group.get(group, -1) for group in groups.tolist()])
    by_expert = dict(zip(run.groups.group.tolist(), run.groups.expert.tolist(), strict=True))
    expert = np.array([by_expert.get(group, -1) for group in groups.tolist()])
    rank = np.where(used[at] == groups, first[at], len(run.need["group"]))
    # Experts run in any order, so inside a layer they stand by number, after what comes first.
    start = np.array([rank[layer == level].min() if level >= 0 else -1 for level in layer])
    start = np.where(layer >= 0, start, rank)
    return np.lexsort((groups, np.where(expert >= 0, 0, rank), expert, start))


def access_figure(
    run: RunData, found: GroupSteps, mode: str, theme: Theme, max_rows: int = MAX_ROWS
) -> go.Figure:
    """Draw groups x steps; colour is a count or a time, dots mark demand loads."""
    values = {"misses": found.misses, "stall": found.stall_ns / 1e6}.get(mode, found.accesses)
    title = {"misses": "demand loads", "stall": "stall (ms)"}.get(mode, "accesses")
    cells, rows, columns = sum_bins(values, max_rows, MAX_COLUMNS)
    names = row_names(run, found.groups, rows)
    steps = column_names(found.steps, columns)
    limit, _ = robust_max(cells)
    fig = figure(theme, height=max(300, min(660, 130 + 14 * len(cells))))
    fig.add_heatmap(
        z=cells.astype(np.float32) if mode == "stall" else _narrow(cells),
        x=steps,
        y=names,
        zmin=0,
        zmax=limit,
        colorscale=quantity_scale(theme, limit if mode != "stall" else 1e3),
        colorbar=colorbar(limit, "ms" if mode == "stall" else ""),
        hovertemplate=f"%{{y}}<br>step %{{x}}: <b>%{{z:,.4~g}}</b> {title}<extra></extra>",
    )
    if mode == "accesses":
        _mark_misses(fig, found, (rows, columns), (names, steps), theme)
    ticks, labels = group_ticks(run.groups, found.groups[rows[:-1]])
    label_rows(fig, ticks, labels, names)
    show_steps(fig, cells.shape[1])
    return fig


def _narrow(cells: np.ndarray) -> np.ndarray:
    """Return counts in the smallest type that holds them: less to send."""
    largest = int(cells.max(initial=0))
    return cells.astype(np.uint8 if largest < 256 else np.uint16 if largest < 65_536 else np.int32)


def _mark_misses(
    fig: go.Figure,
    found: GroupSteps,
    bins: tuple[np.ndarray, np.ndarray],
    names: tuple[np.ndarray, np.ndarray],
    theme: Theme,
) -> None:
    """Put a dot on cells with demand loads, unless there are so many that dots hide all."""
    misses = np.add.reduceat(np.add.reduceat(found.misses, bins[0][:-1], 0), bins[1][:-1], 1)
    row, column = np.nonzero(misses)
    if len(row) > _MAX_MARKS:
        return
    number = misses[row, column]
    dense = misses.shape[1] > 100 or misses.shape[0] > 60
    fig.add_scatter(
        x=names[1][column],
        y=names[0][row],
        mode="markers",
        name="demand loads",
        marker={
            "symbol": "circle",
            "size": 4 if dense else 7,
            "color": theme.series["miss"],
            "line": {"width": 0 if dense else 1, "color": theme.surface},
        },
        customdata=number,
        hovertemplate="%{y}<br>step %{x}: <b>%{customdata:,}</b> demand loads<extra></extra>",
        showlegend=False,
    )


def group_table(run: RunData, found: GroupSteps, window: tuple[int, int]) -> DataTable:
    """Return a row a group, the longest stalls first."""
    columns = (
        Column("group", "Group", numeric=False),
        Column("module_path", "Module", numeric=False),
        Column("bytes", "Pages", units.size),
        Column("accesses", "Accesses", units.count),
        Column("demand_loads", "Demand loads", units.count),
        Column("loads_per_access", "Loads / access", units.number),
        Column("stall_ns", "Stall", units.nanoseconds),
    )
    labels, paths = run.groups.names(found.groups), run.groups.paths(found.groups)
    known = run.groups
    sizes = dict(zip(known.group.tolist(), known.bytes.tolist(), strict=True))
    accesses, misses = found.accesses.sum(axis=1), found.misses.sum(axis=1)
    stall = found.stall_per_group
    rows = [
        (
            labels[i],
            paths[i],
            sizes.get(int(found.groups[i]), 0),
            int(accesses[i]),
            int(misses[i]),
            misses[i] / accesses[i] if accesses[i] else float("nan"),
            int(stall[i]),
        )
        for i in np.lexsort((-misses, -stall)).tolist()
    ]
    caption = f"Groups in {window_text(window)}, the longest stalls first"
    return DataTable("groups", caption, columns, rows)


def build(run: RunData, state: ViewState, theme: Theme, max_rows: int = MAX_ROWS) -> PageContent:
    """Return the page."""
    missing = no_pages(run, TITLE, QUESTION)
    if missing is not None:
        return missing
    steps, _ = run.step_starts
    window = state.window(int(steps.min()), int(steps.max()))
    has_sets = bool((run.pages["set"] >= 0).any())
    modes = MODES if has_sets else MODES[:-1]
    mode = state.mode if state.mode in dict(modes) else "accesses"
    choice = Choice("mode", "Show", modes, mode)
    if mode == "experts":
        content = experts.build(run, window, theme, max_rows)
        return replace(content, choices=(choice,))
    found = window_steps(run, window)
    verdict = _verdict(run, found, window)
    panel = Panel(
        "access",
        f"{dict(modes)[mode].capitalize()} by group and step",
        access_figure(run, found, mode, theme, max_rows),
        _summary(found, mode),
        legend=_legend(mode),
    )
    return PageContent(
        TITLE,
        QUESTION,
        verdict,
        notices=trace_notices(run),
        choices=(choice,),
        panels=(panel,),
        how=_how(),
        tables=(group_table(run, found, window),),
    )


def _legend(mode: str) -> str:
    what = {"misses": "demand loads", "stall": "stall in ms"}.get(mode, "accesses")
    return f"Colour: {what} of a group in a step; grey is zero"


def _summary(found: GroupSteps, mode: str) -> str:
    if mode != "accesses" or not found.misses.any():
        return "Grey cells are zero; the table below sums the rows."
    cells = int((found.misses > 0).sum())
    if cells > _MAX_MARKS:
        return (
            f"{cells:,} cells had demand loads, too many to mark here: choose “demand loads” "
            "above, or fewer steps."
        )
    return f"A dot marks each of the {cells:,} cells in which pages were loaded on demand."


def _verdict(run: RunData, found: GroupSteps, window: tuple[int, int]) -> str:
    accesses, misses = int(found.accesses.sum()), int(found.misses.sum())
    stall = found.stall_per_group
    text = (
        f"In {window_text(window)}, {units.count(accesses)} accesses to "
        f"{units.plural(len(found.groups), 'group')} needed {units.count(misses)} demand loads"
    )
    if not num_rows(run.actions):
        return f"{text}: the run recorded no page movements, everything stayed on the device."
    if not stall.sum():
        return f"{text} and no measured stall."
    worst = int(stall.argmax())
    label = run.groups.names(found.groups[worst : worst + 1])[0]
    return (
        f"{text} and {units.nanoseconds(int(stall.sum()))} of stall; {label} waited longest, "
        f"{units.nanoseconds(int(stall[worst]))} ({units.share(stall[worst] / stall.sum())})."
    )


def _how() -> tuple[How, ...]:
    return (
        How(
            "accesses",
            "rows of need: one for each use of a group's parameters, gradient or moments",
            "count",
            "measured",
        ),
        How(
            "demand loads",
            "pages loaded because a use asked for them (act = load); prefetched pages do not count",
            "count",
            "measured",
        ),
        How("stall", "wait_ns of the group's pages (act = stall)", "time", "measured"),
        How(
            "colour limit",
            "the 99.5th percentile of the cells above zero, if the largest is far above it",
            "as the colour bar",
            "measured",
        ),
    )
