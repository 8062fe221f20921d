"""Models made at random train as in plain PyTorch, at the smallest budget and a little above it.

Layers of random kinds are called in random order, some twice; some are frozen, some share a weight,
some contain others, and runs of them are checkpointed together.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.paged_loop import MIB, POLICIES, PagedRun, Paging, smallest_budget
from tests.fsdp.plain_loop import VOCAB, Loop, assert_equal, train_plainly

WIDTH = 64


class Layer(nn.Module):
    """Two matrices, and perhaps layers inside."""

    def __init__(self, chooser: random.Random, depth: int = 0) -> None:
        super().__init__()
        inner = chooser.choice([8, 64, 1088, 2304, 4608])
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        count = chooser.choice([0, 0, 2]) if depth == 0 else 0
        self.inside = nn.ModuleList(Layer(chooser, depth + 1) for _ in range(count))
        self.spare = nn.Linear(WIDTH, WIDTH) if chooser.random() < 0.2 else None
        self.detached = chooser.random() < 0.2

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).relu())
        for layer in self.inside:
            y = layer(y)
        if self.detached:
            y = y + 0.1 * x @ self.down.weight.detach()[:, :1]
        return x + y


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        chooser = random.Random(seed)
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(chooser) for _ in range(chooser.randint(2, 6)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=chooser.random() < 0.5)
        if chooser.random() < 0.4:
            self.head.weight = self.embed.weight
        same = [a for a in self.layers if a.up.out_features == self.layers[0].up.out_features]
        if len(same) > 1 and chooser.random() < 0.5:
            same[1].up.weight = same[0].up.weight
        for layer in self.layers:
            for part in (layer, layer.up, *layer.inside):
                if chooser.random() < 0.15:
                    part.requires_grad_(False)
        if chooser.random() < 0.3:
            self.embed.requires_grad_(False)
        indices = [i for i in range(len(self.layers)) for _ in range(chooser.choice([1, 1, 1, 2]))]
        chooser.shuffle(indices)
        self.segments: list[tuple[bool, list[int]]] = []
        while indices:
            cut = chooser.randint(1, len(indices))
            self.segments.append((chooser.random() < 0.5, indices[:cut]))
            indices = indices[cut:]
        self.reads_embedding = chooser.random() < 0.2

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)

        def run(x: Tensor, indices: list[int]) -> Tensor:
            for index in indices:
                x = self.layers[index](x)
            return x

        for again, indices in self.segments:
            x = checkpoint(run, x, indices, use_reentrant=False) if again else run(x, indices)
        logits = self.head(x)
        if self.reads_embedding:
            logits = logits + x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=() if s < 8 else (pytest.mark.slow,)) for s in range(120)]
)
def test_a_random_model_trains_as_in_plain_pytorch(seed):
    chooser = random.Random(seed + 10_000)
    update = chooser.choice(["step", "backward"])
    loop = Loop(
        steps=5,
        max_grad_norm=0.3 if update == "step" and chooser.random() < 0.5 else None,
        evaluate=chooser.random() < 0.3,
        forwards_first=chooser.choice(["", "", "one backward", "two backwards"]),
        seed=seed,
    )
    extra = chooser.choice([0, 0, 2, 6, 16])
    if Model(seed).reads_embedding:
        extra += 2  # is known only when it happens
    page_size = chooser.choice([2, 256]) * MIB
    least = smallest_budget(Model(seed), page_size=page_size)
    paging = Paging(
        least + extra * MIB,
        chooser.choice(list(POLICIES)),
        chooser.choice(["host", "host", "disk"]),
        update=update,
        page_size=page_size,
    )
    expected = train_plainly(Model(seed), loop)
    run = PagedRun(Model(seed), loop, paging)
    try:
        assert_equal(run.train(expect_traffic=False), expected)
    finally:
        run.close()
