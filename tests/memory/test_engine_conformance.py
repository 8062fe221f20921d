"""Every TransferEngine keeps these promises. The scheduler relies on nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from odc.errors import OdcError
from odc.memory.engines.base import CommandKind, Priority, Ticket
from odc.memory.frames import FRAME_BYTES
from tests.memory.engine_harness import (
    NUM_PAGES,
    Harness,
    ThreadHarness,
    VirtualHarness,
    in_order_of_end,
    no_fault,
    resident,
)

LOAD, STORE = CommandKind.LOAD, CommandKind.STORE
CREATE, RELEASE = CommandKind.CREATE, CommandKind.RELEASE


# -- order -----------------------------------------------------------------------------------------


def test_equals_run_in_order_of_submission(make: Callable[..., Harness]) -> None:
    h = make()
    with h.held(LOAD):
        tickets = [h.engine.submit(LOAD, h.pages[p]) for p in (5, 3, 9, 1)]
    h.run_until_idle(tickets)
    assert in_order_of_end(*tickets) == [5, 3, 9, 1]


def test_the_highest_priority_runs_first(make: Callable[..., Harness]) -> None:
    h = make()
    with h.held(LOAD):
        tickets = [
            h.engine.submit(LOAD, h.pages[page], (), priority)
            for page, priority in (
                (1, Priority.EARLY),
                (2, Priority.NORMAL),
                (3, Priority.URGENT),
                (4, Priority.EARLY),
                (5, Priority.URGENT),
            )
        ]
    h.run_until_idle(tickets)
    assert in_order_of_end(*tickets) == [3, 5, 2, 1, 4]


def test_a_wait_overtakes_what_is_queued(make: Callable[..., Harness]) -> None:
    h = make()
    with h.held(LOAD):
        ahead = [h.engine.submit(LOAD, h.pages[p]) for p in range(1, 9)]
        needed = h.engine.submit(LOAD, h.pages[9])
        h.engine.urge(needed)
    h.engine.wait(needed)
    h.run_until_idle(ahead)
    assert in_order_of_end(needed, *ahead) == [9, *range(1, 9)]


def test_a_wait_makes_all_that_it_waits_for_urgent(make: Callable[..., Harness]) -> None:
    """A load over a frame that is still being written home: the write may not stay queued."""
    h = make()
    resident(h, *range(8))
    with h.held(STORE):
        early = [h.engine.submit(STORE, h.pages[p], (), Priority.EARLY) for p in range(1, 7)]
        store = h.engine.submit(STORE, h.pages[7], (), Priority.EARLY)
        release = h.engine.submit(RELEASE, h.pages[7], (store,))
        load = h.engine.submit(LOAD, h.pages[8], (release,))
        h.engine.urge(load)
    h.engine.wait(load)
    h.run_until_idle(early)
    assert all(store.done_ns <= t.done_ns for t in early)
    assert store.done_ns <= release.done_ns <= load.done_ns


def test_a_command_starts_after_all_that_it_waits_for(make: Callable[..., Harness]) -> None:
    h = make()
    resident(h, 0, 1, 2)
    with h.held(STORE) as first:
        stores = [h.engine.submit(STORE, h.pages[p]) for p in (1, 2)]
        release = h.engine.submit(RELEASE, h.pages[1], tuple(stores))
        load = h.engine.submit(LOAD, h.pages[3], (release, first))
        other = h.engine.submit(LOAD, h.pages[4])
        h.engine.wait(other)  # a command that is ready is not held up by one that is not
        assert not h.engine.poll(release) and not h.engine.poll(load)
    h.run_until_idle([*stores, release, load, other])
    assert max(t.done_ns for t in stores) <= release.done_ns - release.dur_ns
    assert release.done_ns <= load.done_ns - load.dur_ns


def test_a_command_after_finished_ones_is_ready_at_once(make: Callable[..., Harness]) -> None:
    h = make()
    done = h.engine.submit(LOAD, h.pages[1])
    h.engine.wait(done)
    after = h.engine.submit(LOAD, h.pages[2], (done,))
    h.engine.wait(after)
    assert h.engine.poll(done) and h.engine.poll(after)


def test_directions_do_not_wait_for_each_other(make: Callable[..., Harness]) -> None:
    h = make()
    resident(h, 0)
    with h.held(STORE) as held:
        load = h.engine.submit(LOAD, h.pages[1])
        release = h.engine.submit(CREATE, h.pages[2])
        h.engine.wait(release)
        assert not h.engine.poll(held)
        if h.name == "threads":  # the virtual store and load take equally long
            h.engine.wait(load)
            assert not h.engine.poll(held)


# -- cancel ----------------------------------------------------------------------------------------


def test_a_queued_command_can_be_taken_back(make: Callable[..., Harness]) -> None:
    h = make()
    ran: list[int] = []
    h.fault = lambda kind, page: ran.append(page)  # type: ignore[func-returns-value]
    with h.held(LOAD):
        dropped = h.engine.submit(LOAD, h.pages[1])
        kept = h.engine.submit(LOAD, h.pages[2])
        assert h.engine.cancel(dropped)
        assert h.engine.cancel(dropped), "a second cancel finds it taken back"
    h.run_until_idle([kept])
    assert ran == [0, 2]
    assert not h.engine.poll(dropped)
    h.engine.wait(dropped)  # returns


def test_a_started_command_runs_to_its_end(make: Callable[..., Harness]) -> None:
    h = make()
    with h.held(LOAD) as started:
        assert not h.engine.cancel(started)
    h.engine.wait(started)
    assert h.engine.poll(started)
    assert not h.engine.cancel(started)


def test_what_waits_for_a_cancelled_command_goes_on_without_it(
    make: Callable[..., Harness],
) -> None:
    h = make()
    resident(h, 0, 1)
    with h.held(STORE):
        store = h.engine.submit(STORE, h.pages[1])
        load = h.engine.submit(LOAD, h.pages[2], (store,))
        assert not h.engine.poll(load)
        before = h.engine.now_ns()
        assert h.engine.cancel(store)
        h.engine.wait(load)
    assert load.done_ns - load.dur_ns >= before, "it ran before its dependency was taken back"


# -- errors ----------------------------------------------------------------------------------------


def fail(kinds: CommandKind, page: int) -> Callable[[CommandKind, int], BaseException | None]:
    error = OSError(f"{kinds.name} {page}")
    return lambda kind, at: error if (kind, at) == (kinds, page) else None


def test_an_error_surfaces_at_poll_and_at_wait(make: Callable[..., Harness]) -> None:
    h = make()
    h.fault = fail(LOAD, 3)
    ticket = h.engine.submit(LOAD, h.pages[3])
    for _ in range(2):
        with pytest.raises(OSError, match="LOAD 3"):
            h.engine.wait(ticket)
        with pytest.raises(OSError, match="LOAD 3"):
            h.engine.poll(ticket)
    h.engine.wait(h.engine.submit(LOAD, h.pages[4]))  # the engine lives on


def test_an_error_fails_all_that_waits_for_it(make: Callable[..., Harness]) -> None:
    h = make()
    resident(h, 1)
    h.fault = fail(STORE, 1)
    store = h.engine.submit(STORE, h.pages[1])
    release = h.engine.submit(RELEASE, h.pages[1], (store,))
    load = h.engine.submit(LOAD, h.pages[2], (release,))
    with pytest.raises(OSError, match="STORE 1"):
        h.engine.wait(load)
    late = h.engine.submit(RELEASE, h.pages[1], (store,))
    with pytest.raises(OSError, match="STORE 1"):
        h.engine.wait(late)


def test_frames_of_a_failed_store_stay_where_they_are() -> None:
    h = ThreadHarness()
    resident(h, 1)
    h.fault = fail(STORE, 1)
    release = h.engine.submit(RELEASE, h.pages[1], (h.engine.submit(STORE, h.pages[1]),))
    with pytest.raises(OSError, match="STORE 1"):
        h.engine.wait(release)
    assert h.pool.num_free == NUM_PAGES - 1
    h.fault = no_fault
    h.engine.wait(h.engine.submit(STORE, h.pages[1]))
    h.engine.wait(h.engine.submit(RELEASE, h.pages[1]))
    assert h.pool.num_free == NUM_PAGES
    h.close()


@pytest.mark.parametrize("kind", [LOAD, CREATE])
def test_a_failed_way_in_leaves_its_frames_in_the_pool(
    kind: CommandKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = ThreadHarness()
    if kind == LOAD:
        h.fault = fail(LOAD, 1)
    else:

        def refuse(address: int, num_frames: int) -> None:
            raise OSError("no mappings left")

        monkeypatch.setattr(h.pool, "map", refuse)
    ticket = h.engine.submit(kind, h.pages[1])  # does not raise here
    with pytest.raises(OSError):
        h.engine.wait(ticket)
    assert h.pool.num_free == NUM_PAGES
    h.close()


# -- time ------------------------------------------------------------------------------------------


def test_submit_never_blocks(make: Callable[..., Harness]) -> None:
    h = make()
    with h.held(LOAD) as held:
        tickets = [h.engine.submit(LOAD, h.pages[p], (held,)) for p in range(1, NUM_PAGES)]
        assert not any(h.engine.poll(t) for t in tickets)
    h.run_until_idle(tickets)


def test_a_transfer_takes_as_long_as_the_line_needs(make: Callable[..., Harness]) -> None:
    bandwidth = FRAME_BYTES * 200.0  # 5 ms a page
    h = make(bandwidth=bandwidth)
    start = h.engine.now_ns()
    loads = [h.engine.submit(LOAD, h.pages[p]) for p in range(6)]
    for number, ticket in enumerate(loads, start=1):
        h.engine.wait(ticket)
        least = int(number * FRAME_BYTES / bandwidth * 1e9)
        assert ticket.done_ns >= start + least
        assert h.engine.now_ns() >= ticket.done_ns
        assert ticket.dur_ns >= least // number
    ends = [t.done_ns for t in loads]
    assert all(b - a >= 5_000_000 for a, b in zip(ends, ends[1:], strict=False))


def test_the_line_is_full_duplex(make: Callable[..., Harness]) -> None:
    """Ten pages each way end long before twenty pages one way would."""
    h = make(bandwidth=FRAME_BYTES * 200.0)
    resident(h, *range(10))
    start = h.engine.now_ns()
    stores = [h.engine.submit(STORE, h.pages[p]) for p in range(10)]
    loads = [h.engine.submit(LOAD, h.pages[p]) for p in range(10, 20)]
    for ticket in [*stores, *loads]:
        h.engine.wait(ticket)
    both = max(t.done_ns for t in [*stores, *loads]) - start
    assert both >= 10 * 5_000_000
    overlap = min(stores[-1].done_ns, loads[-1].done_ns) - max(
        t[0].done_ns - t[0].dur_ns for t in (stores, loads)
    )
    assert overlap > 0.5 * both


def test_maps_and_unmaps_do_not_hold_a_line(make: Callable[..., Harness]) -> None:
    h = make(bandwidth=FRAME_BYTES * 2.0)  # half a second a page
    resident(h, 0)
    h.engine.wait(h.engine.submit(RELEASE, h.pages[0]))
    start = h.engine.now_ns()
    ticket = h.engine.submit(CREATE, h.pages[1])
    h.engine.wait(ticket)
    assert ticket.done_ns - start < 500_000_000


def test_the_line_does_not_drift_when_threads_wake_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sleep ends 2 ms late; the line's clock still ticks by bytes / bandwidth."""
    h = ThreadHarness(bandwidth=FRAME_BYTES * 200.0)
    real = time.sleep
    monkeypatch.setattr("odc.memory.engines.threads.time.sleep", lambda s: real(s + 0.002))
    loads = [h.engine.submit(LOAD, h.pages[p]) for p in range(8)]
    h.run_until_idle(loads)
    steps = [b.done_ns - a.done_ns for a, b in zip(loads, loads[1:], strict=False)]
    assert sum(s == int(FRAME_BYTES / h.engine.link_bandwidth * 1e9) for s in steps) >= 5
    h.close()


