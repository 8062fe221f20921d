"""``PagedAdamW``: AdamW whose moments lie in pages, run group by group and page by page.

The arithmetic is torch's fused kernel on the pieces of parameters that lie in a page, and equals
``torch.optim.AdamW(fused=True)`` to the last bit: an update is elementwise, and pages end at
multiples of the vector length. A parameter without a gradient is skipped and its step counter
stands still, exactly where torch skips it. The norm for clipping is put together from the norms of
single gradients in the order of ``model.parameters()``, as ``clip_grad_norm_(foreach=False)``
does.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from odc.errors import ConfigError
from odc.fsdp.adamw import Settings, update
from odc.fsdp.group import ParamGroup
from odc.fsdp.home_update import HomeUpdates, Job
from odc.fsdp.parameter import PagedParameter
from odc.fsdp.runtime import Runtime
from odc.memory.events import Kind, Op, Phase

NUM_MOMENTS = 2
STATE_NAMES = ("exp_avg", "exp_avg_sq", "master")  # by slot of what lies beside a parameter
_SUPPORTED = ("lr", "betas", "eps", "weight_decay", "maximize", "fused")
_KNOWN = frozenset(inspect.signature(torch.optim.AdamW).parameters)  # its own word on the others
# Arguments of odc.paged, for whoever misspells one.
_PAGED = (
    "total_mem",
    "page_budget",
    "page_size",
    "home",
    "home_dir",
    "host_mem",
    "init",
    "param_groups",
    "update",
    "accumulate",
    "max_grad_norm",
    "where",
    "master_weights",
    "frozen_format",
    "activations",
    "memory",
)


def check_options(optimizer: type, options: dict[str, Any]) -> None:
    """Refuse what the paged optimizer cannot do.

    Raises:
        ConfigError: an optimizer made already, in place of its class.
        ValueError: another class than AdamW, or an option of it that needs state outside pages.
        TypeError: an argument that nobody knows.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a class, got an instance of {type(optimizer).__name__}, whose "
            "parameters are not those that lie in pages; use odc.paged(model, torch.optim.AdamW, "
            "lr=...) and the optimizer that it returns"
        )
    if optimizer is not torch.optim.AdamW:
        raise ValueError(
            f"optimizer must be torch.optim.AdamW, got {optimizer}: has to lie in pages; "
            "with total_mem='unlimited' any torch.optim works on "
            "model.parameters()"
        )
    for name, value in options.items():
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, (*_SUPPORTED, *_PAGED), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(
                f"neither odc.paged nor torch.optim.AdamW has an argument {name}{meant}"
            )
        if name not in _SUPPORTED and value not in (None, False):
            raise ValueError(
                f"AdamW option {name}={value!r} is not supported on pages; "
                f"use {', '.join(_SUPPORTED)}"
            )


