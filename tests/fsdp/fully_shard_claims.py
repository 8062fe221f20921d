"""What holds of `fully_shard` on several ranks; the names are the claims.

The reference is one process that sees the data of all ranks, or torch's own FSDP2 in the same run.
"""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import odc
from odc.fsdp import dbuffer
from odc.fsdp.ragged import RaggedTensor
from odc.fsdp.sharded_runtime import comm_of
from tests.fsdp.claims import Entry, World, registry

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


# -- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Prime sizes: rows never divide."""

    def __init__(self, size: int = 37, inner: int = 53) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 37)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(37, 31, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


class Experts(nn.Module):
    """Three experts, of which a rank's data may use two: more ranks than experts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12)
        self.router = nn.Linear(12, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, 12, 20) * 0.2)
        self.down = nn.Parameter(torch.randn(3, 20, 12) * 0.2)
        self.head = nn.Linear(12, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = self.router(x).softmax(-1)
        inner = torch.relu(torch.einsum("btd,edh->bteh", x, self.up))
        return self.head(x + torch.einsum("bteh,ehd,bte->btd", inner, self.down, gates))


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 31, (2, 9), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def sharded(world: World, model: nn.Module, apply: Any = None, **chosen: Any) -> nn.Module:
    """A copy, sharded layer by layer; `apply` is `odc.fully_shard` or torch's."""
    apply = apply or odc.fully_shard
    made = copy.deepcopy(model)
    for layer in getattr(made, "layers", ()):
        apply(layer, mesh=world.mesh, **chosen)
    apply(made, mesh=world.mesh, **chosen)
    return made


def gradients64(world: World, model: nn.Module, step: int) -> tuple[dict[str, Tensor], ...]:
    """(mean over ranks of the fp32 gradients taken in fp64, mean of their magnitudes)."""
    mean: dict[str, Tensor] = {}
    size: dict[str, Tensor] = {}
    for rank in range(world.size):
        one = copy.deepcopy(model)
        loss_of(one, batch(rank, step)).backward()
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad.double() / world.size
            mean[name] = mean.get(name, 0) + grad
            size[name] = size.get(name, 0) + grad.abs()
    return mean, size


def train_single(world: World, model: nn.Module, steps: int, accumulate: int = 1) -> list[float]:
    """All ranks' data in one process, in the order of ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            for rank in range(world.size):
                loss = loss_of(model, batch(rank, accumulate * step + micro)) / world.size
                (loss / accumulate).backward()
                total += loss.item() / accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_ranks(
    world: World, model: nn.Module, steps: int, accumulate: int = 1, sync_each: bool = True
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for micro in range(accumulate):
            if not sync_each:
                model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = loss_of(model, batch(world.rank, accumulate * step + micro))
            (loss / accumulate).backward()
            total += loss.detach() / accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world.size)
    return losses


def deviation(got: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))


# -- numbers -------------------------------------------------------------------------------------


@claim(2, 3, 4)
def each_gradient_is_the_mean_to_a_rounding_a_rank(world: World) -> None:
    for build in (Net, Experts):
        torch.manual_seed(1)
        model = build()
        mean, size = gradients64(world, model, 0)
        mine = sharded(world, model)
        loss_of(mine, batch(world.rank, 0)).backward()
        for name, parameter in mine.named_parameters():
            assert isinstance(parameter.grad, RaggedTensor)
            error = (parameter.grad.full_tensor().double() - mean[name]).abs()
            assert bool((error <= world.size * 2.0**-24 * size[name]).all()), name


@claim(2, 3, 4)
def two_runs_give_the_same_bits(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    grads = []
    for _ in range(2):
        mine = sharded(world, model)
        loss_of(mine, batch(world.rank, 0)).backward()
        grads.append([p.grad.to_local().clone() for p in mine.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def check_training(world: World, model: nn.Module, **chosen: Any) -> None:
    """Ten losses as close to one process as twice what FSDP2's are."""
    theirs = train_ranks(world, sharded(world, model, fsdp2), 10)
    mine = sharded(world, model, **chosen)
    losses = train_ranks(world, mine, 10)
    wanted = train_single(world, model, 10)
    limit = max(2 * deviation(theirs, wanted), 1e-6)
    assert deviation(losses, wanted) <= limit, (losses, wanted)


@claim(2, 3, 4)
def ten_losses_are_those_of_one_process(world: World) -> None:
    torch.manual_seed(1)
    check_training(world, Net())
    torch.manual_seed(2)
    check_training(world, Experts(), granularity="tensor")
    torch.manual_seed(3)
    check_training(world, Net(tied=True), granularity="rows:4", planner="greedy")


@claim(2)
def checkpointing_changes_no_bit(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    plain = train_ranks(world, sharded(world, model), 4)
    model.recompute = True
    assert train_ranks(world, sharded(world, model), 4) == plain
    assert train_ranks(world, sharded(world, model, reshard_after_forward=False), 4) == plain


@claim(2, 3)
def accumulating_with_and_without_reductions_agrees_with_one_process(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    often = train_ranks(world, sharded(world, model), 4, accumulate=3)
    once = train_ranks(world, sharded(world, model), 4, accumulate=3, sync_each=False)
    wanted = train_single(world, model, 4, accumulate=3)
    assert deviation(often, wanted) < 2e-6 and deviation(once, wanted) < 2e-6


@claim(2, 3)
def mixed_precision_strays_from_fp32_no_further_than_twice_fsdp2(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    wanted = train_single(world, copy.deepcopy(model), 10)
    for reduce in (torch.float32, torch.bfloat16, None):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        theirs = train_ranks(world, sharded(world, model, fsdp2, mp_policy=policy), 10)
        mine = sharded(world, model, mp_policy=policy)
        losses = train_ranks(world, mine, 10)
        limit = 2 * deviation(theirs, wanted)
        assert deviation(losses, wanted) <= limit, (reduce, losses, theirs, wanted)
        assert all(p.dtype == torch.float32 for p in mine.parameters())


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


@claim(4)
def hybrid_sharding_is_sharding_and_replicas(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    mine = copy.deepcopy(model)
    for layer in mine.layers:
        odc.fully_shard(layer, mesh=mesh)
    odc.fully_shard(mine, mesh=mesh)
    losses = train_ranks(world, mine, 5)
    assert deviation(losses, train_single(world, model, 5)) < 2e-6


# -- parameters ----------------------------------------------------------------------------------


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
def evaluating_between_steps_changes_nothing(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    wanted = train_ranks(world, sharded(world, model), 3)
    mine = sharded(world, model)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        with torch.no_grad():
            loss_of(mine, batch(world.rank, 77))
        loss = loss_of(mine, batch(world.rank, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world.size)
    assert losses == wanted


@claim(2)
def an_exception_in_a_forward_leaves_a_model_that_trains(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    wanted = train_ranks(world, sharded(world, model), 2)
    mine = sharded(world, model)
    handle = mine.layers[1].down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(mine, batch(world.rank, 0))
    handle.remove()
    mine.reset_iter_state()
    assert train_ranks(world, mine, 2) == wanted


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


@claim(2)
def gradients_that_are_zeroed_in_place_are_added_to(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    mine = sharded(world, model)
    grads = []
    for _ in range(2):
        loss_of(mine, batch(world.rank, 0)).backward()
        grads.append([p.grad.full_tensor() for p in mine.parameters()])
        mine.zero_grad(set_to_none=False)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


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


def same_data_losses(world: World, model: nn.Module, step: Any) -> list[float]:
    """Losses of four steps on one batch for all ranks; `step` does what a loop does in between."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for number in range(4):
        loss = loss_of(model, batch(0, number))
        step(model, loss, number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@claim(2)
def an_evaluation_between_backward_and_update_leaves_nothing_stale(world: World) -> None:
    def step(model: nn.Module, loss: Tensor, number: int) -> None:
        loss.backward()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            model(batch(0, number))

    torch.manual_seed(1)
    model = Net()
    mine = sharded(world, model)
    assert same_data_losses(world, mine, step) == same_data_losses(world, model, step)


class Broken(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("boom")


@claim(2)
def an_exception_in_backward_is_forgotten_after_zero_grad(world: World) -> None:
    """Reductions were under way when it came."""

    def step(model: nn.Module, loss: Tensor, number: int) -> None:
        if number == 1:
            hook = model.layers[1].up.register_forward_hook(lambda m, a, out: Broken.apply(out))
            with pytest.raises(ValueError, match="boom"):
                loss_of(model, batch(0, 7)).backward()
            hook.remove()
            model.zero_grad()
            loss = loss_of(model, batch(0, number))
        loss.backward()

    torch.manual_seed(1)
    model = Net()
    mine = sharded(world, model)
    assert same_data_losses(world, mine, step) == same_data_losses(world, model, step)


@claim(2)
def a_gradient_that_somebody_keeps_does_not_change(world: World) -> None:
    """Slices that only a parameter showed are written over, those that are kept are not."""
    for size, precision in ((37, None), (700, None), (37, torch.float64)):
        torch.manual_seed(1)
        model = nn.Sequential(Block(size, size), nn.Linear(size, 3))
        policy = MixedPrecisionPolicy(reduce_dtype=precision)
        for layer in model:
            odc.fully_shard(layer, mesh=world.mesh, mp_policy=policy)
        odc.fully_shard(model, mesh=world.mesh, mp_policy=policy)
        addresses = []
        for keep in (lambda g: g, lambda g: g.to_local(), lambda g: g.to_local()[:1], None, None):
            model(torch.randn(2, size)).square().sum().backward()
            grads = [p.grad for p in model.parameters()]
            addresses.append([g.to_local().data_ptr() for g in grads])
            values = [g.to_local().clone() for g in grads]
            kept = [keep(g) for g in grads] if keep else []
            del grads
            model.zero_grad()
            model(torch.randn(2, size)).square().sum().backward()
            model.zero_grad()
            for one, value in zip(kept, values, strict=False):
                held = one.to_local() if isinstance(one, RaggedTensor) else one
                assert torch.equal(held, value[: held.numel()])
            kept = one = held = None
        assert addresses[0] == addresses[-1], "nobody keeps one any more"


@claim(2)
def a_gather_that_nobody_waits_for_delays_no_other(world: World) -> None:
    model = nn.Sequential(nn.Linear(2000, 2000))
    odc.fully_shard(model, mesh=world.mesh)
    if world.rank == 1:
        time.sleep(0.3)  # the other rank has dropped its model when this rank's bytes come
    model.unshard(async_op=True)
    del model
    gc.collect()
    rank = torch.full((1,), float(world.rank))
    comm_of(world.mesh.get_group(), torch.device("cpu")).all_reduce(rank).wait()
    assert rank == 1


@claim(4)
def micro_batches_are_added_up_over_replicas_once(world: World) -> None:
    torch.manual_seed(1)
    model = Net()
    for recurse in (True, False):  # all of it, or what is the root's own
        mine = copy.deepcopy(model)
        for part in (*mine.layers, mine):
            odc.fully_shard(part, mesh=world.grid)
        for step in range(2):
            for micro in range(3):
                mine.set_requires_all_reduce(micro == 2, recurse=recurse)
                loss_of(mine, batch(world.rank, 3 * step + micro)).backward()
                assert micro == 2 or mine.head.weight.grad is None or step > 0
            plain = copy.deepcopy(model)
            for micro in range(3):
                for rank in range(world.size):
                    (loss_of(plain, batch(rank, 3 * step + micro)) / world.size).backward()
            for got, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)
            mine.zero_grad(set_to_none=step > 0)


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
def a_backward_for_second_derivatives_is_refused_and_forgotten(world: World) -> None:
    def step(one: nn.Module, loss: Tensor, number: int) -> None:
        if number == 1 and one is mine:
            with pytest.raises(RuntimeError, match="create_graph=True is not supported on a shard"):
                loss.backward(create_graph=True)
            mine.zero_grad()
            loss = loss_of(mine, batch(0, number))
        loss.backward()

    torch.manual_seed(1)
    model = Net()
    mine = sharded(world, model)
    assert same_data_losses(world, mine, step) == same_data_losses(world, model, step)


@claim(2, 3)
def slices_of_gradients_may_be_a_part_of_the_buffer_or_not(world: World) -> None:
    """As large ones are: reduced at once, added up before or after, and zeroed in place."""
    torch.manual_seed(1)
    model = Net()
    before = dbuffer.MAX_LOST
    losses = []
    for lost in (0.0, float("inf")):
        dbuffer.MAX_LOST = lost
        mine = sharded(world, model)
        parts = [
            part
            for layer in mine.layers
            for part in odc.fully_shard.state(layer).group.buffer.parts
        ]
        assert all((part.joined is not None) == bool(lost) for part in parts)
        found = train_ranks(world, mine, 2)
        found += train_ranks(world, mine, 2, accumulate=2)
        found += train_ranks(world, mine, 2, accumulate=3, sync_each=False)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for step in range(3):
            loss_of(mine, batch(world.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        losses.append(found + train_ranks(world, mine, 1))
    dbuffer.MAX_LOST = before
    assert losses[0] == losses[1]


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
