"""What holds of sharded models in safetensors files; the names are the claims.

The other side is Hugging Face's safetensors, which reads what odc wrote and wrote what odc reads.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import odc
from odc.errors import CheckpointError
from odc.fsdp.interop import load_safetensors, save_safetensors
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.interop_models import assert_holds, folder_of, full
from tests.fsdp.sharded_models import Net, sharded

CLAIMS: dict[str, Entry] = {}
claim = functools.partial(registry(CLAIMS), slow=True)  # files of some size


class Mixed(nn.Module):
    """Dtypes, shapes and buffers of all kinds, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(layers=2, tied=True)
        self.bf16 = nn.Parameter(torch.randn(7, 3).bfloat16())
        self.row = nn.Parameter(torch.randn(1))
        self.register_buffer("count", torch.arange(5))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def mixed(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def reference(model: nn.Module) -> dict[str, Tensor]:
    """What a folder of the model holds, by safetensors' own functions."""
    return {name: t for name, t in model.state_dict().items() if name != "net.head.weight"}


def sharded_mixed(world: World, model: Mixed, apply: Any = None, **chosen: Any) -> nn.Module:
    apply = apply or odc.fully_shard
    for layer in model.net.layers:
        apply(layer, mesh=world.mesh, **chosen)
    return apply(model, mesh=world.mesh, **chosen)


@claim(2, 1, 3, 4)
def a_folder_is_read_into_spans_and_written_from_them(world: World) -> None:
    source = folder_of(world, "source")
    wanted = reference(mixed(1))
    if world.rank == 0:
        source.mkdir()
        save_file(wanted, source / "model.safetensors")
    dist.barrier()
    for number, granularity in enumerate(("block", "rows:4", "tensor")):
        model = sharded_mixed(world, mixed(2), granularity=granularity)
        assert load_safetensors(model, source) == ([], [])
        assert_holds(model, wanted)
        target = folder_of(world, f"target{number}")
        save_safetensors(model, target)
        assert sorted(os.listdir(target)) == ["model.safetensors"]
        written = load_file(target / "model.safetensors")
        assert written.keys() == wanted.keys()
        assert all(torch.equal(written[name], wanted[name]) for name in wanted)


@claim(2, 1, 3)
def files_are_cut_by_size_and_joined_by_the_index(world: World) -> None:
    target = folder_of(world, "cut")
    model = sharded_mixed(world, mixed(1))
    save_safetensors(model, target, max_shard_size=8000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    wanted = reference(mixed(1))
    assert index["weight_map"].keys() == wanted.keys()
    total = sum(value.numel() * value.itemsize for value in wanted.values())
    assert index["metadata"]["total_size"] == total
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for name in files:
        held = load_file(target / name)
        assert len(held) == 1 or sum(v.numel() * v.itemsize for v in held.values()) <= 8000
    other = sharded_mixed(world, mixed(2), granularity="rows:4")
    load_safetensors(other, target)
    assert_holds(other, wanted)


@claim(2, 1)
def plain_and_fsdp2_models_are_read_and_written_too(world: World) -> None:
    wanted = reference(mixed(1))
    target = folder_of(world, "plain")
    save_safetensors(mixed(1), target)
    for build in (mixed, lambda seed: sharded_mixed(world, mixed(seed), fsdp2)):
        model = build(2)
        load_safetensors(model, target)
        assert_holds(model, wanted)
        save_safetensors(model, target, overwrite=True)
        written = load_file(target / "model.safetensors")
        assert all(torch.equal(written[name], wanted[name]) for name in wanted)


@claim(4)
def replicas_read_the_same_and_one_writes(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    target = folder_of(world, "replicas")
    save_safetensors(odc.fully_shard(mixed(1), mesh=mesh), target)
    other = odc.fully_shard(mixed(2), mesh=mesh)
    load_safetensors(other, target)
    assert_holds(other, reference(mixed(1)))


@claim(2, 3)
def dtypes_are_converted_on_the_way(world: World) -> None:
    source = folder_of(world, "bf16")
    wanted = {name: value.bfloat16() for name, value in Net().state_dict().items()}
    if world.rank == 0:
        source.mkdir()
        save_file(wanted, source / "model.safetensors")
    dist.barrier()
    model = sharded(world, Net())
    load_safetensors(model, source)
    assert_holds(model, {name: value.float() for name, value in wanted.items()})


@claim(2)
def what_does_not_fit_is_listed_at_once_and_changes_nothing(world: World) -> None:
    source = folder_of(world, "misfit")
    state = {name: value.clone() for name, value in Net(layers=2).state_dict().items()}
    del state["layers.0.up.bias"], state["head.weight"]
    state["layers.1.up.weight"] = torch.zeros(53, 38)
    state.update({"layers.7.up.bias": torch.zeros(2), "extra": torch.zeros(2)})
    if world.rank == 0:
        source.mkdir()
        save_file(state, source / "model.safetensors")
    dist.barrier()
    torch.manual_seed(1)
    model = sharded(world, Net(layers=2))
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    with pytest.raises(odc.OdcError) as caught:
        load_safetensors(model, source)
    assert str(caught.value).splitlines()[1:] == [
        "missing from the file (2): layers.0.up.bias, head.weight",
        "not in the model (2): extra, layers.7.up.bias",
        "of another shape (1): layers.1.up.weight: (53, 38) in the file, (53, 37) in the model",
    ]
    with pytest.raises(CheckpointError, match="of another shape"):
        load_safetensors(model, source, strict=False)
    assert_holds(model, before)
    del state["layers.1.up.weight"]
    dist.barrier()
    if world.rank == 0:
        save_file(state, source / "model.safetensors")
    dist.barrier()
    report = load_safetensors(model, source, strict=False)
    assert report.missing == ["layers.0.up.bias", "layers.1.up.weight", "head.weight"]
    assert report.unexpected == ["extra", "layers.7.up.bias"]
    assert_holds(model, {"embed.weight": state["embed.weight"]})


@claim(2)
def an_error_of_one_rank_is_raised_by_all(world: World) -> None:
    target = folder_of(world, "private")
    if world.rank == 1:  # a disk of its own
        target = target / "elsewhere"
    with pytest.raises(CheckpointError, match="rank 1|all ranks share"):
        save_safetensors(sharded(world, Net()), target)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(target, ignore_errors=True)


@claim(2)
def a_folder_appears_whole_or_not_at_all(world: World) -> None:
    target = folder_of(world, "whole")
    model = sharded(world, Net())
    save_safetensors(model, target)
    with pytest.raises(CheckpointError, match="exists and is not empty; pass overwrite=True"):
        save_safetensors(model, target)
    if world.rank == 0:
        (target / "tokenizer.json").write_text("{}")
        (target.parent / f".{target.name}.partial").mkdir()  # of a save that was killed
    dist.barrier()
    save_safetensors(model, target, max_shard_size=8000, overwrite=True)
    names = sorted(os.listdir(target))
    assert "tokenizer.json" in names and "model.safetensors" not in names
    assert not [name for name in os.listdir(target.parent) if name.startswith(f".{target.name}")]


@claim(2)
def a_file_that_was_cut_is_refused(world: World) -> None:
    target = folder_of(world, "short")
    model = sharded(world, Net())
    save_safetensors(model, target)
    dist.barrier()
    if world.rank == 0:
        path = target / "model.safetensors"
        os.truncate(path, path.stat().st_size - 5)
    dist.barrier()
    with pytest.raises(CheckpointError, match="cut short"):
        load_safetensors(model, target)
    with pytest.raises(CheckpointError, match="holds neither"):
        load_safetensors(model, target.parent)


def resident(key: str) -> int:
    """Bytes of `VmRSS` or of its peak since `reset_peak`, `VmHWM`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def extra_bytes(act: Callable[[], Any]) -> int:
    """What a call's peak adds to resident memory."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    act()
    return resident("VmHWM") - before


@claim(2)
def reading_and_writing_need_less_memory_than_one_tensor(world: World) -> None:
    size, layers = 2304, 10  # 212 MB, 21 MB a tensor

    def build(dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            parts = [nn.Linear(size, size, bias=False, dtype=dtype) for _ in range(layers)]
        model = odc.fully_shard(nn.Sequential(*parts), mesh=world.mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(world.rank + 1)
        return model

    wide, narrow = build(torch.float32), build(torch.bfloat16)
    target, other = folder_of(world, "large"), folder_of(world, "narrow")
    save_safetensors(sharded(world, Net()), folder_of(world, "warm"))
    found = {
        "save": extra_bytes(lambda: save_safetensors(wide, target)),
        "load": extra_bytes(lambda: load_safetensors(wide, target)),
    }
    save_safetensors(narrow, other)
    found["convert"] = extra_bytes(lambda: load_safetensors(wide, other))
    assert max(found.values()) < size * size * 4, found
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(target)
        shutil.rmtree(other)