class PagedAdamW(torch.optim.Optimizer):
    """AdamW over a paged model. Made by ``odc.paged``.

    Attributes:
        grad_norm: global norm of the gradients of the last step, where ``max_grad_norm`` was given.
    """

    def __init__(
        self,
        runtime: Runtime,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        options: dict[str, Any],
        max_grad_norm: float | None,
    ) -> None:
        self._runtime = runtime
        self._max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        defaults: dict[str, Any] = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "maximize": False,
            # the rest as torch writes it, so that either loads the other's state
            "amsgrad": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        settable = ("lr", "betas", "eps", "weight_decay", "maximize")
        defaults |= {k: v for k, v in options.items() if k in settable}
        super().__init__(params, defaults)
        self._home_updates = HomeUpdates(runtime.manager)
        self._steps: dict[tuple[int, int], torch.Tensor] = {}
        self._hyper: dict[tuple[int, int], dict[str, Any]] = {}
        self._order: list[PagedParameter] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                self._adopt(parameter, group)
        self._refuse_strays()
        runtime.update = self._update

    def _refuse_strays(self) -> None:
        for group in self._runtime.groups:
            for index, slot in enumerate(group.slots):
                if group.trainable and (group.group, index) not in self._hyper:
                    raise ValueError(
                        f"{slot.fqn} is trainable and in no group of param_groups; freeze it with "
                        "requires_grad_(False) before odc.paged, or add it"
                    )

    def _adopt(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if not isinstance(parameter, PagedParameter):
            raise ValueError(
                "an optimizer of a paged model takes parameters of that model only; pass "
                "param_groups=lambda model: [...] to odc.paged, which is called with its parameters"
            )
        key = (parameter._group.group, parameter._index)
        self._hyper[key] = group
        self._steps[key] = torch.zeros((), dtype=torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_hyper"):
            for parameter in self.param_groups[-1]["params"]:
                self._adopt(parameter, self.param_groups[-1])

    # -- the loop's calls ------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every group that has a gradient (those that backward has not updated).

        Args:
            closure: as in torch: recomputes the loss with gradients and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self._runtime
        runtime.recover()
        if any(used < runtime.num_steps for g in runtime.groups for used in g.used.values()):
            raise RuntimeError(
                "opt.step() again without opt.zero_grad(): the gradients were used by the step "
                "before it; call opt.zero_grad() after every opt.step()"
            )
        coefficient = self._clip_coefficient()
        for group in runtime.groups:
            self._collect_plain(group)
            if any(group.has_gradient):
                self._update(group, Phase.OPTIMIZER, coefficient)
        runtime.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the model.

        Raises:
            ValueError: ``set_to_none=False``: a zero gradient would be a page of zeros.
            RuntimeError: ``update="backward"`` has used them, and ``step`` was not called.
        """
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False) is not supported; use set_to_none=True")
        self._runtime.forget_gradients()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of a parameter's gradient, or None if it has none."""
        assert isinstance(parameter, PagedParameter)
        group = parameter._group
        if not group.has_gradient[parameter._index]:
            shown = parameter.grad
            return None if shown is None else shown.clone()
        manager = self._runtime.manager
        manager.access(group.group, [(Kind.GRADIENT, Op.READ)], Phase.OTHER)
        try:
            return group.view(Kind.GRADIENT, parameter._index).clone()
        finally:
            manager.release(group.group, Kind.GRADIENT)

    # -- update ----------------------------------------------------------------------------------

    def _collect_plain(self, group: ParamGroup) -> None:
        """A resident model shows gradients as ``.grad``: note which are there."""
        if not (group.plain_grad and group.trainable):
            return
        for index, parameter in enumerate(group.parameters):
            gradient = parameter.grad
            group.has_gradient[index] = gradient is not None
            if gradient is not None:
                group.gradient_live = True
                view = group.view(Kind.GRADIENT, index)
                if gradient.data_ptr() != view.data_ptr():
                    view.copy_(gradient)

    def _clip_coefficient(self) -> torch.Tensor | None:
        if self._max_grad_norm is None:
            return None
        norms = []
        for parameter in self._runtime.model.parameters():
            if not isinstance(parameter, PagedParameter):
                continue
            group, index = parameter._group, parameter._index
            if group.plain_grad:
                if parameter.grad is not None:
                    norms.append(torch.linalg.vector_norm(parameter.grad))
            elif group.has_gradient[index]:
                norms.append(group.norm(index))
        if not norms:
            return None
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        return torch.clamp(self._max_grad_norm / (self.grad_norm + 1e-6), max=1.0)

    @torch.no_grad()
    def _update(
        self, group: ParamGroup, phase: Phase, coefficient: torch.Tensor | None = None
    ) -> None:
        if group.spec.at_home:
            self._update_at_home(group, phase, coefficient)
        else:
            self._update_on_device(group, phase, coefficient)
        group.updates += 1
        # the fused kernel does not: a graph that saved the old values must say so
        torch.autograd.graph.increment_version(
            [p for p, g in zip(group.parameters, group.has_gradient, strict=True) if g]
        )
        if group.plain_grad:
            group.has_gradient = [False] * len(group.slots)
        else:
            group.use_gradients(self._runtime.num_steps)

    def _update_at_home(
        self, group: ParamGroup, phase: Phase, coefficient: torch.Tensor | None
    ) -> None:
        jobs = self._jobs(group)
        group.unpin_gradient()
        self._runtime.manager.update(
            group.group,
            phase,
            lambda part: self._home_updates.make(group, part, jobs, coefficient),
        )
        self._count(group, jobs)

    def _update_on_device(
        self, group: ParamGroup, phase: Phase, coefficient: torch.Tensor | None
    ) -> None:
        manager = self._runtime.manager
        op = Op.READ if coefficient is None else Op.WRITE
        if not group.gradient_pinned:
            manager.access(group.group, [(Kind.GRADIENT, op)], phase)
            group.gradient_pinned = True
        jobs = self._jobs(group)
        self._count(group, jobs)
        needs = [(Kind.PARAMETER, Op.WRITE), (Kind.MOMENT, Op.WRITE)]
        for part in range(manager.table.parts(group.group)):
            manager.access(group.group, needs, phase, part)
            try:
                for job in jobs:
                    chunks = [c for c in group.chunks(part) if c.index in job.steps]
                    if chunks:
                        steps = [job.steps[c.index] for c in chunks]
                        update(chunks, steps, job.settings, coefficient)
            finally:
                manager.release(group.group, Kind.PARAMETER, part)
                manager.release(group.group, Kind.MOMENT, part)

    def _jobs(self, group: ParamGroup) -> list[Job]:
        """What is to be updated, by parameter group of the optimizer, with the next steps."""
        jobs: dict[int, Job] = {}
        for index, present in enumerate(group.has_gradient):
            hyper = self._hyper.get((group.group, index))
            if not present or hyper is None:
                continue
            job = jobs.setdefault(id(hyper), Job(Settings.of(hyper), {}))
            job.steps[index] = self._steps[group.group, index] + 1
        return list(jobs.values())

    def _count(self, group: ParamGroup, jobs: list[Job]) -> None:
        for job in jobs:
            for index, step in job.steps.items():
                self._steps[group.group, index] = step

    # -- state -----------------------------------------------------------------------------------

    def steps_of(self, group: ParamGroup) -> list[torch.Tensor]:
        """Step counters of a group's parameters, () float32 each."""
        return [self._steps[group.group, i] for i in range(len(group.slots))]

    def state_dict(self) -> dict[str, Any]:
        """As of ``torch.optim.AdamW``, with copies of the moments: as large as they are."""
        packed = super().state_dict()
        numbers: dict[int, int] = {}
        for own, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            for parameter, number in zip(own["params"], saved["params"], strict=True):
                numbers[id(parameter)] = number
        state: dict[int, dict[str, torch.Tensor]] = {}
        for group in self._runtime.groups:
            if not group.trainable:
                continue
            slots = range(group.spec.num_moments)
            moments = [self._runtime.copy_out(group, Kind.MOMENT, m) for m in slots]
            for index, parameter in enumerate(group.parameters):
                step = self._steps.get((group.group, index))
                if step is not None and step.item() and id(parameter) in numbers:
                    state[numbers[id(parameter)]] = {
                        "step": step.clone(),
                        "exp_avg": moments[0][index],
                        "exp_avg_sq": moments[1][index],
                    }
                    if group.has_master(index):
                        state[numbers[id(parameter)]]["master"] = moments[2][index]
        packed["state"] = dict(sorted(state.items()))
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take moments, step counters and options from a state of ``torch.optim.AdamW``."""
        state = dict(state_dict["state"])
        super().load_state_dict({**state_dict, "state": {}})
        self._runtime.updated_in_backward = False  # what an interrupted backward did is undone
        self._hyper.clear()
        found: dict[tuple[int, int], dict[str, torch.Tensor] | None] = {}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                self._hyper[parameter._group.group, parameter._index] = group
                self._check_shapes(parameter, state.get(number))
                found[parameter._group.group, parameter._index] = state.get(number)
        for own in self._runtime.groups:
            mine = {
                i: found[key] for i in range(len(own.slots)) if (key := (own.group, i)) in found
            }
            if mine:
                self._load_group(own, mine)

    @staticmethod
    def _check_shapes(parameter: PagedParameter, saved: dict[str, torch.Tensor] | None) -> None:
        for name in STATE_NAMES[:NUM_MOMENTS]:
            if saved is not None and saved[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} of {parameter._fqn} has shape {tuple(saved[name].shape)}, the "
                    f"parameter's is {tuple(parameter.shape)}"
                )

    def _load_group(
        self, group: ParamGroup, saved: dict[int, dict[str, torch.Tensor] | None]
    ) -> None:
        """Take the state of a group's parameters, by index; None: it has not begun."""
        manager = self._runtime.manager
        if group.spec.at_home:
            for slot, name in enumerate(STATE_NAMES[: group.spec.num_moments]):
                with manager.at_home(group.group, Kind.MOMENT, slot, write=True) as buffer:
                    for index, state in saved.items():
                        _take(group.home_view(buffer, index), name, state)
        else:
            manager.access(group.group, [(Kind.MOMENT, Op.WRITE)], Phase.OTHER)
            try:
                for slot, name in enumerate(STATE_NAMES[:NUM_MOMENTS]):
                    for index, state in saved.items():
                        _take(group.view(Kind.MOMENT, index, slot), name, state)
            finally:
                manager.release(group.group, Kind.MOMENT)
        group.note_written()  # a state without masters leaves those that parameters have
        for index, state in saved.items():
            step = float(state["step"]) if state else 0.0
            self._steps[group.group, index] = torch.tensor(step, dtype=torch.float32)


def _take(view: torch.Tensor, name: str, state: dict[str, torch.Tensor] | None) -> None:
    """One value of a parameter's state; without one it is zero, but for a master, which stays."""
    if state is not None and name in state:
        view.copy_(state[name])
    elif name != STATE_NAMES[-1]:
        view.zero_()
