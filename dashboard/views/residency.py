"""Residency: which pages were on the device, and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.binning import MAX_COLUMNS, MAX_ROWS, majority_rows
from dashboard.content import Choice, Column, DataTable, How, PageContent, Panel
from dashboard.data import RunData
from dashboard.groups import page_names
from dashboard.state import ViewState
from dashboard.theme import TRANSPARENT, Theme, figure
from dashboard.views.frame import (
    add_swatches,
    group_ticks,
    label_rows,
    no_pages,
    trace_notices,
    window_text,
)
from profiler.analysis import residency_matrix, select
from profiler.residency import Residency
from profiler.schema import Act, Kind, Phase, Tier

TITLE = "Residency"
QUESTION = "Which pages were on the device, and when?"
DEFAULT_STEPS = 3
ORDERS = (("first_use", "kind and first use"), ("group", "group"))
ABSENT = 3
"""Code of a gradient that does not exist, beside those of `Residency`: nowhere, and known to be."""

_STATES = {
    Residency.DEVICE: ("device", "2 on the device"),
    Residency.HOME: ("home", "1 at home"),
    ABSENT: ("absent", "3 no gradient exists"),
    Residency.UNKNOWN: ("unknown", "0 unknown"),
}


@dataclass(frozen=True)
class ResidencyMap:
    """Residency of pages (P) in time bins (B) of a window of steps.

    Attributes:
        page_rows: (P,) rows of the page table, in the order drawn.
        edges_ns: (B + 1,) borders of the time bins.
        codes: (P, B) u8, a `Residency` or `ABSENT`.
        marks: (time, name) of what begins: traced steps, and evaluations, generations and
            checkpoints within them.
    """

    page_rows: np.ndarray
    edges_ns: np.ndarray
    codes: np.ndarray
    marks: list[tuple[int, str]]

    def share(self, code: Residency) -> float:
        """Return the share of the known cells that have this code."""
        known = int((self.codes != Residency.UNKNOWN).sum())
        return float((self.codes == code).sum() / known) if known else float("nan")


def page_order(run: RunData, order: str) -> np.ndarray:
    """Return rows of the page table by kind and first use, or by group."""
    pages = run.pages
    by_group = np.lexsort((pages["part"], pages["slot"], pages["kind"], pages["group"]))
    if order == "group":
        return by_group
    key = run.need["group"].astype(np.int64) * 256 + run.need["kind"]
    used, first = np.unique(key, return_index=True)
    if not len(used):
        return by_group
    wanted = pages["group"].astype(np.int64) * 256 + pages["kind"]
    at = np.minimum(np.searchsorted(used, wanted), len(used) - 1)
    rank = np.where(used[at] == wanted, first[at], np.iinfo(np.int64).max)
    return by_group[np.lexsort((rank[by_group], pages["kind"][by_group]))]


def residency_map(
    run: RunData, window: tuple[int, int], order: str, num_bins: int = MAX_COLUMNS
) -> ResidencyMap:
    """Return where pages were during the steps of a window."""
    begin, end = window_span(run, window)
    rows = page_order(run, order)
    matrix = residency_matrix(run.intervals, run.pages["page"][rows], num_bins, (begin, end))
    codes = matrix.codes
    gradients = run.pages["kind"][rows] == Kind.GRADIENT
    # A gradient has no home: where no event puts it on the device, there is none.
    codes[gradients] = np.where(codes[gradients] == Residency.DEVICE, Residency.DEVICE, ABSENT)
    return ResidencyMap(rows, matrix.edges_ns, codes, _marks(run, window))


_EXTRAS = {
    Phase.EVALUATION: "evaluation",
    Phase.GENERATION: "generation",
    Phase.OTHER: "save or other",
}


def _marks(run: RunData, window: tuple[int, int]) -> list[tuple[int, str]]:
    """Return what begins in a window; with many steps only some of them."""
    steps, starts = run.step_starts
    inside = (steps >= window[0]) & (steps <= window[1])
    pairs = list(zip(starts[inside].tolist(), steps[inside].tolist(), strict=True))
    found = [(t_ns, f"step {step}") for t_ns, step in pairs[:: max(1, -(-len(pairs) // 10))]]
    if len(pairs) <= 10:
        phase, step = run.need["phase"], run.need["step"]
        for wanted, name in _EXTRAS.items():
            rows = np.flatnonzero((phase == wanted) & (step >= window[0]) & (step <= window[1]))
            _, first = np.unique(step[rows], return_index=True)
            found += [(t_ns, name) for t_ns in run.need["t_ns"][rows[first]].tolist()]
    return sorted(found)


def window_span(run: RunData, window: tuple[int, int]) -> tuple[int, int]:
    """Return the first and last time (ns) of the traced steps of a window."""
    steps, starts = run.step_starts
    inside = (steps >= window[0]) & (steps <= window[1])
    begin = int(starts[inside].min()) if inside.any() else int(starts.min(initial=0))
    later = starts[steps > window[1]]
    last = int(run.intervals.end_ns.max(initial=begin + 1))
    return begin, max(int(later.min()) if len(later) else last, begin + 1)


def residency_figure(
    run: RunData, found: ResidencyMap, theme: Theme, max_rows: int = MAX_ROWS
) -> go.Figure:
    """Draw pages x time; colour says where a page was."""
    codes, borders = majority_rows(found.codes, max_rows)
    names = _row_names(page_names(select(run.pages, found.page_rows), run.groups), borders)
    width = (found.edges_ns[-1] - found.edges_ns[0]) / codes.shape[1] / 1e9
    fig = figure(theme, height=max(300, min(660, 130 + 9 * len(codes))))
    fig.add_heatmap(
        z=codes,
        x0=width / 2,
        dx=width,
        y=names,
        zmin=-0.5,
        zmax=3.5,
        colorscale=_state_scale(theme),
        showscale=False,
        hovertemplate="%{y}<br>%{x:.4~f} s: state <b>%{z}</b> (2 device, 1 home, 3 none, 0 unknown)"
        "<extra></extra>",
    )
    present = set(np.unique(codes).tolist())
    titles = {name: title for code, (name, title) in _STATES.items() if code in present}
    add_swatches(fig, theme, titles, "square")
    _mark_steps(fig, found, theme)
    shown = found.page_rows[borders[:-1]]
    rows, labels = group_ticks(run.groups, run.pages["group"][shown])
    label_rows(fig, rows, labels, names)
    _mark_kinds(fig, run.pages["kind"][shown], theme)
    fig.update_xaxes(
        title_text="time from the start of the window (s)", showgrid=False, zeroline=False
    )
    return fig


def _state_scale(theme: Theme) -> list[list[object]]:
    """Return a flat colour for each of the codes 0 to 3."""
    colors = (TRANSPARENT, *(theme.series[name] for name in ("home", "device", "absent")))
    return [[edge / 4, color] for code, color in enumerate(colors) for edge in (code, code + 1)]


def _mark_kinds(fig: go.Figure, kinds: np.ndarray, theme: Theme) -> None:
    """Name the bands of an order by kind."""
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    if not 1 < len(starts) <= len(Kind):
        return
    for start in starts.tolist():
        if start:
            fig.add_hline(y=start - 0.5, line={"color": theme.text, "width": 1}, opacity=0.6)
        fig.add_annotation(
            x=1,
            xref="paper",
            xanchor="right",
            xshift=-4,
            y=start - 0.5,
            yanchor="top",
            showarrow=False,
            text=f"{units.code(Kind, kinds[start])}s",
            font={"size": 11.5, "color": theme.text},
            bgcolor=theme.surface,
            opacity=0.9,
        )


def _row_names(names: list[str], borders: np.ndarray) -> np.ndarray:
    merged = []
    for low, high in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        more = f"<br>and {high - low - 1} more pages, most of them" if high - low > 1 else ""
        merged.append(names[low] + more)
    return np.array(merged, object)


def _mark_steps(fig: go.Figure, found: ResidencyMap, theme: Theme) -> None:
    """Draw where steps, evaluations and saves begin."""
    for t_ns, name in found.marks:
        at = float(t_ns - found.edges_ns[0]) / 1e9
        fig.add_vline(x=at, line={"color": theme.text, "width": 1, "dash": "dot"}, opacity=0.55)
        fig.add_annotation(
            x=at,
            xshift=4,
            y=1,
            yref="paper",
            yanchor="top",
            xanchor="left",
            showarrow=False,
            text=name,
            font={"size": 11.5, "color": theme.text},
            bgcolor=theme.surface,
            opacity=0.85,
        )


def page_rows(run: RunData, window: tuple[int, int]) -> list[list[object]]:
    """Return a row a page of what happened to it in the window, the most often loaded first."""
    begin, end = window_span(run, window)
    actions, pages = run.actions, run.pages
    inside = (actions["t_ns"] >= begin) & (actions["t_ns"] < end)
    at = np.searchsorted(pages["page"], actions["page"])
    inside &= at < len(pages["page"])

    def per_page(values: np.ndarray, *acts: Act) -> np.ndarray:
        rows = inside & np.isin(actions["act"], np.array(acts, np.uint8))
        total = np.zeros(len(pages["page"]), np.int64)
        np.add.at(total, at[rows], values[rows])
        return total

    ones = np.ones(len(actions["act"]), np.int64)
    resident = _resident_ns(run, begin, end)
    columns = [
        per_page(ones, Act.LOAD),
        per_page(ones, Act.PREFETCH),
        per_page(ones, Act.EVICT),
        per_page(ones, Act.WRITE_BACK, Act.EARLY_WRITE_BACK),
        per_page(actions["wait_ns"], Act.STALL),
        resident / (end - begin),
    ]
    names = run.groups.names(pages["group"])
    order = np.lexsort((-columns[1], -columns[0], -columns[4]))
    return [
        [
            int(pages["page"][row]),
            names[row],
            units.code(Kind, pages["kind"][row]),
            str(pages["module_path"][row]),
            int(pages["bytes"][row]),
            *(column[row].item() for column in columns),
        ]
        for row in order.tolist()
    ]


def _resident_ns(run: RunData, begin: int, end: int) -> np.ndarray:
    """Return (P,) time that each page spent on the device between two times."""
    stays = run.intervals
    here = stays.tier == Tier.DEVICE
    spent = np.minimum(stays.end_ns, end) - np.maximum(stays.start_ns, begin)
    total = np.zeros(len(run.pages["page"]), np.int64)
    at = np.minimum(np.searchsorted(run.pages["page"], stays.page), len(total) - 1)
    np.add.at(total, at[here], np.maximum(spent[here], 0))
    return total


def page_table(run: RunData, window: tuple[int, int]) -> DataTable:
    """Return the table below the figure."""
    columns = (
        Column("page", "Page"),
        Column("group", "Group", numeric=False),
        Column("kind", "Kind", numeric=False),
        Column("module_path", "Module", numeric=False),
        Column("bytes", "Size", units.size),
        Column("demand_loads", "Demand loads", units.count),
        Column("prefetches", "Prefetches", units.count),
        Column("evictions", "Evictions", units.count),
        Column("write_backs", "Write-backs", units.count),
        Column("stall_ns", "Stall", units.nanoseconds),
        Column("resident_share", "Resident", units.share),
    )
    caption = f"Pages in {window_text(window)}, the longest stalls first"
    return DataTable("pages", caption, columns, page_rows(run, window))


def build(run: RunData, state: ViewState, theme: Theme, max_rows: int = MAX_ROWS) -> PageContent:
    """Return the page."""
    missing = no_pages(run, TITLE, QUESTION)
    if missing is not None:
        return missing
    steps, _ = run.step_starts
    window = state.window(int(steps.min()), int(steps.max()), DEFAULT_STEPS)
    order = state.order if state.order in dict(ORDERS) else "first_use"
    found = residency_map(run, window, order, min(MAX_COLUMNS, 2 * max_rows))
    verdict = _verdict(run, found, window)
    panel = Panel(
        "residency",
        f"Pages by {dict(ORDERS)[order]}, over time",
        residency_figure(run, found, theme, max_rows),
        verdict,
        hatched=True,
    )
    return PageContent(
        TITLE,
        QUESTION,
        verdict,
        notices=trace_notices(run),
        choices=(Choice("order", "Order of pages", ORDERS, order),),
        panels=(panel,),
        how=_how(found),
        tables=(page_table(run, window),),
    )


def _verdict(run: RunData, found: ResidencyMap, window: tuple[int, int]) -> str:
    begin, end = int(found.edges_ns[0]), int(found.edges_ns[-1])
    share = _resident_ns(run, begin, end) / (end - begin)
    frames = float((share * run.frame_bytes).sum())
    rows = page_rows(run, window)
    again = sum(1 for row in rows if int(str(row[5])) + int(str(row[6])) > 1)
    budget = f" under a budget of {units.size(run.page_budget)}" if run.page_budget else ""
    return (
        f"In {window_text(window)}, {units.count(round(float(share.sum()), 1))} of "
        f"{units.plural(len(rows), 'page')} were on the device on average "
        f"({units.share(float(share.mean()))}), in {units.size(frames)} of frames{budget}; "
        f"{again:,} pages came in more than once."
    )


def _how(found: ResidencyMap) -> tuple[How, ...]:
    bins = found.codes.shape[1]
    width = units.nanoseconds((found.edges_ns[-1] - found.edges_ns[0]) / bins)
    return (
        How(
            "state of a cell",
            f"state of the page in the middle of one of {bins:,} time bins of "
            f"{width}, from load, prefetch, evict, cancel and drop events",
            "0 to 3",
            "measured",
        ),
        How(
            "merged rows",
            f"above {MAX_ROWS} pages, neighbouring rows share one: it shows the "
            "state of most of its pages",
            "0 to 3",
            "measured",
        ),
        How("resident", "time on the device / length of the window", "share of time", "measured"),
        How(
            "unknown, none",
            "unknown: no event says where the page was; none: a gradient before it is created and "
            "after it is dropped, which has no bytes anywhere",
            "0, hatched; 3",
            "measured",
        ),
    )
