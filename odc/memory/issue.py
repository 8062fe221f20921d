"""Choosing commands: which pages to load ahead over which victims, and what to write back early.

Pure functions of the page table and a plan; the manager turns their answer into commands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odc.memory.pages import PageState, PageTable
from odc.memory.plan import Plan

# A victim must be worth clearly less than what is loaded over it: equal values would swap for ever.
_MARGIN = 1.05


@dataclass(slots=True)
class Load:
    """Load ``page`` after evicting ``victims``."""

    page: int
    victims: list[int]


class Victims:
    """A sorted list of victims, taken from the front."""

    def __init__(self, ordered: np.ndarray, table: PageTable) -> None:
        self._ordered = ordered.tolist()
        self._table = table
        self._at = 0

    def peek(self, num_frames: int, below: float, keep: np.ndarray | None) -> list[int] | None:
        """The victims that free ``num_frames`` and are each worth less than ``below``, or None."""
        chosen: list[int] = []
        at = self._at
        while num_frames > 0:
            if at >= len(self._ordered):
                return None
            page = self._ordered[at]
            if keep is not None and keep[page] * _MARGIN >= below:
                return None
            chosen.append(page)
            num_frames -= int(self._table.num_frames[page])
            at += 1
        self._at = at
        return chosen

    def rest(self) -> list[int]:
        """All that is left."""
        left = self._ordered[self._at :]
        self._at = len(self._ordered)
        return left


def choose_loads(
    table: PageTable,
    plan: Plan,
    victims: Victims,
    free_frames: int,
    room_bytes: int,
    room_items: int | None,
    visit_start: int,
) -> list[Load]:
    """Pages to load ahead now, in order of use.

    Args:
        table: page states.
        plan: what is wished for and what pages are worth; its cursor moves past what is settled.
        victims: evictable pages, first victim first.
        free_frames: frames that need no victim.
        room_bytes: bytes that may still be put in flight.
        room_items: resident pages that may still be added, or None.
        visit_start: virtual time at which the current visit began: what it used is settled.
    """
    loads: list[Load] = []
    wish, ahead = plan.wish, plan.wish_visit
    at = plan.cursor
    chosen_pages: set[int] = set()
    while at < len(wish) and room_bytes > 0:
        page = int(wish[at])
        past = ahead[at] < plan.visits
        if past or table.state[page] in (PageState.RESIDENT, PageState.LOADING):
            at += 1
            if past:
                plan.cursor = at
            continue
        used = ahead[at] == plan.visits and table.last_use[page] >= visit_start
        if used or page in chosen_pages or (room_items is not None and room_items <= 0):
            at += 1
            continue
        need = int(table.num_frames[page]) - free_frames
        chosen = victims.peek(need, float(plan.keep[page]), plan.keep) if need > 0 else []
        if chosen is None:
            break
        loads.append(Load(page, chosen))
        chosen_pages.add(page)
        gained = sum(int(table.num_frames[v]) for v in chosen)
        free_frames += gained - int(table.num_frames[page])
        room_bytes -= table.pages[page].num_bytes
        if room_items is not None:
            room_items += len(chosen) - 1
        at += 1
    return loads


def choose_write_backs(
    table: PageTable, plan: Plan, ordered: np.ndarray, storing: set[int], lookahead_frames: int
) -> list[int]:
    """Dirty pages among the next victims: written now, they cost nothing when they must go.

    Only what would be evicted to make room for the next ``lookahead_frames`` is worth a write: a
    page that stays is likely to be dirtied again first.
    """
    chosen = []
    frames = 0
    for page in ordered.tolist():
        if frames >= lookahead_frames:
            break
        frames += int(table.num_frames[page])
        if table.dirty[page] and page not in storing:
            chosen.append(page)
    return chosen


def missing_frames(table: PageTable, plan: Plan, limit: int) -> int:
    """Frames that the wish list asks for and that are not there, up to ``limit``."""
    frames = 0
    for at in range(plan.cursor, len(plan.wish)):
        if frames >= limit:
            return limit
        if plan.wish_visit[at] < plan.visits:
            continue
        page = int(plan.wish[at])
        if table.state[page] in (PageState.HOME, PageState.EVICTING):
            frames += int(table.num_frames[page])
    return frames
