"""What `fully_shard` refuses and accepts as FSDP2 does, in FSDP2's words where programs match them.

The names are the claims; what is computed is in `fully_shard_claims.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import odc
from odc.fsdp.ragged import RaggedTensor
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.sharded_models import Net, batch, loss_of, sharded, train_ranks

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


def on_meta(world: World) -> Any:
    """Sharded while the meta device is the default; rank 1 has no element of the narrow layer."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 1, bias=False), nn.Linear(1, 5))
        for part in (*model, model):
            odc.fully_shard(part)
    return model


# -- names ---------------------------------------------------------------------------------------


@claim(2)
def all_names_of_fsdp2_come_from_one_place(world: World) -> None:
    names = "fully_shard FSDPModule MixedPrecisionPolicy CPUOffloadPolicy OffloadPolicy"
    for name in f"{names} register_fsdp_forward_method share_comm_ctx UnshardHandle".split():
        assert name in odc.__all__ and hasattr(fsdp2, name)
        assert getattr(odc, name).__name__ == name
    handle = odc.fully_shard(nn.Linear(4, 4)).unshard(async_op=True)
    assert isinstance(handle, odc.UnshardHandle)
    handle.wait()


@claim(2)
def the_function_of_torch_distributes_like_a_sharded_parameter(world: World) -> None:
    torch.manual_seed(1)
    model = odc.fully_shard(nn.Linear(3, 5))
    full = torch.randn(5, 3)
    weight = model.weight
    made = torch.distributed.tensor.distribute_tensor(full, weight.device_mesh, weight.placements)
    assert isinstance(made, RaggedTensor) and made.placements == weight.placements
    assert torch.equal(made.full_tensor(), full)


# -- the meta device -----------------------------------------------------------------------------


@claim(2)
def parameters_on_meta_stay_there_until_they_get_values(world: World) -> None:
    model = on_meta(world)
    assert all(p.is_meta and isinstance(p, RaggedTensor) for p in model.parameters())
    told = r"should be materialized from meta device .*: \['0.weight'\]"
    for act in (lambda: model(torch.ones(2, 5)), model[0].unshard):
        with pytest.raises(RuntimeError, match=told):
            act()
    model.to_empty(device="cpu")
    assert not any(p.is_meta for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert all(bool((p.full_tensor() < 0.5).all()) for p in model.parameters())


@claim(2)
def values_that_are_assigned_to_a_meta_model_are_trained(world: World) -> None:
    torch.manual_seed(1)
    plain = Net()
    with torch.device("meta"):
        model = sharded(world, Net())
    state = {}
    for name, meta in model.state_dict().items():
        full = plain.state_dict()[name]
        made = torch.distributed.tensor.distribute_tensor(full, meta.device_mesh, meta.placements)
        state[name] = nn.Parameter(made)
    model.load_state_dict(state, assign=True)
    assert train_ranks(world, model, 3) == train_ranks(world, sharded(world, plain), 3)


@claim(2)
def a_parameter_replaced_by_another_layout_is_refused(world: World) -> None:
    model: Any = odc.fully_shard(nn.Linear(4, 4))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), world.mesh, [Replicate()]))
    with pytest.raises(
        ValueError, match=r"weight was replaced by a DTensor \(\(Replicate\(\),\)\)"
    ):
        model(torch.ones(2, 4))


# -- refused arguments ---------------------------------------------------------------------------


@claim(2)
def parameters_and_meshes_that_cannot_be_sharded_are_refused(world: World) -> None:
    grid = init_device_mesh("cpu", (2, world.size // 2))
    with pytest.raises(AssertionError, match="with mesh_dim_names specified"):
        odc.fully_shard(nn.Linear(4, 4), mesh=grid)
    crossed = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="does not support non-contiguous parameters"):
        odc.fully_shard(crossed)
    split: Any = nn.Linear(4, 4)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), world.mesh, [Shard(0)]))
    with pytest.raises(NotImplementedError, match="weight is a DTensor"):
        odc.fully_shard(split)
    ignored = odc.fully_shard(split, ignored_params={split.weight})
    assert not isinstance(ignored.weight, RaggedTensor)
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        odc.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: Shard(1))
    odc.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: Shard(-1))


# -- the root ------------------------------------------------------------------------------------


@claim(2)
def the_outermost_module_is_called_first(world: World) -> None:
    for begin in (
        lambda layer: layer(torch.ones(2, 4)),
        lambda layer: layer._get_fsdp_state()._lazy_init(),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part in (*model, model):
            odc.fully_shard(part)
        begin(model[0])
        told = (
            "already been lazily initialized for 0\nFSDP requires running forward through the root"
        )
        with pytest.raises(RuntimeError, match=told):
            model(torch.ones(2, 4))


@claim(2)
def several_modules_of_one_call_are_no_root(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    odc.fully_shard([model[0], model[1]])
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got "):
        model(torch.ones(2, 4))
    model[0].unshard()  # gathers nevertheless, as a module around them may be to come
    model[0].reshard()
    odc.fully_shard(model)(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- precision -----------------------------------------------------------------------------------


@claim(2)
def gradients_are_summed_in_a_dtype_narrower_than_that_of_compute(world: World) -> None:
    torch.manual_seed(1)
    plain = Net()
    model = sharded(world, plain, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    loss_of(model, batch(world.rank, 0)).backward()
    loss_of(plain, batch(world.rank, 0)).backward()
    for mine, one in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        wanted = one.grad.bfloat16()
        dist.all_reduce(wanted)
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad.full_tensor(), (wanted / world.size).float())


@claim(2)
def a_module_is_called_inside_a_forward_derivative(world: World) -> None:
    torch.manual_seed(1)
    layer = odc.fully_shard(nn.Linear(5, 3), reshard_after_forward=False)
    full, bias = layer.weight.full_tensor(), layer.bias.full_tensor()
    point, direction = torch.randn(5), torch.randn(5)
    value, change = torch.func.jvp(layer, (point,), (direction,))  # its first forward
    torch.testing.assert_close(value, full @ point + bias)
    torch.testing.assert_close(change, full @ direction)
