"""The passes of a model: whose forward runs, whose backward runs, and when a backward is over.

What pages and what shards has the same passes; they differ in what a pass, a gradient and the end
of a backward ask of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from odc.fsdp.collective import Collective, NullCollective
from odc.memory.events import Phase

if TYPE_CHECKING:
    from odc.fsdp.hooks import Call, UnitHooks


class Passes:
    """Who is inside a forward or a backward; the state that all hooks of one model share.

    Args:
        model: the root module.
    """

    update_in_backward = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.collective: Collective = NullCollective()
        self.units: list[UnitHooks] = []
        self.stack: list[UnitHooks] = []  # whose forward runs, innermost last
        self.calls: list[Call] = []  # whose backward runs
        self.forward_phase = Phase.FORWARD
        self._backward_task = -1
        self._clock = 0

    def tick(self) -> int:
        """The clock of forward calls."""
        self._clock += 1
        return self._clock

    def begin_pass(self, args: Any, kwargs: Any) -> None:
        """The root's forward begins."""
        raise NotImplementedError

    def keeps(self, unit: UnitHooks) -> bool:
        """Whether a unit's parameters stay pinned when its forward or its backward is over."""
        return False

    def begin_backward(self) -> None:
        """The first hook of a backward: have its end reported."""
        task = torch._C._current_graph_task_id()
        if task == self._backward_task:
            return
        self.recover()
        self.check_backward()
        self._backward_task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def check_backward(self) -> None:
        """Whether the backward that begins is one that is supported."""

    def finish_calls(self, after: int) -> None:
        """Calls that began later than ``after`` are done; see [Note: when a backward is done]."""
        for call in [c for c in self.calls if c.start > after]:
            call.hooks.done(call)

    def suspend_others(self, recomputed: UnitHooks) -> None:
        """Units that wait for a recompute need nothing until they are recomputed themselves."""
        for call in self.calls:
            if call.hooks is not recomputed and call.hooks not in recomputed.around:
                call.hooks.suspend()

    def _end_backward(self) -> None:
        self.calls.clear()
        for unit in self.units:
            unit.release()
        self.end_backward()
        self._backward_task = -1  # last: what fails before is cleaned up

    def end_backward(self) -> None:
        """The backward is over and every unit has given its parameters up."""
        raise NotImplementedError

    def take_gradient(self, group: Any, index: int) -> None:
        """A parameter's gradient is complete for this backward."""
        raise NotImplementedError

    def settle(self, group: Any, last: bool = False) -> None:
        """No more gradients come from the calls of ``group`` that ran.

        Args:
            group: of a call that is done.
            last: the backward is over.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Clean up after an exception in a forward or a backward, if there was one."""
        if self.stack or self._backward_task != -1:
            self.reset()

    def reset(self) -> None:
        """Release everything that an interrupted pass left pinned."""
        self.calls.clear()
        self.stack.clear()
        for unit in self.units:
            unit.reset()
        self.forget_pass()
        self._backward_task = -1

    def forget_pass(self) -> None:
        """What an interrupted pass left of gradients."""
        raise NotImplementedError
