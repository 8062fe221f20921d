"""Choosing commands: which pages to load ahead over which victims, and what to write back early.

Pure functions of the page table and a plan; the pager turns their answer into commands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odc.memory.pages import PageTable
from odc.memory.plan import Plan

# A victim must be worth clearly less than what is loaded over it: equal values would swap for ever.
_MARGIN = 1.05
# Wishes looked at in one go; what lies beyond is looked at when these have been used.
_HORIZON = 256


@dataclass(slots=True)
class Load:
    """Load ``page`` after evicting ``victims``."""

    page: int
    victims: list[int]


class Victims:
    """A sorted list of victims, taken from the front."""

    def __init__(self, ordered: np.ndarray, table: PageTable) -> None:
        self._ordered: list[int] = ordered.tolist()
        self._table = table
        self._at = 0

    def take(self, num_frames: int, below: float, keep: np.ndarray | None) -> list[int] | None:
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


def wanted_pages(table: PageTable, plan: Plan, visit_start: int) -> np.ndarray:
    """Pages that are wished for and absent, soonest first, each once.

    Args:
        table: page states.
        plan: wishes; those of visits that are past do not count.
        visit_start: virtual time at which the current visit began: what it used is settled.
    """
    while plan.cursor < len(plan.wish) and plan.wish_visit[plan.cursor] < plan.visits:
        plan.cursor += 1
    near = slice(plan.cursor, plan.cursor + _HORIZON)
    pages: np.ndarray = plan.wish[near]
    wanted = table.absent[pages]
    if not wanted.any():
        return pages[:0]
    now = plan.wish_visit[near] == plan.visits
    wanted &= ~(now & (table.last_use[pages] >= visit_start))
    return np.array(list(dict.fromkeys(pages[wanted].tolist())), np.int64)


def choose_loads(
    table: PageTable,
    wanted: np.ndarray,
    keep: np.ndarray,
    victims: Victims,
    free_frames: int,
    room_bytes: int,
    room_items: int | None,
) -> list[Load]:
    """Pages to load ahead now, in order of use.

    Args:
        table: page states.
        wanted: absent pages, soonest first.
        keep: (num_pages,) keep values.
        victims: evictable pages, first victim first.
        free_frames: frames that need no victim.
        room_bytes: bytes that may still be put in flight.
        room_items: resident pages that may still be added, or None.
    """
    loads: list[Load] = []
    for page in wanted.tolist():
        if room_bytes <= 0 or (room_items is not None and room_items <= 0):
            break
        frames = int(table.num_frames[page])
        chosen: list[int] | None = []
        if frames > free_frames:
            chosen = victims.take(frames - free_frames, float(keep[page]), keep)
        if chosen is None:
            break
        loads.append(Load(page, chosen))
        free_frames += sum(int(table.num_frames[v]) for v in chosen) - frames
        room_bytes -= table.pages[page].num_bytes
        if room_items is not None:
            room_items += len(chosen) - 1
    return loads


def choose_write_backs(
    table: PageTable, ordered: np.ndarray, storing: set[int], lookahead_frames: int
) -> list[int]:
    """Dirty pages among the next victims: written now, they cost nothing when they must go.

    Only what would be evicted to make room for the next ``lookahead_frames`` is worth a write: a
    page that stays is likely to be dirtied again first.
    """
    frames = table.num_frames[ordered]
    near = ordered[np.cumsum(frames) - frames < lookahead_frames]
    return [p for p in near[table.dirty[near]].tolist() if p not in storing]
