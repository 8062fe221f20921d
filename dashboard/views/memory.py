"""Memory: what pages and transients take, against the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard import units
from dashboard.binning import MAX_POINTS, edges
from dashboard.content import Column, DataTable, How, Notice, PageContent, Panel
from dashboard.data import RunData
from dashboard.state import ViewState
from dashboard.theme import Theme, figure
from dashboard.views.frame import no_pages, trace_notices, window_text
from dashboard.views.residency import window_span
from profiler.analysis import num_rows
from profiler.schema import Account, Kind, Tier

TITLE = "Memory"
QUESTION = "Who owns the device's memory, and does it stay within the budget?"
DEFAULT_STEPS = 5
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Resident:
    """Bytes of frames on the device over time, reconstructed from page events.

    Attributes:
        t_ns: (T,) times of the samples.
        by_kind: (3, T) i64 bytes of parameters, gradients and moments.
    """

    t_ns: np.ndarray
    by_kind: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """(T,) i64 bytes of all kinds."""
        total: np.ndarray = self.by_kind.sum(axis=0)
        return total


def resident_bytes(run: RunData, window: tuple[int, int], num_samples: int = 1_024) -> Resident:
    """Sum the frames of the pages on the device, by kind, at equally spaced times."""
    begin, end = window_span(run, window)
    times = np.linspace(begin, end, num_samples, endpoint=False).astype(np.int64)
    stays, pages = run.intervals, run.pages
    here = np.flatnonzero(stays.tier == Tier.DEVICE)
    at = np.minimum(np.searchsorted(pages["page"], stays.page[here]), num_rows(pages) - 1)
    by_kind = np.zeros((len(Kind), num_samples), np.int64)
    for kind in Kind:
        mine = pages["kind"][at] == kind
        size = run.frame_bytes[at[mine]]
        change = np.zeros(num_samples + 1, np.int64)
        np.add.at(change, np.searchsorted(times, stays.start_ns[here[mine]]), size)
        np.add.at(change, np.searchsorted(times, stays.end_ns[here[mine]]), -size)
        by_kind[kind] = np.cumsum(change)[:-1]
    return Resident(times, by_kind)


def account_series(
    run: RunData, account: Account, window: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return times, allocated bytes and peaks of an account on the device (or the whole process).

    Long series are cut into bins of which the highest sample is kept: peaks must not vanish.
    """
    mem = run.mem
    keep = (mem["account"] == account) & (mem["step"] >= window[0]) & (mem["step"] <= window[1])
    keep &= (mem["tier"] == Tier.DEVICE) if account != Account.PROCESS else True
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(mem["t_ns"][rows], kind="stable")]
    t_ns, allocated, peak = (mem[name][rows] for name in ("t_ns", "allocated", "peak"))
    if len(rows) <= MAX_POINTS:
        return t_ns, allocated, peak
    borders = edges(len(rows), MAX_POINTS)[:-1]
    return (
        t_ns[borders],
        np.maximum.reduceat(allocated, borders),
        np.maximum.reduceat(peak, borders),
    )


def accounts_figure(run: RunData, window: tuple[int, int], theme: Theme) -> go.Figure:
    """Draw the accounts over time, with the budget of pages."""
    fig = figure(theme, height=320)
    begin, _ = window_span(run, window)
    lines = (
        (Account.PAGES, "pages", "compute", "solid"),
        (Account.TRANSIENTS, "transients", "transients", "dash"),
        (Account.ACTIVATIONS, "activations", "moment", "dashdot"),
        (Account.GATHERED, "gathered", "gradient", "dot"),
        (Account.PROCESS, "whole process", "other", "solid"),
    )
    last = 0.0
    for account, name, series, dash in lines:
        t_ns, allocated, _ = account_series(run, account, window)
        if not len(t_ns):
            continue
        seconds = (t_ns - begin) / 1e9
        last = max(last, float(seconds.max()))
        fig.add_scatter(
            x=seconds,
            y=allocated / _MIB,
            name=name,
            mode="lines" if len(t_ns) > 1 else "markers",
            line={**theme.line(series, dash=dash), "shape": "hv"},
            hovertemplate=f"%{{x:.4~f}} s: <b>%{{y:,.1f}} MiB</b> {name}<extra></extra>",
        )
    if run.page_budget:
        add_budget(fig, np.array([0.0, last]), run.page_budget, theme)
    fig.update_yaxes(title_text="MiB", rangemode="tozero")
    fig.update_xaxes(title_text="time from the start of the window (s)", zeroline=False)
    return fig


def add_budget(fig: go.Figure, ends: np.ndarray, budget: int, theme: Theme) -> None:
    """Draw the budget of pages as a dashed line with a legend entry."""
    fig.add_scatter(
        x=ends,
        y=np.full(len(ends), budget / _MIB),
        mode="lines",
        name=f"page budget {units.size(budget)}",
        line=theme.line("budget", dash="dash"),
        hovertemplate="budget <b>%{y:,.1f} MiB</b><extra></extra>",
    )


