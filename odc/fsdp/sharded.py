"""A sharded group: parameters that are gathered together, and whose gradients are reduced together.

A parameter is one of two objects, and its module holds the one that is true now: a `RaggedTensor`
over this rank's slice, which optimizers and checkpoints see, or a plain parameter over the full
buffer, which forward and backward see.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from odc.fsdp.dbuffer import DBuffer
from odc.fsdp.ragged import RaggedShard, RaggedTensor
from odc.fsdp.ragged_local import new_dtensor
from odc.fsdp.storage import GatherPool
from odc.fsdp.wrap import Place
from odc.memory.events import Phase
from odc.sharding import GranularityLike, TensorSpec, plan_group
from odc.sharding.plan import Plan

MAX_BUFFERS = 3


@dataclass(slots=True)
class SharedPlace(Place):
    """A parameter's place, and the other modules' attributes that are the same parameter."""

    shared: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a group; `None`: that of the parameters.

    Attributes:
        param_dtype: of gathered parameters and of compute.
        reduce_dtype: of the reduction of gradients; `None`: that of compute.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@dataclass(kw_only=True)
class Behaviour:
    """What may be changed between passes.

    Attributes:
        reshard_after_forward: give the full parameters up between forward and backward.
        keeps_after_evaluation: without gradient the same choice holds; False for a root whose
            choice is odc's: its parameters would be stale after an update that follows.
        reshard_after_backward: and after the backward.
        requires_sync: reduce gradients at the end of a backward; otherwise they add up unreduced.
        requires_all_reduce: on a mesh with replicas, add up over these as well.
        divide_factor: what gradients are divided by; `None`: the ranks that share the data.
        fill_unused: a parameter without gradient counts as one of zeros.
        unshard_in_backward: gather for the backward; not where it reads no parameter.
        ahead_forward, ahead_backward: groups whose gathers start as soon as this one's is there;
            `None`: the one that followed in the last pass.
        reduce_hook: is called with the flat reduced gradients, which it may change in place.
    """

    reshard_after_forward: bool = True
    keeps_after_evaluation: bool = True
    reshard_after_backward: bool = True
    requires_sync: bool = True
    requires_all_reduce: bool = True
    divide_factor: float | None = None
    fill_unused: bool = False
    unshard_in_backward: bool = True
    ahead_forward: list[ShardedGroup] | None = None
    ahead_backward: list[ShardedGroup] | None = None
    reduce_hook: Callable[[torch.Tensor], None] | None = None


class ShardedGroup:
    """The parameters of one unit on one rank of a mesh.

    Args:
        name: of the unit's module.
        places: its parameters, trainable or not.
        mesh: one axis, or (replicas, shards).
        granularity: what stays together on one rank.
        precision: dtypes.
        pool: memory for what is gathered.
        device: of the storages.
        planner: `greedy` or `optimal`.
        max_buffers: sub-buffers at most.
    """

    def __init__(
        self,
        name: str,
        places: list[SharedPlace],
        mesh: DeviceMesh,
        *,
        granularity: GranularityLike,
        precision: Precision,
        pool: GatherPool,
        device: torch.device,
        planner: str = "optimal",
        max_buffers: int = MAX_BUFFERS,
    ) -> None:
        self.name = name
        self.number = -1  # within its model
        self.places = places
        self.mesh = mesh
        self.behaviour = Behaviour()
        self.updates = 0  # of interest to hooks: versions never change inside a backward
        self.rests = False
        self.trainable = any(place.parameter.requires_grad for place in places)
        self.pins = 0  # modules of the group whose forward or backward runs
        self.has_gradient = [False] * len(places)  # in the gradient buffer
        self.received: set[int] = set()  # in this backward
        # Of sums still to be added up over replicas: which parameters have one, and sub-buffers.
        self.partial: tuple[list[int], list[torch.Tensor]] | None = None
        shards = mesh.size(mesh.ndim - 1)
        self.plan = plan_parameters(places, shards, granularity, precision, planner, max_buffers)
        rank = mesh.get_local_rank(mesh.ndim - 1)
        self.buffer = DBuffer(
            self.plan, rank, device, precision.param_dtype, precision.reduce_dtype, pool
        )
        self.sharded = [self._shard(number) for number in range(len(places))]
        self.unsharded = [self._unshard(number) for number in range(len(places))]
        self.take_gradient: Callable[[ShardedGroup, int], None] | None = None  # the runtime's
        for place in places:  # the full values are not kept
            place.parameter = _described(place.parameter, place.parameter.dtype)
        self.show(self.sharded)

    # -- parameters ------------------------------------------------------------------------------

    def _placements(self, number: int) -> tuple[Placement, ...]:
        place = self.plan.placements[number]
        shard = RaggedShard(place.block_numel, self.plan.local_units(place.tensor.fqn))
        return (*[Replicate()] * (self.mesh.ndim - 1), shard)

    def _wrap(self, number: int, local: torch.Tensor) -> RaggedTensor:
        shape = self.places[number].parameter.shape
        return RaggedTensor.from_span(local, self.mesh, self._placements(number), shape)

    def _shard(self, number: int) -> nn.Parameter:
        """The parameter over the slice, with this rank's elements of its present values.

        On the meta device it has none, and stays there until `to_empty` or the like.
        """
        place = self.places[number]
        parameter = place.parameter
        local = self.buffer.shard(self._fqn(number))
        if parameter.is_meta:
            local = torch.empty_like(local, device="meta")
        else:
            offset, numel = self._span(number)
            local.copy_(parameter.detach().reshape(-1)[offset : offset + numel])
        made = nn.Parameter(self._wrap(number, local), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    def _unshard(self, number: int) -> nn.Parameter:
        """The parameter over the full buffer, with a version counter of its own."""
        view = self.buffer.view(self._fqn(number))
        trainable = self.places[number].parameter.requires_grad
        made = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device), trainable)
        made.data = view
        made.__dict__.update(self.places[number].parameter.__dict__)
        if trainable:
            # A strong reference, held by the hook in C++, would never be collected.
            arrived = functools.partial(_arrived, weakref.ref(self), number)
            made.register_post_accumulate_grad_hook(arrived)
        return made

    def _fqn(self, number: int) -> str:
        return self.plan.placements[number].tensor.fqn

    def _span(self, number: int) -> tuple[int, int]:
        """(offset, elements) of this rank's part of a tensor."""
        shard = self._placements(number)[-1]
        assert isinstance(shard, RaggedShard)
        return shard.span(self.plan.placements[number].tensor.numel, self.buffer.rank)

    def show(self, parameters: list[nn.Parameter]) -> None:
        """Puts the sharded or the unsharded parameters into the modules."""
        for place, parameter in zip(self.places, parameters, strict=True):
            place.module._parameters[place.name] = parameter
            for module, name in place.shared:
                module._parameters[name] = parameter

    def adopt(self) -> None:
        """Takes parameters back whose local tensor was exchanged (`to_empty`, `.to`, `assign`).

        Raises:
            NotImplementedError: parameters of one sub-buffer were cast to several dtypes.
            ValueError: one was replaced by something that is not sharded in the same way.
        """
        with torch._C._DisableFuncTorch():  # as in the hooks
            if not self.is_gathered:
                self._retype()
            for number in range(len(self.places)):
                self._adopt(number)

    def _adopt(self, number: int) -> None:
        place = self.places[number]
        held = place.module._parameters[place.name]
        if held is self.unsharded[number]:
            return
        if held is not self.sharded[number]:
            self._check_replacement(number, held)
        assert isinstance(held, nn.Parameter) and isinstance(held, RaggedTensor)
        self.sharded[number] = held
        if self.unsharded[number].requires_grad != held.requires_grad:
            place.parameter.requires_grad_(held.requires_grad)
            self.unsharded[number] = self._unshard(number)
        inner = held._local_tensor
        if inner.is_meta:  # values are still to come
            return
        local = self.buffer.shard(self._fqn(number))
        if inner.data_ptr() != local.data_ptr() or inner.device != local.device:
            local.copy_(inner)
            held._local_tensor = local

    def _check_replacement(self, number: int, held: object) -> None:
        wanted = self._placements(number)
        if isinstance(held, RaggedTensor) and held.placements == wanted:
            return
        found = getattr(held, "placements", "not sharded")
        raise ValueError(
            f"{self.name}: the parameter {self.places[number].fqn} was replaced by a "
            f"{type(held).__name__} ({found}), but is sharded as {wanted}; give it its values with "
            "copy_() or load_state_dict(), or replace it by distribute_tensor(values, "
            "parameter.device_mesh, parameter.placements)"
        )

    def _retype(self) -> None:
        """After `.to(dtype)`: the same layout in other dtypes."""
        held = [place.module._parameters[place.name] for place in self.places]
        dtypes = [parameter.dtype for parameter in held if parameter is not None]
        if dtypes == [place.parameter.dtype for place in self.places]:
            return
        of_buffer: dict[int, torch.dtype] = {}
        for place, dtype in zip(self.plan.placements, dtypes, strict=True):
            if of_buffer.setdefault(place.buffer, dtype) != dtype:
                raise NotImplementedError(
                    f"{self.name}: its parameters were cast to {of_buffer[place.buffer]} and "
                    f"{dtype}; cast all of a module given to fully_shard to one dtype"
                )
        buffers = [
            replace(buffer, dtype=_name(of_buffer[number]))
            for number, buffer in enumerate(self.plan.buffers)
        ]
        placements = [
            replace(place, tensor=replace(place.tensor, dtype=_name(dtype)))
            for place, dtype in zip(self.plan.placements, dtypes, strict=True)
        ]
        self.plan = replace(self.plan, buffers=tuple(buffers), placements=tuple(placements))
        old = self.buffer
        self.buffer = DBuffer(
            self.plan, old.rank, old.device, old.param_dtype, old.reduce_dtype, old.pool
        )
        for own, dtype in zip(self.places, dtypes, strict=True):
            own.parameter = _described(own.parameter, dtype)
        self.unsharded = [self._unshard(number) for number in range(len(self.places))]

    # -- gathering -------------------------------------------------------------------------------

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffers are there (or arriving)."""
        return self.buffer.gathered

    def pin_parameters(self, phase: Phase) -> None:
        """The slice is always resident; the full buffers stay while somebody uses them."""
        self.pins += 1

    def unpin_parameters(self) -> None:
        """The slice stays."""
        self.pins -= 1

    def reshard(self) -> None:
        """Gives the full parameters up."""
        if self.is_gathered:
            self.show(self.sharded)
            self.buffer.give_full()

    # -- gradients -------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter got its gradient in this backward."""
        return len(self.received) == sum(p.requires_grad for p in self.unsharded)

    def add_gradient(self, number: int) -> None:
        """Takes a parameter's gradient from autograd into the gradient buffer: one copy."""
        parameter = self.unsharded[number]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if not self.buffer.has_gradients:
            self.buffer.take_gradients(self.behaviour.requires_sync and self.slices_are_free())
        view = self.buffer.gradient_view(self._fqn(number))
        if self.has_gradient[number]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.has_gradient[number] = True
        self.received.add(number)

    def slices_are_free(self) -> bool:
        """Whether nobody sees the slices of reduced gradients: they may be written over.

        A gradient that no parameter has any more may be kept by somebody else.
        """
        return all(p.grad is None for p in self.sharded) and not self.buffer.slices_are_held()

    def fill_gradients(self) -> list[int]:
        """Zeros where a parameter got none; returns the parameters that have one."""
        present = [n for n, has in enumerate(self.has_gradient) if has]
        for number, parameter in enumerate(self.unsharded):
            if not self.has_gradient[number]:
                self.buffer.gradient_view(self._fqn(number)).zero_()
                if self.behaviour.fill_unused and parameter.requires_grad:
                    present.append(number)
        return present

    def show_gradients(self, present: list[int], reduced: list[torch.Tensor] | None) -> None:
        """Sets `.grad` of sharded parameters.

        Args:
            present: the parameters that got one.
            reduced: slices to add to gradients that are there already; `None`: the group's own
                gradient slices hold what is new.
        """
        free = self.slices_are_free()
        for number in present:
            parameter = self.sharded[number]
            local = self.buffer.gradient_shard(self._fqn(number))
            if reduced is not None:
                place = self.plan.placements[number]
                new = self.buffer._own(reduced[place.buffer], place)
                if isinstance(parameter.grad, RaggedTensor):
                    parameter.grad.to_local().add_(new)
                    continue
                local = local.copy_(new) if free else new.to(parameter.dtype)
            assert isinstance(parameter, RaggedTensor)
            spec = parameter._spec
            parameter.grad = new_dtensor(RaggedTensor, local, spec, requires_grad=False)

    def drop_gradients(self) -> None:
        """An unreduced gradient is dead."""
        self.buffer.give_gradients()
        self.has_gradient = [False] * len(self.places)
        self.received.clear()
        self.partial = None


def _arrived(of: weakref.ref[ShardedGroup], number: int, _: torch.Tensor) -> None:
    group = of()
    assert group is not None and group.take_gradient, "a backward without a forward of the root"
    group.take_gradient(group, number)


def _described(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """What there is to know of a parameter but its values."""
    meta = torch.empty(parameter.shape, dtype=dtype, device="meta")
    made = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_parameters(
    places: list[SharedPlace],
    shards: int,
    granularity: GranularityLike,
    precision: Precision,
    planner: str,
    max_buffers: int = MAX_BUFFERS,
) -> Plan:
    """Plans a group: sub-buffers by the parameters' own dtypes, aligned in all of its dtypes."""
    tensors = [TensorSpec(p.fqn, tuple(p.parameter.shape), str(p.parameter.dtype)) for p in places]
    widest = max((p.parameter.dtype.itemsize for p in places), default=1)
    chosen = (precision.param_dtype, precision.reduce_dtype)
    narrow = min((dtype.itemsize for dtype in chosen if dtype is not None), default=widest)
    alignment = 64 * max(1, widest // narrow)
    return plan_group(
        tensors,
        shards,
        granularity=granularity,
        alignment=alignment,
        planner=planner,
        max_buffers=max_buffers,
    )
