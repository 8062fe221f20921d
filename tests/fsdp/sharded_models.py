"""Models, data and loops of the claims about `fully_shard`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import odc
from tests.fsdp.claims import World


class Block(nn.Module):
    """Prime sizes: rows never divide."""

    def __init__(self, size: int = 37, inner: int = 53) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 37)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(37, 31, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


class Experts(nn.Module):
    """Three experts, of which a rank's data may use two: more ranks than experts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12)
        self.router = nn.Linear(12, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, 12, 20) * 0.2)
        self.down = nn.Parameter(torch.randn(3, 20, 12) * 0.2)
        self.head = nn.Linear(12, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = self.router(x).softmax(-1)
        inner = torch.relu(torch.einsum("btd,edh->bteh", x, self.up))
        return self.head(x + torch.einsum("bteh,ehd,bte->btd", inner, self.down, gates))


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 31, (2, 9), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def sharded(world: World, model: nn.Module, apply: Any = None, **chosen: Any) -> nn.Module:
    """A copy, sharded layer by layer; `apply` is `odc.fully_shard` or torch's."""
    apply = apply or odc.fully_shard
    made = copy.deepcopy(model)
    for layer in getattr(made, "layers", ()):
        apply(layer, mesh=world.mesh, **chosen)
    apply(made, mesh=world.mesh, **chosen)
    return made


def train_single(world: World, model: nn.Module, steps: int, accumulate: int = 1) -> list[float]:
    """All ranks' data in one process, in the order of ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            for rank in range(world.size):
                loss = loss_of(model, batch(rank, accumulate * step + micro)) / world.size
                (loss / accumulate).backward()
                total += loss.item() / accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_ranks(
    world: World, model: nn.Module, steps: int, accumulate: int = 1, sync_each: bool = True
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for micro in range(accumulate):
            if not sync_each:
                model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = loss_of(model, batch(world.rank, accumulate * step + micro))
            (loss / accumulate).backward()
            total += loss.detach() / accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world.size)
    return losses


def deviation(got: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))


def same_data_losses(world: World, model: nn.Module, step: Any) -> list[float]:
    """Losses of four steps on one batch for all ranks; `step` does what a loop does in between."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for number in range(4):
        loss = loss_of(model, batch(0, number))
        step(model, loss, number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
