"""What is refused of RaggedTensors, by name; the names are the claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from odc.fsdp.ragged import RaggedLayoutError, RaggedOpError, RaggedShard, RaggedTensor
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.ragged_pairs import full, layer_pair, ragged

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)

REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten::mm": lambda p: p @ p,
    "aten::addmm": lambda p: torch.addmm(p, p, p),
    "aten::bmm": lambda p: torch.bmm(p.view(1, 6, 6), p.view(1, 6, 6)),
    "aten::t": lambda p: p.t(),
    "aten::transpose": lambda p: p.transpose(0, 1),
    "aten::permute": lambda p: p.permute(1, 0),
    "aten::expand": lambda p: p.expand(2, 6, 6),
    "aten::as_strided": lambda p: p.as_strided((6,), (6,)),
    "aten::set_": lambda p: p.set_(p),
    "aten::cat": lambda p: torch.cat([p, p]),
    "aten::stack": lambda p: torch.stack([p, p]),
    "aten::split": lambda p: p.split(3),
    "aten::unbind": lambda p: p.unbind(),
    "aten::index": lambda p: p[torch.tensor([0, 1])],
    "aten::index_put_": lambda p: p.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "aten::gather": lambda p: p.gather(0, torch.zeros(6, 6, dtype=torch.long)),
    "aten::slice": lambda p: p[:, 1:],
    "aten::select": lambda p: p[:, 1],
    "aten::sum": lambda p: p.sum(0),
    "aten::mean": lambda p: p.mean(1),
    "aten::max": lambda p: p.max(0),
    "aten::amax": lambda p: p.amax(0),
    "aten::linalg_vector_norm": lambda p: torch.linalg.vector_norm(p, dim=1),
    "aten::argmax": lambda p: p.argmax(),
    "aten::sort": lambda p: p.sort(),
    "aten::topk": lambda p: p.topk(2),
    "aten::cumsum": lambda p: p.cumsum(0),
    "aten::_softmax": lambda p: p.softmax(0),
    "aten::embedding": lambda p: nn.functional.embedding(torch.tensor([0]), p),
    "aten::native_layer_norm": lambda p: nn.functional.layer_norm(p, (6,)),
    "aten::view.dtype": lambda p: p.view(torch.int32),
    "aten::nonzero": lambda p: torch.where(p),
    "aten::_foreach_max": lambda p: torch._foreach_max([p]),
    "c10d::allreduce_": lambda p: dist.all_reduce(p),
    "share_memory_": lambda p: p.share_memory_(),
    "from_local": lambda p: RaggedTensor.from_local(p.to_local()),
    "another mesh": lambda p: p.redistribute(
        dist.init_device_mesh("cpu", (2,), mesh_dim_names=("other",)), [Replicate()]
    ),
    "Shard(dim=1)": lambda p: p.redistribute(placements=[Shard(1)]),
}


@claim(2)
def an_op_that_is_not_in_the_table_raises_and_is_named(world: World) -> None:
    for name, use in REFUSED.items():
        tensor = ragged(world, torch.randn(6, 6))
        with pytest.raises((RaggedOpError, RuntimeError)) as caught:
            use(tensor)
        assert name in str(caught.value), (name, caught.value)
        assert isinstance(caught.value, RaggedOpError), (name, caught.value)


@claim(2)
def operands_that_do_not_lie_alike_raise(world: World) -> None:
    mine = ragged(world, full("matrix"))
    others = {
        "two layouts": ragged(world, full("matrix"), "last"),
        "another shape": ragged(world, full("wide")),
        "plain": full("matrix"),
        "Shard(0)": distribute_tensor(full("matrix"), world.mesh, [Shard(0)]),
    }
    for name, other in others.items():
        for use in (
            lambda other=other: mine + other,
            lambda other=other: mine.add_(other),
            lambda other=other: other + mine,
            lambda other=other: torch._foreach_add([mine, mine], [mine, other]),
            lambda other=other: torch._foreach_add_([other], [mine]),
            lambda other=other: torch.equal(mine, other),
        ):
            with pytest.raises((RaggedLayoutError, RaggedOpError)):
                use()
                raise AssertionError(name)
    with pytest.raises(RaggedLayoutError, match="full_tensor"):
        full("matrix").copy_(mine)
    assert torch.equal(
        (mine + distribute_tensor(full("matrix"), world.mesh, [Replicate()])).full_tensor(),
        full("matrix") * 2,
    )


@claim(2)
def a_gradient_of_another_layout_is_an_error_at_the_step(world: World) -> None:
    for wrong in (ragged(world, full("matrix"), "last"), full("matrix")):
        for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            parameter = nn.Parameter(ragged(world, full("matrix")))
            parameter.grad = wrong
            with pytest.raises(RaggedLayoutError, match="RaggedShard"):
                torch.optim.AdamW([parameter], **options).step()


@claim(2)
def optimizers_that_need_more_than_a_span_raise(world: World) -> None:
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS):
        parameter = nn.Parameter(ragged(world, full("matrix")))
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RaggedOpError, match=f"torch.optim.{cls.__name__} .*: use an optimizer"):
            cls([parameter]).step(lambda: 0.0)
        plain = nn.Parameter(full("matrix"))
        plain.grad = torch.ones_like(plain)
        cls([plain]).step(lambda: 0.0)  # others are not asked
    with pytest.raises(RaggedOpError, match="aten::cat"):
        nn.utils.parameters_to_vector([parameter])


@claim(2)
def a_forward_on_sharded_parameters_raises(world: World) -> None:
    mine, _ = layer_pair(world, lambda: nn.Linear(4, 7))
    with pytest.raises(RaggedOpError, match="aten::"):
        mine(torch.ones(2, 4))


@claim(2)
def what_does_not_fit_is_refused(world: World) -> None:
    mesh, local = world.mesh, torch.zeros(3)
    wrong: dict[str, Callable[[], Any]] = {
        "blocks": lambda: RaggedTensor.from_span(local, mesh, RaggedShard(1, (3, 3)), (7,)),
        "ranks": lambda: RaggedTensor.from_span(local, mesh, RaggedShard(1, (6,)), (6,)),
        "local tensor": lambda: RaggedTensor.from_span(local, mesh, RaggedShard(1, (4, 4)), (8,)),
        "last axis": lambda: RaggedTensor.from_span(local, mesh, [Shard(0)], (6,)),
        "local_units": lambda: RaggedShard(0, (1,)),
        "mesh axes": lambda: RaggedTensor.from_span(local, mesh, [Replicate()] * 2, (6,)),
    }
    for text, use in wrong.items():
        with pytest.raises(RaggedLayoutError, match=text):
            use()
