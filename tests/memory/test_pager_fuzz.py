"""Whatever is asked, in whatever order, under whatever hints: no byte and no frame is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory.pager_world import World
from tests.memory.virtual_world import VirtualWorld, random_commands


def run(world: World, steps: int) -> None:
    try:
        for _ in range(steps):
            world.random_step()
        world.check_everything()
    finally:
        world.close()


@pytest.mark.parametrize("home", ["host", "disk", "host+disk"])
@pytest.mark.parametrize("seed", range(7))
def test_wrong_hints_never_change_a_byte(seed: int, home: str, tmp_path: Path) -> None:
    run(World(seed, home, tmp_path), 300)


@pytest.mark.parametrize("seed", range(10, 15))
def test_accesses_that_follow_no_order_never_change_a_byte(seed: int, tmp_path: Path) -> None:
    """Recorded orders are of no use here: every pass, phase and set is drawn anew."""
    run(World(seed, "host", tmp_path, prefetch="orders"), 300)


@pytest.mark.parametrize("seed", range(20, 24))
def test_demand_paging_never_changes_a_byte(seed: int, tmp_path: Path) -> None:
    run(World(seed, "host", tmp_path, prefetch="none"), 300)


@pytest.mark.parametrize("home, seed", [("host", s) for s in range(40, 46)] + [("host+disk", 46)])
def test_failing_reads_and_writes_never_change_a_byte(home: str, seed: int, tmp_path: Path) -> None:
    """Each error reaches the caller once; what could not be stored is kept and stored later."""
    world = World(seed, home, tmp_path)
    world.home.chance = 0.1
    run(world, 300)
    assert world.home.raised


@pytest.mark.parametrize("seed", [60, 61])
def test_the_smallest_budget_that_is_promised_works(seed: int, tmp_path: Path) -> None:
    run(World(seed, "host", tmp_path, spare_frames=0), 300)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "disk", "host+disk"])
def test_ten_thousand_steps_leak_no_frame(home: str, tmp_path: Path) -> None:
    world = World(100, home, tmp_path, num_groups=14)
    world.home.chance = 0.01
    run(world, 10_000)


def run_virtual(seed: int, chance: float, steps: int) -> None:
    world = VirtualWorld(seed, chance)
    for _ in range(steps):
        world.step()
    world.finish()
    assert (world.failed > 0) == (chance > 0)


@pytest.mark.parametrize("seed, chance", [(0, 0.0), (1, 0.0), (2, 0.02), (3, 0.1)])
def test_wrong_hints_on_the_virtual_clock_lose_nothing(seed: int, chance: float) -> None:
    """Prefetches taken back, demands that overtake, failing disks, pages that come back old."""
    run_virtual(seed, chance, 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed, chance", [(10, 0.0), (11, 0.01)])
def test_ten_thousand_steps_on_the_virtual_clock_lose_nothing(seed: int, chance: float) -> None:
    run_virtual(seed, chance, 10_000)


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_is_asked_anything_ends_everything(seed: int) -> None:
    engine, tickets = random_commands(seed, 2_000)
    engine.advance(10**13)
    assert engine.is_idle()
    for ticket in tickets:
        assert (ticket.done_ns >= 0) != ticket.cancelled
        assert ticket.cancelled or ticket.dur_ns <= ticket.done_ns - ticket.ready_ns
