"""What `fully_shard` computes on several ranks, and its gradients; the names are the claims.

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

import odc
from odc.fsdp import dbuffer
from odc.fsdp.ragged import RaggedTensor
from odc.fsdp.sharded_runtime import comm_of
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.sharded_models import (
    Block,
    Experts,
    Net,
    batch,
    deviation,
    loss_of,
    same_data_losses,
    sharded,
    train_ranks,
    train_single,
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


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
    for reduce in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        theirs = train_ranks(world, sharded(world, model, fsdp2, mp_policy=policy), 10)
        mine = sharded(world, model, mp_policy=policy)
        losses = train_ranks(world, mine, 10)
        limit = 2 * deviation(theirs, wanted)
        assert deviation(losses, wanted) <= limit, (reduce, losses, theirs, wanted)
        assert all(p.dtype == torch.float32 for p in mine.parameters())
    unsaid = sharded(world, model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert train_ranks(world, unsaid, 3) == losses[:3], "gradients are summed as they come"


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
