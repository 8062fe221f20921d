"""``odc.paged``: a model and an optimizer whose state lives in pages, for a person's own loop."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from odc.errors import ConfigError
from odc.fsdp.activations import Activations, check_mode
from odc.fsdp.blocks import BlockFormat
from odc.fsdp.first_values import Init, fill_pages
from odc.fsdp.group import GroupLayout, ParamGroup, UnitGroups
from odc.fsdp.group_layouts import check_where, choose_home, lay_out_groups
from odc.fsdp.hooks import UnitHooks
from odc.fsdp.lora import Factor
from odc.fsdp.optimizer import NUM_MOMENTS, PagedAdamW, check_options
from odc.fsdp.paged_module import PagedModule
from odc.fsdp.runtime import Runtime
from odc.fsdp.wrap import ExpertSet, Unit, check_modules, find_units
from odc.memory.manager import MemoryManager

M = TypeVar("M", bound=nn.Module)
ParamGroups = Callable[[nn.Module], Iterable[Any]]


def paged(
    model: M,
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW,
    *,
    total_mem: int | str | None = None,
    page_budget: int | str | None = None,
    page_size: int | str = "256MB",
    home: str = "host",
    home_dir: str | os.PathLike[str] | None = None,
    host_mem: int | str | None = None,
    init: Init | None = None,
    param_groups: ParamGroups | None = None,
    update: str = "step",
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    where: str = "device",
    master_weights: bool = False,
    frozen_format: str = "native",
    activations: str = "keep",
    memory: MemoryManager | None = None,
    **options: Any,
) -> tuple[M, PagedAdamW | None]:
    """Put a model's parameters, gradients and optimizer moments into pages.

    The model is changed in place; then the loop is plain PyTorch: ``loss.backward()``,
    ``opt.step()``, ``opt.zero_grad()``. Losses and weights are those of
    ``torch.optim.AdamW(fused=True)`` to the last bit.

    Args:
        model: built already (its parameters are moved into frames group by group), or on the meta
            device (then ``init`` fills them group by group and nothing is ever held in full).
        optimizer: ``torch.optim.AdamW``, or None for a model that is not trained, or (without a
            budget) trained by any ``torch.optim``.
        total_mem: what pages, activations and gradients may take together, as bytes or ``"2GB"``;
            None keeps everything resident. Pages get what the largest step so far has left.
        page_budget: what pages may take, whatever the rest needs; instead of ``total_mem``.
        page_size: upper limit of a page; smaller pages fit smaller budgets.
        home: where pages live when they are not on the device: ``"host"`` memory, ``"disk"``, or
            ``"host+disk"`` (what host memory has no room for is on disk).
        home_dir: folder for the disk.
        host_mem: host memory that ``"host+disk"`` may take; None: what is free.
        init: called as ``init(fqn, module)`` for every module that owns parameters, or buffers, on
            the meta device.
        param_groups: called with the paged model, returns what ``torch.optim.AdamW`` takes; every
            trainable parameter must be in it. Without it: those of ``model.parameters()``.
        update: ``"step"`` updates in ``opt.step()`` and suits any loop; ``"backward"`` updates each
            group as soon as its gradient is final, which moves far fewer bytes: no clipping,
            ``accumulate`` must say how many backwards make a step, and a step that was begun cannot
            be thrown away.
        accumulate: backwards before ``opt.step()``; only ``update="backward"`` needs it.
        max_grad_norm: clip gradients by their global norm, as ``clip_grad_norm_`` does.
        where: where groups are updated. ``"device"`` moves moments over the link; ``"home"``
            updates where they live: a gradient goes there, the optimizer runs beside the
            computation, and moments have no pages on the device. ``"auto"`` chooses for each
            group, by the rates of link and update (``odc/memory/update_place.py``). Results are
            the same to the last bit.
        master_weights: for a model in bfloat16: parameters and moments in float32 at home, of which
            the model's are roundings; needs ``where="home"``.
        frozen_format: how matrices that are not trained lie at home: ``"native"``, or in blocks of
            64 values that share a scale, as ``"int8"`` or ``"int4"``: 8.25 or 4.25 bits a value
            cross the link and are turned back on the device. They are rounded once, when they are
            written, so that results are the same under every budget. Vectors stay as they are.
        activations: what layers (the children of the outermost ``nn.ModuleList``) save for
            backward is kept (``"keep"``), computed again in backward (``"checkpoint"``), or moved
            home and loaded ahead of its backward (``"offload"``). Losses are the same to the last
            bit.
        memory: a manager made by hand, instead of the memory arguments above.
        **options: of the optimizer: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize``.

    Returns:
        The model and its optimizer (None without one). ``opt.state_dict()`` is that of
        ``torch.optim.AdamW`` over the same parameters; by default those are the trainable ones.

    Raises:
        ValueError: an argument that cannot work; says what to change.
        BudgetError: a group does not fit; says which budget would do.
    """
    _check(model, optimizer, update, accumulate, max_grad_norm, options)
    check_where(where, master_weights, optimizer)
    _check_memory(memory, total_mem, page_budget)
    check_mode(activations)
    if memory is None:
        memory = MemoryManager(
            total_mem=total_mem,
            page_budget=page_budget,
            page_size=page_size,
            home=home,
            home_dir=home_dir,
            host_mem=host_mem,
        )
    units, sets = find_units(model)
    has_meta = any(
        p is not None and p.is_meta and not isinstance(module, Factor)
        for module in model.modules()
        for p in module._parameters.values()
    )
    if has_meta and init is None:
        raise ValueError("the model is on the meta device: pass init=(fqn, module) -> None")
    frozen = BlockFormat.of(frozen_format)
    layouts = lay_out_groups(units, optimizer is not None, frozen)
    if optimizer is not None:
        choose_home(memory, layouts, where, master_weights)
    groups, groups_of = _make_groups(memory, units, layouts)
    if frozen is not None and not any(group.codec for group in groups):
        warnings.warn(
            f"frozen_format={frozen_format!r} has no effect: the model has no frozen matrices; "
            "call requires_grad_(False) on them before odc.paged",
            stacklevel=2,
        )
    memory.seal(
        _set_groups(sets, groups_of),
        _held(units, groups_of),
        gradients_come_home=update == "step" or accumulate > 1 or any(x.at_home for x in layouts),
    )
    fill_pages(model, memory, units, groups_of, init if has_meta else None)
    runtime = Runtime(
        model,
        memory,
        groups,
        update_in_backward=update == "backward",
        accumulate=accumulate,
        clip=max_grad_norm is not None,
    )
    _install(runtime, units, sets, groups_of, optimizer is not None)
    runtime.activations = Activations(model, memory, activations)
    adapters = getattr(model, "_odc_adapters", None)
    if adapters is not None:
        runtime.use_adapter(adapters.active)
    model.__class__ = type(f"Paged{type(model).__name__}", (PagedModule, type(model)), {})
    model._odc_runtime = runtime  # type: ignore[assignment]
    # Not at exit: what still reads the model then must find it.
    weakref.finalize(model, memory.close).atexit = False
    if optimizer is None:
        return model, None
    trainable = [p for p in model.parameters() if p.requires_grad]
    parameters = param_groups(model) if param_groups is not None else trainable
    return model, PagedAdamW(runtime, parameters, options, max_grad_norm)


def _check(
    model: nn.Module,
    optimizer: type | None,
    update: str,
    accumulate: int,
    max_grad_norm: float | None,
    options: dict[str, Any],
) -> None:
    if isinstance(model, PagedModule):
        raise ValueError("the model is paged already")
    if optimizer is not None:
        check_options(optimizer, options)
    check_modules(model, optimizer is not None)
    if update not in ("step", "backward"):
        raise ValueError(f"update must be 'step' or 'backward', got {update!r}")
    if update == "backward" and max_grad_norm is not None:
        raise ValueError(
            "max_grad_norm needs the norm of all gradients before the first update; "
            "use update='step'"
        )
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, int | float) and 0 < max_grad_norm < math.inf
    ):
        raise ValueError(f"max_grad_norm must be a number above 0, got {max_grad_norm!r}")
    if optimizer is not None and not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient; pass optimizer=None")
    devices = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
    if devices:
        raise ValueError(f"parameters on {', '.join(sorted(devices))}: pass a model on cpu or meta")
    if torch.get_num_threads() >= (os.cpu_count() or 1) > 1:
        warnings.warn(
            f"{torch.get_num_threads()} compute threads on {os.cpu_count()} cores leave none for "
            f"transfers; torch.set_num_threads({(os.cpu_count() or 2) - 1}) is usually faster",
            stacklevel=3,
        )


def _check_memory(
    memory: MemoryManager | None, total_mem: int | str | None, page_budget: int | str | None
) -> None:
    """Refuse a limit that would be ignored."""
    limited = total_mem is not None and total_mem != "unlimited"
    if memory is not None and (limited or page_budget is not None):
        raise ConfigError(
            "memory: is a manager with a budget of its own; drop total_mem and page_budget, or "
            "give them to the manager"
        )
    if limited and page_budget is not None:
        raise ConfigError(
            f"total_mem={total_mem!r} and page_budget={page_budget!r}: what pages get is measured "
            "for the one and fixed by the other; drop page_budget to stay within total_mem, or "
            "drop total_mem to fix what pages get"
        )


def _make_groups(
    memory: MemoryManager, units: list[Unit], layouts: list[GroupLayout]
) -> tuple[list[ParamGroup], dict[int, UnitGroups]]:
    groups_of = {id(unit): UnitGroups() for unit in units}
    groups = [ParamGroup(memory, layout, NUM_MOMENTS) for layout in layouts]
    for group, layout in zip(groups, layouts, strict=True):
        groups_of[id(group.unit)].own.append(group)
        for guest in layout.guests:
            groups_of[id(guest)].tied.append(group)
    for unit in units:
        borrowed = {id(place.parameter) for place in unit.borrowed}
        for other in unit.tied:
            groups_of[id(unit)].tied += [
                group
                for group in groups_of[id(other)].own
                if any(id(place.parameter) in borrowed for place in group.places)
            ]
    return groups, groups_of


def _set_groups(sets: list[ExpertSet], groups_of: dict[int, UnitGroups]) -> list[tuple[int, ...]]:
    """The groups of each set; an expert whose small parts lie beside counts with the frozen one."""
    return [tuple(groups_of[id(u)].own[0].group for u in s.members) for s in sets]


def _held(units: list[Unit], groups_of: dict[int, UnitGroups]) -> dict[int, list[int]]:
    """For each group, the groups pinned while it runs."""
    held: dict[int, list[int]] = {}
    for unit in units:
        mine = groups_of[id(unit)]
        around = [g for p in unit.parents for g in groups_of[id(p)].all] + mine.all
        # a shared group is held with each of its units in turn: it counts with what they own
        for group in mine.own or mine.all:
            others = [g.group for g in _together(group, around) if g is not group]
            held.setdefault(group.group, []).extend(others)
    return held


def _together(group: ParamGroup, around: list[ParamGroup]) -> list[ParamGroup]:
    """Those that are pinned with a group: of several adapters one, the largest where any may be."""
    adapter = group.adapter
    if not adapter:
        sizes: dict[str, int] = {}
        for other in around:
            sizes[other.adapter] = sizes.get(other.adapter, 0) + other.spec.state_bytes
        sizes.pop("", None)
        adapter = max(sizes, key=lambda name: sizes[name], default="")
    return [other for other in around if other.adapter in ("", adapter)]


def _install(
    runtime: Runtime,
    units: list[Unit],
    sets: list[ExpertSet],
    groups_of: dict[int, UnitGroups],
    trained: bool,
) -> None:
    for unit in units:
        hooks = UnitHooks(runtime, unit, groups_of[id(unit)])
        hooks.hook_parameters()
        runtime.units.append(hooks)
    for index, experts in enumerate(sets):
        runtime.order_experts(experts.module, index)
    for group in runtime.groups:
        if runtime.manager.unlimited:
            group.plain_grad = not runtime.update_in_backward
            group.frozen = group.frozen and trained
