"""The best schedule of a tiny run, by search.

Whole pages move on a line in and a line out, or on one line that goes one way at a time; a transfer
that began runs to its end. A schedule is a sequence of decisions: begin an access, begin a load
(over victims), begin a store. Take the best one and let every decision, in the same order, happen
as soon as what it needs is there: a line, frames, a page. No decision and no end of a transfer
comes later than before, no frame is taken that was not, so this is a best schedule too; and in it
every decision falls on the start of the run or on the end of a transfer or computation. Victims
are evicted when their frames are taken, no earlier. So it is enough to look at states at such
moments, and A* looks at them in order of a lower bound on the elapsed time.

A store begins only while its page is not pinned, as in the pager. At one moment stores are decided
on before an access pins pages, then the access begins, then loads, then stores of what the access
let go: any other order at the same moment leads to the same states. An access begins as soon as it
can, unless it takes frames or pins a dirty page: then something else may have to come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations
from math import inf

from odc.memory.replay.instance import Instance
from odc.memory.replay.schedule import Schedule

MOST_ACCESSES = 12
MOST_PAGES = 6
_MOST_STATES = 200_000

_ABSENT, _LOADING, _CLEAN, _DIRTY = range(4)
_STORE_FIRST, _BEGIN, _LOAD, _STORE, _WAIT = range(5)  # what may still be decided at this moment


@dataclass(frozen=True, slots=True)
class _State:
    """The device at a moment.

    Attributes:
        pages: of each page, where it is.
        access: the next to begin.
        compute_s, in_s, out_s: time until a computation, load or store ends; inf if there is none.
        in_page, out_page: what moves; -1 for nothing.
        stale: what is being stored was changed meanwhile, or died.
        stage: decisions that are still open at this moment.
    """

    pages: tuple[int, ...]
    access: int = 0
    compute_s: float = inf
    in_s: float = inf
    out_s: float = inf
    in_page: int = -1
    out_page: int = -1
    stale: bool = False
    stage: int = _STORE_FIRST


def exact_schedule(instance: Instance) -> Schedule | None:
    """A schedule of least elapsed time, or None where the run is too large to search."""
    largest = max(instance.load_s, default=0.0)
    if instance.n > MOST_ACCESSES or len(instance.frames) > MOST_PAGES:
        return None
    if largest > instance.slice_s * (1 + 1e-9):
        return None
    return _Search(instance).run()


class _Search:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.pages = range(len(instance.frames))
        n = instance.n
        # by access: pinned until it begins, pinned while it computes
        self.waiting: list[frozenset[int]] = []
        self.computing: list[frozenset[int]] = []
        holds = list(
            zip(
                instance.page,
                instance.first,
                instance.accesses.last.tolist(),
                instance.accesses.through.tolist(),
                strict=True,
            )
        )
        for at in range(n + 1):
            self.waiting.append(frozenset(p for p, f, z, _ in holds if f < at <= z))
            self.computing.append(
                frozenset(p for p, f, z, t in holds if f <= at and (at < z or (at == z and t)))
            )
        self.next_first = [self._next_loads(at) for at in range(n + 1)]

    def _next_loads(self, access: int) -> list[int]:
        """Of each page, the access from ``access`` on for which its content is needed, or n."""
        instance = self.instance
        found = [instance.n] * len(self.pages)
        for hold in reversed(range(len(instance.page))):
            if instance.first[hold] >= access:
                fresh = instance.creates[hold]
                found[instance.page[hold]] = instance.n if fresh else instance.first[hold]
        return found

    def run(self) -> Schedule | None:
        instance = self.instance
        there = set(instance.resident)
        start = _State(
            tuple(
                _ABSENT if p not in there else _DIRTY if instance.dirty[p] else _CLEAN
                for p in self.pages
            )
        )
        heap: list[tuple[float, int, float, _State, _State]] = []
        heappush(heap, (self._bound(start), 0, 0.0, start, start))
        came_from: dict[_State, tuple[_State, float]] = {}
        number = 0
        while heap and len(came_from) < _MOST_STATES:
            _, _, time, state, before = heappop(heap)
            if state in came_from:
                continue
            came_from[state] = before, time
            if state.access == instance.n and state.compute_s == inf:
                return self._retrace(came_from, state)
            for duration, after in self._successors(state):
                if after not in came_from:
                    number += 1
                    later = time + duration
                    heappush(heap, (later + self._bound(after), number, later, after, state))
        return None

    def _retrace(self, came_from: dict[_State, tuple[_State, float]], state: _State) -> Schedule:
        """The schedule that led to the last state."""
        began = [0.0] * self.instance.n
        loads: list[int] = []
        stores: list[int] = []
        elapsed = came_from[state][1]
        while True:
            before, time = came_from[state]
            if before == state:
                break
            if state.access > before.access:
                began[before.access] = time
            if state.in_page != before.in_page and state.in_page >= 0:
                loads.append(state.in_page)
            if state.out_page != before.out_page and state.out_page >= 0:
                stores.append(state.out_page)
            state = before
        stall, end = [], 0.0
        for start, duration in zip(began, self.instance.compute, strict=True):
            stall.append(start - end)
            end = start + duration
        return Schedule(elapsed, stall, loads[::-1], stores[::-1], [], [])

    def _bound(self, state: _State) -> float:
        """Time that is left at least: what must be loaded for an access, and all that follows."""
        instance = self.instance
        computing = state.compute_s if state.compute_s < inf else 0.0
        least: float = computing + instance.remaining[state.access]
        loading = state.in_s if state.in_page >= 0 else 0.0
        if instance.half_duplex and state.out_page >= 0:
            loading = state.out_s
        needed = self.next_first[state.access]
        absent = sorted((needed[p], p) for p in self.pages if state.pages[p] == _ABSENT)
        for first, page in absent:
            if first < instance.n:
                loading += instance.load_s[page]
                least = max(least, loading + instance.remaining[first])
        return least

    # -- what can happen -------------------------------------------------------------------------

    def _successors(self, state: _State) -> Iterator[tuple[float, _State]]:
        if state.stage == _STORE_FIRST:
            yield from ((0.0, after) for after in self._store(state, _BEGIN))
            yield 0.0, replace(state, stage=_BEGIN)
        elif state.stage == _BEGIN:
            begun = list(self._begin(state)) if self._waits(state) else []
            yield from ((0.0, after) for after in begun)
            if not begun or self._may_wait(state):
                yield 0.0, replace(state, stage=_LOAD)
        elif state.stage == _LOAD:
            yield from ((0.0, after) for after in self._load(state))
            yield 0.0, replace(state, stage=_STORE)
        elif state.stage == _STORE:
            yield from ((0.0, after) for after in self._store(state, _WAIT))
            yield 0.0, replace(state, stage=_WAIT)
        else:
            duration = min(state.compute_s, state.in_s, state.out_s)
            if duration < inf:
                yield duration, self._pass(state, duration)

    def _waits(self, state: _State) -> bool:
        return state.compute_s == inf and state.access < self.instance.n

    def _may_wait(self, state: _State) -> bool:
        """Whether it can be of use to begin the next access later than possible."""
        instance = self.instance
        return any(
            instance.creates[hold] or state.pages[instance.page[hold]] == _DIRTY
            for hold in instance.begins[state.access]
        )

    def _begin(self, state: _State) -> Iterator[_State]:
        instance, at = self.instance, state.access
        if any(state.pages[p] not in (_CLEAN, _DIRTY) for p in instance.loaded[at]):
            return
        created = [instance.page[h] for h in instance.begins[at] if instance.creates[h]]
        pinned = self.waiting[at].union(instance.loaded[at])
        for pages in self._over_victims(state, created, pinned):
            changed = list(pages)
            stale = state.stale
            for hold in instance.begins[at]:
                page = instance.page[hold]
                if instance.dirties[hold]:
                    changed[page] = _DIRTY
                    stale |= page == state.out_page
            for hold in instance.released_at_start[at]:
                if instance.dies[hold]:
                    changed[instance.page[hold]] = _ABSENT
                    stale |= instance.page[hold] == state.out_page
            duration = instance.compute[at]
            yield replace(
                state,
                pages=tuple(changed),
                access=at + 1,
                compute_s=duration if duration > 0.0 else inf,
                stale=stale,
                stage=_STORE_FIRST,
            )

    def _load(self, state: _State) -> Iterator[_State]:
        instance = self.instance
        if state.in_page >= 0 or (instance.half_duplex and state.out_page >= 0):
            return
        needed = self.next_first[state.access]
        for page in self.pages:
            if state.pages[page] != _ABSENT or needed[page] == instance.n:
                continue
            for pages in self._over_victims(state, [page], self._pinned(state)):
                yield replace(
                    state,
                    pages=(*pages[:page], _LOADING, *pages[page + 1 :]),
                    in_page=page,
                    in_s=instance.load_s[page],
                    stage=_STORE,
                )

    def _store(self, state: _State, stage: int) -> Iterator[_State]:
        if state.out_page >= 0 or (self.instance.half_duplex and state.in_page >= 0):
            return
        pinned = self._pinned(state)
        for page in self.pages:
            if state.pages[page] == _DIRTY and page not in pinned:
                yield replace(state, out_page=page, out_s=self.instance.store_s[page], stale=False)

    def _pinned(self, state: _State) -> frozenset[int]:
        if state.compute_s < inf:
            return self.computing[state.access - 1]
        return self.waiting[state.access]

    def _over_victims(
        self, state: _State, wanted: list[int], pinned: frozenset[int]
    ) -> Iterator[tuple[int, ...]]:
        """Page states after evicting each least set of clean pages that makes room."""
        frames = self.instance.frames
        taken = sum(frames[p] for p in self.pages if state.pages[p] != _ABSENT)
        dead = state.out_page >= 0 and state.pages[state.out_page] == _ABSENT
        taken += frames[state.out_page] if dead else 0  # until its store ends
        need = sum(frames[p] for p in wanted if state.pages[p] == _ABSENT)
        need += taken - self.instance.capacity
        if need <= 0:
            yield state.pages
            return
        clean = [p for p in self.pages if state.pages[p] == _CLEAN and p not in pinned]
        for count in range(1, len(clean) + 1):
            for victims in combinations(clean, count):
                freed = sum(frames[p] for p in victims)
                if need <= freed < need + min(frames[p] for p in victims):
                    yield tuple(_ABSENT if p in victims else s for p, s in enumerate(state.pages))

    def _pass(self, state: _State, duration: float) -> _State:
        """Let time pass until something ends."""
        instance = self.instance
        pages = list(state.pages)
        stale = state.stale
        compute_s, in_s, out_s = (
            inf if left <= duration * (1 + 1e-12) else round(left - duration, 15)
            for left in (state.compute_s, state.in_s, state.out_s)
        )
        if out_s == inf and state.out_page >= 0 and not stale:
            pages[state.out_page] = _CLEAN
        if in_s == inf and state.in_page >= 0:
            pages[state.in_page] = _CLEAN
        out_page = -1 if out_s == inf else state.out_page
        stale &= out_page >= 0
        if compute_s == inf and state.compute_s < inf:
            for hold in instance.released_after[state.access - 1]:
                page = instance.page[hold]
                if instance.dies[hold]:
                    pages[page] = _ABSENT
                    stale |= page == out_page
        in_page = -1 if in_s == inf else state.in_page
        return _State(tuple(pages), state.access, compute_s, in_s, out_s, in_page, out_page, stale)
