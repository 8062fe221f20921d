"""What an access costs, counted in calls of Python functions: times depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from odc.memory.manager import popularity
from odc.memory.replay import budget_for, link_for, synthetic
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape
from odc.memory.victims import CostAware


def counting(plain: Callable[..., None], counts: list[int]) -> Callable[..., None]:
    """``plain``, with the Python functions that each call enters added to ``counts``."""

    def counted(*args: Any, **kwargs: Any) -> None:
        entered = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal entered
            entered += event == "call"

        sys.setprofile(profile)
        try:
            plain(*args, **kwargs)
        finally:
            sys.setprofile(None)
            counts.append(entered)

    return counted


def calls(name: str, layers: int, warm_up: int) -> tuple[list[int], list[int]]:
    """Calls of each access and of each release, in the step after the warm-up."""
    workload = synthetic(name, steps=warm_up + 1, shape=Shape(layers=layers))
    drive = virtual_drive(
        workload,
        budget_bytes=budget_for(workload, 0.5),
        link=link_for(workload, 1.0),
        eviction=CostAware(),
        prefetch=popularity,
    )
    drive.run(warm_up)
    accesses: list[int] = []
    releases: list[int] = []
    pager: Any = drive.pager
    pager.access = counting(pager.access, accesses)
    pager.release = counting(pager.release, releases)
    drive.run()
    return sorted(accesses), sorted(releases)


@pytest.mark.parametrize(
    ("name", "access", "release"), [("W1", 28, 32), ("W2", 28, 10), ("W3", 30, 32)]
)
def test_an_access_of_a_known_order_takes_few_calls(name: str, access: int, release: int) -> None:
    """The virtual clock's own events are among them: ten or so where a page leaves."""
    accesses, releases = calls(name, 100, 3)
    assert accesses[len(accesses) // 2] <= access
    assert releases[len(releases) // 2] <= release
    assert accesses[int(0.98 * len(accesses))] <= 80


def test_the_calls_of_an_access_do_not_grow_with_the_number_of_pages() -> None:
    few, _ = calls("W1", 50, 3)
    many, _ = calls("W1", 500, 3)
    for share in (0.5, 0.95):
        assert many[int(share * len(many))] <= few[int(share * len(few))] + 2
