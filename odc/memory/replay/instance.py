"""What an offline schedule is made of: the run as lists, a greedy plan, and exceptions to it.

A *gap* is the time between two holds of a page; gap u follows hold u, and gap m + p is page p's
time before its first hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from odc.memory.replay.accesses import Accesses, Residency


class Keep(IntEnum):
    """What a gap does with its page."""

    GREEDY = 0  # resident until it is the victim needed last
    ALWAYS = 1  # resident throughout
    NEVER = 2  # the first victim of all


class Clean(IntEnum):
    """When a dirty page is stored in a gap."""

    GREEDY = 0  # as the plan says
    AT_ONCE = 1
    LATE = 2  # when it must go


@dataclass(frozen=True, slots=True)
class Plan:
    """How the greedy part goes about it.

    Attributes:
        early: dirty pages are stored as soon as the line out is idle.
        ahead_frames: dirty pages are stored so that this many frames can be given back at once.
        farthest: wait for the store of the page needed last, unless a computation waits already;
            otherwise evict the clean page needed last, if it is needed after what is loaded.
        window: accesses ahead for which pages are loaded; 0 for all.
        stores_first: on a line that goes one way at a time, stores go before loads.
    """

    early: bool = True
    ahead_frames: int = 0
    farthest: bool = False
    window: int = 0
    stores_first: bool = False


@dataclass(slots=True)
class Choices:
    """Exceptions to the plan, by gap; ``order`` by hold: loads go by ascending order."""

    keep: list[int]
    clean: list[int]
    order: list[int]

    @staticmethod
    def none(instance: Instance) -> Choices:
        gaps = len(instance.page_of)
        return Choices([0] * gaps, [0] * gaps, [2 * first for first in instance.first])

    def copy(self) -> Choices:
        return Choices(self.keep[:], self.clean[:], self.order[:])


class Instance:
    """Accesses, capacity and lines as lists: all that a decoder reads and never writes."""

    def __init__(
        self,
        accesses: Accesses,
        capacity_frames: int,
        rates: tuple[float, float],
        half_duplex: bool,
        initial: Residency,
        slice_bytes: int,
    ) -> None:
        self.accesses = accesses
        self.capacity = capacity_frames
        self.half_duplex = half_duplex
        self.slice_s = slice_bytes / rates[0]
        self.compute = (accesses.compute_ns / 1e9).tolist()
        self.n = len(self.compute)
        self.remaining = np.cumsum([0.0, *self.compute[::-1]])[::-1].tolist()
        self.bytes = accesses.page_bytes.tolist()
        self.frames = accesses.page_frames.tolist()
        self.load_s = (accesses.page_bytes / rates[0]).tolist()
        self.store_s = (accesses.page_bytes / rates[1]).tolist()
        self.page = accesses.page.tolist()
        self.first = accesses.first.tolist()
        self.creates = accesses.creates.tolist()
        self.dirties = accesses.dirties.tolist()
        self.dies = accesses.dies.tolist()
        self.resident = np.flatnonzero(initial.resident).tolist()
        self.dirty = (initial.resident & initial.dirty).tolist()
        self.moving = (initial.loading, initial.storing)
        self.begins, self.loaded = self._by_first()
        self.create_frames = [
            sum(self.frames[self.page[hold]] for hold in begun if self.creates[hold])
            for begun in self.begins
        ]
        self.released_at_start, self.released_after = self._by_last()
        self.page_of = self.page + list(range(len(self.frames)))
        self.next_load, self.far = self._gaps()
        self._peaks = self._peak_table()

    def _by_first(self) -> tuple[list[list[int]], list[list[int]]]:
        begins: list[list[int]] = [[] for _ in range(self.n)]
        loaded: list[list[int]] = [[] for _ in range(self.n)]
        for hold, first in enumerate(self.first):
            begins[first].append(hold)
            if not self.creates[hold]:
                loaded[first].append(self.page[hold])
        return begins, loaded

    def _by_last(self) -> tuple[list[list[int]], list[list[int]]]:
        at_start: list[list[int]] = [[] for _ in range(self.n)]
        after: list[list[int]] = [[] for _ in range(self.n)]
        through = self.accesses.through.tolist()
        for hold, last in enumerate(self.accesses.last.tolist()):
            computes = through[hold] and self.compute[last] > 0.0
            (after if computes else at_start)[last].append(hold)
        return at_start, after

    def _gaps(self) -> tuple[list[int], list[int]]:
        """The hold for which a page is loaded at the end of each gap, and its access."""
        holds = len(self.page)
        following = self.accesses.next_hold().tolist() + [-1] * len(self.frames)
        for hold in reversed(range(holds)):
            following[holds + self.page[hold]] = hold
        next_load = [-1 if h < 0 or self.creates[h] else h for h in following]
        return next_load, [self.n if h < 0 else self.first[h] for h in next_load]

    def _peak_table(self) -> list[list[int]]:
        """Powers of two: row k has the most frames that creations take in n..n + 2**k - 1."""
        change = np.zeros(self.n + 1, np.int64)
        accesses = self.accesses
        frames = accesses.page_frames[accesses.page]
        np.add.at(change, accesses.first[accesses.creates], frames[accesses.creates])
        np.add.at(change, accesses.last[accesses.dies] + 1, -frames[accesses.dies])
        level = np.cumsum(change)[:-1]
        table = [level]
        width = 1
        while 2 * width <= self.n:
            level = np.maximum(level[:-width], level[width:])
            table.append(level)
            width *= 2
        return [row.tolist() for row in table] if change.any() else []

    def created_frames(self, start: int, stop: int) -> int:
        """Most frames that pages created from the beginning of the run take in [start..stop]."""
        if not self._peaks:
            return 0
        row = (stop - start + 1).bit_length() - 1
        peaks = self._peaks[row]
        return max(peaks[start], peaks[stop - (1 << row) + 1])