def test_a_wait_that_takes_too_long_shows_the_queues() -> None:
    h = ThreadHarness(timeout_s=0.2)
    with h.held(LOAD):
        store = h.engine.submit(STORE, h.pages[2])
        h.engine.wait(store)
        blocked = h.engine.submit(LOAD, h.pages[5])
        waiting = h.engine.submit(RELEASE, h.pages[6], (blocked,))
        with pytest.raises(OdcError, match=r"page 6: RELEASE not done") as caught:
            h.engine.wait(waiting)
        told = str(caught.value)
        assert "in: LOAD page 0 normal runs, 0 of 2 MiB moved\n" in told
        assert "in: LOAD page 5 urgent after []" in told
        assert "moves: RELEASE page 6 urgent after ['LOAD 5']" in told
        h.engine.cancel(waiting)
        h.engine.cancel(blocked)
    h.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_is_gone_is_named_instead_of_waited_for_in_silence() -> None:
    h = ThreadHarness(timeout_s=0.2)

    def end_the_thread(*args: object) -> None:
        raise SystemExit

    h.engine._note = end_the_thread  # type: ignore[method-assign]
    ticket = h.engine.submit(LOAD, h.pages[1])
    with pytest.raises(OdcError, match=r"LOAD not done \(after 0.2 s\)[^$]*ended: odc-in\n"):
        h.engine.wait(ticket)
    h.close()


