"""A cycle under a schedule, run tick by tick: what ``decode`` must agree with.

Programs are passes made by hand; times are whole ticks. Every tick, all that can happen happens:
lines finish and start transfers, frames that came back go to the first request that waits, the
computation goes on. Nothing is shared with the code under test but the page table.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from odc.memory.cycle import Cycle, Rates, Start
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.orders import OrderLibrary
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.recorded import RecordedOrder
from odc.memory.stations import Stations

P, G, M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT
Leave = tuple[int, int, int]  # pass, visit in it, page
START = (-1, -1)  # the place of pages that are there at the beginning of a run


@dataclass
class Row:
    """A visit of a group: what it needs after how many ticks, how long it is held, what dies."""

    group: int
    phase: Phase
    needs: list[tuple[Kind, Op, int]]
    held: int
    ticks: int
    drops: frozenset[Kind] = frozenset()
    span: int = 0


@dataclass
class Program:
    """Passes, the pages behind them, and a machine: frames, ticks a frame in and out."""

    table: PageTable
    passes: list[list[Row]]
    frames: int
    load: int
    store: int

    def orders(self) -> list[RecordedOrder]:
        """The passes as recorded."""
        library = OrderLibrary(Stations(self.table, []))
        for ctx, rows in enumerate(self.passes):
            library.begin_pass(ctx)
            for row in rows:
                visit = library.visit(library.stations.of_group[row.group], row.phase)
                for kind, op, at in row.needs:
                    visit.dur_ns = float(at)
                    visit.note(kind, op, 0)
                for kind in row.drops:
                    visit.drops |= 1 << kind
                visit.held_ns, visit.span = float(row.held), row.span
                visit.dur_ns = float(row.ticks)
        library.begin_pass(0)
        return [library.orders[ctx] for ctx in range(len(self.passes))]

    def rates(self) -> Rates:
        return Rates(self.load / FRAME_BYTES, self.store / FRAME_BYTES)

    def cycle(self, resident: Sequence[int] | None = None) -> Cycle:
        start = None if resident is None else Start(resident)
        return Cycle(self.table, self.orders(), self.frames, self.rates(), start)


def place_of_uses(cycle: Cycle) -> list[Leave]:
    """Where each use of a cycle stands: pass, visit, page."""
    place = {u: event.place for event in cycle.events for u in event.uses}
    return [(*place.get(u, START), use.page) for u, use in enumerate(cycle.uses)]


# -- programs --------------------------------------------------------------------------------------


def random_program(
    seed: int, num_passes: int = 1, num_groups: int = 4, spare: int | None = None
) -> Program:
    """Forward visits in any order; trained groups are updated in a backward, or behind it.

    One more group encloses others now and then: it is held while their visits run. ``spare`` are
    frames beyond what the largest group needs.
    """
    rng = random.Random(seed)
    table = PageTable(rng.choice((1, 2)) * FRAME_BYTES)
    trained = [rng.random() < 0.5 for _ in range(num_groups)]
    for group in range(num_groups):
        size = rng.choice((1, 1, 2)) * FRAME_BYTES
        table.add_group(GroupSpec(f"g{group}", size, int(trained[group]), trained[group]), {})
    table.add_group(GroupSpec("outer", FRAME_BYTES, 0, False), {})
    table.seal()
    passes = []
    for _ in range(num_passes):
        rows = [_read(rng, rng.randrange(num_groups)) for _ in range(rng.randint(2, 6))]
        if rng.random() < 0.8:
            groups = list(dict.fromkeys(row.group for row in reversed(rows)))
            in_step = rng.random() < 0.4
            rows += [_backward(rng, g, trained[g], in_step) for g in groups]
            if in_step:
                rows += [_update(rng, g) for g in groups if trained[g]]
        if rng.random() < 0.5:
            outer = _read(rng, num_groups)
            outer.span = rng.randint(1, len(rows) + 1)
            rows.insert(0, outer)
        passes.append(rows)
    groups = range(num_groups)
    least = max(sum(table.frames[p] for k in Kind for p in table.of(g, k)) for g in groups)
    frames = least + (rng.randint(3, 8) if spare is None else spare)
    return Program(table, passes, frames, rng.randint(1, 4), rng.randint(1, 4))


def _read(rng: random.Random, group: int) -> Row:
    ticks = rng.randint(0, 6)
    return Row(group, Phase.FORWARD, [(P, Op.READ, 0)], rng.randint(0, ticks), ticks)


def _backward(rng: random.Random, group: int, trained: bool, in_step: bool) -> Row:
    if not trained:
        row = _read(rng, group)
        row.phase = Phase.BACKWARD
        return row
    at = rng.randint(0, 4)
    needs = [(P, Op.READ, 0), (G, Op.CREATE, at)]
    held = at + rng.randint(0, 3)
    if in_step:
        return Row(group, Phase.BACKWARD, needs, held, held + rng.randint(0, 2))
    needs += [(P, Op.WRITE, at), (M, Op.WRITE, at)]
    ticks = held + rng.randint(0, 2)
    return Row(group, Phase.BACKWARD, needs, held, ticks, frozenset({G}))


def _update(rng: random.Random, group: int) -> Row:
    needs = [(G, Op.READ, 0), (P, Op.WRITE, 0), (M, Op.WRITE, 0)]
    held = rng.randint(0, 3)
    return Row(group, Phase.OPTIMIZER, needs, held, held + rng.randint(0, 2), frozenset({G}))


# -- the machine -----------------------------------------------------------------------------------


@dataclass
class _Moment:
    """Pages are needed; then the computation goes on; then uses end."""

    needs: list[_Need] = field(default_factory=list)
    ticks: int = 0
    ends: list[_Need] = field(default_factory=list)


@dataclass(eq=False)
class _Need:
    at: Leave
    created: bool
    dirties: bool
    dies: bool
    fetch: bool = False  # needs frames
    granted: bool = False
    there: bool = False
    gone: bool = False
    before: _Need | None = None  # the page's use before this one

    @property
    def page(self) -> int:
        return self.at[2]


def moments_of(program: Program) -> list[_Moment]:
    """One round of the passes."""
    found: list[_Moment] = []
    for number, rows in enumerate(program.passes):
        ends: dict[int, list[_Need]] = {}
        for place, row in enumerate(rows):
            own: dict[int, _Need] = {}
            times = sorted({0, *(at for _, _, at in row.needs)})
            held = min(max(row.held, times[-1]), row.ticks)
            for at, following in zip(times, [*times[1:], held], strict=True):
                moment = _Moment(ticks=following - at)
                for kind in Kind:
                    ops = [op for k, op, _ in row.needs if k == kind]
                    first = [t for k, _, t in row.needs if k == kind][:1]
                    if first != [at]:
                        continue
                    for page in program.table.of(row.group, kind):
                        if page in own:
                            own[page].dirties |= ops != [Op.READ]
                            continue
                        dies = kind in row.drops
                        writes = any(op != Op.READ for op in ops)
                        own[page] = _Need((number, place, page), ops[0] == Op.CREATE, writes, dies)
                        moment.needs.append(own[page])
                found.append(moment)
            ends.setdefault(place + row.span, []).extend(own.values())
            found[-1].ends = ends.pop(place, [])
            found.append(_Moment(ticks=row.ticks - held))
        found[-1].ends += [need for left in ends.values() for need in left]
    return found


class Machine:
    """Two lines, frames and a computation, in ticks."""

    def __init__(
        self,
        program: Program,
        leaves: set[Leave],
        rounds: int,
        resident: Sequence[int] | None,
        dirty: Sequence[int] = (),
        granted: Sequence[float] = (),
    ) -> None:
        self.program, self.leaves = program, leaves
        self.frames = program.table.frames
        self.now = 0
        self.most = 0  # frames taken at once
        self.rounds: list[int] = []  # when each ended
        self.loads = 0
        self.dirty = set(dirty)
        self.stores: deque[_Need] = deque()
        self.store: tuple[_Need, int] | None = None  # use that ended, end of the store
        self.load: tuple[_Need, int] | None = None
        self.per_round = len(moments_of(program))
        self.moments = deque(m for _ in range(rounds) for m in moments_of(program))
        start = self._link(resident)
        self.free = program.frames - sum(self.frames[need.page] for need in start)
        requests = [n for m in self.moments for n in m.needs if n.fetch]
        self.waiting = deque(n for n in requests if not n.created)
        if granted:  # when each gets its frames; those of a moment do in the order of need
            assert len(granted) == len(requests)
            requests = [
                requests[at] for at in sorted(range(len(requests)), key=granted.__getitem__)
            ]
        self.requests = deque(requests)
        for need in start:
            if need.at in leaves:
                self._leave(need)

    def _link(self, resident: Sequence[int] | None) -> list[_Need]:
        """Which use follows which, and who needs frames; returns what is there at the beginning."""
        needs = [need for moment in self.moments for need in moment.needs]
        last: dict[int, _Need] = {}
        if resident is None:  # as at the end of a round
            last = {n.page: _Need(n.at, False, False, n.dies) for n in needs[: len(needs) // 2]}
            last = {page: need for page, need in last.items() if self._stays(need)}
        else:
            last = {page: _Need((*START, page), False, False, False) for page in resident}
        start = list(last.values())
        for need in needs:
            need.before = last.get(need.page)
            need.fetch = need.created or need.before is None or not self._stays(need.before)
            last[need.page] = need
        return start

    def _stays(self, need: _Need) -> bool:
        return not need.dies and need.at not in self.leaves

    def run(self) -> bool:
        """To the end; False if something never comes."""
        steps = self._compute()
        state = next(steps)
        while True:
            before = None
            while before != (before := self._picture(state)):
                self._move()
                state = steps.send(None)
                if state == "done":
                    return True
            if state == "waits" and self.load is None and self.store is None:
                return False
            self.now += 1

    def _picture(self, state: str) -> tuple[object, ...]:
        """Changes whenever something has happened."""
        lines = (self.load, self.store, len(self.stores), len(self.requests), len(self.waiting))
        return (state, self.free, len(self.moments), *lines)

    def _compute(self) -> Iterator[str]:
        while self.moments:
            moment = self.moments[0]
            while not all(need.there or not need.fetch for need in moment.needs):
                yield "waits"
            self.dirty |= {need.page for need in moment.needs if need.dirties}
            end = self.now + moment.ticks
            while self.now < end:
                yield f"computes until {end}"
            for need in moment.ends:
                if need.dies:
                    self.dirty.discard(need.page)
                if not self._stays(need):
                    self._leave(need)
            self.moments.popleft()
            if len(self.moments) % self.per_round == 0:
                self.rounds.append(self.now)
            yield "goes on"
        while True:
            yield "done"

    def _leave(self, need: _Need) -> None:
        if need.page in self.dirty:
            self.dirty.discard(need.page)
            self.stores.append(need)
        else:
            self._left(need)

    def _left(self, need: _Need) -> None:
        need.gone = True
        self.free += self.frames[need.page]

    def _move(self) -> None:
        """What lines and frames do at this tick."""
        if self.store is not None and self.store[1] <= self.now:
            self._left(self.store[0])
            self.store = None
        if self.load is not None and self.load[1] <= self.now:
            self.load[0].there = True
            self.load = None
        if self.store is None and self.stores:
            need = self.stores.popleft()
            self.store = (need, self.now + self.program.store * self.frames[need.page])
        while self.requests and self.free >= self.frames[self.requests[0].page]:
            need = self.requests.popleft()
            self.free -= self.frames[need.page]
            self.most = max(self.most, self.program.frames - self.free)
            need.granted, need.there = True, need.created
        if self.load is None and self.waiting:
            need = self.waiting[0]
            if need.granted and (need.before is None or need.before.gone):
                self.waiting.popleft()
                self.load = (need, self.now + self.program.load * self.frames[need.page])
                self.loads += 1


def run_schedule(
    program: Program,
    leaves: set[Leave],
    resident: Sequence[int] | None = None,
    dirty: Sequence[int] = (),
    granted: Sequence[float] = (),
) -> tuple[int, float, int] | None:
    """(ticks of a cycle or run, loads in it, the most frames taken), None if it does not fit.

    ``granted`` gives the order in which requests get their frames; else it is that of need.
    """
    rounds = 2 if resident is None else 1
    machine = Machine(program, leaves, rounds, resident, dirty, granted)
    if machine.free < 0 or not machine.run():
        return None
    start = machine.rounds[0] if rounds == 2 else 0
    return machine.rounds[-1] - start, machine.loads / rounds, machine.most
