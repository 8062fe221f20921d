"""What holds of RaggedTensors in optimizers, norms and scaling; the names are the claims.

The reference is one process with plain tensors, or torch's own DTensor.
"""

from __future__ import annotations

import io
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from odc.fsdp.ragged import distribute_ragged
from tests.fsdp.claims import Claim, Entry, World, registry
from tests.fsdp.ragged_pairs import (
    KINDS,
    SHAPES,
    assert_close,
    full,
    pairs,
    ragged,
    set_gradients,
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)

LOOP = ({"foreach": False}, {"foreach": True}, {})
FUSED = (*LOOP, {"fused": True})
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "AdamW": (torch.optim.AdamW, {}, FUSED),
    "Adam_amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}, FUSED),
    "SGD_momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, FUSED),
    "SGD_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, FUSED),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}, FUSED),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, LOOP),
    "NAdam": (torch.optim.NAdam, {}, LOOP),
    "RAdam": (torch.optim.RAdam, {}, LOOP),
    "Adadelta": (torch.optim.Adadelta, {}, LOOP),
    "Adamax": (torch.optim.Adamax, {}, LOOP),
    "ASGD": (torch.optim.ASGD, {}, LOOP),
    "Rprop": (torch.optim.Rprop, {}, LOOP),
    "Adam_coupled_decay": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, FUSED),
    "AdamW_tensor_lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}, ({"fused": True},)),
}


def check_steps(world: World, cls: Any, options: dict[str, Any]) -> None:
    """To the last bit; a fused kernel computes what its vectors leave over in another way."""
    tolerance = 1e-6 if options.get("fused") else 0
    options = {"lr": 0.01, **options}
    made = pairs(world)
    stepped = made
    if cls is torch.optim.Rprop:  # its masks index no tensor without dimensions
        stepped = [pair for pair in made if pair[1].dim()]
    places = [mine.to_local().data_ptr() for mine, _ in stepped]
    ours = cls([mine for mine, _ in stepped], **options)
    theirs = cls([plain for _, plain in stepped], **options)
    for step in range(3):
        set_gradients(world, made, step)
        ours.step()
        theirs.step()
    for (mine, plain), place in zip(stepped, places, strict=True):
        assert_close(mine.detach(), plain.detach(), tolerance)
        assert mine.to_local().data_ptr() == place
        assert ours.state[mine].keys() == theirs.state[plain].keys()
        for key, value in theirs.state[plain].items():
            if key == "step" or not isinstance(value, Tensor) or value.shape != plain.shape:
                assert not isinstance(ours.state[mine][key], DTensor), key
            elif plain.dim():
                assert_close(ours.state[mine][key], value, tolerance)


def _optimizer_claim(name: str) -> Claim:
    cls, options, modes = OPTIMIZERS[name]

    def check(world: World) -> None:
        for mode in modes:
            check_steps(world, cls, {**options, **mode})

    return check


for _name in OPTIMIZERS:
    claim(2, name=f"{_name}_steps_as_in_one_process")(_optimizer_claim(_name))


@claim(2, 3)
def muon_steps_as_in_one_process(world: World) -> None:
    for options in ({}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}):
        made = [pair for pair in pairs(world) if pair[1].dim() == 2]
        ours = torch.optim.Muon([mine for mine, _ in made], **options)
        theirs = torch.optim.Muon([plain for _, plain in made], **options)
        for step in range(3):
            for mine, plain in made:
                plain.grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(step))
                mine.grad = distribute_ragged(
                    plain.grad, world.mesh, mine.placements, src_data_rank=None
                )
            ours.step()
            theirs.step()
        for mine, plain in made:
            assert torch.equal(mine.full_tensor(), plain)
            moments = (o.state[p]["momentum_buffer"] for o, p in ((ours, mine), (theirs, plain)))
            assert torch.equal(next(moments).full_tensor(), next(moments))


@claim(2)
def a_fused_step_takes_ragged_and_shard_0_parameters_in_one_list(world: World) -> None:
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        plain = [nn.Parameter(full("matrix")), nn.Parameter(full("wide"))]
        mine = [
            nn.Parameter(distribute_tensor(full("matrix"), world.mesh, [Shard(0)])),
            nn.Parameter(ragged(world, full("wide"))),
        ]
        ours = torch.optim.AdamW(mine, **options)
        theirs = torch.optim.AdamW(plain, **options)
        for p, q in zip(mine, plain, strict=True):
            q.grad = torch.ones_like(q) * 0.5
            p.grad = torch.ones_like(p) * 0.5
        total = nn.utils.clip_grad_norm_(mine, 1.0)
        expected = nn.utils.clip_grad_norm_(plain, 1.0)
        torch.testing.assert_close(total.full_tensor(), expected)
        ours.step()
        theirs.step()
        for p, q in zip(mine, plain, strict=True):
            torch.testing.assert_close(p.full_tensor(), q)


@claim(2)
def an_optimizers_state_can_be_saved_and_loaded(world: World) -> None:
    made = pairs(world)
    first = torch.optim.AdamW([mine for mine, _ in made], lr=0.01)
    reference = torch.optim.AdamW([plain for _, plain in made], lr=0.01)
    set_gradients(world, made, 0)
    first.step()
    reference.step()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = torch.optim.AdamW([mine for mine, _ in made], lr=0.01)
    second.load_state_dict(torch.load(file, weights_only=True))
    set_gradients(world, made, 1)
    second.step()
    reference.step()
    for mine, plain in made:
        assert_close(mine.detach(), plain.detach())


