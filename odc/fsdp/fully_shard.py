"""`fully_shard`: parameters, gradients and optimizer state sharded over ranks, FSDP2's way of use.

Each call makes one group of the parameters below a module that no earlier call has taken, so it is
applied bottom-up; a module's parameters are `RaggedTensor`s (which are DTensors) while they are
sharded, and plain tensors while forward or backward uses them. Signature and methods follow
PyTorch's `torch.distributed.fsdp.fully_shard` (torch 2.13); what is added is `granularity`, the
planner's layout, and `dbuffer_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from odc.fsdp.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    sharded_class,
    share_comm_ctx,
    state_of,
)
from odc.fsdp.group import UnitGroups
from odc.fsdp.hooks import UnitHooks
from odc.fsdp.managed import (
    STATE,
    TAKEN,
    check_mesh,
    check_module,
    check_placements,
    check_shared,
    managed_modules,
    managed_places,
    shared_with,
)
from odc.fsdp.ragged import install_distribute_tensor
from odc.fsdp.sharded import MAX_BUFFERS, Precision, ShardedGroup
from odc.fsdp.sharded_runtime import ShardedRuntime
from odc.fsdp.storage import GatherPool
from odc.fsdp.wrap import Unit
from odc.memory.events import Phase
from odc.sharding import GranularityLike
from odc.sizes import parse_size

__all__ = [
    "FSDPModule",
    "FullyShardState",
    "FullyShardedDataParallel",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "state_of",
]

install_distribute_tensor()  # what a program makes of sharded parameters with torch's own function

M = TypeVar("M")
DBUFFER_SIZE = 256 * 1024 * 1024
_POOLS: dict[torch.device, GatherPool] = {}
_MESHES: dict[int, tuple[Any, DeviceMesh]] = {}  # by id of the world, kept alive


@dataclass(eq=False)
class FullyShardState:
    """What `fully_shard.state(module)` returns: one for each call."""

    modules: tuple[nn.Module, ...]
    group: ShardedGroup | None
    policy: MixedPrecisionPolicy
    auto_reshard: bool
    pool: GatherPool
    hooks: list[ShardedHooks] = field(default_factory=list)
    runtime: ShardedRuntime | None = None
    shared: list[tuple[str, str]] = field(default_factory=list)  # own name, name in another call

    def begin(self, module: nn.Module) -> ShardedRuntime:
        """The runtime; the first module that is called becomes the root of all below it."""
        if self.runtime is None:
            self.runtime = _make_runtime(module, self)
        return self.runtime

    def enter(self, module: nn.Module) -> ShardedRuntime:
        """As `begin`, before a forward: from now on no module around the root becomes it.

        Raises:
            RuntimeError: the root is one of several modules of a call.
        """
        runtime = self.begin(module)
        if not runtime.called and runtime.model in self.modules and len(self.modules) > 1:
            raise RuntimeError(
                f"FSDP requires a single root module but got {self.modules}: give the module that "
                "holds them to fully_shard as well, and call that one"
            )
        runtime.called = True
        return runtime

    def _lazy_init(self) -> None:
        """What a first forward does before anything runs; some programs call it themselves."""
        self.enter(self.modules[0])


class ShardedHooks(UnitHooks):
    """The hooks of one module of a call: as a paged unit's, with the casts of a policy."""

    def __init__(self, state: FullyShardState, module: nn.Module, name: str) -> None:
        groups = UnitGroups([state.group] if state.group is not None else [])  # type: ignore[list-item]
        self.sharded = state
        super().__init__(None, Unit(name, module), groups)  # type: ignore[arg-type]

    def _register(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(self._pre_forward, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._post_forward, with_kwargs=True),
        ]

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        runtime = self.sharded.enter(module)
        self.runtime = runtime
        if not runtime.stack and module is not runtime.model:
            runtime.partial = True
        policy = self.sharded.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        super()._pre_forward(module, args, kwargs)
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        super()._post_forward(module, args, kwargs, output)
        if self.sharded.policy.output_dtype is None:
            return output
        return _cast(output, self.sharded.policy.output_dtype)

    def _enter(self, *args: Any) -> None:
        with torch._C._DisableFuncTorch():  # a transform (jvp) has no business with buffers
            super()._enter(*args)

    def pin(self, group: Any, phase: Phase) -> None:
        """As a paged unit's, but for a backward that reads no parameter."""
        if phase is not Phase.BACKWARD or group.behaviour.unshard_in_backward:
            super().pin(group, phase)
            return
        group.pin_parameters(phase)
        self.pinned.append(group)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats and value.dtype != dtype else value

    return tree_map(one, values)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: Any = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    granularity: GranularityLike = "block",
    dbuffer_size: int | str | None = None,
    planner: str = "optimal",
    max_buffers: int = MAX_BUFFERS,
) -> M:
    """Shards a module's parameters over the ranks of a mesh.

    Args:
        module: a module, or a list of modules that form one group.
        mesh: one axis, or (replicas, shards); all ranks where not given.
        reshard_after_forward: give the full parameters up between forward and backward; `None`:
            everywhere but at the root. A number of ranks, as FSDP2 takes it, counts as `True`
            (1: as `False`, since a rank would then hold everything).
        shard_placement_fn: asked as FSDP2 asks it; a dimension that it names changes nothing, as
            parameters lie as planned, and another mesh is refused.
        mp_policy: dtypes of compute, reduction and outputs.
        ignored_params: parameters that stay as they are on every rank.
        granularity: what stays together on one rank; see `odc.sharding`.
        dbuffer_size: bytes of full parameters and unreduced gradients kept for reuse, for all
            models on a device. Where it is too small for that, no group is gathered ahead, and none
            reduced while the next one's gradients arrive. `None`: what that takes, at least 256
            MiB.
        planner: `optimal` or `greedy`.
        max_buffers: sub-buffers of a group at most.

    Returns:
        The same module; its class is a subclass that mixes in `FSDPModule`.

    Raises:
        ValueError: the module, the mesh or an argument is not supported; the message says which.
    """
    modules = tuple(module) if isinstance(module, list | tuple) else (module,)
    for one in modules:
        check_module(one)
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is not supported; pass a mesh of one or two axes")
    if mesh is None:
        mesh = _default_mesh()
    _check(mesh, reshard_after_forward, offload_policy)
    device = _device(mesh)
    pool = _POOLS.setdefault(device, GatherPool(0))
    pool.strict = pool.strict and dbuffer_size is not None
    chosen_bytes = DBUFFER_SIZE if dbuffer_size is None else parse_size(dbuffer_size)
    pool.limit_bytes = max(pool.limit_bytes, chosen_bytes)
    policy = mp_policy or MixedPrecisionPolicy()
    places = managed_places(modules, ignored_params or ())
    check_placements(places, shard_placement_fn)
    _move_buffers(modules, device)
    group = None
    shared = shared_with(places)
    originals = [place.parameter for place in places]
    if places:
        group = ShardedGroup(
            type(modules[0]).__name__,
            places,
            mesh,
            granularity=granularity,
            precision=Precision(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype),
            pool=pool,
            device=device,
            planner=planner,
            max_buffers=max_buffers,
        )
        keeps = reshard_after_forward is not None and reshard_after_forward in (False, 1)
        keeps = keeps and reshard_after_forward is not True
        group.behaviour.reshard_after_forward = not keeps
        for place, parameter in zip(places, originals, strict=True):
            parameter.__dict__[TAKEN] = place.fqn
    state = FullyShardState(
        modules, group, policy, reshard_after_forward is None, pool, shared=shared
    )
    for one in modules:
        one.__dict__[STATE] = state
        state.hooks.append(ShardedHooks(state, one, type(one).__name__))
        one.__class__ = sharded_class(type(one))
        one.register_state_dict_pre_hook(_reshard_before)
        one.register_load_state_dict_pre_hook(_reshard_before)
    return module