def kinds_figure(resident: Resident, theme: Theme) -> go.Figure:
    """Draw the bytes on the device over time, stacked by kind."""
    fig = figure(theme, height=344)
    seconds = (resident.t_ns - resident.t_ns[0]) / 1e9
    for kind in Kind:
        if not resident.by_kind[kind].any():
            continue
        name = f"{kind.name.lower()}s"
        color = theme.series[kind.name.lower()]
        fig.add_scatter(
            x=seconds,
            y=resident.by_kind[kind] / _MIB,
            name=name,
            mode="lines",
            stackgroup="bytes",
            line={"width": 0.5, "color": color, "shape": "hv"},
            fillcolor=color,
            hovertemplate=f"%{{x:.4~f}} s: <b>%{{y:,.1f}} MiB</b> {name}<extra></extra>",
        )
    fig.update_yaxes(title_text="MiB", rangemode="tozero")
    fig.update_xaxes(title_text="time from the start of the window (s)", zeroline=False)
    return fig


def group_bytes(run: RunData, window: tuple[int, int]) -> np.ndarray:
    """Return (G, 3) bytes of each group and kind on the device, the mean over the window."""
    begin, end = window_span(run, window)
    stays, pages = run.intervals, run.pages
    spent = np.minimum(stays.end_ns, end) - np.maximum(stays.start_ns, begin)
    here = np.flatnonzero((stays.tier == Tier.DEVICE) & (spent > 0))
    at = np.minimum(np.searchsorted(pages["page"], stays.page[here]), num_rows(pages) - 1)
    row = np.searchsorted(run.groups.group, pages["group"][at])
    held = np.zeros((len(run.groups), len(Kind)))
    np.add.at(held, (row, pages["kind"][at]), spent[here] * run.frame_bytes[at] / (end - begin))
    return held


def groups_figure(run: RunData, held: np.ndarray, theme: Theme, most: int = 12) -> go.Figure:
    """Draw the groups that held most memory, stacked by kind."""
    top = np.argsort(-held.sum(axis=1), kind="stable")[:most]
    labels = np.array(run.groups.names(run.groups.group[top]), object)
    fig = figure(theme, height=max(220, 80 + 22 * len(top)))
    for kind in Kind:
        if not held[top, kind].any():
            continue
        name = f"{kind.name.lower()}s"
        fig.add_bar(
            y=labels,
            x=held[top, kind] / _MIB,
            orientation="h",
            name=name,
            marker={"color": theme.series[kind.name.lower()]},
            hovertemplate=f"%{{y}}: <b>%{{x:,.2f}} MiB</b> {name}<extra></extra>",
        )
    fig.update_layout(barmode="stack", bargap=0.25)
    fig.update_yaxes(autorange="reversed", type="category", showgrid=False)
    fig.update_xaxes(title_text="mean MiB on the device")
    return fig


def group_table(run: RunData, held: np.ndarray, window: tuple[int, int]) -> DataTable:
    """Return a row a group."""
    columns = (
        Column("group", "Group", numeric=False),
        Column("module_path", "Module", numeric=False),
        Column("bytes", "Content", units.size),
        Column("parameter_bytes_mean", "Parameters", units.size),
        Column("gradient_bytes_mean", "Gradients", units.size),
        Column("moment_bytes_mean", "Moments", units.size),
        Column("resident_share", "Resident", units.share),
    )
    groups = run.groups
    row = np.searchsorted(groups.group, run.pages["group"])
    frames = np.bincount(row, run.frame_bytes, len(groups))
    rows = [
        (
            groups.label[i],
            groups.path[i],
            int(groups.bytes[i]),
            *(float(v) for v in held[i]),
            held[i].sum() / frames[i] if frames[i] else float("nan"),
        )
        for i in np.argsort(-held.sum(axis=1), kind="stable").tolist()
    ]
    caption = f"Mean bytes on the device in {window_text(window)}, by group"
    return DataTable("groups", caption, columns, rows)


def process_page(run: RunData, theme: Theme) -> PageContent | None:
    """Return the page of a run that recorded memory but no pages, None if it has no memory."""
    if run.reader is None or not num_rows(run.mem):
        return None
    window = int(run.mem["step"].min()), int(run.mem["step"].max())
    fig = figure(theme, height=320)
    peaks = {}
    accounts = {
        *zip(run.mem["tier"].tolist(), run.mem["account"].tolist(), strict=True),
    }
    for tier, account in sorted(accounts):
        rows = (run.mem["tier"] == tier) & (run.mem["account"] == account)
        name = f"{units.code(Account, account)}, {units.code(Tier, tier)}"
        peaks[name] = int(run.mem["peak"][rows].max())
        # What is gathered is given up by the end of a step: its peak tells.
        shown = "peak" if account == Account.GATHERED else "allocated"
        fig.add_scatter(
            x=run.mem["step"][rows],
            y=run.mem[shown][rows] / _MIB,
            name=name,
            mode="lines+markers",
            line=theme.line("compute" if tier == Tier.DEVICE else "moment"),
            hovertemplate="step %{x}: <b>%{y:,.1f} MiB</b><extra></extra>",
        )
    fig.update_yaxes(title_text="MiB", rangemode="tozero")
    fig.update_xaxes(title_text="step")
    highest = "; ".join(f"{name} peaked at {units.size(value)}" for name, value in peaks.items())
    return PageContent(
        TITLE,
        QUESTION,
        f"In {window_text(window)}, {highest}.",
        notices=(
            *trace_notices(run),
            Notice(
                "info",
                "No pages were recorded: this program keeps no accounts of pages, so the whole "
                "process is shown.",
            ),
        ),
        panels=(Panel("process", "Memory of the process", fig, highest),),
        how=_how()[:1],
        tables=(account_table(run, window),),
    )