@claim(2)
def zero_grad_works_both_ways(world: World) -> None:
    made = pairs(world)
    optimizer = torch.optim.SGD([mine for mine, _ in made])
    set_gradients(world, made, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not mine.grad.to_local().any() for mine, _ in made)
    optimizer.zero_grad()
    assert all(mine.grad is None for mine, _ in made)


@claim(2, 1, 3)
def clip_grad_norm_gives_the_norm_and_the_gradients_of_one_process(world: World) -> None:
    for order in (1, 2, 3, math.inf):
        for foreach in (None, True, False):
            made = pairs(world)
            set_gradients(world, made, 0)
            ours = nn.utils.clip_grad_norm_([p for p, _ in made], 0.5, order, foreach=foreach)
            theirs = nn.utils.clip_grad_norm_([q for _, q in made], 0.5, order, foreach=foreach)
            torch.testing.assert_close(ours.full_tensor(), theirs)
            assert isinstance(ours, DTensor) and math.isclose(
                ours.item(), theirs.item(), rel_tol=1e-5
            )
            for mine, plain in made:
                assert_close(mine.grad, plain.grad)


@claim(2)
def the_norm_of_all_gradients_takes_one_all_reduce(world: World) -> None:
    made = pairs(world)
    set_gradients(world, made, 0)
    with CommDebugMode() as counted, patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        nn.utils.clip_grad_norm_([mine for mine, _ in made], 0.5)
    assert spy.call_count == 1 and counted.get_total_counts() == 0


@claim(2)
def what_one_rank_finds_is_known_to_all(world: World) -> None:
    """`item()` of a torch DTensor that is still partial would be this rank's part."""
    mine = ragged(world, full("matrix"))
    assert mine.norm().item() == float(mine.norm().full_tensor())
    assert math.isclose(mine.sum().item(), full("matrix").sum().item(), rel_tol=1e-5)
    assert mine.max().item() == full("matrix").max().item()
    for sign in (1, -1):
        broken = full("matrix")
        broken.view(-1)[-1] = math.nan  # on the last rank
        mine = ragged(world, broken * sign)
        assert math.isnan(mine.max().item()) and math.isnan(mine.min().item())
        norm = nn.utils.get_total_norm([mine], math.inf)
        assert math.isnan(norm.item())
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.get_total_norm([mine], math.inf, error_if_nonfinite=True)


@claim(2)
def norms_of_one_tensor_are_those_of_one_process(world: World) -> None:
    for kind in KINDS:
        for order in (0, 1, 2, 3, math.inf, -math.inf):
            value = full("matrix")
            mine = torch.linalg.vector_norm(ragged(world, value, kind), order)
            torch.testing.assert_close(
                mine.full_tensor(), torch.linalg.vector_norm(value, order), rtol=1e-5, atol=1e-6
            )


@claim(2)
def gradients_can_be_clipped_by_value(world: World) -> None:
    for foreach in (None, True, False):
        made = pairs(world)
        set_gradients(world, made, 0)
        nn.utils.clip_grad_value_([mine for mine, _ in made], 0.3, foreach=foreach)
        nn.utils.clip_grad_value_([plain for _, plain in made], 0.3, foreach=foreach)
        for mine, plain in made:
            assert_close(mine.grad, plain.grad)


@claim(2)
def an_inf_on_one_rank_stops_the_step_and_lowers_the_scale_on_all(world: World) -> None:
    made = pairs(world)
    before = [mine.to_local().clone() for mine, _ in made]
    optimizer = torch.optim.SGD([mine for mine, _ in made], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    set_gradients(world, made, 0)
    last = made[1][0].grad.to_local()
    if last.numel():  # the whole of it lies on rank 0
        last[-1] = math.inf
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([mine for mine, _ in made], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for (mine, _), value in zip(made, before, strict=True):
        assert torch.equal(mine.to_local(), value)
    set_gradients(world, made, 0, scale=4.0)
    scaler.unscale_(optimizer)
    torch.testing.assert_close(made[0][0].grad.full_tensor(), full("matrix", 1))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(
        made[0][0].detach().full_tensor(), full("matrix") - 0.1 * full("matrix", 1)
    )


@claim(2, slow=True)  # it loads the compiler
def a_compiled_step_equals_an_eager_one(world: World) -> None:
    made = pairs(world)[:4]
    ours = torch.optim.AdamW([mine for mine, _ in made], lr=0.01, foreach=True)
    theirs = torch.optim.AdamW([plain for _, plain in made], lr=0.01, foreach=True)
    step = torch.compile(ours.step, backend="aot_eager")
    for number in range(3):
        for (mine, plain), name in zip(made, SHAPES, strict=False):
            plain.grad = full(name, number + 1)
            mine.grad = distribute_ragged(
                plain.grad, world.mesh, mine.placements, src_data_rank=None
            )
        step()
        theirs.step()
    for mine, plain in made:
        assert_close(mine.detach(), plain.detach(), 1e-5)
