"""The least elapsed time of a tiny run, by looking at every schedule.

All times are whole ticks. Some best schedule decides (evict, begin to load, begin to store, begin
an access) only at the start or when a transfer or computation ends: keep the order of decisions of
any best schedule and let each happen as soon as what it needs is there; none comes later, and what
it needs is given by the start, by earlier decisions, and by ends of transfers and computations. So
Dijkstra over (what moves and for how long, what is where, which access is next), with every single
decision as an edge of length 0 and "until the next end" as the only edge with a length, meets one.

Nothing of ``odc.memory.replay.exact`` is used; that one orders decisions, evicts late and bounds
what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from odc.memory.replay.accesses import Accesses, Residency

TICK_NS = 1_000_000
HOME, COMING, CLEAN, DIRTY = "home", "coming", "clean", "dirty"
# (access, ticks of computation left, load, ticks left, store, ticks left, store is void, pages)
State = tuple[int, int, int, int, int, int, bool, tuple[str, ...]]


class Brute:
    """``load_ticks`` and ``store_ticks`` are for one frame."""

    def __init__(
        self,
        accesses: Accesses,
        capacity: int,
        load_ticks: int,
        store_ticks: int,
        half_duplex: bool,
        initial: Residency,
    ) -> None:
        self.a = accesses
        self.n = accesses.num_accesses
        self.capacity = capacity
        self.load_ticks, self.store_ticks = load_ticks, store_ticks
        self.half_duplex = half_duplex
        self.frames = [int(f) for f in accesses.page_frames]
        self.compute = [int(ns) // TICK_NS for ns in accesses.compute_ns]
        pages = tuple(
            HOME if not r else DIRTY if d else CLEAN
            for r, d in zip(initial.resident, initial.dirty, strict=True)
        )
        self.start: State = (0, 0, -1, 0, -1, 0, False, pages)
        self.columns = [
            getattr(accesses, name).tolist()
            for name in ("page", "first", "last", "through", "creates", "dirties", "dies")
        ]

    def holds(self) -> Iterator[tuple[int, int, int, bool, bool, bool, bool]]:
        yield from zip(*self.columns, strict=True)

    def ticks(self) -> int:
        """The least elapsed time."""
        heap: list[tuple[int, State]] = [(0, self.start)]
        seen: set[State] = set()
        while heap:
            time, state = heapq.heappop(heap)
            if state in seen:
                continue
            seen.add(state)
            if state[0] == self.n and state[1] == 0:
                return time
            for duration, after in self.edges(state):
                heapq.heappush(heap, (time + duration, after))
        raise AssertionError("no schedule")

    def pinned(self, state: State) -> set[int]:
        access, computing = state[0], state[1] > 0
        if computing:
            at = access - 1
            return {p for p, f, z, t, *_ in self.holds() if f <= at and (at < z or at == z and t)}
        return {p for p, f, z, *_ in self.holds() if f < access <= z}

    def taken(self, state: State) -> int:
        taken = sum(f for f, s in zip(self.frames, state[7], strict=True) if s != HOME)
        if state[4] >= 0 and state[7][state[4]] == HOME:
            taken += self.frames[state[4]]
        return taken

    def edges(self, state: State) -> Iterator[tuple[int, State]]:
        access, compute, load, load_left, store, store_left, void, pages = state
        free = self.capacity - self.taken(state)
        pinned = self.pinned(state)

        def where(page: int, place: str) -> tuple[str, ...]:
            return (*pages[:page], place, *pages[page + 1 :])

        for page, place in enumerate(pages):
            if place == CLEAN and page not in pinned:
                yield 0, (*state[:7], where(page, HOME))
            line_in = load < 0 and not (self.half_duplex and store >= 0)
            if place == HOME and line_in and self.frames[page] <= free and page != store:
                ticks = self.frames[page] * self.load_ticks
                after = where(page, COMING)
                yield 0, (access, compute, page, ticks, store, store_left, void, after)
            line_out = store < 0 and not (self.half_duplex and load >= 0)
            if place == DIRTY and line_out and page not in pinned:
                ticks = self.frames[page] * self.store_ticks
                yield 0, (access, compute, load, load_left, page, ticks, False, pages)
        if compute == 0 and access < self.n:
            after = self.begun(state, free)
            if after is not None:
                yield 0, after
        left = [t for t in (compute, load_left, store_left) if t > 0]
        if left:
            yield min(left), self.passed(state, min(left))

    def begun(self, state: State, free: int) -> State | None:
        access, _, load, load_left, store, store_left, void, pages = state
        changed = list(pages)
        for page, first, _, _, creates, dirties, _ in self.holds():
            if first != access:
                continue
            if pages[page] == COMING:
                return None
            if creates:
                free -= self.frames[page] if pages[page] == HOME else 0
                changed[page] = DIRTY
            elif pages[page] not in (CLEAN, DIRTY):
                return None
            elif dirties:
                changed[page] = DIRTY
            void |= dirties and page == store
        if free < 0:
            return None
        compute = self.compute[access]
        for page, _, last, through, _, _, dies in self.holds():
            if last == access and dies and not (through and compute):
                changed[page] = HOME
                void |= page == store
        return (access + 1, compute, load, load_left, store, store_left, void, tuple(changed))

    def passed(self, state: State, ticks: int) -> State:
        access, compute, load, load_left, store, store_left, void, pages = state
        changed = list(pages)
        if store >= 0 and store_left == ticks:
            if not void:
                changed[store] = CLEAN
            store, store_left, void = -1, ticks, False
        if load >= 0 and load_left == ticks:
            changed[load] = CLEAN
            load = -1
        if compute == ticks:
            for page, _, last, through, _, _, dies in self.holds():
                if last == access - 1 and dies and through:
                    changed[page] = HOME
                    void |= page == store
        compute, load_left, store_left = (
            max(compute - ticks, 0),
            load_left - ticks if load >= 0 else 0,
            store_left - ticks if store >= 0 else 0,
        )
        return (access, compute, load, load_left, store, store_left, void, tuple(changed))