def account_table(run: RunData, window: tuple[int, int]) -> DataTable:
    """Return a row an account and tier."""
    columns = (
        Column("tier", "Tier", numeric=False),
        Column("account", "Account", numeric=False),
        Column("samples", "Samples", units.count),
        Column("mean_bytes", "Mean", units.size),
        Column("peak_bytes", "Peak", units.size),
    )
    mem = run.mem
    inside = (mem["step"] >= window[0]) & (mem["step"] <= window[1])
    rows = []
    for tier, account in sorted({*zip(mem["tier"].tolist(), mem["account"].tolist(), strict=True)}):
        keep = inside & (mem["tier"] == tier) & (mem["account"] == account)
        if keep.any():
            rows.append(
                (
                    units.code(Tier, tier),
                    units.code(Account, account),
                    int(keep.sum()),
                    float(mem["allocated"][keep].mean()),
                    int(mem["peak"][keep].max()),
                )
            )
    return DataTable("accounts", f"Accounts in {window_text(window)}", columns, rows)


def build(run: RunData, state: ViewState, theme: Theme) -> PageContent:
    """Return the page."""
    missing = no_pages(run, TITLE, QUESTION)
    if missing is not None:
        return process_page(run, theme) or missing
    steps, _ = run.step_starts
    window = state.window(int(steps.min()), int(steps.max()), DEFAULT_STEPS)
    resident, held = resident_bytes(run, window), group_bytes(run, window)
    verdict = _verdict(run, resident, window)
    panels = [
        Panel(
            "kinds",
            "Pages on the device by kind",
            kinds_figure(resident, theme),
            f"Parameters, gradients and moments on the device over {window_text(window)}.",
        ),
        Panel(
            "groups",
            "Who holds the memory",
            groups_figure(run, held, theme),
            "Mean bytes on the device of the largest groups; the table has all of them.",
        ),
    ]
    if num_rows(run.mem):
        panels.insert(
            0,
            Panel(
                "accounts",
                "Accounts against the budget",
                accounts_figure(run, window, theme),
                verdict,
                wide=True,
            ),
        )
    tables = [group_table(run, held, window)]
    if num_rows(run.mem):
        tables.insert(0, account_table(run, window))
    return PageContent(
        TITLE,
        QUESTION,
        verdict,
        notices=trace_notices(run),
        panels=panels,
        how=_how(),
        tables=tables,
    )


def _verdict(run: RunData, resident: Resident, window: tuple[int, int]) -> str:
    _, allocated, peaks = account_series(run, Account.PAGES, window)
    peak = int(max(peaks.max(initial=0), allocated.max(initial=0)))
    source = "the account of pages"
    if not peak:
        peak, source = int(resident.total.max(initial=0)), "pages, summed from their events,"
    at_peak = resident.by_kind[:, int(resident.total.argmax())]
    kind = Kind(int(at_peak.argmax()))
    owner = units.share(at_peak[kind] / max(int(at_peak.sum()), 1))
    text = f"In {window_text(window)}, {source} peaked at {units.size(peak)}"
    if run.page_budget:
        over = peak - run.page_budget
        text += (
            f", {units.size(over)} above the budget of {units.size(run.page_budget)}"
            if over > 0
            else f" of a budget of {units.size(run.page_budget)} "
            f"({units.share(peak / run.page_budget)}, never above it)"
        )
    return f"{text}; {kind.name.lower()}s held {owner} of the pages at the peak."


def _how() -> tuple[How, ...]:
    return (
        How(
            "accounts",
            "rows of mem: what the manager's ledger holds, frames of 2 MiB counted whole",
            "MiB",
            "measured",
        ),
        How(
            "pages by kind",
            "frames of the pages that are on the device by their load, create, evict and drop "
            "events; a small group keeps all its kinds in one page, shown as parameters",
            "MiB",
            "measured",
        ),
        How(
            "mean bytes",
            "Σ frame bytes × time on the device / length of the window",
            "bytes",
            "measured",
        ),
        How("budget", "memory.page_budget of the run", "bytes", "configured"),
    )
