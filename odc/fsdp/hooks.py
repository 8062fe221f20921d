"""Hooks: forward and backward of units drive pages, gradients and updates.

Before a unit's forward its parameters are pinned, after it they are released; the same around its
backward, which begins when a gradient reaches one of its outputs. It is done when every parameter
got its gradient (autograd accumulates into a parameter after its last use in a backward), or when
the gradients of all its inputs are complete; whatever is left is swept up when backward ends.

[Note: inputs] A unit with frozen or tied parameters needs them until its last input's gradient is
complete, although all its own gradients may be there before. Autograd runs the node that was
created last first, so when an input's gradient is complete every node of the unit has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from odc.fsdp.group import ParamGroup, UnitGroups
from odc.fsdp.lifecycle import Command, Event, UnitState, transition
from odc.fsdp.parameter import PagedParameter
from odc.fsdp.wrap import Unit
from odc.memory.events import Phase

if TYPE_CHECKING:
    from odc.fsdp.runtime import Runtime


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class UnitHooks:
    """The hooks of one unit.

    Args:
        runtime: what all units share.
        unit: module and place.
        groups: parameters to pin.
    """

    def __init__(self, runtime: Runtime, unit: Unit, groups: UnitGroups) -> None:
        self.runtime = runtime
        self.unit = unit
        self.groups = groups
        self.state = UnitState.IDLE
        self.inputs_awaited = 0
        self.pinned: list[ParamGroup] = []
        self.simple = not groups.tied and all(g.trainable for g in groups.own)
        self._calls: list[tuple[int, ...]] = []
        module = unit.module
        self.handles = [
            module.register_forward_pre_hook(self._pre_forward, with_kwargs=True),
            module.register_forward_hook(self._post_forward, with_kwargs=True),
        ]

    # -- forward ---------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            self._enter(Event.PRE_RECOMPUTE, Phase.RECOMPUTE)
            return
        if module is self.runtime.model:
            self.runtime.begin_pass(args, kwargs)
        self._enter(Event.PRE_FORWARD, self.runtime.forward_phase)

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            self._enter(Event.POST_RECOMPUTE, Phase.RECOMPUTE)
            return
        self._enter(Event.POST_FORWARD, self.runtime.forward_phase)
        if torch.is_grad_enabled():
            self._watch(args, kwargs, output)

    def _watch(self, args: Any, kwargs: Any, output: Any) -> None:
        """Register for the backward of this call."""
        outputs = [t for t in tree_leaves(output) if _needs_grad(t)]
        if not outputs or not self.groups.all:
            return
        versions = tuple(g.updates for g in self.groups.all)
        call = _Call(self, versions)
        for tensor in outputs:
            tensor.register_hook(call.pre_backward)
        for tensor in tree_leaves((args, kwargs)):
            if _needs_grad(tensor) and not tensor.is_leaf:
                call.inputs += 1
                tensor.register_hook(call.input_done)

    # -- backward --------------------------------------------------------------------------------

    def pre_backward(self, call: _Call) -> None:
        self.runtime.begin_backward()
        for group, version in zip(self.groups.all, call.versions, strict=True):
            if group.updates != version and not self.runtime.optimizer_sees_versions:
                raise RuntimeError(
                    f"a backward through {self.unit.fqn or 'the model'} after its parameters were "
                    "updated in an earlier backward of the same forward; use update='step', which "
                    "updates in opt.step()"
                )
        self._enter(Event.PRE_BACKWARD, Phase.BACKWARD)

    def input_done(self) -> None:
        self.inputs_awaited -= 1
        if self.inputs_awaited == 0:
            self.done()

    def gradient(self, group: ParamGroup, index: int) -> None:
        """A parameter's gradient is complete for this backward."""
        runtime = self.runtime
        runtime.begin_backward()
        group.add_gradient(index, Phase.BACKWARD)
        if not group.complete or group.plain_grad:
            return
        if group in self.pinned:
            self.pinned.remove(group)
            group.unpin_parameters()
        runtime.group_complete(group)
        if self.simple and all(g.complete for g in self.groups.own):
            self.done()

    def done(self) -> None:
        """Nothing of this unit runs any more in this backward."""
        self._enter(Event.BACKWARD_DONE, Phase.BACKWARD)
        self.inputs_awaited = 0

    def sweep(self) -> None:
        """Backward is over: release what no hook released."""
        if self.state != UnitState.IDLE:
            self.done()
        for group in self.groups.own:
            if group.received and not group.complete:
                self.runtime.group_partial(group)
            group.received.clear()
        self.inputs_awaited = 0

    def reset(self) -> None:
        """An exception ended a pass half-way."""
        self._enter(Event.RESET, Phase.OTHER)
        self.inputs_awaited = 0
        for group in self.groups.own:
            group.unpin_gradient()
            group.received.clear()

    # -- pins ------------------------------------------------------------------------------------

    def _enter(self, event: Event, phase: Phase) -> None:
        self.state, command = transition(self.state, event)
        if command == Command.ACQUIRE:
            for group in self.groups.all:
                group.pin_parameters(phase)
                self.pinned.append(group)
                self.runtime.collective.unshard(group)
        elif command == Command.RELEASE:
            for group in self.pinned:
                self.runtime.collective.reshard(group)
                group.unpin_parameters()
            self.pinned.clear()

    def hook_parameters(self) -> None:
        """Take gradients from autograd as they become complete."""
        for group in self.groups.own:
            if not group.trainable:
                continue
            for parameter in group.parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, PagedParameter)
        self.gradient(parameter._group, parameter._index)


class _Call:
    """One forward call of a unit, until its backward."""

    __slots__ = ("begun", "hooks", "inputs", "versions")

    def __init__(self, hooks: UnitHooks, versions: tuple[int, ...]) -> None:
        self.hooks = hooks
        self.versions = versions
        self.inputs = 0
        self.begun = -1

    def pre_backward(self, grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self.begun != task:  # once a backward, for the first of the outputs
            self.begun = task
            self.hooks.inputs_awaited += self.inputs
            self.hooks.pre_backward(self)

    def input_done(self, grad: torch.Tensor) -> None:
        if self.begun == torch._C._current_graph_task_id():
            self.hooks.input_done()


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
