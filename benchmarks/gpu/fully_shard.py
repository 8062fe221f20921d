"""fully_shard on one device, or on several: NCCL correctness, and what world size 1 costs.

    python benchmarks/gpu/fully_shard.py                         # one device
    torchrun --nproc-per-node N benchmarks/gpu/fully_shard.py    # N devices

Checks losses against an unsharded model on the same data (fp32 without TF32), in fp32 and bf16,
then times steps of a plain model, odc and FSDP2 in turn: 9 repeats, medians. Without a CUDA device
the same script runs over gloo on the CPU with a small model, which checks the script and nothing
else.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import odc
from odc.train.config_model import ModelConfig
from odc.train.models import build_model

REPEATS = 9
STEPS = 10


def start() -> tuple[torch.device, DeviceMesh]:
    """The process group, NCCL where there is a device."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=size)
    return torch.device(kind), init_device_mesh(kind, (size,))


def make_model(device: torch.device) -> nn.Module:
    large = device.type == "cuda"
    config = ModelConfig(
        hidden_size=2048 if large else 128, num_layers=8 if large else 2, num_heads=16
    )
    torch.manual_seed(0)
    return build_model(config, 8192).to(device)


def shard(model: nn.Module, apply: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Any:
    made = copy.deepcopy(model)
    for layer in made.layers:  # type: ignore[union-attr]
        apply(layer, mesh=mesh, mp_policy=policy)
    apply(made, mesh=mesh, mp_policy=policy)
    return made


def batch(device: torch.device, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    length = 1024 if device.type == "cuda" else 64
    return torch.randint(0, 8192, (2, length + 1), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens[:, :-1])
    logits = (out[0] if isinstance(out, tuple) else out).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def losses(model: nn.Module, device: torch.device, data_ranks: range) -> list[float]:
    """Mean loss of every step; one process may see the data of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for rank in data_ranks:
            loss = loss_of(model, batch(device, rank, step)) / len(data_ranks)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if len(data_ranks) == 1 and dist.get_world_size() > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        found.append(total.item())
    return found


def check(model: nn.Module, device: torch.device, mesh: DeviceMesh) -> dict[str, float]:
    """Largest relative deviation from one process, of odc and of FSDP2."""
    size, rank = dist.get_world_size(), dist.get_rank()
    wanted = losses(copy.deepcopy(model), device, range(size))
    found = {}
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for name, apply in (("odc", odc.fully_shard), ("fsdp2", fsdp2)):
            got = losses(shard(model, apply, mesh, policy), device, range(rank, rank + 1))
            worst = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
            found[f"{name} {dtype or 'fp32'}"] = worst
    return found


def make_step(model: nn.Module, device: torch.device) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = batch(device, dist.get_rank(), 0)

    def step() -> float:
        _synchronize(device)
        began = time.perf_counter()
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        return time.perf_counter() - began

    return step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def times(model: nn.Module, device: torch.device, mesh: DeviceMesh) -> dict[str, list[float]]:
    policy = MixedPrecisionPolicy()
    steps = {
        "odc": make_step(shard(model, odc.fully_shard, mesh, policy), device),
        "fsdp2": make_step(shard(model, fsdp2, mesh, policy), device),
    }
    if dist.get_world_size() == 1:
        steps["plain"] = make_step(copy.deepcopy(model), device)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(3 + REPEATS):
        for name, step in steps.items():
            seconds = step()
            if repeat >= 3:
                found[name].append(seconds)
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device, mesh = start()
    model = make_model(device)
    deviations = check(model, device, mesh)
    measured = times(model, device, mesh)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, **deviations}, indent=2))
        for key, seconds in measured.items():
            middle = statistics.median(seconds)
            print(
                f"{key}: {middle * 1e3:.2f} ms ({min(seconds) * 1e3:.2f}-{max(seconds) * 1e3:.2f})"
            )
        if "plain" in measured:
            ratios = [a / b for a, b in zip(measured["odc"], measured["plain"], strict=True)]
            print(f"odc / plain at world size 1: {statistics.median(ratios):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
