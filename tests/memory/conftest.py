"""Fixtures of the engine tests: every engine keeps the same promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.memory.engine_harness import Harness, ThreadHarness, VirtualHarness


@pytest.fixture(params=[ThreadHarness, VirtualHarness], ids=["threads", "virtual"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    """Makes an engine with its pages; closed when the test ends."""
    made: list[Harness] = []

    def build(**options: object) -> Harness:
        made.append(request.param(**options))
        return made[-1]

    yield build
    for harness in made:
        harness.close()
