"""How long a cycle takes under a schedule: two lines, frames, and nothing decided any more.

Loads run in the order of need, each as soon as the line is free and frames have been given back;
a page that leaves is stored, if it is dirty, as soon as its use ends. Frames go to what needs
them in the order of need, what is made fresh included.
"""

from __future__ import annotations

import heapq

from odc.memory.cycle import Cycle, Event, Keep


def decode(cycle: Cycle, keep: Keep, waits: list[int] | None = None) -> tuple[float, float] | None:
    """Time and loads of a cycle under a schedule; None if it does not fit.

    Args:
        cycle: what is run.
        keep: for each use, whether its page stays until its next use.
        waits: takes the uses that were waited for.
    """
    uses, frames = cycle.uses, cycle.frames
    room = cycle.num_frames - sum(
        frames[uses[u].page] for u in cycle.around if keep[u] and not uses[u].leaves
    )
    room -= sum(frames[page] for page in cycle.resident)
    if room < 0:
        return None
    lines = _Lines(cycle, room)
    for u in range(cycle.num_uses, len(uses)):
        lines.begin(u, keep[u])
    start = 0.0
    for turn in range(cycle.rounds):
        if turn == cycle.rounds - 1:
            start = lines.now
        for event in cycle.events[: cycle.surely]:
            if not lines.run(event, keep, waits):
                return None
    elapsed = lines.now - start
    for event in cycle.events[cycle.surely :]:  # of a pass that may come
        if not lines.run(event, keep, waits):
            return None
    elapsed += cycle.chance * (lines.now - start - elapsed)
    return elapsed, lines.loads / cycle.rounds


class _Lines:
    """The two lines and the frames while a schedule is decoded."""

    __slots__ = (
        "cycle",
        "dirty",
        "frames_ns",
        "free",
        "freed",
        "left_ns",
        "load_ns",
        "loads",
        "now",
        "store_ns",
        "stored_ns",
    )

    def __init__(self, cycle: Cycle, room: int) -> None:
        self.cycle = cycle
        self.now = 0.0
        start = cycle.begins_with
        self.load_ns = start.load_ns  # the way in is busy until then
        self.stored_ns = start.stored_ns
        self.store_ns = max(start.stored_ns.values(), default=0.0)
        self.frames_ns = 0.0  # when the last frame that was taken became free
        self.free = room
        self.freed: list[tuple[float, int]] = []
        self.left_ns = [0.0] * len(cycle.frames)
        self.dirty = bytearray(len(cycle.frames))
        self.loads = 0

    def run(self, event: Event, keep: Keep, waits: list[int] | None) -> bool:
        """One event; False if there is no room for what it needs."""
        cycle = self.cycle
        ready = self.now
        for u in event.uses:
            use, last = cycle.uses[u], cycle.before[u]
            here = last >= 0 and keep[last] and not cycle.uses[last].leaves
            if use.created or not here:
                if not self._take(cycle.frames[use.page]):
                    return False
                if use.created:
                    ready = max(ready, self.frames_ns)
                else:
                    self._load(use.page)
                    if self.load_ns > ready:
                        ready = self.load_ns
                        if waits is not None:
                            waits.append(u)
            if use.dirties:
                self.dirty[use.page] = 1
        self.now = ready + event.compute_ns
        for u in event.ends:
            self._end(u, keep[u])
        return True

    def begin(self, u: int, kept: bool) -> None:
        """A page that is resident at the beginning stays or leaves."""
        use = self.cycle.uses[u]
        self.dirty[use.page] = use.dirties
        self._end(u, kept)

    def _take(self, count: int) -> bool:
        while self.free < count:
            if not self.freed:
                return False
            when, frames = heapq.heappop(self.freed)
            self.free += frames
            if when > self.frames_ns:
                self.frames_ns = when
        self.free -= count
        return True

    def _load(self, page: int) -> None:
        start = max(self.load_ns, self.frames_ns, self.left_ns[page])
        self.load_ns = start + self.cycle.load_ns[page]
        self.loads += 1

    def _end(self, u: int, kept: bool) -> None:
        use = self.cycle.uses[u]
        if kept and not use.leaves:
            return
        when = self.now
        if self.dirty[use.page]:
            self.dirty[use.page] = 0
            if not use.dies:
                self.store_ns = max(self.store_ns, self.now) + self.cycle.store_ns[use.page]
                when = self.store_ns
        elif use.page in self.stored_ns:
            when = max(when, self.stored_ns[use.page])
        self.left_ns[use.page] = when
        heapq.heappush(self.freed, (when, self.cycle.frames[use.page]))
