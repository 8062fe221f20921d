"""What holds of a RaggedTensor on several ranks; the names are the claims.

The reference is one process with plain tensors, or torch's own DTensor.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from odc.fsdp.ragged import (
    RaggedLayoutError,
    RaggedOpError,
    RaggedShard,
    RaggedTensor,
    distribute_ragged,
    install_distribute_tensor,
)
from tests.fsdp.claims import Claim, Entry, World, registry
from tests.fsdp.ragged_pairs import (
    KINDS,
    SHAPES,
    assert_close,
    full,
    pairs,
    ragged,
    set_gradients,
    shard,
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


# -- optimizers ----------------------------------------------------------------------------------

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


def _steps(world: World, cls: Any, options: dict[str, Any]) -> None:
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
            _steps(world, cls, {**options, **mode})

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


# -- norms and scaling ---------------------------------------------------------------------------


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


# -- values --------------------------------------------------------------------------------------


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


def _layer_pair(world: World, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """(with ragged parameters, plain), of the same values."""
    torch.manual_seed(3)
    plain = make()
    mine = copy.deepcopy(plain)
    for module in mine.modules():
        for number, (name, value) in enumerate(list(module._parameters.items())):
            if value is not None:
                kind = KINDS[number]
                setattr(module, name, nn.Parameter(ragged(world, value.detach(), kind)))
    return mine, plain


def _stack() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 7), nn.LayerNorm(7), nn.Conv1d(3, 2, 2)
    )


def _assert_same_module(mine: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.detach().full_tensor(), theirs.detach()), name


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
    plain = _stack()
    mine, _ = _layer_pair(world, _stack)
    mine.to("meta")
    assert all(p.is_meta and isinstance(p, RaggedTensor) for p in mine.parameters())
    mine.to_empty(device="cpu")
    for model in (mine, plain):
        torch.manual_seed(5)
        for layer in model:
            layer.reset_parameters()
    _assert_same_module(mine, plain)


@claim(2)
def module_casts_keep_the_layout(world: World) -> None:
    mine, plain = _layer_pair(world, _stack)
    for cast in (lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.cpu().float()):
        _assert_same_module(cast(mine), cast(plain))
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
    mine, plain = _layer_pair(world, _stack)
    _assert_same_module(copy.deepcopy(mine), plain)
    average = torch.optim.swa_utils.AveragedModel(mine)
    average.update_parameters(mine)
    _assert_same_module(average.module, plain)


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


# -- saving --------------------------------------------------------------------------------------


@claim(2)
def torch_save_and_load_with_weights_only_keep_the_layout(world: World) -> None:
    mine, plain = _layer_pair(world, _stack)
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
    _assert_same_module(mine, plain)


@claim(2)
def load_state_dict_takes_full_tensors_and_refuses_other_layouts(world: World) -> None:
    mine, plain = _layer_pair(world, _stack)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    mine.load_state_dict(plain.state_dict())
    _assert_same_module(mine, plain)
    other = {key: ragged(world, value, "between") for key, value in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match="redistribute"):
        mine.load_state_dict(other)
    mine.load_state_dict(other, assign=True)
    _assert_same_module(mine, plain)
    assert mine[1].weight.placements == other["1.weight"].placements


def _trained(world: World) -> tuple[nn.Module, Any, nn.Module, Any]:
    """Models and optimizers after one step: (ragged, its optimizer, plain, its optimizer)."""
    mine, plain = _layer_pair(world, _stack)
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
    mine, _ = _layer_pair(world, _stack)
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
    sharded = _stack()
    torch.manual_seed(3)
    sharded = _stack()
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
    sharded = _stack()
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
        again, _ = _layer_pair(world, _stack)
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


# -- refusals ------------------------------------------------------------------------------------

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
    mine, _ = _layer_pair(world, lambda: nn.Linear(4, 7))
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


# -- other meshes, other paths -------------------------------------------------------------------


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


@claim(2)
def without_a_subclass_dispatch_the_ops_reach_the_table_by_a_mode(world: World) -> None:
    """As in torch 2.11, whose fast path never calls a subclass's `__torch_dispatch__`."""
    from odc.fsdp import ragged_ops

    kept = ragged_ops.SpanTensor.__torch_dispatch__
    before = RaggedTensor.__torch_function__
    ragged_ops.SpanTensor.__torch_dispatch__ = DTensor.__torch_dispatch__
    try:
        ragged_ops.choose_path(RaggedTensor)
        assert RaggedTensor.__torch_function__ != before
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            _steps(world, torch.optim.AdamW, options)
        clip_grad_norm_gives_the_norm_and_the_gradients_of_one_process(world)
        modules_on_meta_become_bit_equal_to_one_process(world)
        with pytest.raises(RaggedOpError, match="aten::mm"):
            ragged(world, full("matrix")) @ torch.ones(5, 2)
    finally:
        ragged_ops.SpanTensor.__torch_dispatch__ = kept
        RaggedTensor.__torch_function__ = torch._C._disabled_torch_function_impl
    assert_close(ragged(world, full("matrix")) + 1, full("matrix") + 1)
