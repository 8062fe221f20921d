"""What holds of sharded modules and parameters as such: kinds, states, parts, refusals.

The reference is one process with the plain module.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import odc
from odc.fsdp.ragged import RaggedTensor
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.sharded_models import (
    Block,
    Net,
    batch,
    deviation,
    loss_of,
    sharded,
    train_ranks,
    train_single,
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


@claim(2)
def outputs_and_inputs_are_cast_as_the_policy_says(world: World) -> None:
    seen = []

    class Probe(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, self.weight.dtype))
            return super().forward(x)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = odc.fully_shard(Probe(6, 5), mesh=world.mesh, mp_policy=policy)
    out = model(torch.randn(2, 6))
    assert seen == [(torch.bfloat16, torch.bfloat16)] and out.dtype == torch.float32
    out.sum().backward()
    assert model.weight.grad.dtype == torch.float32


@claim(2, 3)
def parameters_are_dtensors_when_sharded_and_plain_when_not(world: World) -> None:
    model = sharded(world, Net())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total.item() == sum(p.numel() for p in model.parameters())
    model.layers[0].unshard()
    assert not isinstance(model.layers[0].up.weight, DTensor)
    assert isinstance(model.layers[1].up.weight, DTensor)
    model.layers[0].reshard()
    assert isinstance(model.layers[0].up.weight, DTensor)
    handle = model.layers[1].unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.layers[1].up.weight, DTensor)


@claim(2)
def the_class_is_swapped_and_copies_are_refused(world: World) -> None:
    model = sharded(world, Net())
    assert type(model).__name__ == "FSDPNet" and isinstance(model, (odc.FSDPModule, Net))
    assert isinstance(model.layers[0], odc.FSDPModule) and isinstance(model.layers[0], Block)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)
    copy.deepcopy(model.head.weight)
    states = {id(odc.fully_shard.state(layer)) for layer in model.layers}
    assert len(states) == len(model.layers) and None not in states
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        odc.fully_shard(model, mesh=world.mesh)
    with pytest.raises(ValueError, match="does not support containers"):
        odc.fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=world.mesh)
    with pytest.raises(ValueError, match="doesn't support scalar parameters"):
        scalar = nn.Module()
        scalar.p = nn.Parameter(torch.tensor(1.0))
        odc.fully_shard(scalar, mesh=world.mesh)


@claim(2, 3)
def frozen_ignored_and_unused_parameters_have_no_gradient(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    model.layers[0].up.weight.requires_grad_(False)
    model.layers[1].unused = nn.Parameter(torch.ones(5, 3))
    kept = model.head.weight
    mine = copy.deepcopy(model)
    ignored = {mine.head.weight}
    for layer in mine.layers:
        odc.fully_shard(layer, mesh=world.mesh)
    odc.fully_shard(mine, mesh=world.mesh, ignored_params=ignored)
    assert not isinstance(mine.head.weight, DTensor) and mine.head.weight.shape == kept.shape
    loss_of(mine, batch(world.rank, 0)).backward()
    assert mine.layers[0].up.weight.grad is None and mine.layers[1].unused.grad is None
    assert mine.layers[0].up.bias.grad is not None and mine.layers[1].up.weight.grad is not None
    loss_of(model, batch(world.rank, 0)).backward()
    assert torch.equal(mine.head.weight.grad, kept.grad)


@claim(2)
def several_forwards_and_modules_called_twice_add_up(world: World) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(31, 37)
            self.layers = nn.ModuleList([Block()])
            self.head = nn.Linear(37, 31)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layers[0](self.layers[0](self.embed(tokens))))

    torch.manual_seed(1)
    model = Twice()
    mine = sharded(world, model)
    (loss_of(mine, batch(world.rank, 0)) + loss_of(mine, batch(world.rank, 1))).backward()
    for rank in range(world.size):
        loss = loss_of(model, batch(rank, 0)) + loss_of(model, batch(rank, 1))
        (loss / world.size).backward()
    for parameter, wanted in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)


@claim(2)
def a_meta_model_is_filled_after_sharding(world: World) -> None:
    with torch.device("meta"):
        model = Net()
    mine = sharded(world, model)
    mine.to_empty(device="cpu")
    for module in mine.modules():
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(3)
            module.reset_parameters()
    assert deviation(train_ranks(world, mine, 2), train_ranks(world, mine, 2)) < 1
    assert all(bool(p.full_tensor().isfinite().all()) for p in mine.parameters())


@claim(2, 3)
def a_state_dict_goes_to_plain_models_and_back(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    mine = sharded(world, model)
    loss_of(mine, batch(world.rank, 0))  # the root stays gathered after its forward
    state = mine.state_dict()
    assert all(isinstance(value, RaggedTensor) for value in state.values())
    for name, value in model.state_dict().items():
        assert torch.equal(state[name].full_tensor(), value)
    other = sharded(world, Net())
    other.load_state_dict(state)
    got = train_ranks(world, other, 2)
    assert got == train_ranks(world, mine, 2)


@claim(2)
def a_forward_method_by_another_name_gathers_too(world: World) -> None:
    class Named(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    torch.manual_seed(1)
    plain = Named(6, 5)
    mine = odc.fully_shard(copy.deepcopy(plain), mesh=world.mesh)
    odc.register_fsdp_forward_method(mine, "encode")
    x = torch.randn(3, 6)
    mine.encode(x).sum().backward()
    plain.encode(x).sum().backward()
    torch.testing.assert_close(mine.weight.grad.full_tensor(), plain.weight.grad)


@claim(2)
def a_model_may_be_cast_after_it_was_sharded(world: World) -> None:
    torch.manual_seed(1)
    plain = Net()
    mine = sharded(world, plain)
    mine.to(torch.float64)
    wanted = train_single(world, plain.double(), 3)
    assert deviation(train_ranks(world, mine, 3), wanted) < 1e-7  # the losses are taken in fp32
    for parameter in mine.parameters():
        local = parameter.to_local()
        assert parameter.dtype == local.dtype == torch.float64


@claim(2)
def a_part_that_is_called_by_itself_trains_too(world: World) -> None:
    torch.manual_seed(1)
    plain = Net()
    mine = sharded(world, plain)
    loss_of(mine, batch(world.rank, 0)).backward()
    mine.zero_grad()
    generator = torch.Generator().manual_seed(world.rank)
    mine.layers[1](torch.randn(3, 37, generator=generator)).sum().backward()
    for rank in range(world.size):
        generator = torch.Generator().manual_seed(rank)
        out = plain.layers[1](torch.randn(3, 37, generator=generator))
        (out.sum() / world.size).backward()
    for parameter, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)


@claim(4)
def a_number_of_ranks_to_reshard_to_counts_as_true(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    wanted = train_ranks(world, sharded(world, model), 2)
    assert train_ranks(world, sharded(world, model, reshard_after_forward=2), 2) == wanted
    with pytest.raises(ValueError, match="it should be a factor of 4, not 3"):
        sharded(world, model, reshard_after_forward=3)


class Chunked(nn.Module):
    """A head that is called apart from the body, on pieces, each with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 37)
        self.body = Block()
        self.norm = nn.LayerNorm(37)
        self.head = nn.Linear(37, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.body(self.embed(tokens)))


