"""How long a cycle takes under a schedule: two lines, frames, and nothing decided any more.

Loads run in the order of need, each as soon as the line is free and frames have been given back;
a page that leaves is stored, if it is dirty, as soon as its use ends. Frames go to what needs
them in the order of need, what is made fresh included.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from odc.memory.cycle import Cycle, Event, Keep

_ALL = 1 << 60  # more frames than there are


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
    lines = Lines(cycle, room)
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
    instead = cycle.other_chance * _stall_ns(cycle, keep) if cycle.other else 0.0
    for event in cycle.events[cycle.surely :]:  # of a pass that may come
        if not lines.run(event, keep, waits):
            return None
    elapsed += cycle.chance * (lines.now - start - elapsed) + instead
    return elapsed, lines.loads / cycle.rounds


def _stall_ns(cycle: Cycle, keep: Keep) -> float:
    """About how long the pass that may follow instead waits for what is not there then."""
    uses, last, line_ns, stall_ns = cycle.uses, cycle.last, 0.0, 0.0
    for page, start_ns in cycle.other:
        u = last.get(page, -1)
        if u < 0 or not keep[u] or uses[u].leaves:
            line_ns += cycle.load_ns[page]
            stall_ns = max(stall_ns, line_ns - start_ns)
    return stall_ns


class Lines:
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
            if use.created:
                ready = self._make(cycle.frames[use.page], ready)
                if ready < 0.0:
                    return False
            elif not here:
                if not self._take(cycle.frames[use.page]):
                    return False
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
        """Frames for a load: those that became free first."""
        while self.free < count:
            if not self.freed:
                return False
            when, frames = self.freed.pop(0)
            self.free += frames
            if when > self.frames_ns:
                self.frames_ns = when
        self.free -= count
        return True

    def _make(self, count: int, ready: float) -> float:
        """Frames for what is made fresh.

        In a run they are, of those that are free by then, the last that became so: loads for what
        is needed later may begin before, in frames that were free sooner. In a cycle they are
        taken in the order of need: its schedule is followed for long, and has this for slack.

        Returns:
            ``ready``, or when the frames are free, if that is later; -1 if they are too few.
        """
        freed = self.freed
        if self.cycle.cyclic:
            return max(ready, self.frames_ns) if self._take(count) else -1.0
        while count:
            at = bisect_right(freed, (ready, _ALL)) - 1
            if at < 0:
                taken = min(count, self.free)
                self.free -= taken
                ready = max(ready, self.frames_ns) if taken else ready
                count -= taken
                at = 0
                if not count:
                    break
            if not freed:
                return -1.0
            when, frames = freed.pop(at)
            ready = max(ready, when)
            count -= frames
            if count < 0:
                insort(freed, (when, -count))
                count = 0
        return ready

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
        insort(self.freed, (when, self.cycle.frames[use.page]))
