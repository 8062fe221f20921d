"""What holds of sharded models in checkpoints of `torch.distributed.checkpoint`.

The names are the claims. The other side is FSDP2, or a plain model in one process.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import fully_shard as fsdp2

from odc.fsdp.ragged import install_distribute_tensor
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.interop_models import assert_holds, full
from tests.fsdp.sharded_models import Net, batch, deviation, loss_of, sharded

CLAIMS: dict[str, Entry] = {}
claim = functools.partial(registry(CLAIMS), slow=True)  # many checkpoints


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of two groups, as most trainers make it."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, rank: int = 0
) -> list[float]:
    """Every rank has the same data, so that the losses are those of any number of ranks."""
    losses = []
    for number in numbers:
        loss = loss_of(model, batch(rank, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = dcp_state.get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def load_from(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    dcp_state.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All values by name, on every rank."""
    found = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value).clone()
    return found


def trained_by_one(tied: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net(layers=2, tied=tied)
    optimizer = optimizer_of(model)
    steps(model, optimizer, range(3))
    return model, optimizer


Built = tuple[nn.Module, torch.optim.Optimizer]


def made(world: World, tied: bool, apply: Any = None, seed: int = 7, **chosen: Any) -> Built:
    torch.manual_seed(seed)
    model = sharded(world, Net(layers=2, tied=tied), apply, **chosen)
    return model, optimizer_of(model)


TIED = {"untied": False, "tied": True}


@claim(2)
def two_ranks_save_checkpoints(world: World) -> None:
    """Others load them."""
    for kind, tied in TIED.items():
        for name, apply, chosen in (("odc", None, {"granularity": "rows:4"}), ("fsdp2", fsdp2, {})):
            model, optimizer = made(world, tied, apply, seed=1, **chosen)
            steps(model, optimizer, range(3))
            dcp.save(state_of(model, optimizer), checkpoint_id=world.shared / f"{name}-{kind}")
            if world.rank == 0:
                held = whole(model, optimizer)
                torch.save(held, world.shared / f"{name}-{kind}.pt")
            else:
                whole(model, optimizer)
    dist.barrier()


def check_loaded(world: World, built: Built, path: Path, tied: bool) -> None:
    """Bit-equal to what was saved, and training goes on as in one process."""
    model, optimizer = built
    load_from(model, optimizer, path)
    wanted = torch.load(f"{path}.pt")
    held = whole(model, optimizer)
    assert held.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(held[name], value), name
    got = steps(model, optimizer, range(3, 6))
    assert deviation(got, steps(*trained_by_one(tied), range(3, 6))) < 2e-6


@claim(2, 1, 3, 4, after="two_ranks_save_checkpoints")
def a_checkpoint_of_two_ranks_and_rows_loads_on_any_number_and_granularity(world: World) -> None:
    for kind, tied in TIED.items():
        for granularity in ("block", "tensor"):
            built = made(world, tied, granularity=granularity)
            check_loaded(world, built, world.shared / f"odc-{kind}", tied)


@claim(2, 1, 3, after="two_ranks_save_checkpoints")
def an_fsdp2_checkpoint_loads_into_an_odc_model(world: World) -> None:
    for kind, tied in TIED.items():
        check_loaded(world, made(world, tied), world.shared / f"fsdp2-{kind}", tied)


@claim(2, 1, 3, after="two_ranks_save_checkpoints")
def an_odc_checkpoint_loads_into_an_fsdp2_model_and_a_plain_one(world: World) -> None:
    for kind, tied in TIED.items():
        path = world.shared / f"odc-{kind}"
        check_loaded(world, made(world, tied, fsdp2), path, tied)
        plain = Net(layers=2, tied=tied)
        check_loaded(world, (plain, optimizer_of(plain)), path, tied)


@claim(2, 3)
def full_state_dicts_come_out_of_a_model_and_go_in_from_rank_0(world: World) -> None:
    install_distribute_tensor()
    for tied in TIED.values():
        model, optimizer = made(world, tied, seed=1)
        steps(model, optimizer, range(3))
        wanted = whole(model, optimizer)
        options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        parameters, moments = dcp_state.get_state_dict(model, optimizer, options=options)
        if world.rank == 0:
            assert all(type(value) is Tensor for value in parameters.values())
            plain = Net(layers=2, tied=tied)
            plain.load_state_dict(parameters)
        else:
            parameters, moments = {}, {}
        other, fresh = made(world, tied, granularity="rows:4")
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # Not set_state_dict: with nothing on the other ranks torch's own hangs on FSDP2, too.
        dcp_state.set_model_state_dict(other, parameters, options=options)
        dcp_state.set_optimizer_state_dict(other, fresh, moments, options=options)
        held = whole(other, fresh)
        for name, value in wanted.items():
            assert torch.equal(held[name], value), name


@claim(2)
def saving_in_the_background_sees_the_moment_of_the_call(world: World) -> None:
    model, optimizer = made(world, False, seed=1)
    steps(model, optimizer, range(2))
    wanted = whole(model, optimizer)
    path = world.shared / "background"
    saving = dcp.async_save(state_of(model, optimizer), checkpoint_id=path)
    steps(model, optimizer, range(2, 4))
    saving.result()
    load_from(model, optimizer, path)
    held = whole(model, optimizer)
    assert all(torch.equal(held[name], value) for name, value in wanted.items())


@claim(2)
def torch_save_writes_the_spans_and_nothing_around_them(world: World) -> None:
    model, _ = made(world, False)
    path = world.shared / f"spans-{world.rank}.pt"
    torch.save(model.state_dict(), path)
    held = sum(p.to_local().numel() * p.to_local().itemsize for p in model.parameters())
    assert path.stat().st_size < 1.1 * held + 40_000  # every tensor has its mesh beside it
    other, _ = made(world, False, seed=8)
    other.load_state_dict(torch.load(path, weights_only=False))
    assert_holds(other, {name: full(value) for name, value in model.state_dict().items()})
