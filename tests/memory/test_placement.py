"""Placement: host memory goes to what moves most; disk pages are spread along the order of use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import odc.memory.home_plan as home_plan
from odc.memory.engines.base import TierSpeed
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.home_plan import HomeOptions, make_home, plan_home
from odc.memory.machine import Machine
from odc.memory.manager import popularity
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Pager
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.placement import choose_host_pages, traffic_of
from odc.memory.prefetch import Limits
from odc.memory.replay.drive import Drive
from odc.memory.replay.simulate import Clock
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.memory.victims import CostAware
from tests.memory.workloads import dense

GIB = 1 << 30
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=40)


def model(num_layers: int = 12, frames: int = 4) -> PageTable:
    table = PageTable(2 * FRAME_BYTES)
    for layer in range(num_layers):
        table.add_group(GroupSpec(f"layers.{layer}", frames * FRAME_BYTES, 2, True, layer), {})
    table.seal()
    return table


@given(SIZES, st.integers(0, 200), st.data())
def test_host_pages_fit_and_no_page_that_moves_more_had_to_give_way(
    sizes: list[int], room: int, data: st.DataObject
) -> None:
    frames = np.array(sizes)
    traffic = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=99)))
    traffic = traffic[: len(sizes)].astype(float)
    chosen = choose_host_pages(frames, traffic, room)
    assert frames[chosen].sum() <= room
    left = room - frames[chosen].sum()
    assert (frames[~chosen] > left).all(), "a page on disk would have fitted"
    for value in set(traffic.tolist()):
        better = traffic >= value
        if frames[better].sum() <= room:
            assert chosen[better].all()


@given(st.integers(1, 60), st.integers(0, 60), st.permutations(range(60)))
def test_along_the_order_of_use_disk_pages_are_spread_evenly(
    count: int, room: int, shuffled: list[int]
) -> None:
    order = [page for page in shuffled if page < count]
    chosen = choose_host_pages(np.ones(count, int), np.ones(count), room, order)
    on_host = chosen[order].astype(int)
    assert on_host.sum() == min(room, count)
    share = on_host.sum() / count
    for width in range(1, count + 1):  # any stretch of the order holds its share, give or take one
        windows = np.convolve(on_host, np.ones(width, int), "valid")
        assert (np.abs(windows - share * width) <= 1 + 1e-9).all()


def test_gradients_go_first_then_parameters_then_moments() -> None:
    table = model()
    traffic = traffic_of(table)
    kinds = np.array([p.kind for p in table.pages])
    least = {kind: traffic[kinds == kind].min() for kind in Kind}
    most = {kind: traffic[kinds == kind].max() for kind in Kind}
    assert least[Kind.GRADIENT] > most[Kind.PARAMETER] > most[Kind.MOMENT]


def test_gradients_that_never_come_home_take_no_host_memory_from_others() -> None:
    table = model()
    traffic = traffic_of(table, gradients_come_home=False)
    kinds = np.array([p.kind for p in table.pages])
    assert (traffic[kinds == Kind.GRADIENT] == 0).all()
    chosen = choose_host_pages(table.num_frames, traffic, int(table.num_frames.sum()) * 3 // 4)
    assert chosen[kinds != Kind.GRADIENT].all() and not chosen[kinds == Kind.GRADIENT].any()


def test_experts_and_frozen_groups_come_after_what_every_step_uses() -> None:
    table = PageTable(FRAME_BYTES)
    table.add_group(GroupSpec("dense", 2 * FRAME_BYTES, 2, True), {})
    table.add_group(GroupSpec("frozen", 2 * FRAME_BYTES, 0, False), {})
    table.add_group(GroupSpec("expert", 2 * FRAME_BYTES, 2, True, set_index=0, expert=0), {})
    table.seal()
    traffic = traffic_of(table)
    dense, frozen, expert = (traffic[table.of(g, Kind.PARAMETER)[0]] for g in range(3))
    assert dense > frozen > expert


def plan(host_mem: int | None, free: int = 8 * GIB, **options: object):  # type: ignore[no-untyped-def]
    table = model()
    machine = Machine(16 * GIB, free)
    chosen = HomeOptions("host+disk", host_mem=host_mem)
    return table, plan_home(table, chosen, machine, frame_bytes=64 * FRAME_BYTES, **options)


def test_what_is_planned_adds_up() -> None:
    table, made = plan(50 * FRAME_BYTES)
    needs = made.needs
    assert needs.host_bytes + needs.spare_bytes <= 50 * FRAME_BYTES
    everything = table.home_bytes + table.gradient_bytes
    assert needs.host_bytes + needs.spare_bytes + needs.disk_bytes == everything
    assert needs.frame_bytes == 64 * FRAME_BYTES
    gradients = np.array([p.kind == Kind.GRADIENT for p in table.pages])
    assert (made.spare == gradients).all() and made.on_host[gradients].all()


def test_without_host_mem_what_is_free_is_used_and_a_margin_is_left() -> None:
    table, made = plan(None)
    assert made.on_host.all(), "the model fits what is free"
    pool = 64 * FRAME_BYTES
    table, made = plan(None, free=pool + (256 << 20) + 20 * FRAME_BYTES, rest_bytes=5 * FRAME_BYTES)
    host = int(table.num_frames[made.on_host].sum())
    assert host == 14, "15 frames are left; pages have two"
    table, made = plan(None, free=pool)
    assert not made.on_host.any()


@pytest.mark.parametrize("kind, tier", [("host", Tier.HOST), ("disk", Tier.DISK)])
def test_homes_of_one_tier_are_planned_as_such(kind: str, tier: Tier) -> None:
    made = plan_home(model(), HomeOptions(kind), Machine(GIB, GIB), frame_bytes=0)
    assert made.on_host.all() if tier == Tier.HOST else not made.on_host.any()


def test_a_home_that_nothing_comes_to_takes_no_memory() -> None:
    table, options = model(), HomeOptions("host")
    made = plan_home(table, options, Machine(GIB, GIB), frame_bytes=GIB, pages_come_home=False)
    assert made.needs.host_bytes == made.needs.rest_bytes == 0
    home = make_home(table, options, made)
    assert home.used_bytes == 0
    home.close()


def test_pages_on_disk_are_worth_more_where_others_are_in_host_memory() -> None:
    _, made = plan(50 * FRAME_BYTES)
    cost = made.load_cost()
    assert (cost[~made.on_host] == home_plan.DISK_COST).all() and (cost[made.on_host] == 1).all()
    for kind in ("host", "disk"):
        alone = plan_home(model(), HomeOptions(kind), Machine(GIB, GIB), frame_bytes=0)
        assert (alone.load_cost() == 1).all()


def stall_ns(on_host: np.ndarray, cost: float = 1.0) -> int:
    """Waiting of a dense model whose disk has a quarter of the speed of host memory."""
    workload = dense(24, 8)
    table = workload.table()
    tiers = [Tier.HOST if there else Tier.DISK for there in on_host]
    rate = FRAME_BYTES * 50.0
    speeds = {
        Tier.HOST: TierSpeed(2 * rate, 2 * rate, 50_000),
        Tier.DISK: TierSpeed(rate / 2, rate / 2, 100_000),
    }
    engine = VirtualEngine(1.0, tier_of=tiers.__getitem__, speeds=speeds)
    transfers = Transfers(table, engine, int(table.num_frames.sum()) * 3 // 10, Tier.HOST)
    library = OrderLibrary(Stations(table, workload.sets))
    table.load_weight = np.where(on_host, 1.0, cost).tolist()
    prefetcher = popularity(library, Limits())
    pager = Pager(table, library, transfers, CostAware(), prefetcher)
    drive = Drive(workload, pager, Clock(engine), engine.now_ns)
    return sum(drive.run().after(3).stall_ns)


def test_spreading_disk_pages_hides_more_than_one_run_of_them() -> None:
    """The same bytes on disk: spread along the order, the first layers in host memory, and spread
    with what lives on disk worth more."""
    table = dense(24, 1).table()
    traffic = traffic_of(table, gradients_come_home=False)
    even = choose_host_pages(table.num_frames, traffic, len(table.pages) // 2)
    first = np.arange(len(table.pages)) < len(table.pages) // 2
    assert even.sum() == first.sum()
    spread, run, valued = stall_ns(even), stall_ns(first), stall_ns(even, home_plan.DISK_COST)
    assert spread < 0.6 * run and valued < 0.6 * spread
