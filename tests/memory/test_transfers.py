"""Write-backs, errors and room: what the pager promises, one case each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from odc.errors import BudgetError, PageIOError
from odc.memory.engines.base import CommandKind, Ticket
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind, Op, Phase, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Pager, Tuning
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.prefetch import Prefetcher
from odc.memory.stations import Stations, Visit
from odc.memory.transfers import Transfers

PARAMETER = Kind.PARAMETER
PAGE = 2 * FRAME_BYTES
PAGE_NS = 10_000_000


class FixedPlan:
    """Wishes for the same pages, always; all others are never used again, the last used last."""

    scheduled = False
    utilization = 0.0

    def __init__(self, table: PageTable, wish: Sequence[int]) -> None:
        self.table, self.wish = table, list(wish)
        self.until = np.full(len(table.pages), 1e9)
        self.until[self.wish] = 1.0
        self.version = 0
        self._uses = 0

    def advance(self, visit: Visit, tokens: int, remaining: Sequence[int]) -> None:
        """Nothing ever changes."""

    def next_use(self, page: int) -> float:
        self._uses += 1
        return 1.0 if page in self.wish else 1e9 - self._uses

    def wanted(self) -> Iterator[tuple[int, int]]:
        self.table.left.clear()
        yield from ((page, 0) for page in self.wish if self.table.is_absent[page])

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Nor by hints."""


class Setup:
    """Groups of one frozen page each, room for a few, and a virtual clock of 10 ms a page."""

    def __init__(self, num_groups: int, num_pages: int, wish: Sequence[int] = ()) -> None:
        self.table = PageTable(PAGE)
        for group in range(num_groups):
            spec = GroupSpec(f"g{group}", PAGE, 0, False)
            self.table.add_group(spec, {})
        self.table.seal()
        self.failing: dict[tuple[CommandKind, int], BaseException] = {}
        self.started: list[tuple[CommandKind, int]] = []
        self.engine = VirtualEngine(PAGE * 100.0, fault=self._fault)
        self.transfers = Transfers(self.table, self.engine, 2 * num_pages, Tier.HOST)
        library = OrderLibrary(Stations(self.table, []))
        prefetcher: Prefetcher | None = FixedPlan(self.table, wish) if wish else None
        tuning = Tuning(gate=False)
        self.pager = Pager(
            self.table, library, self.transfers, prefetcher=prefetcher, tuning=tuning
        )
        self.pager.begin_pass(0)

    def _fault(self, ticket: Ticket) -> BaseException | None:
        key = (ticket.kind, ticket.page.page)
        self.started.append(key)
        return self.failing.get(key)

    def use(self, group: int, op: Op = Op.READ) -> None:
        self.pager.access(group, [(PARAMETER, op)], Phase.FORWARD)
        self.pager.release(group, PARAMETER)
        self.transfers.check()

    def stores(self, page: int) -> int:
        return self.started.count((CommandKind.STORE, page))

    def settle(self) -> None:
        self.engine.advance(100 * PAGE_NS)
        self.transfers.poll()
        self.transfers.check()


# -- write-backs -------------------------------------------------------------------------------


def test_a_clean_page_is_never_written() -> None:
    s = Setup(3, 1)
    for group in (0, 1, 2, 0, 1):
        s.use(group)
    assert s.pager.take().bytes_out == 0


def test_a_dirty_page_is_written_once_when_it_goes() -> None:
    s = Setup(3, 1)
    s.use(0, Op.WRITE)
    for group in (1, 2, 0, 1):
        s.use(group)
    assert s.stores(0) == 1
    assert s.pager.take().bytes_out == PAGE


def test_a_queued_write_back_is_taken_back_when_its_page_changes_again() -> None:
    s = Setup(4, 4)
    for group in (0, 1):
        s.use(group, Op.WRITE)
    s.transfers.store(0, early=True)  # starts
    s.engine.advance(1)
    s.transfers.poll()
    s.transfers.store(1, early=True)  # queued behind it
    s.use(1, Op.WRITE)
    s.settle()
    assert (s.stores(0), s.stores(1)) == (1, 0)
    assert not s.table.dirty[0] and s.table.dirty[1]
    assert s.pager.take().bytes_out == PAGE


def test_a_write_back_that_runs_while_its_page_changes_does_not_clean_it() -> None:
    s = Setup(3, 1)
    s.use(0, Op.WRITE)
    s.transfers.store(0, early=True)
    s.engine.advance(1)
    s.transfers.poll()
    s.use(0, Op.WRITE)
    s.settle()
    assert s.table.dirty[0]
    s.use(1)
    assert s.stores(0) == 2


