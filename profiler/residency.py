"""Where pages were, and what groups cost: tables from `actions`, `need` and `pages`.

A page holds frames from the start of its load (or of the need that created it) until it is evicted
or dropped. A page whose first event takes it off the device was there from the beginning; one whose
first event brings it was at home. After a drop a page has no bytes anywhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from profiler.merge import Table, action_steps, concatenate, num_rows, select
from profiler.schema import Act, Kind, Op, Tier

_NOWHERE = -1  # tier of a page that died


class Residency(enum.IntEnum):
    """Codes of the residency matrix."""

    UNKNOWN = 0  # no event tells, or the page has no bytes (dropped)
    HOME = 1
    DEVICE = 2


@dataclass(frozen=True)
class Intervals:
    """Stays of pages on tiers, ordered by page and time; those of one page do not overlap.

    Attributes:
        page: i64.
        tier: i64, a `Tier`.
        start_ns: i64.
        end_ns: i64, exclusive.
    """

    page: np.ndarray
    tier: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.page)


def creations(need: Table, pages: Table) -> Table:
    """Return columns `page`, `t_ns` (and `session`) of the pages created by `need`."""
    rows = np.flatnonzero(need["op"] == Op.CREATE)
    key = need["group"][rows].astype(np.int64) * 256 + need["kind"][rows]
    page_key = pages["group"].astype(np.int64) * 256 + pages["kind"]
    order = np.argsort(page_key, kind="stable")
    left = np.searchsorted(page_key[order], key, side="left")
    count = np.searchsorted(page_key[order], key, side="right") - left
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    created = {
        "page": pages["page"][order[np.repeat(left, count) + within]],
        "t_ns": np.repeat(need["t_ns"][rows], count),
    }
    if "session" in need:
        created["session"] = np.repeat(need["session"][rows], count)
    return created


def residency_intervals(
    actions: Table, *, need: Table | None = None, pages: Table | None = None
) -> Intervals:
    """Return where each page was and when.

    Args:
        actions: `TraceReader.actions()`, in any order.
        need: With `pages`, tells when fresh pages (gradients) took their frames.
        pages: `TraceReader.pages`.
    """
    times = [t["t_ns"] for t in (actions, need or {}) if num_rows(t)]
    if not times or not num_rows(actions):
        return Intervals(*(np.empty(0, np.int64) for _ in range(4)))
    begin = min(int(t.min()) for t in times)
    end = max(int((actions["t_ns"] + actions["dur_ns"]).max()), *(int(t.max()) for t in times)) + 1
    moves = _moves(actions, creations(need, pages) if need and pages else None)
    stays: list[np.ndarray] = []
    for session in np.unique(moves["session"]):
        mine = select(moves, moves["session"] == session)
        last = session == moves["session"].max()
        until = end if last else int(mine["t_ns"].max()) + 1
        first = session == moves["session"].min()
        since = begin if first else int(mine["t_ns"].min())
        stays.append(_stays(mine, since, until))
    page, tier, start, stop = np.concatenate(stays, axis=1)
    order = np.lexsort((start, page))
    return Intervals(page[order], tier[order], start[order], stop[order])


def _moves(actions: Table, created: Table | None) -> Table:
    """Return columns page, t_ns, session, before, after: every change of a page's tier."""
    empty = dict.fromkeys(("page", "t_ns", "session", "before", "after"), np.empty(0, np.int64))
    act = actions["act"]
    arrives = (act == Act.LOAD) | (act == Act.PREFETCH)
    stays_put = act == Act.CANCEL  # a transfer that did not happen leaves the page where it was
    leaves = act == Act.EVICT
    dies = act == Act.DROP
    rows = np.flatnonzero(arrives | stays_put | leaves | dies)
    src = actions["src"].astype(np.int64)
    after = np.full(len(act), int(Tier.DEVICE))
    after[leaves] = actions["dst"][leaves]
    after[stays_put] = src[stays_put]
    after[dies] = _NOWHERE
    before = np.full(len(act), int(Tier.DEVICE))
    before[arrives | stays_put] = src[arrives | stays_put]
    moves = {
        "page": actions["page"][rows].astype(np.int64),
        "t_ns": actions["t_ns"][rows],
        "session": actions.get("session", np.zeros(len(act), np.int64))[rows].astype(np.int64),
        "before": before[rows],
        "after": after[rows],
    }
    if created is None:
        return moves
    count = num_rows(created)
    fresh = {
        "page": created["page"].astype(np.int64),
        "t_ns": created["t_ns"],
        "session": created.get("session", np.zeros(count, np.int64)).astype(np.int64),
        "before": np.full(count, _NOWHERE),
        "after": np.full(count, int(Tier.DEVICE)),
    }
    return concatenate([moves, fresh], empty)


def _stays(moves: Table, begin: int, end: int) -> np.ndarray:
    """Return (4, N): page, tier, start, end of the stays of one session."""
    ordered = select(moves, np.lexsort((moves["t_ns"], moves["page"])))
    page, t_ns = ordered["page"], ordered["t_ns"]
    first = np.ones(len(page), bool)
    first[1:] = page[1:] != page[:-1]
    stop = np.full(len(page), end)
    stop[:-1] = np.where(first[1:], end, t_ns[1:])
    after = np.stack([page, ordered["after"], t_ns, stop])
    heads = np.flatnonzero(first)
    before = np.stack(
        [page[heads], ordered["before"][heads], np.full(len(heads), begin), t_ns[heads]]
    )
    stays = np.concatenate([before, after], axis=1)
    stays = stays[:, (stays[3] > stays[2]) & (stays[1] != _NOWHERE)]
    return _joined(stays[:, np.lexsort((stays[2], stays[0]))])


