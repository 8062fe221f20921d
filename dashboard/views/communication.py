"""Communication: who sends how much to whom, and in which operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.binning import edges, robust_max
from dashboard.content import Choice, Column, DataTable, How, Notice, PageContent, Panel
from dashboard.data import RunData
from dashboard.state import ViewState
from dashboard.theme import Theme, bar_margins, colorbar, figure, quantity_scale
from dashboard.views.frame import trace_notices, window_text
from profiler.analysis import CommMatrix, Table, comm_matrix, num_rows, select
from profiler.schema import CommOp

TITLE = "Communication"
QUESTION = "Which links carry how much, and for what?"
MAX_RANKS = 128
_PRINTED_RANKS = 16
_CODE = """\
# on every rank, after init_process_group
from odc.monitor import Profiler

with Profiler(trace_interval=10, metrics=["comm_vol"]) as profiler:
    for batch in loader:
        loss = train_step(batch)
        profiler.step(loss=loss)

# torchrun --nproc-per-node 2 train.py
"""


def one_rank(run: RunData) -> PageContent:
    """Explain why there is nothing to draw for a run of one rank."""
    moved = ""
    if run.metrics.known("bytes_in"):
        inward = units.size(run.metrics.total("bytes_in"))
        outward = units.size(run.metrics.total("bytes_out"))
        moved = f" Its traffic is between device and home: {inward} in, {outward} out."
    return PageContent(
        TITLE,
        QUESTION,
        f"Run “{run.name}” has one rank, so no byte crossed a link between ranks.{moved}",
        notices=trace_notices(run),
        explanation=(
            "A matrix of ranks would be a single empty square. Page traffic is on the overview, "
            "residency and access pages. With two ranks or more, this page shows who sends how "
            "much to whom, and which operations it is for:",
        ),
        code=_CODE,
    )


def not_recorded(run: RunData) -> PageContent:
    """Explain how to record communication."""
    metrics = run.manifest.get("metrics", [])
    asked = "comm_vol" in metrics
    return PageContent(
        TITLE,
        QUESTION,
        f"Run “{run.name}” has {run.world_size} ranks but recorded no communication.",
        notices=trace_notices(run),
        explanation=(
            "comm_vol was asked for, but no collective was seen in a traced step. Collectives that "
            "go from C++ to C++ (buckets of DistributedDataParallel) cannot be seen from Python."
            if asked
            else "The metric comm_vol was not recorded. Add it:",
        ),
        code="" if asked else _CODE,
    )


def filtered(run: RunData, window: tuple[int, int], op: str | None) -> Table:
    """Return the transfers of a window of steps, of one operation if it is named."""
    keep = (run.comm["step"] >= window[0]) & (run.comm["step"] <= window[1])
    if op in _OPS:
        keep &= run.comm["op"] == _OPS[op]
    return select(run.comm, keep)


_OPS = {op.name.lower(): op for op in CommOp}


def matrix_of(run: RunData, comm: Table) -> CommMatrix:
    """Return bytes from rank to rank."""
    groups = run.reader.process_groups if run.reader is not None else {}
    ranks = max(int(comm[n].max(initial=0)) for n in ("rank", "src", "dst")) + 1
    return comm_matrix(comm, max(run.world_size, ranks), process_groups=groups)


def rank_cells(run: RunData, matrix: CommMatrix) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix to draw, (n, n) f64 bytes, and the borders of its bins of ranks.

    NaN is unknown: ranks whose files are not here, and the diagonal (a rank sends itself nothing).
    """
    dense = matrix.dense().astype(np.float64)
    present = set(run.reader.ranks) if run.reader is not None else set()
    missing = [r for r in range(matrix.world_size) if r not in present and not dense[r].any()]
    borders = edges(matrix.world_size, MAX_RANKS)
    merged = np.add.reduceat(np.add.reduceat(dense, borders[:-1], 0), borders[:-1], 1)
    if len(borders) - 1 == matrix.world_size:
        np.fill_diagonal(merged, np.nan)
        merged[missing] = np.nan
    return merged, borders


