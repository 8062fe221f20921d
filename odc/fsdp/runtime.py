"""What the units of a model share: the pass, the backward, the update, and the way to values.

One runtime belongs to one model. It counts micro-steps, decides when a complete group is updated
(in backward, or at ``opt.step()``), and sweeps up when a backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from odc.fsdp.collective import Collective, NullCollective
from odc.fsdp.experts import ExpertOrder
from odc.fsdp.group import ParamGroup
from odc.fsdp.hooks import UnitHooks, in_backward
from odc.fsdp.lifecycle import UnitState
from odc.memory.events import Kind, Op, Phase
from odc.memory.manager import MemoryManager

Update = Callable[[ParamGroup, Phase], None]


class Runtime:
    """State shared by the hooks of one model.

    Args:
        model: the root module.
        manager: the sealed memory manager.
        groups: all parameter groups.
        update_in_backward: update a group as soon as its gradient is final.
        accumulate: backwards that make one update.
        clip: whether norms are taken.
    """

    def __init__(
        self,
        model: nn.Module,
        manager: MemoryManager,
        groups: list[ParamGroup],
        *,
        update_in_backward: bool,
        accumulate: int,
        clip: bool,
    ) -> None:
        self.model = model
        self.manager = manager
        self.groups = groups
        self.update_in_backward = update_in_backward
        self.accumulate = accumulate
        self.clip = clip
        self.collective: Collective = NullCollective()
        self.units: list[UnitHooks] = []
        self.orders: list[ExpertOrder] = []
        self.update: Update | None = None
        self.micro = 0  # backwards since the last update
        self.forward_phase = Phase.FORWARD
        self._backward_task = -1

    @property
    def optimizer_sees_versions(self) -> bool:
        """With updates at the step autograd's own version counters catch a stale backward."""
        return not self.update_in_backward

    @property
    def last_micro(self) -> bool:
        return self.micro == self.accumulate - 1

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, args: Any, kwargs: Any) -> None:
        """The root's forward begins."""
        if any(u.state != UnitState.IDLE for u in self.units):
            self.reset()
        grad = torch.is_grad_enabled()
        self.forward_phase = Phase.FORWARD if grad else Phase.EVALUATION
        tokens = next((t.numel() for t in tree_leaves((args, kwargs)) if _is_tensor(t)), 0)
        self.manager.micro = self.micro
        # even: training, by micro-step; odd: no gradient
        ctx = 2 * min(self.micro, self.accumulate - 1) if grad else 1
        self.manager.begin_pass(ctx, tokens)

    def begin_backward(self) -> None:
        """The first hook of a backward: have its end reported."""
        task = torch._C._current_graph_task_id()
        if task != self._backward_task:
            self._backward_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_task = -1
        for unit in self.units:
            unit.sweep()
        self.micro += 1

    def reset(self) -> None:
        """Release everything that an interrupted pass left pinned."""
        for unit in self.units:
            unit.reset()
        self._backward_task = -1

    # -- gradients -------------------------------------------------------------------------------

    def group_complete(self, group: ParamGroup) -> None:
        """All gradients of a group arrived in this backward."""
        self.collective.reduce_gradients(group)
        if self.update_in_backward and self.last_micro:
            assert self.update is not None
            self.update(group, Phase.BACKWARD)
        else:
            self._park(group)

    def group_partial(self, group: ParamGroup) -> None:
        """Backward ended with some gradients missing; the update waits for ``opt.step()``."""
        self._park(group)

    def _park(self, group: ParamGroup) -> None:
        if self.clip:
            group.take_norms()
        group.unpin_gradient()

    # -- experts ---------------------------------------------------------------------------------

    def order_experts(self, module: nn.Module, set_index: int) -> None:
        """Give a mixture-of-experts module its ``expert_order``."""

        def choose(members: list[int]) -> list[int]:
            return self.manager.open_set(set_index, members, self.forward_phase)

        order = ExpertOrder(choose, self._phase)
        module.expert_order = order  # type: ignore[assignment]
        self.orders.append(order)

    def _phase(self) -> Phase:
        return Phase.RECOMPUTE if in_backward() else self.forward_phase

    def end_step(self) -> None:
        """An optimizer step is over."""
        self.micro = 0
        for order in self.orders:
            order.forget()
        self.manager.end_update()

    # -- values ----------------------------------------------------------------------------------

    @contextmanager
    def resident(self, groups: list[ParamGroup], write: bool = False) -> Iterator[None]:
        """Pin the parameters of groups for reading or writing outside a forward."""
        op = Op.WRITE if write else Op.READ
        pinned: list[ParamGroup] = []
        try:
            for group in groups:
                group.pin_parameters(Phase.OTHER, op)
                pinned.append(group)
            yield
        finally:
            for group in pinned:
                group.unpin_parameters()

    def copy_out(self, group: ParamGroup, kind: Kind, slot: int = 0) -> list[torch.Tensor]:
        """Copies of a group's parameters, gradients or one of its moments."""
        self.manager.access(group.group, [(kind, Op.READ)], Phase.OTHER)
        try:
            return [group.view(kind, i, slot).clone() for i in range(len(group.slots))]
        finally:
            self.manager.release(group.group, kind)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
