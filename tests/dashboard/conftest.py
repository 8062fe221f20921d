"""Small recorded runs, and one server with a browser for all tests that need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard.catalog import RunPlace
from dashboard.data import RunData
from tests.dashboard.recording import Recording

Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Write a run: `record("name", steps=3)`."""

    def write(name: str = "run", **options: object) -> Path:
        return Recording(**options).write(tmp_path / "runs" / name)  # type: ignore[arg-type]

    return write


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run of 6 steps, 2 layers of 4 experts, under a tight budget."""
    return Recording().write(tmp_path_factory.mktemp("small") / "lru+none")


@pytest.fixture(scope="session")
def small(small_path: Path) -> RunData:
    return RunData(RunPlace("lru+none", small_path))


@pytest.fixture
def open_run() -> Callable[[Path], RunData]:
    return lambda path: RunData(RunPlace(path.name, path))