def matrix_figure(run: RunData, matrix: CommMatrix, theme: Theme) -> go.Figure:
    """Draw the matrix of ranks: rows send, columns receive."""
    cells, borders = rank_cells(run, matrix)
    unit, scale = _unit(float(np.nanmax(cells, initial=0)))
    limit, _ = robust_max(cells / scale)
    names = _rank_names(borders)
    size = len(names)
    fig = figure(theme, height=max(340, min(640, 150 + 56 * size if size < 9 else 640)))
    fig.add_heatmap(
        z=(cells / scale).astype(np.float32),
        x=names,
        y=names,
        zmin=0,
        zmax=limit,
        colorscale=quantity_scale(theme, 1e3),
        colorbar=colorbar(limit, unit),
        texttemplate="%{z:,.3~g}" if size <= _PRINTED_RANKS else None,
        hoverongaps=False,
        hovertemplate=f"rank %{{y}} → rank %{{x}}: <b>%{{z:,.4~g}} {unit}</b><extra></extra>",
    )
    fig.update_xaxes(type="category", title_text="receives", showgrid=False, nticks=16)
    fig.update_yaxes(
        type="category",
        title_text="sends",
        showgrid=False,
        nticks=16,
        range=[size - 0.5, -0.5],
    )
    bar_margins(fig)
    return fig


def _unit(largest: float) -> tuple[str, float]:
    for name, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if largest >= scale:
            return name, scale
    return "B", 1.0


def _rank_names(borders: np.ndarray) -> np.ndarray:
    pairs = zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    return np.array([f"{a}" if b - a == 1 else f"{a}–{b - 1}" for a, b in pairs], object)


def by_group_and_op(run: RunData, comm: Table) -> tuple[np.ndarray, list[str], list[str]]:
    """Sum the message bytes of parameter groups (rows) and operations (columns)."""
    groups, row = np.unique(comm["group"], return_inverse=True)
    ops, column = np.unique(comm["op"], return_inverse=True)
    cells = np.zeros((len(groups), len(ops)))
    np.add.at(cells, (row, column), comm["bytes"])
    known = run.groups.names(groups)
    names = ["no group named" if group < 0 else known[i] for i, group in enumerate(groups.tolist())]
    return cells, names, [units.code(CommOp, op) for op in ops.tolist()]


def groups_figure(run: RunData, comm: Table, theme: Theme, most: int = 40) -> go.Figure:
    """Draw parameter groups x operations; colour is the bytes of their messages."""
    cells, names, ops = by_group_and_op(run, comm)
    top = np.sort(np.argsort(-cells.sum(axis=1), kind="stable")[:most])
    cells, shown = cells[top], np.array([names[i] for i in top], object)
    unit, scale = _unit(float(cells.max(initial=0)))
    limit, _ = robust_max(cells / scale)
    fig = figure(theme, height=max(240, 150 + 26 * len(shown)))
    fig.add_heatmap(
        z=(cells / scale).astype(np.float32),
        x=np.array(ops, object),
        y=shown,
        zmin=0,
        zmax=limit,
        colorscale=quantity_scale(theme, 1e3),
        colorbar=colorbar(limit, unit),
        texttemplate="%{z:,.3~g}",
        xgap=1,
        ygap=1,
        hovertemplate=f"%{{y}}, %{{x}}: <b>%{{z:,.4~g}} {unit}</b><extra></extra>",
    )
    fig.update_xaxes(type="category", showgrid=False)
    fig.update_yaxes(type="category", showgrid=False, range=[len(shown) - 0.5, -0.5])
    bar_margins(fig, x_title=False)
    return fig


def link_table(matrix: CommMatrix) -> DataTable:
    """Return a row a link, the busiest first."""
    columns = (
        Column("src", "From rank"),
        Column("dst", "To rank"),
        Column("bytes", "Sent", units.size),
        Column("share", "Share", units.share),
        Column("transfers", "Transfers", units.count),
    )
    total = max(int(matrix.bytes.sum()), 1)
    rows = [
        (
            int(matrix.src[i]),
            int(matrix.dst[i]),
            int(matrix.bytes[i]),
            matrix.bytes[i] / total,
            int(matrix.count[i]),
        )
        for i in np.argsort(-matrix.bytes, kind="stable").tolist()
    ]
    said = "collectives spread over a ring: modelled" if matrix.modelled else "measured"
    return DataTable("links", f"Links, the busiest first ({said})", columns, rows)


def op_table(comm: Table) -> DataTable:
    """Return a row an operation."""
    columns = (
        Column("op", "Operation", numeric=False),
        Column("calls", "Calls", units.count),
        Column("message_bytes", "Message bytes", units.size),
        Column("dur_ns", "Duration", _time_or_unknown),
        Column("wait_ns", "Host wait", units.nanoseconds),
    )
    rows: list[Any] = []
    for op in np.unique(comm["op"]).tolist():
        mine = select(comm, comm["op"] == op)
        rows.append(
            (
                units.code(CommOp, op),
                num_rows(mine),
                *(int(mine[n].sum()) for n in ("bytes", "dur_ns", "wait_ns")),
            )
        )
    rows.sort(key=lambda row: row[2], reverse=True)
    return DataTable("operations", "Operations, summed over ranks", columns, rows)


