"""What the units of a paged model share: the update, and the way to values.

One runtime belongs to one model. It counts micro-steps, decides when a complete group is updated
(in backward, or at ``opt.step()``), and sweeps up when a backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from odc.fsdp.experts import ExpertOrder
from odc.fsdp.group import ParamGroup
from odc.fsdp.hooks import in_backward
from odc.fsdp.passes import Passes
from odc.fsdp.sweep import Sweep
from odc.memory.events import Kind, Op, Phase
from odc.memory.manager import MemoryManager

if TYPE_CHECKING:
    from odc.fsdp.activations import Activations
    from odc.fsdp.hooks import UnitHooks

Update = Callable[[ParamGroup, Phase], None]


class Runtime(Passes):
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
        super().__init__(model)
        self.manager = manager
        self.groups = groups
        self.update_in_backward = update_in_backward
        self.accumulate = accumulate
        self.clip = clip
        self.orders: list[ExpertOrder] = []
        self.update: Update | None = None
        self.activations: Activations | None = None
        self.updated_in_backward = False  # and opt.step() not called since
        self.num_steps = 0
        self.micro = 0  # backwards since the last update
        self.sweep: Sweep | None = None  # the step that runs in layer-major order
        self._hints: dict[int, float] = {}  # of the pass to come
        self._adapter = 0
        self._adapters: dict[str | None, int] = {}  # in the order in which they were first used
        for group in groups:
            group.runtime = self

    @property
    def last_micro(self) -> bool:
        return self.micro == self.accumulate - 1

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, args: Any, kwargs: Any) -> None:
        """The root's forward begins."""
        self.recover()
        grad = torch.is_grad_enabled()
        self.forward_phase = Phase.FORWARD if grad else Phase.EVALUATION
        # even: training, by micro-step; odd: no gradient
        ctx = 2 * min(self.micro, self.accumulate - 1) if grad else 1
        self.manager.micro = self.micro
        self._enter_pass(ctx, num_tokens((args, kwargs)))

    def _enter_pass(self, ctx: int, tokens: int) -> None:
        ctx += 2 * (self.accumulate + 1) * self._adapter  # each adapter has its own contexts
        self.manager.begin_pass(ctx, tokens)
        if self._hints:
            hints, self._hints = self._hints, {}
            self.manager.hint(list(hints), list(hints.values()))

    @contextmanager
    def sweeping(self, sweep: Sweep, num_micro: int, tokens: int) -> Iterator[None]:
        """A step in layer-major order: one pass, in a context of its own.

        Args:
            sweep: of this model.
            num_micro: micro-batches of the step.
            tokens: of a micro-batch.
        """
        self.recover()
        self.forward_phase = Phase.FORWARD
        self.manager.micro = 0
        self._enter_pass(2 * self.accumulate, tokens)
        self.sweep = sweep
        sweep.begin(num_micro)
        if self.activations is not None:
            self.activations.is_off = True
        try:
            yield
            self.micro += num_micro
        except BaseException:
            self.reset()
            raise
        finally:
            self.sweep = None
            if self.activations is not None:
                self.activations.is_off = False

    def keeps(self, unit: UnitHooks) -> bool:
        return self.sweep is not None and self.sweep.keeps(unit)

    def hint(self, groups: list[int], scores: list[float]) -> None:
        """Scores for the forward that runs, else for the next one."""
        if self.stack:
            self.manager.hint(groups, scores)
        else:
            self._hints.update(zip(groups, scores, strict=True))

    def check_backward(self) -> None:
        if torch.is_grad_enabled() and not self.manager.unlimited:
            raise RuntimeError(
                "create_graph=True is not supported on a paged model: the second backward would "
                "read parameters that have left; use total_mem='unlimited'"
            )

    def end_backward(self) -> None:
        if self.sweep is not None:
            self.sweep.end_backward()
            return
        received = False
        for group in self.groups:
            self.settle(group, last=True)
            received = received or bool(group.received)
            group.received.clear()
            group.in_page.clear()
        if received:
            self.micro += 1
        if self.activations is not None:
            self.activations.end_backward()

    def forget_pass(self) -> None:
        for group in self.groups:
            group.unpin_gradient()
            group.received.clear()
            group.in_page.clear()
            group.unsettled = False

    # -- gradients -------------------------------------------------------------------------------

    def take_gradient(self, group: ParamGroup, index: int) -> None:
        """A parameter's gradient is complete for this backward."""
        if self._accepts_gradient(group, index):
            group.add_gradient(index, Phase.BACKWARD)

    def gradient_page(self, group: ParamGroup, index: int) -> tuple[torch.Tensor, bool]:
        """A parameter's gradient, for who computes it in its page and hands autograd none.

        It is complete when autograd has seen every use of the parameter.

        Returns:
            A view of the page, pinned until the group is settled, and whether it has content that
            the new gradient is to be added to.
        """
        self._accepts_gradient(group, index)
        group.in_page.add(index)
        return group.gradient_page(index, Phase.BACKWARD)

    def _accepts_gradient(self, group: ParamGroup, index: int) -> bool:
        """Whether a gradient is for pages; refuses one that cannot be right."""
        self.begin_backward()
        if not group.trainable:
            self._refuse_gradient(group, index)
            return False
        if self.update_in_backward and self.micro >= self.accumulate and not group.plain_grad:
            raise RuntimeError(
                f"backward number {self.micro + 1} of a step, but accumulate={self.accumulate}: "
                "with update='backward' the last of them updates; pass accumulate=, or call "
                "opt.step() and opt.zero_grad() after every step"
            )
        return True

    def _refuse_gradient(self, group: ParamGroup, index: int) -> None:
        if group.codec is not None:
            raise RuntimeError(
                f"a gradient for {group.slots[index].fqn}, which is stored as "
                f"{group.codec.format.name} and cannot be trained; call requires_grad_(False) "
                "on it before odc.paged, or use frozen_format='native'"
            )
        if self.manager.unlimited:  # a torch.optim of the caller's own
            return
        raise RuntimeError(
            f"a gradient for {group.slots[index].fqn}, but the model was paged without an "
            "optimizer; pass optimizer=torch.optim.AdamW to odc.paged, or total_mem='unlimited' "
            "for any torch.optim"
        )

    def settle(self, group: ParamGroup, last: bool = False) -> None:
        """No more gradients come from the calls that ran: update, or put away until later.

        Args:
            group: of a call that is done.
            last: the backward is over.
        """
        if not group.unsettled:
            return
        if self.sweep is not None:
            self.sweep.settle(group, last)
            return
        updates = group.complete and self.update_in_backward and self.last_micro
        if updates and group.is_pinned and not last:  # somebody else's backward reads it
            group.unpin_gradient()
            return
        group.unsettled = False
        if group.complete:
            self.collective.reduce_gradients(group)
        if updates:
            assert self.update is not None
            self.updated_in_backward = True
            self.update(group, Phase.BACKWARD)
        else:
            self.park(group)

    def park(self, group: ParamGroup) -> None:
        """Put a gradient away until more of it comes, or ``opt.step()``."""
        if self.clip:
            group.take_norms()
        group.unpin_gradient()

    def forget_gradients(self) -> None:
        """All gradients of the model are zeroed."""
        if self.updated_in_backward:
            raise RuntimeError(
                "zero_grad() between backward and opt.step(): with update='backward' the update "
                "has happened and cannot be undone; to skip updates use update='step'"
            )
        self.recover()
        for group in self.groups:
            group.forget_gradients()
        self.micro = 0

    # -- values out of place ---------------------------------------------------------------------

    def adopt(self, group: ParamGroup) -> bool:
        """A parameter is read that is not there: the unit whose forward runs uses it as well.

        Returns:
            False if no forward runs. Otherwise the group is pinned with that unit from now on.
        """
        if in_backward() or not self.stack:
            return False
        unit = self.stack[-1]
        if group not in unit.groups.all:
            unit.groups.tied.append(group)
        unit.pin(group, self.forward_phase)
        return True

    def use_adapter(self, name: str | None) -> None:
        """The groups of one adapter run from now on, those of the others rest.

        Raises:
            RuntimeError: a forward or backward runs, or a step's backwards have begun to update.
        """
        if self.stack or in_backward():
            raise RuntimeError("an adapter is exchanged inside a forward or backward; do it after")
        if self.update_in_backward and self.micro:
            raise RuntimeError(
                f"an adapter is exchanged after {self.micro} of {self.accumulate} backwards of a "
                "step: with update='backward' do it between steps, after opt.step()"
            )
        for group in self.groups:
            group.rests = bool(group.adapter) and group.adapter != name
        self._adapter = self._adapters.setdefault(name, len(self._adapters))

    # -- experts ---------------------------------------------------------------------------------

    def order_experts(self, module: nn.Module, set_index: int) -> None:
        """Give a mixture-of-experts module its ``expert_order``.

        Experts that draw random numbers keep the order of plain PyTorch: each draw depends on
        those before it.
        """
        draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())

        def choose(members: list[int]) -> list[int]:
            phase, free = self.forward_phase, not (draws and module.training)
            order = self.manager.open_set(set_index, members, phase, resident_first=free)
            if self.sweep is not None:
                self.sweep.note_members(set_index, order)
            return order

        order = ExpertOrder(choose, self._phase)
        module.expert_order = order  # type: ignore[assignment]
        self.orders.append(order)

    def _phase(self) -> Phase:
        return Phase.RECOMPUTE if in_backward() else self.forward_phase

    def end_step(self) -> None:
        """An optimizer step is over."""
        self.micro = 0
        self.updated_in_backward = False
        self.num_steps += 1
        for unit in self.units:
            unit.has_graph = False
        for order in self.orders:
            order.forget()
        self.manager.end_update()
        if self.manager.ledger.measures:
            self.manager.rebalance()

    # -- values ----------------------------------------------------------------------------------

    @contextmanager
    def resident(self, groups: list[ParamGroup], write: bool = False) -> Iterator[None]:
        """Pin the parameters of groups for reading or writing outside a forward.

        What is written to a group that is stored in few bits is rounded to them at the end.
        """
        op = Op.WRITE if write else Op.READ
        pinned: list[tuple[ParamGroup, list[int]]] = []
        try:
            for group in groups:
                group.pin_parameters(Phase.OTHER, op)
                pinned.append((group, [p._version for p in group.parameters]))
            yield
        finally:
            changed = [g for g, before in pinned if [p._version for p in g.parameters] != before]
            try:
                for group, _ in pinned if write else ():
                    group.round_values()
            finally:
                for group, _ in pinned:
                    group.unpin_parameters()
        if changed and not write:
            raise RuntimeError(
                f"parameters of {changed[0].spec.name} were changed inside model.resident(...), "
                "and the change may be lost; use model.resident(..., write=True)"
            )

    def copy_out(self, group: ParamGroup, kind: Kind, slot: int = 0) -> list[torch.Tensor]:
        """Copies of a group's parameters, gradients or one of its moments."""
        if kind == Kind.MOMENT and group.spec.at_home:
            with self.manager.at_home(group.group, kind, slot) as buffer:
                return [group.home_view(buffer, i).clone() for i in range(len(group.slots))]
        self.manager.access(group.group, [(kind, Op.READ)], Phase.OTHER)
        try:
            return [group.view(kind, i, slot).clone() for i in range(len(group.slots))]
        finally:
            self.manager.release(group.group, kind)


def num_tokens(batch: Any) -> int:
    """Elements of the first tensor in (nested) containers, 0 without one."""
    return next((t.numel() for t in tree_leaves(batch) if isinstance(t, torch.Tensor)), 0)
