"""How a model's parameters get into pages: values they have already, or what an ``init`` writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from odc.fsdp.group import ParamGroup, UnitGroups
from odc.fsdp.lora import Factor
from odc.fsdp.parameter import PagedParameter
from odc.fsdp.wrap import Unit
from odc.memory.events import Op, Phase
from odc.memory.manager import MemoryManager

Init = Callable[[str, nn.Module], None]


def fill_pages(
    model: nn.Module,
    memory: MemoryManager,
    units: list[Unit],
    groups_of: dict[int, UnitGroups],
    init: Init | None,
) -> None:
    """Unit by unit: take frames, put the parameters there, give them their values.

    Args:
        init: called as ``init(fqn, module)`` for modules on the meta device; None: there are none.
    """
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