def test_a_page_that_died_is_not_written() -> None:
    s = Setup(3, 3)
    s.pager.access(0, [(PARAMETER, Op.CREATE)], Phase.BACKWARD)
    s.use(1, Op.WRITE)
    s.transfers.store(1, early=True)
    s.engine.advance(1)
    s.pager.release(0, PARAMETER)
    s.transfers.store(0, early=True)
    s.pager.forget(0, PARAMETER)
    s.settle()
    assert s.stores(0) == 0
    assert s.table.state[0] == PageState.HOME and s.transfers.free == 4


def test_future_victims_are_cleaned_before_they_must_go() -> None:
    """Two dirty pages, a wish for a third that does not fit: one is written ahead of time."""
    s = Setup(4, 2, wish=[3])
    s.pager.tuning = Tuning(max_items=0)  # nothing is loaded ahead: cleaning only
    s.use(0, Op.WRITE)
    s.use(1, Op.WRITE)
    s.use(1)
    s.settle()
    assert s.stores(0) == 1 and not s.table.dirty[0]
    before = s.engine.now_ns()
    s.use(2)
    assert s.engine.now_ns() - before == PAGE_NS, "the eviction had to wait for a write"


def test_before_an_order_is_known_no_more_is_in_flight_than_was_tuned() -> None:
    """Thirty pages fit and all are wished for: three of 4 MiB at a time."""
    s = Setup(40, 30, wish=range(1, 40))
    assert s.pager.tuning.flight_bytes == 3 * PAGE
    for group in range(12):
        s.use(group)
        assert 0 < s.transfers.in_flight_bytes <= 3 * PAGE
        s.engine.advance(PAGE_NS // 2)


# -- evictions taken back ------------------------------------------------------------------------


def test_a_page_that_waits_for_its_write_is_there_again_when_it_is_needed() -> None:
    """Nothing is loaded and nothing is waited for; what is being written goes on being written."""
    s = Setup(4, 3)
    s.use(0, Op.WRITE)
    s.transfers.evict(0)
    loaded, before = s.started.count((CommandKind.LOAD, 0)), s.engine.now_ns()
    s.use(0)
    assert s.started.count((CommandKind.LOAD, 0)) == loaded
    assert s.engine.now_ns() == before and s.pager.counters.misses == 1
    s.settle()
    assert s.stores(0) == 1 and not s.table.dirty[0]
    assert s.transfers.free == 4, "the frames of one page of three"


def test_a_page_that_was_taken_back_and_changed_is_written_again() -> None:
    s = Setup(4, 3)
    s.use(0, Op.WRITE)
    s.transfers.evict(0)
    s.engine.advance(1)
    s.transfers.poll()  # its write has begun
    s.use(0, Op.WRITE)
    s.settle()
    assert s.table.dirty[0], "what was written is old"
    s.transfers.evict(0)
    s.settle()
    assert s.stores(0) == 2 and s.table.state[0] == PageState.HOME


def test_frames_that_another_load_counts_on_are_not_taken_back() -> None:
    s = Setup(4, 2)
    s.use(0, Op.WRITE)
    s.use(1)
    s.transfers.evict(0)
    s.transfers.load(2, -1)  # into the frames of page 0
    assert not s.transfers.rescue(0)
    s.use(0)
    assert s.table.state[0] == PageState.RESIDENT
    assert s.started.count((CommandKind.LOAD, 0)) == 2


# -- errors ------------------------------------------------------------------------------------


def test_a_page_whose_store_failed_is_still_resident_and_dirty() -> None:
    s = Setup(3, 1)
    s.use(0, Op.WRITE)
    s.failing[CommandKind.STORE, 0] = PageIOError("disk full", page=0, path="/home/pages")
    with pytest.raises(PageIOError, match="page 0 in /home/pages: disk full"):
        s.use(1)
    s.transfers.check()
    assert s.table.state[0] == PageState.RESIDENT and s.table.dirty[0]
    assert s.table.state[1] == PageState.HOME and s.table.pins[1] == 0
    assert s.transfers.in_flight_bytes == s.transfers.out_flight_bytes == 0
    s.failing.clear()
    s.use(1)  # now it works
    assert s.stores(0) == 2
    assert s.pager.take().bytes_out == PAGE


def test_an_early_write_back_that_fails_is_told_once_and_tried_again() -> None:
    s = Setup(2, 1)
    s.use(0, Op.WRITE)
    s.transfers.store(0, early=True)
    s.failing[CommandKind.STORE, 0] = PageIOError("no", page=0)
    with pytest.raises(PageIOError):
        s.settle()
    s.settle()
    assert s.table.state[0] == PageState.RESIDENT and s.table.dirty[0]
    s.failing.clear()
    s.use(1)
    assert s.stores(0) == 2


def test_a_page_that_could_not_be_read_is_at_home_and_its_frames_are_free() -> None:
    s = Setup(2, 1)
    s.failing[CommandKind.LOAD, 0] = PageIOError("bad block", page=0)
    with pytest.raises(PageIOError, match="page 0: bad block"):
        s.use(0)
    s.transfers.check()
    assert s.transfers.free == 2 and s.table.state[0] == PageState.HOME
    s.failing.clear()
    s.use(0)


def test_a_page_asked_for_again_while_its_store_fails_keeps_its_content() -> None:
    """It is on its way out, wanted back, and never left: nothing may be loaded over it."""
    s = Setup(3, 2)
    s.use(0, Op.WRITE)
    s.transfers.evict(0)
    s.failing[CommandKind.STORE, 0] = PageIOError("no", page=0)
    with pytest.raises(PageIOError):
        s.use(0)
    s.transfers.check()
    assert s.table.state[0] == PageState.RESIDENT and s.table.dirty[0]
    s.use(0)
    assert (CommandKind.LOAD, 0) not in s.started[2:]


def test_a_dead_page_whose_store_fails_is_given_up_all_the_same() -> None:
    s = Setup(2, 1)
    s.use(0, Op.WRITE)
    s.transfers.store(0, early=True)
    s.failing[CommandKind.STORE, 0] = PageIOError("no", page=0)
    s.engine.advance(1)
    s.pager.forget(0, PARAMETER)
    with pytest.raises(PageIOError):
        s.settle()
    assert not s.table.dirty[0]
    s.use(1)
    assert s.stores(0) == 1


# -- room --------------------------------------------------------------------------------------


def test_pinned_pages_that_leave_no_room_are_a_budget_error() -> None:
    s = Setup(4, 2)
    s.pager.access(0, [(PARAMETER, Op.READ)], Phase.FORWARD)
    s.pager.access(1, [(PARAMETER, Op.READ)], Phase.FORWARD)
    with pytest.raises(BudgetError, match=r"in use by g0, g1, g2; 4 frames .* use at least 6"):
        s.pager.access(2, [(PARAMETER, Op.READ)], Phase.FORWARD)
    assert s.table.pins[2] == 0
    s.pager.release(0, PARAMETER)
    s.use(2)


def test_a_prefetch_that_is_needed_is_not_taken_back_for_room() -> None:
    """Both pages of an access, one of them on its way already, and no frame to spare."""
    table = PageTable(FRAME_BYTES)
    table.add_group(GroupSpec("pair", 2 * FRAME_BYTES, 0, False), {})
    table.add_group(GroupSpec("other", FRAME_BYTES, 0, False), {})
    table.seal()
    engine = VirtualEngine(PAGE * 100.0)
    transfers = Transfers(table, engine, 2, Tier.HOST)
    pager = Pager(table, OrderLibrary(Stations(table, [])), transfers)
    pager.begin_pass(0)
    transfers.load(2, -1)
    engine.poll(transfers.loading[2])  # starts
    transfers.load(0, -1)  # queued: could be taken back
    pager.access(0, [(PARAMETER, Op.READ)], Phase.FORWARD)
    assert [table.state[p] for p in (0, 1)] == [PageState.RESIDENT] * 2


def test_a_wrong_prefetch_gives_way_to_a_need() -> None:
    s = Setup(6, 3)
    for page in (3, 4, 5):
        s.transfers.load(page, -1)
    s.engine.poll(s.transfers.loading[3])  # starts; the others are queued
    s.use(0)
    assert (CommandKind.LOAD, 5) not in s.started
    assert s.pager.take().bytes_in == 3 * PAGE


def test_frames_that_are_back_are_used_before_frames_that_are_not() -> None:
    s = Setup(4, 2)
    s.use(0, Op.WRITE)
    s.use(1)
    s.transfers.evict(0)  # behind a write of 10 ms
    s.transfers.evict(1)  # at once
    before = s.engine.now_ns()
    s.use(2)
    assert s.engine.now_ns() - before == PAGE_NS


def test_an_eviction_is_taken_back_when_the_load_that_counted_on_part_of_it_is_cancelled() -> None:
    """Its frames come back in two parts then."""
    s = Setup(3, 2)
    for group in (0, 1):
        s.use(group, Op.WRITE)
    transfers = s.transfers
    transfers.num_frames += 1  # the load takes one free frame and one of the page that leaves
    transfers.free += 1
    transfers.evict(0)
    transfers.load(2, -1)
    assert not transfers.rescue(0)
    assert transfers.cancel_one_prefetch()
    transfers.arrived.clear()
    transfers.rescue_all()
    assert s.table.state[0] == PageState.RESIDENT
    assert transfers.arrived == [0]  # may be evicted again
    s.settle()
    assert s.stores(0) == 1  # what was being stored went on being stored
    assert not s.table.is_dirty[0]


def test_the_time_until_stores_end_adds_up_in_the_order_of_the_queue() -> None:
    s = Setup(3, 3)
    for group in range(3):
        s.use(group, Op.WRITE)
    for page in (2, 0):
        s.transfers.store(page, early=False)
    assert s.transfers.stored_ns(1.0) == {2: PAGE, 0: 2 * PAGE}


def victims(s: Setup) -> list[int]:
    """Of the first three pages."""
    return [page for page in s.pager.room.victims().first() if page < 3]


def test_where_stores_queue_pages_go_by_what_waiting_and_loading_them_again_costs() -> None:
    """Page 1 is stored before 0, both are not used again; 2 is clean and is."""
    s = Setup(5, 5, wish=[3])
    for group in (0, 1):
        s.use(group, Op.WRITE)
    s.use(2)
    room, until = s.pager.room, s.pager.prefetcher.until  # type: ignore[union-attr]
    room.policy.planned = True  # type: ignore[misc]
    room._take_order()
    unknown, load_ns = 1e17, s.transfers.load_ns(PAGE)
    assert load_ns == pytest.approx(PAGE_NS)
    until[:4] = unknown, unknown - 64.0, 10 * load_ns, 1.0
    for page in (1, 0):
        s.transfers.store(page, early=False)
    assert victims(s) == [2, 1, 0], "far from here: half a load, before one store and two"
    until[2] = 2 * load_ns
    room.queue.invalidate()
    assert victims(s) == [1, 2, 0], "soon: somewhat more than a load"
    s.transfers.load(4, -1)
    until[2] = 10 * load_ns
    room.queue.invalidate()
    assert victims(s) == [1, 2, 0], "while the line in is busy nothing waits for the store"
    s.settle()
    assert victims(s) == [0, 1, 2], "all are clean: the one used last"


def test_a_dirty_page_that_is_not_being_stored_has_its_store_to_wait_for() -> None:
    s = Setup(3, 3, wish=[2])
    s.use(0, Op.WRITE)
    s.use(1)
    room, until = s.pager.room, s.pager.prefetcher.until  # type: ignore[union-attr]
    room.policy.planned = True  # type: ignore[misc]
    room._take_order()
    until[:3] = 1e17, 100 * PAGE_NS, 1.0
    assert victims(s)[:2] == [1, 0]


def test_frames_are_counted_on_in_the_order_in_which_stores_end() -> None:
    """Page 1 is stored before 0, though it is evicted after it."""
    s = Setup(4, 2)
    for group in (0, 1):
        s.use(group, Op.WRITE)
    for page in (1, 0):
        s.transfers.store(page, early=False)
    for page in (0, 1):
        s.transfers.evict(page)
    s.transfers.load(2, -1)
    s.transfers.load(3, -1)
    s.transfers.check()
    s.settle()
    loads = [page for kind, page in s.started if kind == CommandKind.LOAD]
    assert loads[-2:] == [2, 3]
    arrived = s.transfers.arrived[-2:]
    assert arrived == [2, 3]


def test_an_early_store_of_a_page_that_has_to_go_stands_behind_no_later_one() -> None:
    s = Setup(4, 3)
    for group in (0, 1, 2):
        s.use(group, Op.WRITE)
    s.transfers.store(0, early=False)
    s.transfers.store(1, early=True)
    s.transfers.evict(1)
    s.transfers.evict(2)
    s.settle()
    stores = [page for kind, page in s.started if kind == CommandKind.STORE]
    assert stores == [0, 1, 2]
    assert s.stores(1) == 1


def test_what_was_to_leave_stays_when_all_is_recalled_and_queued_stores_with_it() -> None:
    s = Setup(3, 3)
    for group in range(3):
        s.use(group, Op.WRITE)
    for page in range(3):
        s.transfers.evict(page)
    s.engine.advance(PAGE_NS // 2)
    s.transfers.recall_all()
    s.transfers.check()
    assert list(s.transfers.storing) == [0], "it has begun"
    assert s.transfers.bytes_out == PAGE
    s.settle()
    assert [s.stores(page) for page in range(3)] == [1, 0, 0]
    assert s.table.is_dirty[1] and s.table.is_dirty[2] and not s.table.is_dirty[0]


def test_the_way_in_is_not_busy_with_what_was_cancelled() -> None:
    s = Setup(5, 4)
    s.use(0)  # a rate is known
    for page in (1, 2, 3):
        s.transfers.load(page, -1)
    s.engine.advance(PAGE_NS // 2)
    assert s.transfers.in_busy_ns == pytest.approx(2.5 * PAGE_NS)
    while s.transfers.cancel_one_prefetch():
        pass
    assert s.transfers.in_busy_ns == pytest.approx(0.5 * PAGE_NS)
