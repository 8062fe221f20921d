"""Updates at home, on every engine: what they wait for, and what waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from odc.errors import PageIOError
from odc.memory.engines.base import CommandKind, HomeUpdate, Priority, Ticket
from odc.memory.frames import FRAME_BYTES
from tests.memory.engine_harness import Harness, ThreadHarness, VirtualHarness, resident

LOAD, STORE, UPDATE = CommandKind.LOAD, CommandKind.STORE, CommandKind.UPDATE


def nothing() -> None:
    pass


def update(
    h: Harness, *pages: int, run: Callable[[], None] = nothing, after: tuple[Ticket, ...] = ()
) -> Ticket:
    """An update that goes over some pages, the first of which names it."""
    work = HomeUpdate(pages, FRAME_BYTES, run)
    return h.engine.submit(UPDATE, h.pages[pages[0]], after, Priority.NORMAL, work)


def begin_ns(ticket: Ticket) -> int:
    return ticket.done_ns - ticket.dur_ns


def test_an_update_waits_for_stores_of_its_pages_and_loads_and_stores_wait_for_it(
    make: Callable[..., Harness],
) -> None:
    h = make()
    resident(h, 0, 1, 2)
    with h.held(STORE):
        store = h.engine.submit(STORE, h.pages[2])
        work = update(h, 1, 2)
        load = h.engine.submit(LOAD, h.pages[1])
        again = h.engine.submit(STORE, h.pages[2])
        other = h.engine.submit(LOAD, h.pages[5])
        h.engine.wait(other)
        assert not h.engine.poll(work) and not h.engine.poll(load)
    h.run_until_idle([store, work, load, again])
    assert store.done_ns <= begin_ns(work)
    assert work.done_ns <= begin_ns(load) and work.done_ns <= begin_ns(again)


def test_updates_of_one_page_run_one_after_the_other(make: Callable[..., Harness]) -> None:
    h = make()
    works = [update(h, 1, 2), update(h, 1, 3), update(h, 2, 1)]
    load = h.engine.submit(LOAD, h.pages[1])
    h.engine.wait(load)
    h.run_until_idle(works)
    ends = [t.done_ns for t in (*works, load)]
    assert ends == sorted(ends)


def test_a_wait_for_a_load_makes_its_update_urgent(make: Callable[..., Harness]) -> None:
    h = make()
    resident(h, 0, *range(1, 9))
    with h.held(STORE):
        store = h.engine.submit(STORE, h.pages[7])
        works = [update(h, page, after=(store,)) for page in range(1, 6)]
        load = h.engine.submit(LOAD, h.pages[5])
        h.engine.urge(load)
    h.engine.wait(load)
    h.run_until_idle(works)
    assert works[4].done_ns == min(t.done_ns for t in works)


def test_an_update_that_is_taken_back_holds_nothing_up(make: Callable[..., Harness]) -> None:
    h = make()
    resident(h, 0, 1)
    with h.held(STORE):
        work = update(h, 1, after=(h.engine.submit(STORE, h.pages[1]),))
        load = h.engine.submit(LOAD, h.pages[1])
        assert h.engine.cancel(work)
    h.engine.wait(load)
    assert work.cancelled and work.done_ns < 0


def test_a_failed_update_fails_what_waits_for_it() -> None:
    h = ThreadHarness()
    try:
        resident(h, 0)
        error = PageIOError("no", page=1)

        def fail() -> None:
            raise error

        with h.held(STORE) as first:
            work = update(h, 1, 2, run=fail, after=(first,))
            load = h.engine.submit(LOAD, h.pages[1])
        with pytest.raises(PageIOError):
            h.engine.wait(load)
        assert work.error is error and load.error is error
        assert h.pool.num_free == h.pool.num_frames - 1
    finally:
        h.close()


def test_updates_run_on_a_thread_of_their_own_and_stop_no_transfer() -> None:
    h = ThreadHarness()
    try:
        go, threads = threading.Event(), []

        def slow() -> None:
            threads.append(threading.current_thread().name)
            go.wait(20.0)

        work = update(h, 1, run=slow)
        for page in (2, 3):
            h.engine.wait(h.engine.submit(LOAD, h.pages[page]))
        assert work.done_ns < 0
        go.set()
        h.engine.wait(work)
        assert threads == ["odc-updates"]
    finally:
        h.close()


def test_on_the_clock_an_update_takes_its_bytes_over_its_rate() -> None:
    h = VirtualHarness()
    work = update(h, 1, 2)
    h.engine.wait(work)
    assert work.dur_ns == 10_000_000
    assert h.engine.now_ns() == 10_000_000
