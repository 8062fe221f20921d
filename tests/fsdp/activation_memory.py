"""Trains a few steps in a process of its own and prints what the kernel and the ledger measured."""

from __future__ import annotations

import json
import sys

import torch

import odc
from odc.memory.activations import MODES, predict_peak
from odc.memory.ledger import resident_bytes, trim_heap
from odc.train.config_model import ModelConfig
from odc.train.models import build_model, initializer

SHAPES = {
    "dense": {"hidden_size": 128, "num_layers": 8, "num_heads": 4, "mlp_size": 512},
    "moe": {
        "hidden_size": 128,
        "num_layers": 8,
        "num_heads": 4,
        "num_experts": 4,
        "top_k": 2,
        "expert_size": 256,
    },
}
VOCAB, BATCH, TOKENS = 512, 8, 512


def measure(name: str, mode: str) -> dict[str, object]:
    """Peak resident bytes above what stood before the first step, and what the ledger says."""
    torch.set_num_threads(1)
    config = ModelConfig(**SHAPES[name])
    model, optimizer = odc.paged(
        build_model(config, VOCAB, device="meta"),
        init=initializer(config, 0),
        page_budget="16MB",
        activations=mode,
    )
    trim_heap()
    before = resident_bytes()[0]
    losses = []
    account = model.memory.ledger.activations
    peak = 0
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=generator)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, resident_bytes()[1] - before - account.home_bytes)
    predicted = {m: predict_peak(account.profile, m) for m in MODES}
    model.close()
    return {
        "losses": losses,
        "rss": peak,
        "counted": account.max_peak_bytes,
        "predicted": predicted,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
