"""Loads and stores move in slices: what is urgent overtakes what runs, and nothing moves twice.

Pages are four slices long, and a slice takes 10 ms on the virtual clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from odc.memory.engines.base import CommandKind, Priority, Ticket, TierSpeed
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Tier
from odc.memory.frames import FRAME_BYTES
from tests.memory.engine_harness import (
    NUM_PAGES,
    SLICE,
    Harness,
    ThreadHarness,
    VirtualHarness,
    in_order_of_end,
    pages_at,
    resident,
)

LOAD, STORE = CommandKind.LOAD, CommandKind.STORE
CREATE, RELEASE = CommandKind.CREATE, CommandKind.RELEASE
SLICE_NS = 10_000_000
MS = 1_000_000
BOTH = (Tier.HOST, Tier.DISK)


def slices_of(h: Harness, page: int) -> list[int]:
    return [s for _, p, s in h.slices if p == page] if isinstance(h, ThreadHarness) else []


# -- what overtakes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LOAD, STORE])
@pytest.mark.parametrize("priority", [Priority.EARLY, Priority.NORMAL])
def test_a_demand_overtakes_a_running_transfer_between_slices(
    make: Callable[..., Harness], kind: CommandKind, priority: Priority
) -> None:
    h = make(page_frames=4)
    if kind == STORE:
        resident(h, 0, 1, 2)
    with h.held(kind) as running:
        running.priority = priority
        queued = h.engine.submit(kind, h.pages[1], (), priority)
        demand = h.engine.submit(kind, h.pages[2], (), Priority.URGENT)
    h.run_until_idle([running, queued, demand])
    assert in_order_of_end(running, queued, demand) == [2, 0, 1]
    if isinstance(h, ThreadHarness):
        order = [page for _, page, _ in h.slices]
        assert order == [0, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1, 1]
        assert slices_of(h, 0) == [0, 1, 2, 3]
    else:
        assert [t.done_ns for t in (demand, running, queued)] == [50 * MS, 80 * MS, 120 * MS]
        assert [t.dur_ns for t in (demand, running, queued)] == [40 * MS] * 3
    assert all(t.moved_bytes == t.page.num_bytes for t in (running, queued, demand))


def test_equals_do_not_overtake_each_other(make: Callable[..., Harness]) -> None:
    h = make(page_frames=4)
    with h.held(LOAD) as running:
        others = [h.engine.submit(LOAD, h.pages[p]) for p in (1, 2)]
        late = h.engine.submit(LOAD, h.pages[3], (), Priority.EARLY)
    h.run_until_idle([running, *others, late])
    assert in_order_of_end(running, *others, late) == [0, 1, 2, 3]
    if isinstance(h, ThreadHarness):
        assert [s for _, _, s in h.slices] == [0, 1, 2, 3] * 4


def test_a_wait_for_what_is_queued_overtakes_what_runs(make: Callable[..., Harness]) -> None:
    h = make(page_frames=4)
    with h.held(LOAD) as running:
        queued = [h.engine.submit(LOAD, h.pages[p]) for p in (1, 2, 3)]
        h.engine.urge(queued[1])
    h.engine.wait(queued[1])
    h.run_until_idle([running, *queued])
    assert in_order_of_end(running, *queued) == [2, 0, 1, 3]


def test_what_was_overtaken_can_be_urged_itself(make: Callable[..., Harness]) -> None:
    """It goes on before other urgent ones that have not begun."""
    h = make(page_frames=4)
    with h.held(LOAD) as first:
        second = h.engine.submit(LOAD, h.pages[1], (), Priority.URGENT)
        third = h.engine.submit(LOAD, h.pages[2], (), Priority.URGENT)
        h.engine.urge(first)
    h.engine.wait(first)
    h.run_until_idle([second, third])
    assert in_order_of_end(first, second, third) == [0, 1, 2]


def test_a_demand_over_a_frame_that_is_being_written_early_speeds_the_write_up(
    make: Callable[..., Harness],
) -> None:
    """The write has begun and was overtaken; the demand cannot start before it ends."""
    h = make(page_frames=4)
    resident(h, 0, 1, 2)
    with h.held(STORE) as early:
        early.priority = Priority.EARLY
        other = h.engine.submit(STORE, h.pages[1])
        another = h.engine.submit(STORE, h.pages[2])
        release = h.engine.submit(RELEASE, h.pages[0], (early,))
        load = h.engine.submit(LOAD, h.pages[5], (release,))
        h.engine.urge(load)
    h.engine.wait(load)
    h.run_until_idle([other, another])
    assert early.done_ns <= release.done_ns <= load.done_ns - load.dur_ns
    assert early.done_ns <= other.done_ns - other.dur_ns


def test_what_has_begun_cannot_be_taken_back(make: Callable[..., Harness]) -> None:
    h = make(page_frames=4)
    with h.held(LOAD) as running:
        demand = h.engine.submit(LOAD, h.pages[1], (), Priority.URGENT)
        assert not h.engine.cancel(running)
    h.engine.wait(demand)
    assert not h.engine.cancel(running)
    h.engine.wait(running)
    assert h.engine.poll(running)


def test_a_demand_that_is_taken_back_leaves_what_ran_as_it_was(
    make: Callable[..., Harness],
) -> None:
    h = make(page_frames=4)
    with h.held(LOAD) as running:
        demand = h.engine.submit(LOAD, h.pages[1], (), Priority.URGENT)
        if isinstance(h, VirtualHarness):
            h.engine.advance(1)
        assert h.engine.cancel(demand)
        queued = h.engine.submit(LOAD, h.pages[2])
    h.run_until_idle([running, queued])
    assert in_order_of_end(running, queued) == [0, 2]
    if isinstance(h, VirtualHarness):
        assert (running.done_ns, running.dur_ns, queued.done_ns) == (40 * MS, 40 * MS, 80 * MS)


def test_stores_of_one_page_never_overtake_each_other(make: Callable[..., Harness]) -> None:
    """An early store runs, its page changes, and it has to go: the new store is the last word."""
    h = make(page_frames=4)
    resident(h, 0, 1)
    with h.held(STORE) as early:
        early.priority = Priority.EARLY
        between = h.engine.submit(STORE, h.pages[1])
        again = h.engine.submit(STORE, h.pages[0], (), Priority.URGENT)
        release = h.engine.submit(RELEASE, h.pages[0], (again,))
    h.engine.wait(release)
    h.run_until_idle([between])
    assert early.done_ns <= again.done_ns - again.dur_ns
    assert again.done_ns <= release.done_ns
    if isinstance(h, ThreadHarness):
        assert slices_of(h, 0) == [0, 1, 2, 3] * 2


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_a_slice_that_fails_ends_its_command(kind: CommandKind) -> None:
    h = ThreadHarness(page_frames=4)
    if kind == STORE:
        resident(h, 1)
    free = h.pool.num_free
    failing = {2}

    def fault(made: CommandKind, page: int) -> BaseException | None:
        return OSError("slice 2") if len(slices_of(h, 1)) - 1 in failing else None

    h.fault = fault
    ticket = h.engine.submit(kind, h.pages[1])
    with pytest.raises(OSError, match="slice 2"):
        h.engine.wait(ticket)
    assert slices_of(h, 1) == [0, 1, 2]
    assert h.pool.num_free == free, "frames are where they were"
    failing.clear()
    h.slices.clear()
    h.engine.wait(h.engine.submit(kind, h.pages[1]))
    assert slices_of(h, 1) == [0, 1, 2, 3]
    h.close()


def test_a_close_finishes_what_was_overtaken() -> None:
    h = ThreadHarness(page_frames=4)
    with h.held(LOAD) as running:
        demand = h.engine.submit(LOAD, h.pages[1], (), Priority.URGENT)
        h.engine._stopped = True
    h.close()
    assert running.done_ns >= 0 and slices_of(h, 0) == [0, 1, 2, 3]
    assert demand.done_ns < 0 and not slices_of(h, 1)


# -- tiers -----------------------------------------------------------------------------------------


def test_a_demand_on_one_tier_does_not_queue_behind_the_other(
    make: Callable[..., Harness],
) -> None:
    h = make(page_frames=4, tiers=BOTH)
    if isinstance(h, ThreadHarness):
        h.always_open = {1, 3}
    with h.held(LOAD) as host:
        more = h.engine.submit(LOAD, h.pages[2])
        disk = [h.engine.submit(LOAD, h.pages[p]) for p in (1, 3)]
        if isinstance(h, ThreadHarness):
            for ticket in disk:
                h.engine.wait(ticket)
            assert not h.engine.poll(host)
    h.run_until_idle([host, more, *disk])
    if isinstance(h, VirtualHarness):
        assert [t.done_ns for t in (host, more)] == [t.done_ns for t in disk]


def test_each_tier_has_its_own_speed_on_the_virtual_clock() -> None:
    speeds = {
        Tier.HOST: TierSpeed(FRAME_BYTES * 1000.0, FRAME_BYTES * 500.0, latency_ns=3),
        Tier.DISK: TierSpeed(FRAME_BYTES * 100.0, FRAME_BYTES * 50.0, latency_ns=7),
    }
    engine = VirtualEngine(1.0, tier_of=lambda page: BOTH[page % 2], speeds=speeds)
    pages = pages_at(0, 1)
    tickets = [engine.submit(kind, pages[p]) for kind in (LOAD, STORE) for p in (0, 1)]
    for ticket in tickets:
        engine.wait(ticket)
    assert [t.done_ns for t in tickets] == [MS + 3, 10 * MS + 7, 2 * MS + 3, 20 * MS + 7]


def test_dumps_name_the_tier_of_a_line() -> None:
    h = VirtualHarness(tiers=BOTH, page_frames=4)
    for page in (0, 1, 2):
        h.engine.submit(LOAD, h.pages[page])
    h.engine.advance(15 * MS)
    demand = h.engine.submit(LOAD, h.pages[4], (), Priority.URGENT)
    h.engine.advance(10 * MS)
    assert not h.engine.poll(demand)
    assert h.engine.dump() == "\n".join(
        (
            "host in: LOAD page 4 urgent runs, 0 of 8 MiB moved",
            "host in: LOAD page 0 normal overtaken, 4 of 8 MiB moved",
            "host in: LOAD page 2 normal after []",
            "disk in: LOAD page 1 normal runs, 0 of 8 MiB moved",
        )
    )


# -- the two agree, and a third that counts slices one by one --------------------------------------


def script(seed: int) -> list[tuple[CommandKind, int, list[int], Priority]]:
    """Random loads and stores; each may wait for earlier ones of its line."""
    rng = random.Random(seed)
    commands: list[tuple[CommandKind, int, list[int], Priority]] = []
    for number in range(NUM_PAGES - 1):
        kind = rng.choice((LOAD, LOAD, STORE))
        same = [i for i, command in enumerate(commands) if command[0] == kind]
        after = rng.sample(same, min(rng.choice((0, 0, 1, 2)), len(same)))
        commands.append((kind, number + 1, after, rng.choice(list(Priority))))
    return commands


def play(h: Harness, seed: int) -> list[list[int]]:
    """Pages of both lines in the order in which they ended; some are urged half-way."""
    with h.held(LOAD):
        gate = h.engine.submit(RELEASE, h.pages[0], (h.engine.submit(LOAD, h.pages[0]),))
        tickets: list[Ticket] = []
        for kind, page, after, priority in script(seed):
            waits = [tickets[i] for i in after] or [gate]
            tickets.append(h.engine.submit(kind, h.pages[page], tuple(waits), priority))
        for ticket in random.Random(seed).sample(tickets, 3):
            h.engine.urge(ticket)
    h.run_until_idle(tickets)
    return [in_order_of_end(*(t for t in tickets if t.kind == k)) for k in (LOAD, STORE)]


@pytest.mark.parametrize("seed", range(4))
def test_threads_and_clock_run_a_script_of_slices_in_the_same_order(seed: int) -> None:
    orders = []
    for harness in (ThreadHarness, VirtualHarness):
        h = harness(page_frames=4)
        orders.append(play(h, seed))
        h.close()
    assert orders[0] == orders[1]


class SliceBySlice:
    """The rules again, slowly: one line, one slice at a time, looking through all commands.

    It is told everything before: ``arrivals`` (ns, priority, number) and ``urges`` (ns, number).
    """

    def __init__(
        self, arrivals: list[tuple[int, int, int]], urges: list[tuple[int, int]], length: list[int]
    ) -> None:
        self.arrivals, self.urges, self.length = arrivals, urges, length

    def ends(self) -> list[int]:
        count = len(self.arrivals)
        moved, done = [0] * count, [-1] * count
        now = 0
        while min(done) < 0:
            ready = [i for i, (at, _, _) in enumerate(self.arrivals) if at <= now and done[i] < 0]
            if not ready:
                now = min(at for at, _, _ in self.arrivals if at > now)
                continue
            best = min(ready, key=lambda i: (self._priority(i, now), moved[i] == 0, i))
            moved[best] += 1
            now += SLICE_NS
            if moved[best] == self.length[best]:
                done[best] = now
        return done

    def _priority(self, command: int, now: int) -> int:
        urged = any(c == command and at <= now for at, c in self.urges)
        return 0 if urged else self.arrivals[command][1]


@pytest.mark.parametrize("seed", range(30))
def test_the_clock_is_exact_where_commands_overtake_each_other(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 14)
    lengths = [rng.randint(1, 6) for _ in range(count)]
    times = sorted(rng.randrange(20 * SLICE_NS) for _ in range(count))
    arrivals = [(at, rng.randint(0, 2), i) for i, at in enumerate(times)]
    urges = [(rng.randrange(40 * SLICE_NS), rng.randrange(count)) for _ in range(rng.randint(0, 3))]
    urges = [(at, c) for at, c in urges if at >= arrivals[c][0]]
    expected = SliceBySlice(arrivals, urges, lengths).ends()

    engine = VirtualEngine(SLICE * 100.0, slice_bytes=SLICE)
    pages = [pages_at(0, length)[i] for i, length in enumerate(lengths)]
    tickets: list[Ticket] = []
    events = [(at, 0, i) for i, (at, _, _) in enumerate(arrivals)]
    for at, kind, number in sorted(events + [(at, 1, c) for at, c in urges]):
        engine.advance(at - engine.now_ns())
        if kind:
            engine.urge(tickets[number])
        else:
            priority = Priority(arrivals[number][1])
            tickets.append(engine.submit(LOAD, pages[number], (), priority))
    engine.advance(10**12)
    assert all(engine.poll(t) for t in tickets)
    assert [t.done_ns for t in tickets] == expected
    assert [t.dur_ns for t in tickets] == [n * SLICE_NS for n in lengths]
    assert engine.is_idle()
