"""Values of sharded models, read and compared in the claims about other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tests.fsdp.claims import World


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_holds(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    held = model.state_dict()
    for name, value in wanted.items():
        assert torch.equal(full(held[name]), value), name


def folder_of(world: World, name: str) -> Path:
    """One for every world size, since worlds share a directory."""
    return world.shared / f"{name}-{world.size}"
