"""Hooks: forward and backward of units drive pages, gradients and updates.

Before a unit's forward its parameters are pinned, after it they are released; the same around its
backward, which begins when a gradient reaches one of its outputs.

[Note: when a backward is done] Nothing tells that the last node of a module's backward has run; its
parameters' gradients do not (a node may read a parameter that gets no gradient from it), and a full
backward hook fires too early. But autograd runs, of the nodes that are ready, the one that was
created last. So when a gradient is handed to anything that existed before a call of a module began
(one of its inputs, or an output of an older call), every node of that call has run. Calls carry
the time of their beginning and end for that; what nothing ended ends with the backward itself.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
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
    from odc.fsdp.passes import Passes


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

    def __init__(self, runtime: Passes, unit: Unit, groups: UnitGroups) -> None:
        self.runtime = runtime
        self.unit = unit
        self.groups = groups
        self.state = UnitState.IDLE
        self.pinned: list[ParamGroup] = []
        self.around: set[UnitHooks] = set()  # units inside whose forward this one was called
        self._open: Call | None = None  # the call whose forward runs
        self.has_graph = False  # a forward recorded a graph in this step
        self.awaited = 0  # calls whose backward has not begun
        self.handles = self._register(unit.module)
        self._gradient_handles: list[Any] = []

    def _register(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(self._pre_forward, with_kwargs=True),
            module.register_forward_hook(self._post_forward, with_kwargs=True),
        ]

    # -- forward ---------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        runtime = self.runtime
        if in_backward():
            self._pre_recompute()
            return
        if module is runtime.model:
            runtime.begin_pass(args, kwargs)
        self.around.update(runtime.stack)
        runtime.stack.append(self)  # first: what fails from here on is cleaned up
        self._enter(Event.PRE_FORWARD, runtime.forward_phase)
        if torch.is_grad_enabled():
            self.has_graph = True
            self._open = Call(self, runtime.tick())
            self._open.watch_inputs((args, kwargs))

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        runtime = self.runtime
        if in_backward():
            self._enter(Event.POST_RECOMPUTE, Phase.RECOMPUTE)
            return
        self._enter(Event.POST_FORWARD, runtime.forward_phase)
        runtime.stack.pop()
        call, self._open = self._open, None
        if call is not None and self.groups.all:
            call.end = runtime.tick()
            call.watch_outputs(output)
            self.awaited += 1

    def _pre_recompute(self) -> None:
        if torch.is_grad_enabled() and not self.has_graph:
            raise RuntimeError(
                f"{self.unit.fqn or 'the model'} is recomputed in backward, but its forward "
                "recorded no graph: reentrant activation checkpointing is not supported on a paged "
                "or sharded model; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        if self.state in (UnitState.IDLE, UnitState.SUSPENDED):
            self.runtime.suspend_others(self)
        self._enter(Event.PRE_RECOMPUTE, Phase.RECOMPUTE)

    # -- backward --------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient reached an output of ``call``."""
        runtime = self.runtime
        runtime.begin_backward()
        if not call.begun:
            call.begun = True
            self.awaited = max(self.awaited - 1, 0)
        for group, version in call.versions:
            if group.updates != version and runtime.update_in_backward:
                raise RuntimeError(
                    f"a backward through {self.unit.fqn or 'the model'} after its parameters were "
                    "updated in an earlier backward; use update='step', which updates in opt.step()"
                )
        runtime.finish_calls(after=call.end)
        runtime.calls.append(call)
        # those of its forward: another adapter may be active by now
        self._enter(Event.PRE_BACKWARD, Phase.BACKWARD, [group for group, _ in call.versions])

    def done(self, call: Call) -> None:
        """Every node of ``call`` has run in this backward."""
        self.runtime.calls.remove(call)
        self.release()
        for group, _ in call.versions:
            self.runtime.settle(group)

    def release(self) -> None:
        """Nothing of this unit runs any more in this backward."""
        self._enter(Event.BACKWARD_DONE, Phase.BACKWARD)

    def suspend(self) -> None:
        """Give the parameters up until this unit itself is recomputed."""
        if self.state == UnitState.BACKWARD:
            self._enter(Event.SUSPEND, Phase.RECOMPUTE)

    def reset(self) -> None:
        """An exception ended a pass half-way."""
        self._open = None
        self._enter(Event.RESET, Phase.OTHER)
        self.give_up(Phase.OTHER)

    # -- pins ------------------------------------------------------------------------------------

    def _enter(self, event: Event, phase: Phase, needs: list[ParamGroup] | None = None) -> None:
        self.state, command = transition(self.state, event)
        if command == Command.ACQUIRE:
            self.acquire(phase, needs)
        elif command == Command.RELEASE and not self.runtime.keeps(self):
            self.give_up(phase)

    def acquire(self, phase: Phase, needs: list[ParamGroup] | None = None) -> None:
        """Pin the groups that are not pinned yet: all of the unit, or those that are named."""
        for group in self.groups.all if needs is None else needs:
            if group not in self.pinned:
                self.pin(group, phase)

    def give_up(self, phase: Phase) -> None:
        """Release what is pinned."""
        for group in self.pinned:
            self.runtime.collective.reshard(group, phase)
            group.unpin_parameters()
        self.pinned.clear()

    def pin(self, group: ParamGroup, phase: Phase) -> None:
        """Pin a group's parameters until this unit releases."""
        group.pin_parameters(phase)
        self.pinned.append(group)
        self.runtime.collective.unshard(group)

    def hook_parameters(self) -> None:
        """Take gradients from autograd as they become complete.

        The hook lies in C++, where no collector looks: it must not keep the model.
        """
        own = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            unit = own()
            if unit is not None:
                unit._take(parameter)

        for group in self.groups.own:
            for parameter in group.parameters:
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(take)
                    self._gradient_handles.append(handle)

    def unhook_parameters(self) -> None:
        """Give the hooks of parameters up."""
        for handle in self._gradient_handles:
            handle.remove()

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, PagedParameter)
        self.runtime.take_gradient(parameter._group, parameter._index)