def test_a_command_that_can_never_run_shows_the_queues() -> None:
    h = VirtualHarness()
    stranger = Ticket(LOAD, h.pages[9], Priority.NORMAL, 0, 0)
    ticket = h.engine.submit(LOAD, h.pages[1], (stranger,))
    with pytest.raises(OdcError, match=r"page 1: LOAD can never run\nin: LOAD page 1 urgent after"):
        h.engine.wait(ticket)


def test_a_closed_engine_starts_nothing_and_says_so() -> None:
    h = ThreadHarness()
    ran = h.moved
    with h.held(LOAD):
        queued = h.engine.submit(LOAD, h.pages[1])
        h.engine._stopped = True
    h.close()
    with pytest.raises(OdcError, match="the engine is closed"):
        h.engine.wait(queued)
    assert ran == [("LOAD", 0)]


# -- the two agree ---------------------------------------------------------------------------------


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


def play(h: Harness, commands: list[tuple[CommandKind, int, list[int], Priority]]) -> list[Ticket]:
    with h.held(LOAD):
        gate = h.engine.submit(RELEASE, h.pages[0], (h.engine.submit(LOAD, h.pages[0]),))
        tickets: list[Ticket] = []
        for kind, page, after, priority in commands:
            waits = [tickets[i] for i in after] or [gate]
            tickets.append(h.engine.submit(kind, h.pages[page], tuple(waits), priority))
    h.run_until_idle(tickets)
    return tickets


@pytest.mark.parametrize("seed", range(6))
def test_threads_and_clock_run_a_script_in_the_same_order(seed: int) -> None:
    """Within a line, order is a function of the commands; times agree within the machine's."""
    commands = script(seed)
    bandwidth = FRAME_BYTES * 100.0
    orders: list[list[list[int]]] = []
    spans: list[int] = []
    for harness in (ThreadHarness, VirtualHarness):
        h = harness(bandwidth=bandwidth)
        tickets = play(h, commands)
        orders.append(
            [in_order_of_end(*(t for t in tickets if t.kind == k)) for k in (LOAD, STORE)]
        )
        spans.append(max(t.done_ns for t in tickets) - min(t.done_ns - t.dur_ns for t in tickets))
        h.close()
    assert orders[0] == orders[1]
    assert 0.9 < spans[0] / spans[1] < 3.0
