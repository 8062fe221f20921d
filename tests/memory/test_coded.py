"""Pages that are coded at home: what they take there, what moves, and how long that lasts."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from odc.memory.coded import CodedHome, page_bytes
from odc.memory.engines.base import SLICE_BYTES, CommandKind, Priority
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind, Op, Phase, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.home import DiskHome, HostHome
from odc.memory.home_plan import HomeOptions, plan_home
from odc.memory.machine import Machine
from odc.memory.manager import MemoryManager
from odc.memory.orders import OrderLibrary
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.replay.ratios import read_bytes
from odc.memory.replay.workload import Bundle, RecordedVisit, Workload
from odc.memory.scores import PopularityScorer
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.train.recorder import page_rows

MIB = 1 << 20
NUM_BYTES = 21 * MIB + 300  # of the coded group: pages of 16 MiB and 6, slices of 8, 8 and 6
PAGE = 16 * MIB


class Halves:
    """Keeps the first of two bytes, in which the test writes the same number twice, and 10 more."""

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        self.bytes = np.zeros(num_bytes, np.uint8)

    def stored_bytes(self, begin: int, end: int) -> int:
        return (end - begin) // 2 + 10

    def encode(self, begin: int, end: int, image: memoryview) -> None:
        np.frombuffer(image, np.uint8)[: (end - begin) // 2] = self.bytes[begin:end:2]

    def decode(self, begin: int, end: int, image: memoryview) -> None:
        halves = np.frombuffer(image, np.uint8)[: (end - begin) // 2]
        self.bytes[begin:end] = np.repeat(halves, 2)


def coded_table(block_bytes: int = 4096) -> tuple[PageTable, Halves]:
    """A coded frozen group between a group that is trained and one that is frozen as it is."""
    table, codec = PageTable(PAGE), Halves()
    table.add_group(GroupSpec("a", 3 * MIB, 1, True), {})
    frozen = GroupSpec("b (frozen)", NUM_BYTES, 0, False)
    table.add_group(frozen, {}, lambda begin, end: page_bytes(codec, begin, end, block_bytes))
    table.add_group(GroupSpec("c (frozen)", 3 * MIB, 0, False), {})
    table.seal()
    return table, codec


def coded_pages(table: PageTable) -> list:
    return [table.pages[p] for p in table.of(1, Kind.PARAMETER)]


def test_a_coded_page_takes_its_bytes_at_home_and_its_frames_on_the_device() -> None:
    table, _ = coded_table()
    large, small = coded_pages(table)
    assert (large.num_bytes, large.num_frames) == (16 * MIB, 8)
    assert large.home_bytes == 2 * (4 * MIB + 4096)  # two slices, each in whole blocks
    assert (small.num_bytes, small.num_frames) == (5 * MIB + 4096, 3)
    assert small.home_bytes == (5 * MIB + 300) // 2 // 4096 * 4096 + 4096
    assert [table.span_of(p) for p in (large, small)] == [(0, PAGE), (PAGE, NUM_BYTES)]
    others = [p for p in table.pages if p.group != 1]
    assert all(p.home_bytes == p.num_bytes for p in others)
    ends = [(p.offset, p.offset + p.room_bytes) for p in table.pages]
    ends.sort()
    assert all(b == c for (_, b), (c, _) in zip(ends, ends[1:], strict=False))
    assert all(offset % 4096 == 0 for offset, _ in ends)
    assert ends[-1][1] == table.home_bytes + table.gradient_bytes


def test_images_for_host_memory_are_not_filled_up_to_blocks_of_a_disk() -> None:
    assert HomeOptions("host").block_bytes == 64
    assert HomeOptions("disk").block_bytes == HomeOptions("host+disk").block_bytes == 4096
    table, _ = coded_table(64)
    assert coded_pages(table)[0].home_bytes == 2 * (4 * MIB + 64)


def test_preflight_and_placement_count_the_coded_bytes() -> None:
    table, _ = coded_table()
    machine = Machine(1 << 34, 1 << 34)
    coded = sum(p.room_bytes for p in coded_pages(table))
    for kind, name in (("host", "host_bytes"), ("disk", "disk_bytes")):
        needs = plan_home(table, HomeOptions(kind), machine, frame_bytes=0).needs
        rest = (4 + 4 + 4) * MIB + (4 * MIB if kind == "disk" else 0)  # gradients are spare
        assert getattr(needs, name) == coded + rest
    small = plan_home(table, HomeOptions("host+disk", None, 12 * MIB), machine, frame_bytes=0)
    assert small.needs.host_bytes + small.needs.spare_bytes <= 12 * MIB
    assert small.needs.host_bytes + small.needs.spare_bytes + small.needs.disk_bytes == sum(
        p.room_bytes for p in table.pages
    )


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_was_stored_slice_by_slice_is_loaded_so(kind: str, tmp_path: Path) -> None:
    table, codec = coded_table()
    size = table.home_bytes + table.gradient_bytes
    inner = HostHome(size) if kind == "host" else DiskHome(size, tmp_path)
    home = CodedHome(inner, table, {1: codec}, 4096)
    rng = np.random.default_rng(0)
    content = np.repeat(rng.integers(0, 256, NUM_BYTES // 2, np.uint8), 2)
    codec.bytes[:] = content
    pages = coded_pages(table)
    slices = [
        (page, at, min(SLICE_BYTES, page.num_bytes - at))
        for page in pages
        for at in range(0, page.num_bytes, SLICE_BYTES)
    ]
    plain = next(p for p in table.pages if p.group == 2)
    raw = (ctypes.c_uint8 * 4096).from_buffer(mmap.mmap(-1, 4096))  # at a block's beginning
    raw[:200] = range(200)
    home.store(plain.page, plain.offset, ctypes.addressof(raw), 4096)
    for page, at, length in slices:
        home.store(page.page, page.offset + at, 0, length)
    codec.bytes[:] = 0
    for page, at, length in reversed(slices):
        home.load(page.page, page.offset + at, 0, length)
    assert np.array_equal(codec.bytes, content)
    again = (ctypes.c_uint8 * 4096).from_buffer(mmap.mmap(-1, 4096))
    home.load(plain.page, plain.offset, ctypes.addressof(again), 4096)
    assert bytes(again[:200]) == bytes(range(200))
    moved = sum(p.home_bytes for p in pages) + 4096
    traffic = home.traffic[Tier(Tier.HOST if kind == "host" else Tier.DISK)]
    assert (traffic.bytes_in, traffic.bytes_out) == (moved, moved)
    home.close()


def test_on_the_virtual_clock_a_load_takes_as_long_as_its_bytes_at_home() -> None:
    table, _ = coded_table()
    engine = VirtualEngine(1e9)
    for page in table.pages:
        ticket = engine.submit(CommandKind.LOAD, page)
        engine.wait(ticket)
        assert ticket.dur_ns == page.home_bytes
        assert ticket.moved_bytes == page.num_bytes


def test_a_demand_overtakes_a_coded_page_between_its_slices() -> None:
    table, _ = coded_table()
    large, small = coded_pages(table)
    engine = VirtualEngine(1e9)
    ahead = engine.submit(CommandKind.LOAD, large, (), Priority.NORMAL)
    engine.advance(1000)
    demand = engine.submit(CommandKind.LOAD, small, (), Priority.URGENT)
    engine.wait(demand)
    assert demand.done_ns - demand.dur_ns == large.home_bytes // 2  # the end of the first slice
    assert ahead.moved_bytes == SLICE_BYTES
    engine.wait(ahead)
    assert ahead.dur_ns == large.home_bytes


def test_the_books_count_the_coded_bytes() -> None:
    table, _ = coded_table()
    engine = VirtualEngine(1e9)
    transfers = Transfers(table, engine, 64, Tier.HOST)
    for page in coded_pages(table):
        transfers.load(page.page, 0)
        transfers.settle(page.page)
    expected = sum(p.home_bytes for p in coded_pages(table))
    assert transfers.bytes_in == transfers.total_in == expected
    assert transfers.bytes_per_ns == pytest.approx(1.0)
    assert transfers.used_bytes == (8 + 3) * FRAME_BYTES


def test_a_trace_keeps_the_bytes_at_home_and_an_old_one_has_none() -> None:
    table, _ = coded_table()
    rows = list(page_rows(table))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    again = PageTable.of_trace(columns)
    assert [p.home_bytes for p in again.pages] == [p.home_bytes for p in table.pages]
    assert [p.num_frames for p in again.pages] == [p.num_frames for p in table.pages]
    visit = RecordedVisit(
        0, 0, Phase.FORWARD, 0, 1, [Bundle(1, [(Kind.PARAMETER, Op.READ, 0)])], True
    )
    assert read_bytes(Workload(columns, [visit], [])) == sum(
        p.home_bytes for p in coded_pages(table)
    )
    del columns["home_bytes"]
    assert all(p.home_bytes == p.num_bytes for p in PageTable.of_trace(columns).pages)


def test_what_is_not_coded_is_dear_to_load_and_stays_longer() -> None:
    table, _ = coded_table()
    library = OrderLibrary(Stations(table, []))
    prefetcher = OrderPrefetcher(library, PopularityScorer(library.stations.members))
    dear = [prefetcher._dear[p.page] for p in table.pages]
    coded = {p.page for p in coded_pages(table)}
    assert all(1.99 < d < 2.01 for page, d in enumerate(dear) if page not in coded)
    assert all(1.0 <= dear[page] < 1.001 for page in coded)


def test_a_manager_refuses_to_code_what_has_a_gradient() -> None:
    memory = MemoryManager()
    with pytest.raises(AssertionError, match="a: more is coded"):
        memory.add_group(GroupSpec("a", 4 * MIB, 2, True), Halves(4 * MIB))
