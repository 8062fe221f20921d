"""Choosing commands: which pages to load ahead over which victims, and what to write back early.

Functions of the page table, the plan and the victim queue; the pager turns their answers into
commands.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from odc.memory.pages import PageTable


class Victims(Protocol):
    """Pages that can go."""

    def first(self) -> Iterator[int]:
        """In order; none is taken out."""


@dataclass(slots=True)
class Space:
    """What loads ahead may still take.

    Attributes:
        frames: frames that need no victim.
        items: resident pages that may still be added, None for any number.
        reserve: frames that will soon be taken without a load. They may be filled until then if
            there are victims for them.
    """

    frames: int
    items: int | None = None
    reserve: int = 0


def take_victims(
    table: PageTable,
    queue: Victims,
    num_frames: int,
    until: np.ndarray | None = None,
    later_than: float = 0.0,
    clean_first: bool = False,
) -> list[int] | None:
    """Victims that free ``num_frames`` and are each needed later than a moment.

    Args:
        table: page states.
        queue: what can go, in order.
        num_frames: frames to free.
        until: (num_pages,) times of next use; None takes any victim.
        later_than: no page that is needed before this is taken.
        clean_first: take clean ones before dirty ones, whatever the order.

    Returns:
        None if there are not enough of them; the queue is as before then.
    """
    chosen: list[int] = []
    dirty: list[int] = []
    for page in queue.first():
        if num_frames <= 0:
            break
        if until is not None and until[page] <= later_than:
            break
        if clean_first and table.is_dirty[page]:
            dirty.append(page)
            continue
        chosen.append(page)
        num_frames -= table.frames[page]
    for page in dirty:
        if num_frames <= 0:
            break
        chosen.append(page)
        num_frames -= table.frames[page]
    return chosen if num_frames <= 0 else None


def choose_load(
    table: PageTable,
    page: int,
    queue: Victims,
    until: np.ndarray,
    later_than: float,
    space: Space,
    clean_first: bool = False,
) -> list[int] | None:
    """The victims for a load ahead, [] where frames are free; None if it must not be made now.

    Args:
        table: page states.
        page: the absent page.
        queue: what can go, in order.
        until: (num_pages,) times of next use.
        later_than: only pages that are needed later may go.
        space: what may be taken; counted down if the load is made.
        clean_first: of those, clean ones go first: all of them will go.
    """
    if space.items is not None and space.items <= 0:
        return None
    frames = table.frames[page]
    chosen: list[int] = []
    short = frames + space.reserve - space.frames
    if short > 0:
        found = take_victims(table, queue, short, until, later_than, clean_first)
        if found is None:
            return None
        chosen = _first(table, found, frames - space.frames)
    space.frames += sum(table.frames[v] for v in chosen) - frames
    if space.items is not None:
        space.items += len(chosen) - 1
    return chosen


def _first(table: PageTable, victims: list[int], num_frames: int) -> list[int]:
    """As many of the victims as free ``num_frames``."""
    count = 0
    while num_frames > 0:
        num_frames -= table.frames[victims[count]]
        count += 1
    return victims[:count]


def choose_write_backs(
    table: PageTable, ordered: Iterable[int], storing: Container[int], num_frames: int, count: int
) -> list[int]:
    """Dirty pages among the next victims: written now, they cost nothing when they must go.

    Args:
        table: page states.
        ordered: evictable pages, first victim first.
        storing: pages that are being written.
        num_frames: only what would be evicted to free so many frames is worth a write: a page
            that stays is likely to be dirtied again first.
        count: at most so many.
    """
    chosen: list[int] = []
    for page in ordered:
        if num_frames <= 0 or len(chosen) >= count:
            break
        num_frames -= table.frames[page]
        if table.is_dirty[page] and page not in storing:
            chosen.append(page)
    return chosen
