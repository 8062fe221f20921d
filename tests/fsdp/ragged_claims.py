"""What holds of the values of a RaggedTensor on several ranks; the names are the claims.

The reference is one process with plain tensors, or torch's own DTensor.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from odc.fsdp.ragged import (
    RaggedLayoutError,
    RaggedOpError,
    RaggedShard,
    RaggedTensor,
    distribute_ragged,
)
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.ragged_optimizer_claims import (
    check_steps,
    clip_grad_norm_gives_the_norm_and_the_gradients_of_one_process,
)
from tests.fsdp.ragged_pairs import (
    KINDS,
    SHAPES,
    assert_close,
    assert_same_module,
    full,
    layer_pair,
    ragged,
    shard,
    stack,
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


@claim(2, 3)
def reductions_of_a_whole_tensor_are_those_of_one_process(world: World) -> None:
    value = full("matrix")
    for kind in KINDS:
        mine = ragged(world, value, kind)
        for name in ("sum", "mean", "max", "min", "amax", "amin"):
            ours, theirs = getattr(mine, name)(), getattr(value, name)()
            torch.testing.assert_close(ours.full_tensor(), theirs)
        assert bool((mine > 1).any()) == bool((value > 1).any())
        assert bool((mine > -9).all()) and not bool((mine > 9).any())
        assert torch.equal(mine, mine.clone()) and not torch.equal(mine, mine + 1)
        assert not mine.isnan().any() and mine.isfinite().all()
    assert ragged(world, full("scalar")).item() == full("scalar").item()


@claim(2, 1, 3, 4)
def full_tensor_gives_every_rank_the_whole_whatever_the_layout(world: World) -> None:
    for name in SHAPES:
        for kind in KINDS:
            for block in (1, 2, 5):
                assert torch.equal(ragged(world, full(name), kind, block).full_tensor(), full(name))


@claim(2, 1, 3, 4)
def redistribute_moves_between_all_layouts(world: World) -> None:
    value = full("matrix")
    targets: list[Any] = [shard(value.numel(), world.size, kind, 2) for kind in KINDS]
    targets += [Replicate(), Shard(0), Shard(-2)]
    for kind in KINDS:
        for target in targets:
            mine = ragged(world, value, kind)
            moved = mine.redistribute(world.mesh, [target])
            assert torch.equal(moved.full_tensor(), value)
            back = RaggedTensor.from_dtensor(moved, mine.placements)
            assert torch.equal(back.to_local(), mine.to_local())
            if isinstance(target, Shard):
                expected = distribute_tensor(value, world.mesh, [Shard(0)])
                assert torch.equal(moved.to_local(), expected.to_local())
                assert moved.placements == (Shard(0),) and type(moved) is DTensor
                assert torch.equal((moved + expected).full_tensor(), value * 2)


@claim(3, slow=True)
def redistribute_sends_no_element_that_the_other_rank_has(world: World) -> None:
    value = torch.arange(60.0).view(12, 5)
    sent = []
    plain = dist.all_to_all_single

    def spy(output: Tensor, input: Tensor, receives: Any, sends: Any, **kwargs: Any) -> Any:
        sent.append([count for rank, count in enumerate(sends) if rank != world.rank])
        return plain(output, input, receives, sends, **kwargs)

    mine = distribute_ragged(value, world.mesh, RaggedShard(5, (6, 0, 6)), src_data_rank=None)
    with patch.object(dist, "all_to_all_single", spy):
        moved = mine.redistribute(placements=[RaggedShard(5, (4, 4, 4))])
        assert torch.equal(moved.redistribute(placements=moved.placements), moved)
    assert torch.equal(moved.full_tensor(), value)
    assert sent == [[[10, 0], [0, 0], [0, 10]][world.rank]]


@claim(2, 3)
def distribute_takes_the_values_of_rank_0(world: World) -> None:
    for kind in KINDS:
        value = full("matrix") if world.rank == 0 else torch.zeros(7, 5)
        made = distribute_ragged(value, world.mesh, shard(35, world.size, kind))
        assert torch.equal(made.full_tensor(), full("matrix"))


@claim(2)
def a_span_is_aliased_and_shape_and_kind_are_the_whole_tensors(world: World) -> None:
    layout = shard(35, world.size)
    buffer = torch.zeros(64)
    offset, numel = layout.span(35, world.rank)
    local = buffer[3 : 3 + numel]
    made = RaggedTensor.from_span(local, world.mesh, layout, (7, 5), requires_grad=True)
    parameter = nn.Parameter(made)
    with torch.no_grad():
        parameter.fill_(2.0)
    assert buffer.sum() == 2 * numel and parameter.is_leaf and parameter.requires_grad
    assert isinstance(parameter, DTensor | nn.Parameter) and type(parameter.data) is RaggedTensor
    assert parameter.shape == (7, 5) and parameter.stride() == (5, 1) and parameter.numel() == 35
    assert parameter.to_local().shape == (numel,) and parameter.placements == (layout,)
    with torch.no_grad():
        assert parameter.to_local().data_ptr() == local.data_ptr()
    assert "RaggedTensor(shape=(7, 5)" in repr(parameter)
    buffer.untyped_storage().resize_(0)
    assert parameter.shape == (7, 5)


@claim(2)
def rows_and_reshapes_are_views(world: World) -> None:
    value = full("cube")
    for kind in KINDS:
        for block in (1, 3, 4):
            mine = ragged(world, value, kind, block)
            assert torch.equal(mine[1].full_tensor(), value[1])
            assert torch.equal(mine[-2, 1:].full_tensor(), value[-2, 1:])
            assert torch.equal(mine[1:1].full_tensor(), value[1:1])
            assert torch.equal(mine.view(-1).full_tensor(), value.view(-1))
            assert torch.equal(mine.view(6, -1)[2:5].full_tensor(), value.view(6, -1)[2:5])
            assert torch.equal(mine.reshape(5, 6).full_tensor(), value.reshape(5, 6))
            mine[0][1].fill_(7.0)
            changed = value.clone()
            changed[0][1].fill_(7.0)
            assert torch.equal(mine.full_tensor(), changed)


@claim(2)
def setting_data_copies_and_refuses_what_lies_otherwise(world: World) -> None:
    parameter = nn.Parameter(ragged(world, full("matrix")))
    place = parameter.to_local().data_ptr()
    parameter.data = ragged(world, full("matrix", 5))
    assert torch.equal(parameter.detach().full_tensor(), full("matrix", 5))
    assert parameter.to_local().data_ptr() == place
    for other in (
        full("matrix"),
        ragged(world, full("matrix"), "last"),
        parameter.detach().double(),
    ):
        with pytest.raises(RaggedLayoutError, match="p.data = "):
            parameter.data = other
    parameter.data.mul_(2)
    assert torch.equal(parameter.detach().full_tensor(), full("matrix", 5) * 2)


@claim(2, 3)
def init_functions_are_bit_equal_to_one_process(world: World) -> None:
    functions = [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.zeros_,
        nn.init.ones_,
        lambda t: nn.init.constant_(t, 3.0),
        lambda t: t.bernoulli_(0.3),
        lambda t: t.exponential_(),
        lambda t: t.random_(),
    ]
    for function in functions:
        mine, plain = ragged(world, full("wide")), full("wide")
        for value in (mine, plain):
            torch.manual_seed(11)
            with torch.no_grad():
                function(value)
        assert torch.equal(mine.full_tensor(), plain)


@claim(2)
def modules_on_meta_become_bit_equal_to_one_process(world: World) -> None:
    plain = stack()
    mine, _ = layer_pair(world, stack)
    mine.to("meta")
    assert all(p.is_meta and isinstance(p, RaggedTensor) for p in mine.parameters())
    mine.to_empty(device="cpu")
    for model in (mine, plain):
        torch.manual_seed(5)
        for layer in model:
            layer.reset_parameters()
    assert_same_module(mine, plain)


@claim(2)
def module_casts_keep_the_layout(world: World) -> None:
    mine, plain = layer_pair(world, stack)
    for cast in (lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.cpu().float()):
        assert_same_module(cast(mine), cast(plain))
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in mine.parameters())


@claim(2)
def deepcopy_copies_the_span_and_not_the_buffer(world: World) -> None:
    layout = shard(35, world.size)
    numel = layout.span(35, world.rank)[1]
    local = torch.zeros(10_000)[:numel]
    parameter = nn.Parameter(RaggedTensor.from_span(local, world.mesh, layout, (7, 5)))
    parameter.grad = torch.ones_like(parameter)
    made = copy.deepcopy(parameter)
    assert type(made) is RaggedTensor and isinstance(made, nn.Parameter) and made.requires_grad
    assert made.grad is not parameter.grad and torch.equal(made.grad, parameter.grad)
    assert made.to_local().data_ptr() != local.data_ptr()
    assert made._local_tensor.untyped_storage().nbytes() == numel * 4
    mine, plain = layer_pair(world, stack)
    assert_same_module(copy.deepcopy(mine), plain)
    average = torch.optim.swa_utils.AveragedModel(mine)
    average.update_parameters(mine)
    assert_same_module(average.module, plain)


@claim(2)
def autograd_gives_ragged_gradients(world: World) -> None:
    for kind in KINDS:
        mine = nn.Parameter(ragged(world, full("matrix"), kind))
        plain = nn.Parameter(full("matrix"))
        ((mine**2).sum() * 0.5 + (mine * 3).mean()).backward()
        ((plain**2).sum() * 0.5 + (plain * 3).mean()).backward()
        assert_close(mine.grad, plain.grad)
        mine.grad = plain.grad = None
        (mine.full_tensor() ** 3).sum().backward()
        (plain**3).sum().backward()
        assert_close(mine.grad, plain.grad)
        moved = mine.redistribute(placements=[shard(35, world.size, "even")])
        ((moved * 2) ** 2).sum().backward()
        ((plain * 2) ** 2).sum().backward()
        assert_close(mine.grad, plain.grad, 1e-5)
        mine.grad = None
        mine.to_local().mul(4).sum().backward()
        assert torch.equal(mine.grad.full_tensor(), torch.full((7, 5), 4.0))


@claim(4, slow=True)
def replicas_and_shards_of_a_mesh_of_two_axes(world: World) -> None:
    grid = world.grid
    for kind in KINDS:
        value = full("matrix")
        layout = shard(35, 2, kind)
        mine = distribute_ragged(value if world.rank == 0 else torch.zeros(7, 5), grid, layout)
        assert mine.placements == (Replicate(), layout)
        assert torch.equal(mine.full_tensor(), value)
        norm = torch.linalg.vector_norm(mine)
        torch.testing.assert_close(norm.full_tensor(), value.norm())
        torch.testing.assert_close(mine.sum().full_tensor(), value.sum())
        moved = mine.redistribute(placements=[Replicate(), shard(35, 2, "even")])
        assert torch.equal(moved.full_tensor(), value)
        assert torch.equal(
            moved.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), value
        )
        path = world.shared / f"grid-{kind}"
        dcp.save({"p": mine}, checkpoint_id=path)
        loaded = torch.zeros_like(moved)
        dcp.load({"p": loaded}, checkpoint_id=path)
        assert torch.equal(loaded.full_tensor(), value)
    plain, parameter = nn.Parameter(value.clone()), nn.Parameter(mine)
    plain.grad, parameter.grad = value.clone(), mine.clone()
    for p in (plain, parameter):
        nn.utils.clip_grad_norm_([p], 1.0)
        torch.optim.AdamW([p], fused=True).step()
    torch.testing.assert_close(parameter.full_tensor(), plain)
    with pytest.raises(RaggedLayoutError, match="last of 2 mesh axes"):
        distribute_ragged(value, grid, [layout, Replicate()])


@claim(2)
def ranks_do_not_share_compiled_code(world: World) -> None:
    mine = ragged(world, full("matrix"))
    hashes: list[Any] = [None] * world.size
    dist.all_gather_object(hashes, mine._stable_hash_for_caching())
    assert len(set(hashes)) == 2


@claim(2)
def without_a_subclass_dispatch_the_ops_reach_the_table_by_a_mode(world: World) -> None:
    """As in torch 2.11, whose fast path never calls a subclass's `__torch_dispatch__`."""
    from odc.fsdp import ragged_ops

    kept = RaggedTensor.__torch_dispatch__
    before = RaggedTensor.__torch_function__
    RaggedTensor.__torch_dispatch__ = DTensor.__torch_dispatch__
    try:
        ragged_ops.choose_path(RaggedTensor)
        assert RaggedTensor.__torch_function__ != before
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            check_steps(world, torch.optim.AdamW, options)
        clip_grad_norm_gives_the_norm_and_the_gradients_of_one_process(world)
        modules_on_meta_become_bit_equal_to_one_process(world)
        with pytest.raises(RaggedOpError, match="aten::mm"):
            ragged(world, full("matrix")) @ torch.ones(5, 2)
    finally:
        RaggedTensor.__torch_dispatch__ = kept
        RaggedTensor.__torch_function__ = torch._C._disabled_torch_function_impl
    assert_close(ragged(world, full("matrix")) + 1, full("matrix") + 1)