def _reshard_before(module: nn.Module, *_: Any) -> None:
    """A state dict holds sharded parameters."""
    assert isinstance(module, FSDPModule)
    module.reshard()


fully_shard.state = state_of  # type: ignore[attr-defined]


def _default_mesh() -> DeviceMesh:
    """All ranks on one axis; the same mesh for every call."""
    world = dist.group.WORLD
    if id(world) in _MESHES:
        return _MESHES[id(world)][1]
    mesh = init_device_mesh(_device_type(), (dist.get_world_size(),))
    _MESHES[id(world)] = (world, mesh)
    return mesh


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _check(mesh: DeviceMesh, reshard_after_forward: Any, offload_policy: Any) -> None:
    check_mesh(mesh)
    if not isinstance(reshard_after_forward, bool | int | None):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the "
            f"group size to reshard to, not {reshard_after_forward}"
        )
    shards = mesh.size(mesh.ndim - 1)
    if type(reshard_after_forward) is int and (
        not 1 <= reshard_after_forward <= shards or shards % reshard_after_forward
    ):
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a "
            f"factor of {shards}, not {reshard_after_forward}"
        )
    if getattr(offload_policy, "pin_memory", None) is not None and mesh.device_type != "cpu":
        raise NotImplementedError("offload_policy: use odc.paged, which moves pages to the host")


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for _, module in managed_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _make_runtime(root: nn.Module, state: FullyShardState) -> ShardedRuntime:
    """Joins all states below the root: one runtime, one order of gathers."""
    runtime = ShardedRuntime(root, state.pool)
    joined: set[int] = set()
    for fqn, module in root.named_modules():
        found = state_of(module)
        if found is None:
            continue
        check_shared(fqn, found.shared)
        if found.runtime is not None and found.runtime is not runtime:
            _take_over(runtime, found, fqn)
        found.runtime = runtime
        for hooks in found.hooks:
            if hooks.unit.module is module:
                hooks.runtime = runtime
                hooks.unit.fqn = fqn
                runtime.units.append(hooks)
        if found.group is not None and id(found) not in joined:
            joined.add(id(found))
            found.group.name = fqn or type(root).__name__
            runtime.join(found.group)
    if state.auto_reshard and state.group is not None:
        state.group.behaviour.reshard_after_forward = False
        state.group.behaviour.keeps_after_evaluation = False
    for group in runtime.groups:
        group.adopt()
    if runtime.groups and not state.pool.strict:
        state.pool.limit_bytes = max(state.pool.limit_bytes, runtime.bytes_to_overlap())
    return runtime


