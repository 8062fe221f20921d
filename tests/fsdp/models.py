"""The models of the tests: a few MiB a group, so that pages of 2 MiB frames come and go."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from odc.fsdp.activations import checkpoint_layers
from odc.train.config_model import ModelConfig
from odc.train.models import Transformer, build_model, rope_tables
from tests.fsdp.plain_loop import VOCAB

DENSE = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "mlp_size": 256}
MOE = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_experts": 5,
    "top_k": 2,
    "expert_size": 576,
    "mlp": "gelu",
}


class SegmentTransformer(Transformer):
    """Checkpoints two blocks at once."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        rope = rope_tables(0, idx.size(1), self.config, idx.device)

        def segment(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
            auxiliary = x.new_zeros(())
            for layer in self.layers[first : first + 2]:
                x, more = layer(x, rope)
                auxiliary = auxiliary + more
            return x, auxiliary

        x = self.embed(idx)
        total = x.new_zeros(())
        for first in range(0, len(self.layers), 2):
            x, auxiliary = checkpoint(segment, x, first, use_reentrant=False)
            total = total + auxiliary
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + total


class Twice(nn.Module):
    """Calls its only block several times in one forward, as models with shared layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 640), nn.GELU(), nn.Linear(640, 128))
            for _ in range(3)
        )
        self.head = nn.Linear(128, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        for index in (0, 1, 0, 2, 1):
            x = x + self.layers[index](x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Adapter(nn.Module):
    """A frozen linear layer and a small one beside it that learns (LoRA)."""

    def __init__(self, width: int, inner: int, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, inner)
        self.back = nn.Linear(inner, width)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        for parameter in (*self.base.parameters(), *self.back.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.base(x).relu()) + self.up(self.down(x))


class Adapted(nn.Module):
    """Frozen blocks of 4 MiB with trainable parts, between a frozen embedding and a trained head.

    A few of its blocks are frozen as a whole, and all of them read a tensor made by the first
    layer, whose gradient is complete last of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 256).requires_grad_(False)
        self.first = nn.Linear(256, 256)
        self.layers = nn.ModuleList(Adapter(256, 640) for _ in range(4))
        self.head = nn.Linear(256, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        shared = self.first(self.embed(idx))
        x = shared
        for layer in self.layers:
            x = layer(x) + 0.1 * shared
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Sizes(nn.Module):
    """Groups of 1 KiB (pinned), 128 KiB (compact), and 1 to 9 MiB."""

    WIDTHS = (2, 64, 640, 640, 2560, 4608)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128))
            for width in self.WIDTHS
        )
        self.head = nn.Linear(128, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _transformer(shape: dict, checkpointing: bool = False, **more: object) -> Transformer:
    config = ModelConfig(**{**shape, **more})
    model = build_model(config, VOCAB)
    if checkpointing:
        checkpoint_layers(model)
    return model


def _segments(shape: dict) -> nn.Module:
    model = _transformer(shape)
    model.__class__ = SegmentTransformer
    return model


def _frozen(layers: tuple[int, ...], checkpointing: bool = False) -> nn.Module:
    model = _transformer(DENSE, checkpointing)
    for index in layers:
        model.layers[index].requires_grad_(False)
    if 0 in layers:
        model.embed.requires_grad_(False)
    return model


def _seeded(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


_BUILDERS = {
    "dense": lambda: _transformer(DENSE),
    "dense, checkpointed": lambda: _transformer(DENSE, True),
    "dense, checkpoint of two": lambda: _segments(DENSE),
    "moe": lambda: _transformer(MOE),
    "moe, checkpointed": lambda: _transformer(MOE, True),
    "moe, checkpoint of two": lambda: _segments(MOE),
    "tied": lambda: _transformer(DENSE, tie_embeddings=True),
    "tied, checkpointed": lambda: _transformer(DENSE, True, tie_embeddings=True),
    "frozen in front": lambda: _frozen((0, 1)),
    "frozen in front, checkpointed": lambda: _frozen((0, 1), True),
    "frozen in the middle": lambda: _frozen((1, 2)),
    "frozen in the middle, checkpointed": lambda: _frozen((1, 2), True),
    "adapters": lambda: _seeded(Adapted),
    "called twice": lambda: _seeded(Twice),
    "all sizes": lambda: _seeded(Sizes),
}
NAMES = tuple(_BUILDERS)


@cache
def _states(name: str) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in _BUILDERS[name]().state_dict().items()}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model in training mode; the same weights for the same name, whatever was built before."""
    model = _BUILDERS[name]()
    model.load_state_dict(_states(name))
    return model.to(dtype).train()
