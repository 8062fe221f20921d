"""Whatever is asked, in whatever order, under whatever hints: no byte and no frame is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory.pager_world import World


def run(world: World, steps: int) -> None:
    try:
        for _ in range(steps):
            world.random_step()
        world.check_everything()
    finally:
        world.close()


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("seed", range(10))
def test_wrong_hints_never_change_a_byte(seed: int, home: str, tmp_path: Path) -> None:
    run(World(seed, home, tmp_path), 300)


@pytest.mark.parametrize("seed", range(10, 18))
def test_accesses_that_follow_no_order_never_change_a_byte(seed: int, tmp_path: Path) -> None:
    """Recorded orders are of no use here: every pass, phase and set is drawn anew."""
    run(World(seed, "host", tmp_path, prefetch="orders"), 300)


@pytest.mark.parametrize("seed", range(20, 24))
def test_demand_paging_never_changes_a_byte(seed: int, tmp_path: Path) -> None:
    run(World(seed, "host", tmp_path, prefetch="none"), 300)


@pytest.mark.parametrize("seed", range(40, 50))
def test_failing_reads_and_writes_never_change_a_byte(seed: int, tmp_path: Path) -> None:
    """Each error reaches the caller once; what could not be stored is kept and stored later."""
    world = World(seed, "host", tmp_path)
    world.home.chance = 0.1
    run(world, 300)
    assert world.home.raised


@pytest.mark.parametrize("seed", [60, 61])
def test_the_smallest_budget_that_is_promised_works(seed: int, tmp_path: Path) -> None:
    run(World(seed, "host", tmp_path, spare_frames=0), 300)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "disk"])
def test_ten_thousand_steps_leak_no_frame(home: str, tmp_path: Path) -> None:
    world = World(100, home, tmp_path, num_groups=14)
    world.home.chance = 0.01
    run(world, 10_000)