def _take_over(runtime: ShardedRuntime, found: FullyShardState, fqn: str) -> None:
    """A module that was unsharded before the first forward is no root after all."""
    assert found.runtime is not None, "nothing to take over"
    if found.runtime.called:
        raise RuntimeError(
            f"FSDP state has already been lazily initialized for {fqn}\n"
            "FSDP requires running forward through the root module first: it was called before "
            f"{type(runtime.model).__name__}, which holds it, and became a root of its own"
        )
    runtime.take_over(found.runtime)
    if found.auto_reshard and found.group is not None:
        found.group.behaviour.reshard_after_forward = True


def FullyShardedDataParallel(
    module: M,
    mesh: DeviceMesh | None = None,
    *,
    shard_granularity: GranularityLike = "block",
    dbuffer_size: int | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> M:
    """Shards a model: every layer it finds (what lies in a `ModuleList`), and the rest as the root.

    Args and errors are those of `fully_shard`; `shard_granularity` is its `granularity`.
    """
    assert isinstance(module, nn.Module)
    chosen: dict[str, Any] = {
        "mesh": mesh,
        "granularity": shard_granularity,
        "dbuffer_size": dbuffer_size,
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
    }
    for layer in _layers(module):
        fully_shard(layer, **chosen)
    return fully_shard(module, **chosen)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The outermost modules in a `ModuleList`, in order."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found.extend(layer for layer in child if any(True for _ in layer.parameters()))
        else:
            found.extend(_layers(child))
    return found