def chunked_backward(model: nn.Module, tokens: Tensor, scale: float = 1.0) -> None:
    hidden = model(tokens)
    pieces = []
    for piece in hidden.detach().chunk(3, dim=1):
        piece = piece.contiguous().requires_grad_()
        (model.head(piece).square().mean() * scale).backward()
        assert piece.grad is not None
        pieces.append(piece.grad)
    hidden.backward(torch.cat(pieces, dim=1))


@claim(2)
def modules_of_one_group_may_run_apart_and_in_pieces(world: World) -> None:
    for reshard in (True, False):
        torch.manual_seed(1)
        plain = Chunked()
        mine = copy.deepcopy(plain)
        odc.fully_shard(mine.body, mesh=world.mesh, reshard_after_forward=reshard)
        pair = [mine.norm, mine.head]
        assert odc.fully_shard(pair, mesh=world.mesh, reshard_after_forward=reshard) is pair
        odc.fully_shard(mine, mesh=world.mesh, reshard_after_forward=reshard)
        for _ in range(2):
            mine.zero_grad()
            plain.zero_grad()
            chunked_backward(mine, batch(world.rank, 0))
            for rank in range(world.size):
                chunked_backward(plain, batch(rank, 0), 1 / world.size)
            for parameter, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)


@claim(2)
def reentrant_checkpointing_names_the_argument_to_change(world: World) -> None:
    class Reentrant(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.head(x)

    mine = sharded(world, Reentrant())
    with pytest.raises(RuntimeError, match="or sharded model; pass use_reentrant=False"):
        loss_of(mine, batch(0, 0)).backward()


@claim(2)
def a_parameter_shared_between_two_calls_is_refused(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    model.layers[2].up.weight = model.layers[0].up.weight
    for module in (model.layers[0], model.layers[2], model):
        odc.fully_shard(module, mesh=world.mesh)
    told = r"layers.2.up.weight is shared with up.weight, which is already managed by another"
    with pytest.raises(ValueError, match=told):
        model(batch(0, 0))


@claim(2)
def a_group_of_nothing_but_empty_parameters_trains(world: World) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(0, 0, bias=False))
    model[1].register_forward_pre_hook(lambda module, args: (args[0][:, :0],))
    model[1].register_forward_hook(lambda module, args, output: args[0].sum(1) + output.sum(1))
    for part in (model[1], model):
        odc.fully_shard(part, mesh=world.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model[1].weight.shape == (0, 0)
