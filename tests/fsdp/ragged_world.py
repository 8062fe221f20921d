"""Runs claims on N gloo ranks in spawned processes, and small tensors to make them about.

A claim is a function of a `World` that every rank calls; it asserts. All claims of a world size run
in one spawn, in order, because starting ranks is what takes time.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from odc.fsdp.ragged import RaggedShard, RaggedTensor, distribute_ragged

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (7, 5),
    "bias": (3,),
    "wide": (4, 6),
    "cube": (2, 3, 5),
    "one": (1,),
    "scalar": (),
}


@dataclass(frozen=True)
class World:
    """What a claim is told: the ranks, and a directory they and other worlds share."""

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


Claim = Callable[[World], None]


@dataclass(frozen=True)
class Entry:
    """A claim and the numbers of ranks it is made about."""

    check: Claim
    sizes: tuple[int, ...]


def registry(claims: dict[str, Entry]) -> Callable[..., Callable[[Claim], Claim]]:
    """The decorator `@claim(*sizes)` that adds a function to `claims`."""

    def claim(*sizes: int) -> Callable[[Claim], Claim]:
        def add(check: Claim) -> Claim:
            claims[check.__name__] = Entry(check, sizes)
            return check

        return add

    return claim


def _rank(rank: int, size: int, names: list[str], shared: str, out: str, claims: str) -> None:
    checks = importlib.import_module(claims).CLAIMS
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1")
    store = dist.FileStore(f"{out}/store", size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    world, results = World(rank, size, Path(shared)), {}
    for name in names:
        torch.manual_seed(0)
        try:
            checks[name].check(world)
            results[name] = ""
        except BaseException:  # a failed pytest.raises is no Exception
            results[name] = traceback.format_exc()
        store.set(f"{name}/{rank}", "bad" if results[name] else "good")
        told = {store.get(f"{name}/{other}") for other in range(size)}
        if len(told) > 1:
            break  # a rank may be left behind in a collective
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    if not any(results.values()):
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(1)


def run(
    size: int, names: list[str], shared: Path, out: Path, claims: str = "tests.fsdp.ragged_claims"
) -> dict[str, str]:
    """What went wrong, claim by claim of a module's `CLAIMS`; empty where it holds."""
    out.mkdir()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, size, names, str(shared), str(out), claims))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    results = [
        json.loads(path.read_text()) if (path := out / f"{rank}.json").exists() else {}
        for rank in range(size)
    ]
    codes = [process.exitcode for process in ranks]
    found = {}
    for name in names:
        told = [
            f"rank {rank}: {result.get(name, f'not run (exit code {codes[rank]})')}"
            for rank, result in enumerate(results)
            if result.get(name, "not run")
        ]
        found[name] = "\n".join(told)
    return found
