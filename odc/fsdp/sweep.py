"""A sweep: one step whose micro-batches pass a model part by part, as hooks and updates see it.

The parts of a model are its embedding, its blocks and its loss; forward goes through them in this
order, backward in reverse. A sweep is a single pass. What a part needs is pinned at its first use
and stays, its gradient too, until all micro-batches are through; then its groups are updated (or
put away until ``opt.step()``), unless a part that is still to come adds to their gradients: tied
weights wait for the last of their parts. Experts come and go with each micro-batch, and are updated
behind the last one that was routed to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from odc.fsdp.group import ParamGroup
from odc.memory.events import Phase

if TYPE_CHECKING:
    from odc.fsdp.hooks import UnitHooks
    from odc.fsdp.runtime import Runtime

EMBEDDING = -1  # the part in front of block 0; the loss is the part behind the last block


class Sweep:
    """The parts of a model, and where the step that runs is.

    Args:
        runtime: of the paged model.
        blocks: its blocks, in order.

    Attributes:
        num_micro: micro-batches of the step.
        micro: the one that runs.
    """

    def __init__(self, runtime: Runtime, blocks: Sequence[nn.Module]) -> None:
        self.runtime = runtime
        self.num_micro = 1
        self.micro = 0
        self.loss = len(blocks)
        self._part = EMBEDDING
        self._block_of = {id(m): b for b, block in enumerate(blocks) for m in block.modules()}
        # Dictionaries, as sets with an order.
        self._steady = dict.fromkeys(u for u in runtime.units if self._is_steady(u))
        self._steady_groups = dict.fromkeys(g for u in self._steady for g in u.groups.own)
        self._root = next(u for u in runtime.units if u.unit.module is runtime.model)
        self._embedded: set[ParamGroup] = set()  # what the embedding of this step has used
        self._members: dict[tuple[int, int], dict[int, list[int]]] = {}
        self._last_use: dict[int, int] = {}

    def _is_steady(self, unit: UnitHooks) -> bool:
        """Whether a unit stays pinned through its part: an outermost one, and no expert."""
        if unit.unit.set_index >= 0:
            return False
        block = self._block(unit)
        around = (self._block_of.get(id(parent.module)) for parent in unit.unit.parents)
        return block is None or block not in around

    def _block(self, unit: UnitHooks) -> int | None:
        return self._block_of.get(id(unit.unit.module))

    # -- the step --------------------------------------------------------------------------------

    def begin(self, num_micro: int) -> None:
        """A step of ``num_micro`` micro-batches begins."""
        self.num_micro, self.micro = num_micro, 0
        self._embedded.clear()
        self._members.clear()
        self._last_use.clear()

    @contextmanager
    def part(self, number: int, phase: Phase) -> Iterator[None]:
        """All micro-batches go through one part.

        Args:
            number: a block's, ``EMBEDDING``, or ``loss``.
            phase: of the forwards in it: ``FORWARD``, ``RECOMPUTE``, or ``BACKWARD`` for none.
        """
        runtime = self.runtime
        self._part = number
        runtime.forward_phase = phase
        if number == EMBEDDING:  # nobody calls the root, which owns what is left
            self._root.acquire(phase)
        yield
        if number == EMBEDDING and phase == Phase.FORWARD:
            self._embedded = {group for unit in self._steady for group in unit.pinned}
        forward = phase == Phase.FORWARD and number != self.loss
        for unit in self._steady:
            if not (forward and unit is self._root):  # which stays until the loss
                unit.give_up(phase)
        over = number == EMBEDDING and phase == Phase.BACKWARD and runtime.update_in_backward
        for group in self._steady_groups:
            if group.unsettled or (over and any(group.has_gradient)):
                self._end(group, self._ends_here(group))

    def begin_micro(self, micro: int) -> None:
        """A micro-batch enters the part that runs."""
        self.micro = micro
        if self.runtime.forward_phase == Phase.RECOMPUTE:
            for set_index, members in self._members.get((self._part, micro), {}).items():
                self.runtime.manager.tape(set_index, members)

    # -- what the runtime asks -------------------------------------------------------------------

    def keeps(self, unit: UnitHooks) -> bool:
        """Whether a unit's parameters stay when its forward or backward is over."""
        return unit in self._steady

    def note_members(self, set_index: int, members: list[int]) -> None:
        """The members of a set that the forward of a micro-batch uses, in their order."""
        self._members.setdefault((self._part, self.micro), {})[set_index] = members
        for member in members:
            self._last_use[self.runtime.manager.stations.sets[set_index][member]] = self.micro

    def settle(self, group: ParamGroup, last: bool) -> None:
        """No more gradients come from calls of ``group`` in the micro-batch that runs."""
        if group in self._steady_groups:
            return
        over = group.complete and self._is_local(group)
        over = over and self.micro >= self._last_use.get(group.group, self.num_micro - 1)
        if over and self.runtime.update_in_backward and group.is_pinned and not last:
            group.unpin_gradient()  # somebody else's backward reads it
            return
        self._end(group, over)

    def end_backward(self) -> None:
        """The backward of a micro-batch through a part is over."""
        for group in self.runtime.groups:
            group.in_page.clear()
            if group not in self._steady_groups:
                if group.unsettled:
                    self.settle(group, last=True)
                group.received.clear()

    def _end(self, group: ParamGroup, over: bool) -> None:
        """Update a group whose gradient is final, put the others away."""
        runtime = self.runtime
        group.unsettled = False
        if over and runtime.update_in_backward:
            assert runtime.update is not None
            runtime.updated_in_backward = True
            runtime.update(group, Phase.BACKWARD)
        else:
            runtime.park(group)
        group.received.clear()

    def _ends_here(self, group: ParamGroup) -> bool:
        """Whether no part behind this one adds to a group's gradient."""
        if self._part == EMBEDDING:
            return True
        if self._part < self.loss:
            return self._is_local(group)
        if group in self._embedded or group in self._root.groups.own:
            return False
        inside = (unit for unit in self.runtime.units if self._block(unit) is not None)
        return not any(group in unit.groups.tied for unit in inside)

    def _is_local(self, group: ParamGroup) -> bool:
        """Whether one block alone uses a group."""
        users = [unit for unit in self.runtime.units if group in unit.groups.all]
        blocks = {self._block(unit) for unit in users}
        return len(blocks) == 1 and None not in blocks
