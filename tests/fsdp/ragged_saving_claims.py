"""What holds of RaggedTensors in files and state dicts; the names are the claims.

The reference is one process with plain tensors, or torch's own DTensor.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from odc.fsdp.ragged import RaggedTensor, distribute_ragged, install_distribute_tensor
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.ragged_pairs import (
    KINDS,
    assert_close,
    assert_same_module,
    full,
    layer_pair,
    ragged,
    stack,
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


@claim(2)
def torch_save_and_load_with_weights_only_keep_the_layout(world: World) -> None:
    mine, plain = layer_pair(world, stack)
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for key, value in loaded.items():
        assert type(value) is RaggedTensor and value.placements == mine.state_dict()[key].placements
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    mine.load_state_dict(loaded)
    assert_same_module(mine, plain)


@claim(2)
def load_state_dict_takes_full_tensors_and_refuses_other_layouts(world: World) -> None:
    mine, plain = layer_pair(world, stack)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    mine.load_state_dict(plain.state_dict())
    assert_same_module(mine, plain)
    other = {key: ragged(world, value, "between") for key, value in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match="redistribute"):
        mine.load_state_dict(other)
    mine.load_state_dict(other, assign=True)
    assert_same_module(mine, plain)
    assert mine[1].weight.placements == other["1.weight"].placements


def _trained(world: World) -> tuple[nn.Module, Any, nn.Module, Any]:
    """Models and optimizers after one step: (ragged, its optimizer, plain, its optimizer)."""
    mine, plain = layer_pair(world, stack)
    ours = torch.optim.AdamW(mine.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    torch.manual_seed(9)
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        q.grad = torch.randn_like(q)
        p.grad = distribute_ragged(q.grad, world.mesh, p.placements, src_data_rank=None)
    ours.step()
    theirs.step()
    return mine, ours, plain, theirs


def _assert_same_moments(mine: nn.Module, ours: Any, plain: nn.Module, theirs: Any) -> None:
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert_close(ours.state[p][key], theirs.state[q][key])
        assert ours.state[p]["step"] == theirs.state[q]["step"]


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = dcp_state.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _load(world: World, state_of: Any, path: Any) -> tuple[nn.Module, Any]:
    mine, _ = layer_pair(world, stack)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01)
    state = state_of(mine, optimizer)
    dcp.load(state, checkpoint_id=path)
    dcp_state.set_state_dict(
        mine, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return mine, optimizer


@claim(2)
def a_checkpoint_is_saved_by_two_ranks(world: World) -> None:
    mine, ours, _, _ = _trained(world)
    dcp.save(_state(mine, ours), checkpoint_id=world.shared / "ragged")
    dcp.async_save(_state(mine, ours), checkpoint_id=world.shared / "async").result()
    sharded = stack()
    torch.manual_seed(3)
    sharded = stack()
    fully_shard(sharded, mesh=world.mesh)
    theirs = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    torch.manual_seed(9)
    for parameter in sharded.parameters():
        gradient = torch.randn(parameter.shape)
        parameter.grad = distribute_tensor(gradient, world.mesh, parameter.placements)
    theirs.step()
    dcp.save(_state(sharded, theirs), checkpoint_id=world.shared / "fsdp2")


@claim(2, 1, 3, 4, after="a_checkpoint_is_saved_by_two_ranks")
def a_checkpoint_of_two_ranks_loads_on_any_number(world: World) -> None:
    _, _, plain, theirs = _trained(world)
    for kind in ("ragged", "async", "fsdp2"):
        mine, ours = _load(world, _state, world.shared / kind)
        for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
            assert_close(p.detach(), q.detach())
        _assert_same_moments(mine, ours, plain, theirs)


@claim(2, 3, after="a_checkpoint_is_saved_by_two_ranks")
def a_ragged_checkpoint_loads_into_fsdp2_and_into_plain_tensors(world: World) -> None:
    _, _, plain, theirs = _trained(world)
    sharded = stack()
    fully_shard(sharded, mesh=world.mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    state = _state(sharded, optimizer)
    dcp.load(state, checkpoint_id=world.shared / "ragged")
    dcp_state.set_state_dict(
        sharded, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)
        ours = optimizer.state[p]["exp_avg"].full_tensor()
        torch.testing.assert_close(ours, theirs.state[q]["exp_avg"])
    whole = {"model": {key: torch.zeros_like(v) for key, v in plain.state_dict().items()}}
    dcp.load(whole, checkpoint_id=world.shared / "ragged")
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(whole["model"][key], value)


@claim(2, 1, 3)
def odd_tensors_can_be_saved_and_loaded(world: World) -> None:
    values = {
        "scalar": full("scalar"),
        "nothing": torch.zeros(0, 3),
        "deep": torch.arange(120.0).view(2, 3, 4, 5),
        "long": torch.arange(7),
    }
    saved = {key: ragged(world, value, "uneven") for key, value in values.items()}
    path = world.shared / f"odd{world.size}"
    dcp.save(saved, checkpoint_id=path)
    for kind in KINDS:
        loaded = {
            key: ragged(world, torch.zeros_like(value), kind) for key, value in values.items()
        }
        dcp.load(loaded, checkpoint_id=path)
        for key, value in values.items():
            assert torch.equal(loaded[key].full_tensor(), value), (key, kind)


@claim(2, after="a_checkpoint_is_saved_by_two_ranks")
def loading_into_meta_tensors_is_refused(world: World) -> None:
    state = {"model": {"0.weight": ragged(world, torch.zeros(6, 4)).to("meta")}}
    with pytest.raises(CheckpointException):
        dcp.load(state, checkpoint_id=world.shared / "ragged")


@claim(2)
def full_state_dicts_come_out_and_go_in(world: World) -> None:
    install_distribute_tensor()
    install_distribute_tensor()
    mine, ours, plain, theirs = _trained(world)
    options = dcp_state.StateDictOptions(full_state_dict=True)
    weights = dcp_state.get_model_state_dict(mine, options=options)
    moments = dcp_state.get_optimizer_state_dict(mine, ours, options=options)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(weights[key], value)
        assert not isinstance(weights[key], DTensor)
    for broadcast in (False, True):
        options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        again, _ = layer_pair(world, stack)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        places = [p.to_local().data_ptr() for p in again.parameters()]
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
        empty = broadcast and world.rank > 0
        dcp_state.set_model_state_dict(again, {} if empty else dict(weights), options=options)
        dcp_state.set_optimizer_state_dict(
            again, optimizer, {} if empty else copy.deepcopy(moments), options=options
        )
        for p, q in zip(again.parameters(), plain.parameters(), strict=True):
            assert_close(p.detach(), q.detach())
        assert places == [p.to_local().data_ptr() for p in again.parameters()]
        _assert_same_moments(again, optimizer, plain, theirs)