class Call:
    """One forward call of a unit, until its backward.

    Attributes:
        start, end: the runtime's clock when its forward began and ended.
        begun: a backward reached it.
        versions: the groups it used, and how often each had been updated.
    """

    __slots__ = ("begun", "end", "hooks", "sources", "start", "task", "versions")

    def __init__(self, hooks: UnitHooks, start: int) -> None:
        self.hooks = hooks
        self.start = start
        self.end = start
        self.begun = False
        self.task = -1  # of the backward in which it began
        self.versions: list[tuple[ParamGroup, int]] = []
        self.sources: dict[int, Any] = {}

    def watch_inputs(self, inputs: Any) -> None:
        """Before the forward: it may change an input in place, which then is an output."""
        for tensor in _tensors(inputs):
            if tensor.requires_grad and not tensor.is_leaf:
                self.sources[id(tensor)] = tensor.grad_fn
                tensor.register_hook(self.input_done)

    def watch_outputs(self, output: Any) -> None:
        """After the forward. An input that is handed through is no output."""
        self.versions = [(group, group.updates) for group in self.hooks.groups.all]
        tensors = list(_tensors(output))
        if not tensors and hasattr(output, "__dict__"):  # an answer in a class of its own
            tensors = list(_tensors(list(vars(output).values())))
        for tensor in tensors:
            if tensor.requires_grad and self.sources.get(id(tensor)) is not tensor.grad_fn:
                tensor.register_hook(self.pre_backward)
        self.sources = {}

    def pre_backward(self, grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self.task != task:  # once a backward, for the first of the outputs
            self.task = task
            self.hooks.pre_backward(self)

    def input_done(self, grad: torch.Tensor) -> None:
        if self in self.hooks.runtime.calls:
            self.hooks.done(self)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in (nested) containers and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