def _joined(stays: np.ndarray) -> np.ndarray:
    """Join stays of a page that follow each other on the same tier."""
    page, tier, start, stop = stays
    new = np.ones(len(page), bool)
    new[1:] = (page[1:] != page[:-1]) | (tier[1:] != tier[:-1]) | (start[1:] != stop[:-1])
    heads = np.flatnonzero(new)
    if not len(heads):
        return stays
    tails = np.append(heads[1:], len(page)) - 1
    return np.stack([page[heads], tier[heads], start[heads], stop[tails]])


@dataclass(frozen=True)
class ResidencyMatrix:
    """State of pages over time.

    Attributes:
        pages: (P,) page of each row.
        edges_ns: (B + 1,) borders of the time bins.
        codes: (P, B) u8, a `Residency`: the state at the middle of the bin.
    """

    pages: np.ndarray
    edges_ns: np.ndarray
    codes: np.ndarray


def residency_matrix(
    intervals: Intervals,
    pages: np.ndarray,
    num_bins: int,
    span_ns: tuple[int, int] | None = None,
) -> ResidencyMatrix:
    """Sample the residency of pages at the middle of `num_bins` equal time bins.

    Args:
        intervals: `residency_intervals(...)`.
        pages: (P,) page numbers wanted, in the order of the rows.
        num_bins: Number of columns, at least 1.
        span_ns: First and last time; all of the intervals' by default.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    if span_ns is None:
        known = len(intervals) > 0
        span_ns = (int(intervals.start_ns.min()), int(intervals.end_ns.max())) if known else (0, 1)
    edges = np.linspace(span_ns[0], span_ns[1], num_bins + 1).astype(np.int64)
    middle = edges[:-1] + (edges[1:] - edges[:-1]) // 2
    codes = np.zeros((len(pages), num_bins), np.uint8)
    left = np.searchsorted(intervals.page, pages, side="left")
    right = np.searchsorted(intervals.page, pages, side="right")
    state = np.where(intervals.tier == Tier.DEVICE, Residency.DEVICE, Residency.HOME)
    for row, (low, high) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        if low == high:
            continue
        at = np.searchsorted(intervals.start_ns[low:high], middle, side="right") - 1
        inside = (at >= 0) & (middle < intervals.end_ns[low:high][np.maximum(at, 0)])
        codes[row, inside] = state[low:high][at[inside]]
    return ResidencyMatrix(np.asarray(pages), edges, codes)


@dataclass(frozen=True)
class GroupSteps:
    """What groups needed and cost, per step.

    Attributes:
        groups: (G,) group of each row.
        steps: (S,) step of each column.
        accesses: (G, S) i64, needs.
        misses: (G, S) i64, demand loads of pages.
        stall_ns: (G, S) i64.
    """

    groups: np.ndarray
    steps: np.ndarray
    accesses: np.ndarray
    misses: np.ndarray
    stall_ns: np.ndarray

    @property
    def stall_per_group(self) -> np.ndarray:
        """(G,) i64 ns over all steps."""
        total: np.ndarray = self.stall_ns.sum(axis=1)
        return total


def group_steps(need: Table, actions: Table, pages: Table, kind: Kind | None = None) -> GroupSteps:
    """Count accesses, misses and stall by group and step.

    Args:
        need: Needs of the steps wanted.
        actions: Actions; those outside the needs' steps are left out.
        pages: The page table.
        kind: Only needs and pages of this kind.
    """
    if kind is not None:
        keep = need["kind"] == kind
        table = select(need, keep)
    else:
        table = need
    groups = np.union1d(pages["group"], table["group"])
    steps = np.unique(need["step"])
    shape = (len(groups), len(steps))
    accesses = np.zeros(shape, np.int64)
    at = np.searchsorted(groups, table["group"]), np.searchsorted(steps, table["step"])
    np.add.at(accesses, at, 1)
    misses, stall_ns = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    if len(steps):
        step = action_steps(actions, need)
        index, known = _page_index(actions["page"], pages)
        if kind is not None:
            known &= pages["kind"][index] == kind
        column = np.minimum(np.searchsorted(steps, step), len(steps) - 1)
        known &= steps[column] == step
        row = np.searchsorted(groups, pages["group"][index]) if known.any() else index
        loads = known & (actions["act"] == Act.LOAD)
        np.add.at(misses, (row[loads], column[loads]), 1)
        stalls = known & (actions["act"] == Act.STALL)
        np.add.at(stall_ns, (row[stalls], column[stalls]), actions["wait_ns"][stalls])
    return GroupSteps(groups, steps, accesses, misses, stall_ns)


def _page_index(page: np.ndarray, pages: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of `pages` (ordered by page) and whether each page is in it."""
    if not num_rows(pages):
        return np.zeros(len(page), np.int64), np.zeros(len(page), bool)
    index = np.minimum(np.searchsorted(pages["page"], page), num_rows(pages) - 1)
    return index, pages["page"][index] == page


def bytes_per_step(actions: Table, need: Table) -> Table:
    """Return columns `step`, `bytes_in`, `bytes_out`, and `prefetched` (part of `bytes_in`)."""
    step = action_steps(actions, need)
    steps = np.unique(np.concatenate([step, need["step"].astype(np.int64)]))
    at = np.searchsorted(steps, step)
    act = actions["act"]

    def total(*acts: Act) -> np.ndarray:
        rows = np.isin(act, np.array(acts, np.uint8))
        summed = np.zeros(len(steps), np.int64)
        np.add.at(summed, at[rows], actions["bytes"][rows])
        return summed

    return {
        "step": steps,
        "bytes_in": total(Act.LOAD, Act.PREFETCH),
        "bytes_out": total(Act.WRITE_BACK, Act.EARLY_WRITE_BACK),
        "prefetched": total(Act.PREFETCH),
    }
