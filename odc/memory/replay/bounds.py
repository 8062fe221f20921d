"""The window bound: a lower bound on the elapsed time of any schedule, quick on long traces.

Take two moments s_i < s_j at which accesses i and j begin. Let D be the bytes of the distinct pages
that are needed in [i..j] with content from before i, and W those of the distinct pages that were
dirtied in between and are still of use at s_j. At s_i no more than the capacity C can be resident
or have frames for a transfer under way, and at s_j no more than C can still wait to be stored. So

    s_j - s_i  >=  max((D - C) / bandwidth_in, (W - C) / bandwidth_out),

and on a line that goes one way at a time the sum of the two. Whatever else is known to be resident
at s_i (pages that i creates) or at s_j (clean pages that j needs) makes C smaller. Windows that
follow each other add up, so the bound is the longest path over accesses.

From some starts on, D is replaced by the bytes that paging by Belady's rule loads (``paging``):
more, where pages come, go and come again within the window.

It holds for a reordering of the bundles of a visit too: windows begin and end only where the order
is recorded. It is silent about *when* transfers could have run: where they could not overlap with
computation evenly, the linear program (``lp``) says more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odc.errors import BudgetError
from odc.memory.frames import FRAME_BYTES
from odc.memory.replay.accesses import Accesses, Residency
from odc.memory.replay.paging import Paging

# Windows of more accesses are left out; any subset of windows gives a bound.
_LONGEST = 8192
_STARTS = 24  # of windows in which repeated loads are counted
_REFRESH = 64  # accesses between two looks at how far back windows are worth a look


@dataclass(frozen=True, slots=True)
class WindowBound:
    """What no schedule can beat.

    Attributes:
        elapsed_s: least time from the start to the end of the last computation.
        compute_s: the part of it that is computation.
    """

    elapsed_s: float
    compute_s: float

    @property
    def stall_s(self) -> float:
        return self.elapsed_s - self.compute_s


def window_bound(
    accesses: Accesses,
    capacity_bytes: int,
    bandwidth_in: float,
    bandwidth_out: float,
    half_duplex: bool = False,
    initial: Residency | None = None,
    longest: int = _LONGEST,
) -> WindowBound:
    """Lower bound on the elapsed time of every schedule.

    Args:
        accesses: what is needed, and when.
        capacity_bytes: bytes for pages, used in whole frames.
        bandwidth_in, bandwidth_out: bytes/s each way.
        half_duplex: the two directions share one line.
        initial: what is on the device at the start; nothing where not given.
        longest: accesses in the longest window that is looked at.

    Raises:
        BudgetError: something that is needed at once does not fit.

    Source: counting what must cross the link within a window, as in the module's first lines.
    """
    initial = accesses.start_from(initial)
    frames = capacity_bytes // FRAME_BYTES
    check_capacity(accesses, frames, initial)
    windows = _Windows(accesses, frames, initial, longest)
    elapsed = windows.longest_path((1.0 / bandwidth_in, 1.0 / bandwidth_out), half_duplex)
    return WindowBound(elapsed, accesses.compute_s)


def check_capacity(accesses: Accesses, capacity_frames: int, initial: Residency) -> None:
    """Check that a schedule exists.

    Raises:
        BudgetError: the pages of some access, or those that are there, do not fit together.
    """
    pinned = accesses.pinned_frames()
    worst = int(pinned.argmax()) if len(pinned) else 0
    if len(pinned) and pinned[worst] > capacity_frames:
        raise BudgetError(
            f"access {worst} needs {pinned[worst]} frames of {FRAME_BYTES} bytes at once and the "
            f"capacity is {capacity_frames}; use at least {pinned[worst] * FRAME_BYTES} bytes"
        )
    there = int(accesses.page_frames[initial.resident].sum())
    if there > capacity_frames:
        raise BudgetError(
            f"{there} frames are resident at the start and the capacity is {capacity_frames}; "
            "the residency belongs to another budget"
        )


class _Windows:
    """Points 0 (the start), 1..n (accesses), n + 1 (the end); all windows that end at one point.

    ``needed[i]`` is D and ``written[i]`` is W of the window from point i to the current one.
    """

    def __init__(self, accesses: Accesses, frames: int, initial: Residency, longest: int) -> None:
        self.longest = longest
        n = self.num_points = accesses.num_accesses + 2
        size, room = accesses.page_bytes, accesses.page_frames * FRAME_BYTES
        density = float((size / np.maximum(room, 1)).max()) if len(size) else 1.0
        self.room = room * density  # bytes of pages that fit into the frames of each page
        self.capacity = frames * FRAME_BYTES * density
        self.size = size.astype(np.float64)
        self.compute = np.concatenate([[0.0], accesses.compute_ns / 1e9, [0.0]])
        self.fixed = np.concatenate([[True], accesses.fixed, [True]])
        self.page = accesses.page.tolist()
        self.begin = (accesses.first + 1).tolist()
        self.creates = accesses.creates.tolist()
        self.dirties = accesses.dirties.tolist()
        self.dies = accesses.dies.tolist()
        self.begins: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[list[int]] = [[] for _ in range(n)]
        for hold, (begin, end) in enumerate(zip(self.begin, accesses.last.tolist(), strict=True)):
            self.begins[begin].append(hold)
            self.ends[end + 1].append(hold)
        self.needed = np.zeros(n)
        self.written = np.zeros(n)
        # what of D may be there already when a window opens
        self.there = np.full(n, self.capacity)
        self.there[0] = 0.0 if initial.known else self.capacity
        self.seen = np.where(initial.resident, 0, -1)  # page -> last point at which it was there
        self.soiled = np.where(initial.dirty & initial.resident, 0, -1)  # point of the last dirt
        self.written[0] = float(self.size[initial.dirty & initial.resident].sum())
        self.starts, self.least_loads = self._repeated_loads(accesses, initial)
        self.held_bytes = 0.0
        self.held_clean = 0.0  # room of held pages that were never dirty before
        self.held_soiled: list[int] = []  # the other held pages

    def _repeated_loads(
        self, accesses: Accesses, initial: Residency
    ) -> tuple[np.ndarray, np.ndarray]:
        """Some points, and of each the least bytes loaded from it to every later point."""
        n = accesses.num_accesses
        paging = Paging(accesses, self.capacity)
        inside = np.flatnonzero(accesses.fixed)
        inside = np.unique(inside[np.linspace(0, len(inside) - 1, _STARTS).astype(int)])
        starts = np.concatenate([[0], inside + 1]) if len(inside) else np.zeros(1, np.int64)
        least = np.zeros((len(starts), self.num_points))
        for row, point in enumerate(starts.tolist()):
            access = max(point - 1, 0)
            there = initial.resident if point == 0 and initial.known else None
            found = paging.least_loads(access, there)
            least[row, access + 1 : n + 1] = found
            least[row, n + 1] = found[-1] if len(found) else 0.0
        return starts, least

    def longest_path(self, pace: tuple[float, float], half_duplex: bool) -> float:
        """``pace``: s/byte in and out."""
        time = np.zeros(self.num_points)
        open_at = np.where(self.fixed, 0.0, -np.inf)  # time, where a window may begin
        low = 0
        for at in range(1, self.num_points):
            self._arrive(at)
            if at % _REFRESH == 0:
                low = max(self._saturated(), at - self.longest)
            time[at] = time[at - 1] + self.compute[at - 1]
            if self.fixed[at]:
                window = np.arange(low, at)
                starts = self.starts[: np.searchsorted(self.starts, at)]
                for points, needed in (
                    (window, self.needed[low:at]),
                    (starts, self.least_loads[: len(starts), at]),
                ):
                    if not len(points):  # no page that counts has been seen yet
                        continue
                    load = (needed - self.there[points]) * pace[0]
                    waiting = self.written[points] + self._clean(points)
                    store = (waiting - self.capacity) * pace[1]
                    if half_duplex:
                        least = np.maximum(load, 0.0) + np.maximum(store, 0.0)
                    else:
                        least = np.maximum(load, store)
                    time[at] = max(time[at], float((open_at[points] + least).max()))
                open_at[at] = time[at]
            self._leave(at)
        return float(time[-1])

    def _arrive(self, at: int) -> None:
        """The holds that begin at a point; windows from here on know what is held here."""
        created = 0.0
        for hold in self.begins[at]:
            page = self.page[hold]
            self.held_bytes += self.size[page]
            if self.creates[hold]:
                created += self.size[page]
                self.there[at] -= self.room[page]
            else:
                self.needed[self.seen[page] + 1 : at] += self.size[page]
            if self.soiled[page] < 0:
                self.held_clean += self.room[page]
            else:
                self.held_soiled.append(page)
        self.needed[at] += self.held_bytes - created

    def _clean(self, points: np.ndarray) -> np.ndarray:
        """Room taken now by pages that do not count as written in windows from ``points`` on."""
        taken = np.full(len(points), self.held_clean)
        for page in self.held_soiled:
            taken[np.searchsorted(points, self.soiled[page], "right") :] += self.room[page]
        return taken

    def _leave(self, at: int) -> None:
        """The holds that end at a point: what they dirtied must be stored from now on."""
        for hold in self.ends[at]:
            page = self.page[hold]
            soiled = self.soiled[page]
            self.seen[page] = at
            self.held_bytes -= self.size[page]
            if soiled < 0:
                self.held_clean -= self.room[page]
            else:
                self.held_soiled.remove(page)
            if self.dies[hold]:
                self.written[: soiled + 1] -= self.size[page]
                self.soiled[page] = -1
            elif self.dirties[hold]:
                self.written[soiled + 1 : at + 1] += self.size[page]
                self.soiled[page] = at

    def _saturated(self) -> int:
        """Windows that begin earlier hold no page more than the one that begins here."""
        first = self.seen[self.seen >= 0].min(initial=self.num_points)
        dirty = self.soiled[self.soiled >= 0].min(initial=self.num_points)
        return int(min(first, dirty, self.num_points - 1))