def _time_or_unknown(value: int) -> str:
    return units.nanoseconds(value) if value else "not measured"


def build(run: RunData, state: ViewState, theme: Theme) -> PageContent:
    """Return the page."""
    if run.trace_error:
        return PageContent(
            TITLE,
            QUESTION,
            "The trace of this run cannot be read.",
            notices=(Notice("error", run.trace_error),),
        )
    if not num_rows(run.comm):
        return one_rank(run) if run.world_size < 2 else not_recorded(run)
    steps = run.comm["step"]
    window = state.window(int(steps.min()), int(steps.max()))
    present = [units.code(CommOp, op) for op in np.unique(run.comm["op"]).tolist()]
    op = state.mode if state.mode in present else "all"
    comm = filtered(run, window, op)
    if not num_rows(comm):
        return PageContent(TITLE, QUESTION, f"Nothing was sent in {window_text(window)}.")
    matrix = matrix_of(run, comm)
    verdict = _verdict(matrix, comm, window)
    panels = []
    if matrix.world_size > 1:
        title = f"Rank to rank, {'all operations' if op == 'all' else op} "
        said = "modelled: collectives spread over a ring" if matrix.modelled else "measured"
        panels.append(
            Panel(
                "matrix",
                f"{title.strip()} ({said})",
                matrix_figure(run, matrix, theme),
                verdict,
                legend="Colour: bytes sent; grey is zero, hatched is not sent or unknown",
                hatched=True,
            )
        )
    panels.append(
        Panel(
            "groups",
            "Parameter groups and operations (measured message sizes)",
            groups_figure(run, comm, theme),
            "Message bytes by group and operation; the tables have the numbers.",
            legend="Colour: bytes of messages, summed over ranks; grey is zero",
        )
    )
    options = (("all", "all"), *((name, name.replace("_", "-")) for name in present))
    return PageContent(
        TITLE,
        QUESTION,
        verdict,
        notices=_notices(run),
        choices=(Choice("mode", "Operation", options, op),),
        panels=panels,
        how=_how(),
        tables=(link_table(matrix), op_table(comm)),
    )


def _notices(run: RunData) -> tuple[Notice, ...]:
    found = list(trace_notices(run))
    if run.reader is not None and len(run.reader.ranks) < run.world_size:
        found.append(
            Notice(
                "warning",
                f"Files of {len(run.reader.ranks)} of {run.world_size} ranks "
                "are here; rows of the others are hatched: unknown, not zero.",
            )
        )
    return tuple(found)


def _verdict(matrix: CommMatrix, comm: Table, window: tuple[int, int]) -> str:
    total = int(matrix.bytes.sum())
    op = op_table(comm).rows[0]
    text = (
        f"In {window_text(window)}, {units.plural(matrix.world_size, 'rank')} sent "
        f"{units.size(total)}"
    )
    if not total:
        return f"{text}; {units.plural(num_rows(comm), 'call')} carried no message to another rank."
    top = int(matrix.bytes.argmax())
    even = 1 / max(len(matrix.bytes), 1)
    part = matrix.bytes[top] / total
    load = "no link stands out" if part < 1.2 * even else "more than its even part"
    said = ", modelled as a ring" if matrix.modelled else ""
    return (
        f"{text} to each other{said}: the busiest link, {matrix.src[top]} → {matrix.dst[top]}, "
        f"carries {units.share(part)} ({load}), and {op[0].replace('_', '-')} is "
        f"{units.share(op[2] / max(int(comm['bytes'].sum()), 1))} of the message bytes."
    )


def _how() -> tuple[How, ...]:
    return (
        How(
            "point to point",
            "bytes as sent (send; a recv is not counted again)",
            "bytes",
            "measured",
        ),
        How(
            "all-gather, reduce-scatter",
            "each rank sends (N − 1)/N of the message to the next in its process group: a ring",
            "bytes",
            "modelled",
        ),
        How("all-reduce", "2 (N − 1)/N of the buffer to the next rank", "bytes", "modelled"),
        How("all-to-all", "1/N of the input to every other rank", "bytes", "modelled"),
        How(
            "message bytes",
            "size of the message as issued: gathered output, scattered input, or buffer",
            "bytes",
            "measured",
        ),
        How(
            "duration",
            "from issue to completion as the host saw it; “not measured” where the "
            "backend does not tell",
            "time",
            "measured",
        ),
    )
