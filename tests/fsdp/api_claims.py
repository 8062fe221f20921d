"""What programs written for FSDP2 find in odc's `fully_shard`; the names are the claims.

The list is that of the calls which FSDP2's own tests make (torch 2.13); what they compute is in
`fully_shard_claims.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TheirModule
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import odc
from odc.fsdp import fsdp_module
from odc.fsdp.fully_shard import UnshardHandle
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.sharded_models import Net, batch, loss_of, sharded, train_ranks

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)


def net(world: World, apply: Any = None, **chosen: Any) -> Any:
    torch.manual_seed(1)
    return sharded(world, Net(), apply, **chosen)


def gradients(world: World, model: Any) -> dict[str, torch.Tensor]:
    loss_of(model, batch(world.rank, 0)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def assert_alike(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=2e-6, atol=1e-7, msg=name)


# -- names ---------------------------------------------------------------------------------------


@claim(2)
def every_argument_and_method_of_fsdp2_has_its_name(world: World) -> None:
    theirs = inspect.signature(fsdp2).parameters
    ours = inspect.signature(odc.fully_shard).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
    methods = {n: m for n, m in vars(TheirModule).items() if inspect.isfunction(m)}
    for name, method in methods.items():
        mine = inspect.signature(getattr(odc.FSDPModule, name)).parameters
        if name in ("__new__", "_apply"):
            continue
        wanted = inspect.signature(method).parameters
        assert list(mine) == list(wanted), name
        assert all(mine[key].kind == wanted[key].kind for key in wanted), name
        assert all(mine[key].default == wanted[key].default for key in wanted), name


@claim(2)
def a_call_returns_its_module_and_gives_it_a_state_of_its_own(world: World) -> None:
    model = Net()
    assert odc.fully_shard(model.layers[0], mesh=world.mesh) is model.layers[0]
    pair = [model.layers[1], model.layers[2]]
    assert odc.fully_shard(pair, mesh=world.mesh) is pair
    state = odc.fully_shard.state
    assert state(model) is None and state(model.layers[0]) is not state(model.layers[1])
    assert state(model.layers[1]) is state(model.layers[2])
    assert model.layers[0]._get_fsdp_state() is state(model.layers[0])


@claim(2)
def instances_that_a_container_makes_of_itself_are_not_sharded(world: World) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    odc.fully_shard(model, mesh=world.mesh)
    part = model[:2]
    assert type(part) is nn.Sequential and len(part) == 2 and part[0] is model[0]

    class Layers(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x)
            return x

    layers = odc.fully_shard(Layers([nn.Linear(4, 4), nn.Linear(4, 4)]), mesh=world.mesh)
    assert type(layers[1:]) is Layers and layers[1:][0] is layers[1]
    with fsdp_module.disable_fsdp_module_new_init():
        bare = type(model)()
    assert type(bare) is nn.Sequential and "_modules" not in bare.__dict__
    assert "_modules" in type(model)().__dict__


@claim(2)
def a_parameter_can_be_copied_and_a_module_cannot(world: World) -> None:
    model = net(world)
    twin = copy.deepcopy(model.head.weight)
    assert isinstance(twin, nn.Parameter) and isinstance(twin, DTensor)
    assert twin.placements == model.head.weight.placements
    with torch.no_grad():
        twin.zero_()
    assert bool(model.head.weight.full_tensor().any())
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model.layers[0])


@claim(2)
def wrong_calls_say_what_fsdp2_says(world: World) -> None:
    grid = init_device_mesh("cpu", (1, 1, world.size))
    with pytest.raises(ValueError, match="fully_shard expects a 1D or 2D DeviceMesh but got"):
        odc.fully_shard(nn.Linear(3, 3), mesh=grid)
    dictionary = nn.ModuleDict({"a": nn.Linear(3, 3)})
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        odc.fully_shard(dictionary, mesh=world.mesh)
    with pytest.raises(ValueError, match="should be a factor of"):
        odc.fully_shard(nn.Linear(3, 3), mesh=world.mesh, reshard_after_forward=world.size + 1)
    model = net(world)
    plain: Any = nn.Linear(3, 3)
    for call in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        with pytest.raises(ValueError, match="Expects FSDPModule but got"):
            call([plain])
    with pytest.raises(ValueError, match="Expects list of FSDPModules but got"):
        fsdp_module.share_comm_ctx([model, plain])
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="does not have a method"):
        odc.register_fsdp_forward_method(model, "encode")
    odc.register_fsdp_forward_method(plain, "encode")  # not sharded: nothing to do
    with pytest.raises(TypeError, match="max_input_buffers must be an int, got bool"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="max_input_buffers must be a positive int, got 0"):
        model.set_reduce_scatter_max_input_buffers(0)
    loss_of(model, batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model.layers[0].reset_iter_state()


@claim(2)
def what_has_no_meaning_here_changes_nothing_or_names_what_to_use(world: World) -> None:
    wanted = train_ranks(world, net(world), 3)
    model = net(world)
    model.set_post_optim_event(torch.Event("cpu"))
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_separate_reduce_scatter_group(False)
    model._set_unshard_async_op(True)
    fsdp_module.share_comm_ctx([model, model.layers[0]])
    fsdp_module.share_comm_ctx([])
    assert train_ranks(world, model, 3) == wanted
    refused: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: model.set_custom_all_gather(object()), "a backend of your own"),
        (lambda: model.set_custom_reduce_scatter(object()), "set_all_reduce_hook"),
        (lambda: model.set_symm_mem_for_comm(), "leave it out"),
        (lambda: model.set_separate_reduce_scatter_group(), "share the mesh's process group"),
        (lambda: model.set_reduce_scatter_max_input_buffers(2), "shard larger modules"),
        (lambda: model.set_all_reduce_hook(print, stream=object()), "in the hook"),
    )
    for call, text in refused:
        with pytest.raises(NotImplementedError, match=text):
            call()


# -- gathers -------------------------------------------------------------------------------------


def gather_order(model: Any, act: Callable[[], Any]) -> list[str]:
    """Names of groups in the order in which their gathers start, and modules as they begin."""
    runtime = odc.fully_shard.state(model).runtime
    started: list[str] = []
    start = runtime.start

    def noted(group: Any) -> None:
        if not group.is_gathered:
            started.append(group.name)
        start(group)

    handles = [
        layer.register_forward_pre_hook(lambda *_, n=n: started.append(f"call {n}"))
        for n, layer in enumerate(model.layers)
    ]
    runtime.start = noted
    act()
    runtime.start = start
    for handle in handles:
        handle.remove()
    return started


@claim(2)
def gathers_that_are_named_start_ahead_in_forward_and_backward(world: World) -> None:
    model = net(world)
    first, second, third = model.layers
    loss_of(model, batch(world.rank, 0)).backward()
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    losses: list[torch.Tensor] = []
    order = gather_order(model, lambda: losses.append(loss_of(model, batch(world.rank, 0))))
    at = order.index("call 0")
    assert set(order[:at]) >= {"layers.0", "layers.1", "layers.2"}, order
    order = gather_order(model, losses[0].backward)
    assert order == ["layers.2", "layers.1", "layers.0"], order
    second.set_modules_to_backward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    assert_alike(gradients(world, net(world)), gradients(world, net(world, fsdp2)))


@claim(2)
def named_gathers_change_no_bit_of_a_training(world: World) -> None:
    wanted = train_ranks(world, net(world), 3)
    model = net(world)
    layers = list(model.layers)
    for at, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 3])
        layer.set_modules_to_backward_prefetch(layers[max(at - 2, 0) : at][::-1])
    model.set_modules_to_forward_prefetch(layers[:2])
    assert train_ranks(world, model, 3) == wanted


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 37)
        self.layers = nn.ModuleList()
        self.head = nn.Linear(37, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@claim(2)
def a_module_whose_backward_reads_no_parameter_needs_no_gather_for_it(world: World) -> None:
    torch.manual_seed(1)
    plain = Embedded()
    model = copy.deepcopy(plain)
    odc.fully_shard(model.embed, mesh=world.mesh)
    odc.fully_shard(model, mesh=world.mesh)
    model.embed.set_unshard_in_backward(False)
    loss = loss_of(model, batch(world.rank, 0))
    assert gather_order(model, loss.backward) == []
    mean = [torch.zeros_like(p) for p in plain.parameters()]
    for rank in range(world.size):
        plain.zero_grad()
        loss_of(plain, batch(rank, 0)).backward()
        for total, parameter in zip(mean, plain.parameters(), strict=True):
            total += parameter.grad / world.size
    for parameter, wanted in zip(model.parameters(), mean, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted)


@claim(2)
def a_handle_can_be_waited_for_twice_or_by_the_forward(world: World) -> None:
    model = net(world)
    handle = model.layers[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert not isinstance(model.layers[0].up.weight, DTensor)
    assert model.layers[1].unshard(async_op=True) is not None  # the forward waits for it
    assert model.layers[2].unshard() is None
    loss_of(model, batch(world.rank, 0))
    assert all(isinstance(layer.up.weight, DTensor) for layer in model.layers)
    assert_alike(gradients(world, model), gradients(world, net(world, fsdp2)))
    model.layers[0].reshard()
    model.layers[0].reshard()
    assert isinstance(model.layers[0].up.weight, DTensor)


# -- gradients -----------------------------------------------------------------------------------


@claim(2)
def a_divide_factor_is_that_of_one_module_in_place_of_the_ranks(world: World) -> None:
    plain = gradients(world, net(world))
    model = net(world)
    model.set_gradient_divide_factor(8.0)
    model.layers[1].set_gradient_divide_factor(0.5)
    wanted = {}
    for name, value in plain.items():
        own = not name.startswith("layers.")
        factor = 8.0 if own else 0.5 if name.startswith("layers.1.") else world.size
        wanted[name] = value * world.size / factor
    assert_alike(gradients(world, model), wanted)
    model = net(world)
    with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(8.0)
    assert odc.fully_shard.state(model).group.behaviour.divide_factor == 8.0


@claim(2)
def a_hook_sees_reduced_gradients_and_may_change_them(world: World) -> None:
    plain = gradients(world, net(world))
    model = net(world)
    seen: list[int] = []

    def double(reduced: torch.Tensor) -> None:
        seen.append(reduced.numel())
        reduced.mul_(2)

    model.layers[1].set_all_reduce_hook(double)
    got = gradients(world, model)
    group = odc.fully_shard.state(model.layers[1]).group
    assert seen == [part.local.numel() for part in group.buffer.parts]
    for name, value in plain.items():
        factor = 2 if name.startswith("layers.1.") else 1
        assert torch.equal(got[name], factor * value), name
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(world.rank, 1)).backward()
    assert len(seen) == len(group.buffer.parts)  # nothing was reduced


@claim(2, 4)
def a_hook_of_replicas_runs_after_their_reduction(world: World) -> None:
    mesh = world.grid
    torch.manual_seed(1)
    model = odc.fully_shard(Net(), mesh=mesh)
    kept: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda reduced: kept.append(reduced.clone()))
    loss_of(model, batch(world.rank, 0)).backward()
    for reduced in kept:
        other = reduced.clone()
        dist.all_reduce(other, group=mesh.get_group("replica"))
        torch.testing.assert_close(other, 2 * reduced, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(print, stream=object())


@claim(2)
def gradients_lie_as_their_parameters_do(world: World) -> None:
    model = net(world)
    loss_of(model, batch(world.rank, 0)).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.device_mesh == parameter.device_mesh
        assert parameter.grad.dtype == parameter.dtype


@claim(2)
def resharding_can_be_switched_for_forward_and_backward(world: World) -> None:
    model = net(world)
    layer = model.layers[0]
    for keep in (True, False):
        model.set_reshard_after_forward(not keep)
        loss = loss_of(model, batch(world.rank, 0))
        assert isinstance(layer.up.weight, DTensor) == (not keep)
        model.set_reshard_after_backward(not keep)
        loss.backward()
        assert isinstance(layer.up.weight, DTensor) == (not keep)
    model.zero_grad()
    assert_alike(gradients(world, model), gradients(world, net(world, fsdp2)))
