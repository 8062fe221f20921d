"""What views share: notices about damage, pages for runs without data, ticks for rows."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.content import Notice, PageContent
from dashboard.data import Health, RunData
from dashboard.groups import Groups
from dashboard.theme import Theme, bar_margins
from profiler.analysis import num_rows

RECORD_CODE = """\
# the demo: profile, train predictors, train on with learned prefetch
odc demo --run-dir runs/demo

# a training run with every step traced
odc profile tiny-moe --run-dir runs/profile

# any PyTorch training loop
from odc.monitor import Profiler

with Profiler(trace_interval=1, run_dir="runs/mine") as profiler:
    for batch in loader:
        loss = train_step(batch)
        profiler.step(loss=loss, tokens=batch.numel())
"""


def no_run(root: str) -> PageContent:
    """Return the page for a folder without runs."""
    return PageContent(
        title="No run found",
        question="How do I record one?",
        verdict=f"There is no run in {root}, nor one or two levels below it.",
        explanation=(
            "A run is a directory with metrics.jsonl, summary.json or trace/ in it. This page "
            "looks again every few seconds and shows the first run as soon as it appears.",
        ),
        code=RECORD_CODE,
    )


def unknown_run(name: str, known: list[str]) -> PageContent:
    """Return the page for an address that names a run that is not there."""
    return PageContent(
        title="No such run",
        question="Which runs are there?",
        verdict=f"There is no run named “{name}” in this folder.",
        explanation=("Choose one above: " + ", ".join(known[:20]) + ".",),
    )


def failed(title: str, error: Exception) -> PageContent:
    """Return the page for a view that could not be computed."""
    return PageContent(
        title=title,
        question="What went wrong?",
        verdict="This view could not be computed; the other pages still work.",
        notices=(Notice("error", f"{type(error).__name__}: {error}"),),
    )


def no_pages(run: RunData, title: str, question: str) -> PageContent | None:
    """Return the page that says what is missing, None if pages and accesses were recorded."""
    if run.trace_error:
        return PageContent(
            title,
            question,
            "The trace of this run cannot be read; the overview still works from metrics.jsonl.",
            notices=(Notice("error", run.trace_error),),
        )
    if run.reader is None:
        return PageContent(
            title,
            question,
            f"Run “{run.name}” has no trace, so accesses and page movements are unknown.",
            explanation=(
                "Its metrics are on the overview. To see this page, record the run again with a "
                "trace: profiler.trace_interval in config.yaml is the number of steps from one "
                "traced step to the next, 1 traces every step.",
            ),
            code="profiler:\n  trace_interval: 1\n",
        )
    missing = [
        text
        for text, table in (("a page table", run.pages), ("accesses", run.need))
        if not num_rows(table)
    ]
    if not missing:
        return None
    finished = int(run.metrics["step"].max()) if len(run.metrics) else None
    waiting = run.health.status == "running" and finished is not None
    return PageContent(
        title,
        question,
        f"The trace of “{run.name}” holds no {' and no '.join(missing).replace('a page', 'page')}.",
        notices=trace_notices(run),
        explanation=(
            f"The run has finished step {finished}; traced steps come every "
            f"{run.manifest.get('trace_interval', 1)} steps."
            if waiting
            else "Pages are recorded by odc's memory manager: wrap the model with odc.paged, or "
            "train with odc train. A plain Profiler records steps, memory and communication only.",
        ),
    )


def trace_notices(run: RunData) -> tuple[Notice, ...]:
    """Return what must be said about the health of the recording."""
    if run.trace_error:
        return (Notice("error", run.trace_error),)
    health = run.health
    found = [Notice("error", text) for text in health.corrupt]
    if health.cut:
        found.append(_cut_notice(health))
    traced, steps = len(run.step_starts[0]), len(run.metrics)
    if 0 < traced < steps and health.status != "running":
        text = f"{traced:,} of {units.plural(steps, 'step')} were traced"
        found.append(Notice("info", f"{text}; the others appear on the overview only."))
    return tuple(found)


def _cut_notice(health: Health) -> Notice:
    where = "" if health.last_step is None else f" up to step {health.last_step}"
    recovered = f"{units.plural(health.events, 'event')}{where} were recovered"
    if health.status == "running":
        return Notice("info", f"This run is still being written: {recovered} so far.")
    details = "; ".join(health.cut[:3])
    return Notice("warning", f"The trace has no clean end: {recovered}. {details}.")


def group_ticks(groups: Groups, shown: np.ndarray, most: int = 24) -> tuple[list[int], list[str]]:
    """Return rows to label and their labels: every group if few, else the first of each layer.

    Args:
        groups: The run's groups.
        shown: (R,) group of each row drawn.
        most: Number of labels at most; labels also keep that distance from each other.
    """
    changes = np.flatnonzero(np.diff(shown, prepend=shown[:1] - 1)) if len(shown) else shown
    names = groups.names(shown[changes])
    if len(changes) > most:
        layer_of = dict(zip(groups.group.tolist(), groups.layer.tolist(), strict=True))
        layers = np.array([layer_of.get(group, -1) for group in shown.tolist()])
        starts = np.flatnonzero(np.diff(layers, prepend=-2))
        starts = starts[layers[starts] >= 0]
        if len(starts):
            changes, names = starts, [f"layer {layer}" for layer in layers[starts]]
    distance = len(shown) / most
    kept: list[int] = []
    for index, row in enumerate(changes.tolist()):
        if not kept or row - changes[kept[-1]] >= distance:
            kept.append(index)
    return [int(changes[index]) for index in kept], [names[index] for index in kept]


def label_rows(fig: go.Figure, rows: list[int], labels: list[str], names: np.ndarray) -> None:
    """Put ticks at rows of a category axis, from the top down."""
    fig.update_yaxes(
        type="category",
        tickvals=names[rows] if len(rows) else names[:0],
        ticktext=labels,
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        ticks="outside",
        ticklen=3,
    )


def add_swatches(fig: go.Figure, theme: Theme, names: dict[str, str], symbol: str) -> None:
    """Add a legend entry for each category of a heatmap: title by series name."""
    for series, title in names.items():
        fig.add_scatter(
            x=np.array([np.nan]),
            y=np.array([None], object),
            mode="markers",
            marker={
                "symbol": symbol,
                "size": 12,
                "color": theme.series[series],
                "line": {"width": 1, "color": theme.muted},
            },
            name=title,
            hoverinfo="skip",
        )


def window_text(window: tuple[int, int]) -> str:
    """Return `step 7` or `steps 3–7`."""
    if window[0] == window[1]:
        return f"step {window[0]}"
    return f"steps {window[0]}–{window[1]}"


def row_names(run: RunData, groups: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a unique name for each (merged) row of groups."""
    labels, paths = run.groups.names(groups), run.groups.paths(groups)
    names = []
    for low, high in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        more = f" and {high - low - 1} more" if high - low > 1 else ""
        names.append(f"{labels[low]} · group {groups[low]}{more}<br>{paths[low]}")
    return np.array(names, object)


def column_names(steps: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return a name for each (merged) column of steps."""
    names = []
    for low, high in zip(columns[:-1].tolist(), columns[1:].tolist(), strict=True):
        last = f"–{steps[high - 1]}" if high - low > 1 else ""
        names.append(f"{steps[low]}{last}")
    return np.array(names, object)


def show_steps(fig: go.Figure, num_columns: int) -> None:
    """Lay out a heatmap over steps: a category axis without padding, room for the colour bar."""
    fig.update_xaxes(
        type="category",
        title_text="step",
        showgrid=False,
        nticks=12,
        range=[-0.5, num_columns - 0.5],
    )
    bar_margins(fig)
