"""Small tensors, plain and ragged, to make claims about."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from odc.fsdp.ragged import RaggedShard, RaggedTensor, distribute_ragged
from tests.fsdp.claims import World

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (7, 5),
    "bias": (3,),
    "wide": (4, 6),
    "cube": (2, 3, 5),
    "one": (1,),
    "scalar": (),
}


def shard(numel: int, ranks: int, kind: str = "uneven", block: int = 1) -> RaggedShard:
    """A layout: rows 'uneven', all on the 'first' or 'last' rank, 'even', or none 'between'."""
    blocks = -(-numel // block)
    units = [0] * ranks
    if kind == "first":
        units[0] = blocks
    elif kind == "last":
        units[-1] = blocks
    elif kind == "between":
        units[0], units[-1] = blocks // 3, 0
        units[-1] += blocks - sum(units)
    elif kind == "even":
        for rank in range(ranks):
            units[rank] = blocks // ranks + (rank < blocks % ranks)
    else:
        weights = [rank + 1 for rank in range(ranks)]
        units = [blocks * weight // sum(weights) for weight in weights]
        units[0] += blocks - sum(units)
    return RaggedShard(block, units)


KINDS = ("uneven", "first", "last", "between", "even")


def full(name: str, seed: int = 0) -> Tensor:
    """The same values on every rank."""
    generator = torch.Generator().manual_seed(seed * 100 + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def ragged(world: World, value: Tensor, kind: str = "uneven", block: int = 1) -> RaggedTensor:
    layout = shard(value.numel(), world.size, kind, block)
    return distribute_ragged(value, world.mesh, layout, src_data_rank=None)


def pairs(world: World) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(ragged, plain) parameters of all shapes, every one in another layout."""
    found = []
    for number, name in enumerate(SHAPES):
        plain = nn.Parameter(full(name))
        kind = KINDS[number % len(KINDS)]
        found.append((nn.Parameter(ragged(world, plain.detach(), kind)), plain))
    return found


def set_gradients(
    world: World, made: list[tuple[nn.Parameter, nn.Parameter]], seed: int, scale: float = 1.0
) -> None:
    for (mine, plain), name in zip(made, SHAPES, strict=True):
        plain.grad = full(name, seed + 1) * scale
        mine.grad = distribute_ragged(plain.grad, world.mesh, mine.placements, src_data_rank=None)


def assert_close(mine: Tensor, plain: Tensor, tolerance: float = 1e-6) -> None:
    assert isinstance(mine, RaggedTensor), type(mine)
    torch.testing.assert_close(mine.full_tensor(), plain, rtol=tolerance, atol=tolerance)


def layer_pair(world: World, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """(with ragged parameters, plain), of the same values."""
    torch.manual_seed(3)
    plain = make()
    mine = copy.deepcopy(plain)
    for module in mine.modules():
        for number, (name, value) in enumerate(list(module._parameters.items())):
            if value is not None:
                kind = KINDS[number]
                setattr(module, name, nn.Parameter(ragged(world, value.detach(), kind)))
    return mine, plain


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 7), nn.LayerNorm(7), nn.Conv1d(3, 2, 2)
    )


def assert_same_module(mine: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.detach().full_tensor(), theirs.detach()), name
