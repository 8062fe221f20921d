"""The workload of a training step made from shapes: what the runtime would need, in its order.

Visits are those that `odc.fsdp` records (tests hold the two side by side): the root, the embedding,
the layers with the experts that the router chose, the head; in backward the other way round, each
group updated as soon as its gradient is final, or all of them in the optimizer's step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odc.memory.events import Kind, Op, Phase
from odc.memory.replay.synthetic import page_columns
from odc.memory.replay.workload import Bundle, RecordedVisit, Workload
from odc.train.fit.groups import Paged, PagedGroup
from odc.train.fit.model import Role, Unit

_P, _G, _M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT
_TO_GRADIENT = 0.12  # of a layer's backward: until its first gradient is there
Row = tuple[Kind, Op, int]


@dataclass(frozen=True)
class Times:
    """What a step computes, ns; of one micro-batch.

    Attributes:
        forward, backward: Of a unit of each role; of an expert, where it is used.
        update: Of the optimizer for each parameter, on the device.
        copy: Of a gradient's way into its page, for each parameter.
        hook: Of the runtime itself at every access.
        lead: Of a step, before its first access: the batch, what follows the last update.
    """

    forward: dict[Role, float]
    backward: dict[Role, float]
    update: float
    copy: float = 0.0
    hook: float = 0.0
    lead: float = 0.0

    def scaled(self, factor: float) -> "Times":
        """All of it `factor` times as long."""
        return replace(
            self,
            forward={role: ns * factor for role, ns in self.forward.items()},
            backward={role: ns * factor for role, ns in self.backward.items()},
            update=self.update * factor,
            copy=self.copy * factor,
            hook=self.hook * factor,
            lead=self.lead * factor,
        )


def make_workload(paged: Paged, times: Times, steps: int, seed: int = 0) -> Workload:
    """Returns `steps` optimizer steps of a choice.

    Args:
        paged: The groups and the choice.
        times: What computing takes.
        steps: Optimizer steps.
        seed: Of the experts that are drawn in each layer and pass, all equally likely.
    """
    maker = _Steps(paged, times, seed)
    for step in range(steps):
        maker.step(step)
    return Workload(page_columns(paged.table), maker.visits, list(paged.sets))


class _Steps:
    """Visits in order of time."""

    def __init__(self, paged: Paged, times: Times, seed: int) -> None:
        self.paged, self.times, self.choice = paged, times, paged.choice
        self.visits: list[RecordedVisit] = []
        self._rng = np.random.default_rng(seed)
        self._chosen: dict[int, list[list[Unit]]] = {}
        self._experts: dict[int, list[Unit]] = {}
        for unit in paged.model.of(Role.EXPERT):
            self._experts.setdefault(unit.layer, []).append(unit)
        self._layers = paged.model.of(Role.LAYER)
        self._step = self._micro = self._turn = 0
        # Micro-batches that pass a layer while its pages are there.
        self._together = self.choice.accumulate if self.choice.order == "layer_major" else 1
        self._begins = False

    def step(self, step: int) -> None:
        """Add one optimizer step."""
        choice = self.choice
        passes = choice.accumulate // self._together
        for micro in range(passes):
            self._step, self._micro, self._turn, self._begins = step, micro, micro, True
            self._forward()
            self._backward(updates=choice.update == "backward" and micro == passes - 1)
        if choice.update == "step":
            for group in self.paged.groups:
                if group.trainable:
                    self._add(Phase.OPTIMIZER, [Bundle(group.group, *self._optimizer(group))])

    # -- passes ----------------------------------------------------------------------------------

    def _forward(self) -> None:
        lead = self.times.lead
        for unit in (*self.paged.model.of(Role.ROOT), *self.paged.model.of(Role.EMBEDDING)):
            self._read(unit, Phase.FORWARD, self.times.forward[unit.role] + lead)
            lead = 0.0
        for layer in self._layers:
            self._read(layer, Phase.FORWARD, self.times.forward[Role.LAYER])
            if self._experts:
                draws = [self._draw(layer.layer) for _ in range(self._together)]
                self._chosen[layer.layer] = draws
                for drawn in draws:
                    self._set(drawn, Phase.FORWARD, self.times.forward[Role.EXPERT])
        self._read(self._head(), Phase.FORWARD, self.times.forward[Role.HEAD])

    def _backward(self, updates: bool) -> None:
        model, times = self.paged.model, self.times
        for root in model.of(Role.ROOT):
            self._read(root, Phase.BACKWARD, 0.0)
        if model.tied:
            self._read(self._head(), Phase.BACKWARD, times.backward[Role.HEAD])
        else:
            self._trained(self._head(), times.backward[Role.HEAD], updates)
        for root in model.of(Role.ROOT):
            self._gradient_only(root)
        for layer in reversed(self._layers):
            self._layer_backward(layer, updates)
        for unit in model.of(Role.EMBEDDING):
            self._trained(unit, times.backward[Role.EMBEDDING], updates)
        for root in model.of(Role.ROOT):
            if updates:
                self._update_only(root)

    def _layer_backward(self, layer: Unit, updates: bool) -> None:
        times = self.times
        recomputes = self.choice.recomputes
        again = times.forward[Role.LAYER] if recomputes else 0.0
        backward = times.backward[Role.LAYER]
        if not self._experts:
            self._trained(layer, again + backward, updates)
            return
        self._read(layer, Phase.BACKWARD, again)
        for turn, drawn in enumerate(self._chosen[layer.layer]):
            self._turn = max(self._micro, turn)
            if recomputes:
                self._set(drawn, Phase.RECOMPUTE, times.forward[Role.EXPERT])
            last = updates and turn == self._together - 1
            self._set(drawn, Phase.BACKWARD, times.backward[Role.EXPERT], last)
        self._turn = self._micro
        self._gradients(layer, backward, updates)

    def _draw(self, layer: int) -> list[Unit]:
        units = self._experts[layer]
        share = self.paged.model.used_experts(self.choice.tokens) / self.paged.model.num_experts
        used = self._rng.random(len(units)) < share
        return [unit for unit, drawn in zip(units, used, strict=True) if drawn] or units[:1]

    # -- visits ----------------------------------------------------------------------------------

    def _read(self, unit: Unit, phase: Phase, compute_ns: float) -> None:
        """Its groups are pinned one after the other, and it computes behind the last."""
        groups = self._groups(unit)
        for group in groups:
            after = compute_ns * self._together if group is groups[-1] else 0.0
            self._add(phase, [Bundle(group.group, [(_P, Op.READ, 0)], self._ns(after))])

    def _trained(self, unit: Unit, compute_ns: float, updates: bool) -> None:
        """Backward of a unit: read, gradient, update. A frozen group beside is read too."""
        groups = self._groups(unit)
        frozen = [group for group in groups if not group.trainable]
        trained = [group for group in groups if group.trainable]
        if not frozen:
            for group in trained:
                rows, after = self._gradient(group, compute_ns, updates)
                rows = [(_P, Op.READ, 0), *rows]
                self._add(Phase.BACKWARD, [Bundle(group.group, rows, after)])
            return
        if unit.role == Role.EMBEDDING:  # nothing behind it wants a gradient
            return
        for group in frozen:
            after = 0 if trained else self._ns(compute_ns * self._together)
            self._add(Phase.BACKWARD, [Bundle(group.group, [(_P, Op.READ, 0)], after)])
        self._gradients(unit, compute_ns, updates, [(_P, Op.READ, 0)])

    def _gradients(
        self, unit: Unit, compute_ns: float, updates: bool, first: Sequence[Row] = ()
    ) -> None:
        """What a unit's backward leaves; a group of several layers is final behind its first."""
        trained = [group for group in self._groups(unit) if group.trainable]
        for group in trained:
            final = updates and unit is group.units[0]
            begun = unit is not group.units[-1]
            share = compute_ns / len(trained)
            rows, after = self._gradient(group, share, final, begun)
            self._add(Phase.BACKWARD, [Bundle(group.group, [*first, *rows], after)])

    def _set(
        self, units: list[Unit], phase: Phase, compute_ns: float, updates: bool = False
    ) -> None:
        """The chosen experts of a layer; in backward the last comes first."""
        bundles = []
        for unit in reversed(units) if phase == Phase.BACKWARD else units:
            group = self._groups(unit)[0]
            if phase == Phase.BACKWARD and group.trainable:
                rows, after = self._gradient(group, compute_ns, updates)
                bundles.append(Bundle(group.group, [(_P, Op.READ, 0), *rows], after))
            else:
                after = self._ns(compute_ns)
                bundles.append(Bundle(group.group, [(_P, Op.READ, 0)], after))
        self._add(phase, bundles)

    def _gradient_only(self, unit: Unit) -> None:
        for group in self._groups(unit):
            if group.trainable:
                op = Op.CREATE if self._micro == 0 else Op.WRITE
                self._add(Phase.BACKWARD, [Bundle(group.group, [(_G, op, 0)])])

    def _update_only(self, unit: Unit) -> None:
        for group in self._groups(unit):
            if not group.trainable:
                continue
            rows: list[Row] = [(_P, Op.WRITE, 0), (_M, Op.WRITE, 0)]
            after = self._update_ns(group)
            if group.spec.at_home:
                rows, after = [(_G, Op.UPDATE, 0)], 0
            self._add(Phase.BACKWARD, [Bundle(group.group, rows, after)])

    # -- rows ------------------------------------------------------------------------------------

    def _gradient(
        self, group: PagedGroup, compute_ns: float, updates: bool, begun: bool = False
    ) -> tuple[list[Row], int]:
        """The gradient comes, and with `updates` goes at once; behind it, what is left to do."""
        op = Op.CREATE if self._turn == 0 and not begun else Op.WRITE
        compute_ns *= 1 if group.unit.role == Role.EXPERT else self._together
        until = self._ns(_TO_GRADIENT * compute_ns)
        left = self._ns((1 - _TO_GRADIENT) * compute_ns + self.times.copy * group.numel)
        rows: list[Row] = [(_G, op, until)]
        if not updates:
            return rows, left
        if group.spec.at_home:
            return [*rows, (_G, Op.UPDATE, left)], 0
        rows += [(_P, Op.WRITE, left), (_M, Op.WRITE, 0)]
        if not group.spec.compact:
            rows.append((_G, Op.DROP, self._update_ns(group)))
            return rows, 0
        return rows, self._update_ns(group)

    def _optimizer(self, group: PagedGroup) -> tuple[list[Row], int]:
        if group.spec.at_home:
            return [(_G, Op.UPDATE, 0)], 0
        rows: list[Row] = [(_G, Op.READ, 0), (_P, Op.WRITE, 0), (_M, Op.WRITE, 0)]
        if group.spec.compact:
            return rows, self._update_ns(group)
        return [*rows, (_G, Op.DROP, self._update_ns(group))], 0

    def _update_ns(self, group: PagedGroup) -> int:
        return self._ns(self.times.update * group.numel)

    def _ns(self, compute_ns: float) -> int:
        return round(compute_ns + self.times.hook)

    # -- units -----------------------------------------------------------------------------------

    def _groups(self, unit: Unit) -> list[PagedGroup]:
        return self.paged.of_unit[unit.name]

    def _head(self) -> Unit:
        role = Role.EMBEDDING if self.paged.model.tied else Role.HEAD
        return self.paged.model.of(role)[0]

    def _add(self, phase: Phase, bundles: list[Bundle]) -> None:
        self.visits.append(
            RecordedVisit(
                self._step,
                self._micro,
                phase,
                2 * self._micro,
                self.choice.tokens,
                bundles,
                self._begins,
            )
        )
        self._begins = False
