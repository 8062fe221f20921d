"""``odc.paged``: a model and an optimizer whose state lives in pages, for a person's own loop."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from odc.errors import ConfigError
from odc.fsdp.activations import Activations, check_mode
from odc.fsdp.blocks import BlockFormat
from odc.fsdp.group import GroupLayout, ParamGroup, UnitGroups
from odc.fsdp.group_layouts import check_where, choose_home, lay_out_groups
from odc.fsdp.hooks import UnitHooks
from odc.fsdp.lora import Factor
from odc.fsdp.optimizer import NUM_MOMENTS, PagedAdamW, check_options
from odc.fsdp.parameter import PagedParameter, _refuse_copy
from odc.fsdp.runtime import Runtime
from odc.fsdp.tensor_names import authors_pieces, put, take
from odc.fsdp.wrap import ExpertSet, Unit, check_modules, find_units
from odc.memory.events import Kind, Op, Phase
from odc.memory.manager import MemoryManager

M = TypeVar("M", bound=nn.Module)
Init = Callable[[str, nn.Module], None]
ParamGroups = Callable[[nn.Module], Iterable[Any]]


class PagedModule(nn.Module):
    """Mixed into the class of a paged model's root: what must load pages before it reads values."""

    _odc_runtime: Runtime

    @property
    def memory(self) -> MemoryManager:
        """The model's memory manager."""
        return self._odc_runtime.manager

    def resident(self, prefix: str = "", write: bool = False) -> AbstractContextManager[None]:
        """Pin the parameters whose names begin with ``prefix``, to read or change them.

        All that is named must fit the page budget together. With a ``frozen_format``, values that
        are written to frozen matrices are rounded to it when the block ends: they are read back as
        a load from home gives them.

        Raises:
            ValueError: no parameter has such a name.
            TypeError: ``prefix`` is no text.
        """
        if not isinstance(prefix, str):
            raise TypeError(
                "resident takes the beginning of parameters' names, as in "
                f"model.resident('layers.0'); got a {type(prefix).__name__}"
            )
        groups = list(
            dict.fromkeys(
                p._group
                for name, p in self.named_parameters(remove_duplicate=False)
                if name.startswith(prefix) and isinstance(p, PagedParameter)
            )
        )
        if not groups:
            raise ValueError(f"no parameter's name begins with {prefix!r}")
        return self._odc_runtime.resident(groups, write)

    def hint(self, modules: Sequence[str | nn.Module], scores: Sequence[float]) -> None:
        """Tell the pager what it cannot know: which modules the next forward will use.

        A layer that will be dropped gets 0, one that will certainly run 1: told when the mask is
        drawn, it is neither loaded for nothing nor missing. In a forward the rest of that forward
        is meant. Wrong scores cost time, never a result.

        Args:
            modules: modules of this model, or their names. Each stands for all parameters in it.
            scores: for each, the probability that it runs, 0 to 1.

        Raises:
            ValueError: a module is unknown or has no pages of its own, a score is no probability,
                or there are not as many scores as modules.
        """
        if len(modules) != len(scores):
            raise ValueError(f"scores must be {len(modules)}, one a module, got {len(scores)}")
        names = {id(module): name for name, module in self.named_modules()}
        groups: dict[int, float] = {}
        for module, score in zip(modules, scores, strict=True):
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"scores must be probabilities from 0 to 1, got {score}")
            for group in self._groups_in(module, names):
                groups[group] = float(score)
        self._odc_runtime.hint(list(groups), list(groups.values()))

    def _groups_in(self, module: str | nn.Module, names: dict[int, str]) -> list[int]:
        """The groups all of whose parameters are in a module."""
        if isinstance(module, str):
            if module not in names.values():
                raise ValueError(f"modules: the model has no module {module!r}")
            module = self.get_submodule(module)
        elif id(module) not in names:
            raise ValueError(f"modules: this {type(module).__name__} is no module of the model")
        inside = {id(p) for p in module.parameters()}
        found = [g for g in self._odc_runtime.groups if inside.issuperset(map(id, g.parameters))]
        if not found:
            raise ValueError(
                f"modules: {names[id(module)]!r} has no pages of its own; name the layer around it"
            )
        return [g.group for g in found]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False) is not supported; use set_to_none=True")
        self._odc_runtime.forget_gradients()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Copies of all parameters and buffers, as large as the model is.

        Experts that ``odc.from_pretrained`` took apart are named as the model's authors did.
        """
        state = super().state_dict(*args, **{**kwargs, "keep_vars": True})
        pieces = authors_pieces(self, state)
        copies: dict[int, torch.Tensor] = {}
        for group in self._odc_runtime.groups:
            values = self._odc_runtime.copy_out(group, Kind.PARAMETER)
            copies.update(zip(map(id, group.parameters), values, strict=True))
        for name in list(state):
            value = state.pop(name)
            if isinstance(value, torch.Tensor):
                copy = copies.get(id(value))
                put(state, pieces[name], value.detach() if copy is None else copy)
            else:
                state[name] = value
        return state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``.to()`` and its like: allowed where they change nothing, as ``.to("cpu")`` on a CPU."""
        for parameter in self.parameters():
            probe = torch.empty(0, dtype=parameter.dtype)
            made = fn(probe)
            if made.dtype != probe.dtype or made.device != probe.device:
                raise RuntimeError(
                    f"a paged model stays where it is: cannot make {parameter._fqn} "  # type: ignore[attr-defined]
                    f"{made.dtype} on {made.device}; convert the model before odc.paged"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse_copy("a paged model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_copy("a paged model")

    @property
    def _names(self) -> dict[int, list[str]]:
        """Every name of every parameter: a tied one has several."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return names

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy values into the pages, group by group.

        With a ``frozen_format`` frozen matrices are rounded to it; ``state_dict`` then gives the
        rounded values, which load again without a change.
        """
        if assign:
            raise ValueError("assign=True would leave the pages; use assign=False")
        pieces = authors_pieces(self, super().state_dict(keep_vars=True))
        own = {piece.name for parts in pieces.values() for piece in parts}
        missing, unexpected = sorted(own - set(state_dict)), sorted(set(state_dict) - own)
        if strict and (missing or unexpected):
            raise RuntimeError(f"state_dict: missing {missing}, unexpected {unexpected}")
        runtime, names = self._odc_runtime, self._names
        with torch.no_grad():
            for group in runtime.groups:
                with runtime.resident([group], write=True):
                    for parameter in group.parameters:
                        for name in names[id(parameter)]:
                            take(state_dict, pieces[name], parameter)
            for name, buffer in self.named_buffers():
                take(state_dict, pieces.get(name, []), buffer)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def close(self) -> None:
        """Stop the transfers and give the memory back. The model cannot be used any more."""
        self._odc_runtime.manager.close()
        for unit in self._odc_runtime.units:
            unit.unhook_parameters()


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
    _fill(model, memory, units, groups_of, init if has_meta else None)
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


def _fill(
    model: nn.Module,
    memory: MemoryManager,
    units: list[Unit],
    groups_of: dict[int, UnitGroups],
    init: Init | None,
) -> None:
    """Unit by unit: take frames, put the parameters there, give them their values."""
    memory.begin_pass(-2)
    names = {id(m): fqn for fqn, m in model.named_modules()}
    for unit in units:
        groups = groups_of[id(unit)]
        own = [g for g in groups.own if not g.adapter]
        # an init of a tied module may write to what another unit owns
        tied = [g for g in groups.tied if init is not None and own and g.parameters]
        _fill_groups(unit, own, tied, names, init)
        for group in groups.own:
            if group.adapter:  # one after the other: there may be many, and one of them runs
                _fill_groups(unit, [group], [], names, init)
    _fill_buffers(model, init)


def _fill_groups(
    unit: Unit,
    own: list[ParamGroup],
    tied: list[ParamGroup],
    names: dict[int, str],
    init: Init | None,
) -> None:
    for group in own:
        group.pin_parameters(Phase.OTHER, Op.CREATE)
        group.make_parameters()
        _tie(unit, group)
    for group in tied:
        group.pin_parameters(Phase.OTHER, Op.WRITE)
    _give_values(own, names, init)
    for group in [*own, *tied]:
        group.round_values()
        group.unpin_parameters()


def _give_values(groups: list[ParamGroup], names: dict[int, str], init: Init | None) -> None:
    places = [place for group in groups for place in group.places]
    for module in dict.fromkeys(p.module for p in places if p.parameter.is_meta):
        if isinstance(module, Factor):  # knows its own first values
            module.fill()
        elif init is not None:
            init(names[id(module)], module)
    for group in groups:
        for place, parameter in zip(group.places, group.parameters, strict=True):
            if not place.parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(place.parameter)
            place.parameter = parameter  # lets go of the old tensor


def _fill_buffers(model: nn.Module, init: Init | None) -> None:
    """Buffers on the meta device: ``init`` fills them; what it leaves is not a number."""
    for fqn, module in model.named_modules():
        meta = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in meta.items():
            filler = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, filler, device="cpu")
        if meta and init is not None and not module._parameters:
            init(fqn, module)


def _tie(unit: Unit, group: ParamGroup) -> None:
    made = {id(p.parameter): q for p, q in zip(group.places, group.parameters, strict=True)}
    for alias in unit.aliases:
        replacement: PagedParameter | None = made.get(id(alias.parameter))
        if replacement is not None:
            setattr(alias.module, alias.name, replacement)
            alias.parameter = replacement


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
