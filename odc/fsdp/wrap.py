"""Which parameters form a group: every child of every ``ModuleList``, embeddings, heads, the rest.

A *unit* is a module whose parameters come and go together around its forward and backward. Units
nest (an expert inside a decoder layer); a parameter belongs to the innermost unit around its first
place. A module that uses a parameter owned elsewhere (a tied head) is a unit with ``tied`` names.
Trainable and frozen parameters of a unit are separate groups: a frozen one has no gradient, no
moments, and is never written back. Small trainable parts of it lie beside (``sides.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from odc.errors import ConfigError


@dataclass(slots=True)
class Place:
    """One parameter: its owner module, its attribute and its fully qualified name."""

    module: nn.Module
    name: str
    fqn: str
    parameter: nn.Parameter


ALIGNMENT = 64  # of every parameter in its range, in bytes


def num_bytes_of(place: Place) -> int:
    """Bytes that a parameter takes in its group's range."""
    num_bytes = place.parameter.numel() * place.parameter.element_size()
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Unit:
    """A module around which pages come and go.

    Attributes:
        fqn, module: the module.
        owned: parameters that this unit owns.
        aliases: places of owned parameters in other modules (tied weights).
        borrowed: places in this unit of parameters that others own.
        tied: the units that own them.
        parents: enclosing units, innermost first.
        layer, expert, set_index: place in the model, -1 where there is none.
    """

    fqn: str
    module: nn.Module
    owned: list[Place] = field(default_factory=list)
    aliases: list[Place] = field(default_factory=list)
    borrowed: list[Place] = field(default_factory=list)
    tied: list[Unit] = field(default_factory=list)
    parents: list[Unit] = field(default_factory=list)
    layer: int = -1
    expert: int = -1
    set_index: int = -1


@dataclass(slots=True)
class ExpertSet:
    """Experts that run in a free order: the module that asks for it and its members."""

    module: nn.Module
    members: list[Unit]


def check_modules(model: nn.Module, train: bool) -> None:
    """Refuse parameters that cannot lie in pages.

    Raises:
        ConfigError: one has no shape yet, is sharded, or would be given a sparse gradient.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} has no shape yet: pages need the shape of every parameter; run one "
                "forward before odc.paged, or use a layer that is given its sizes (nn.Linear for "
                "nn.LazyLinear)"
            )
        if hasattr(tensor, "placements"):  # a DTensor, whose module is not imported for this
            raise ConfigError(
                f"{name} is sharded over ranks, and pages are for one rank: leave out fully_shard, "
                "or odc.paged"
            )
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if train and sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or type(module).__name__}: sparse=True gives a sparse gradient, pages hold "
                "dense ones; use sparse=False"
            )


def find_units(model: nn.Module) -> tuple[list[Unit], list[ExpertSet]]:
    """The units of a model, outermost and first first; the last is the root."""
    units: list[Unit] = []
    sets: list[ExpertSet] = []
    root = Unit("", model)
    _walk(model, "", [root], -1, units, sets, _around(model))
    units.append(root)
    _own(model, units)
    kept = [u for u in units if u.owned or u.tied or u.module is model]
    return kept, _number(sets)


def _around(model: nn.Module) -> set[int]:
    """The model and what is only wrapped in it, as by peft: their children are called."""
    found = {id(model)}
    while True:
        inner = [m for m in model.children() if next(m.parameters(), None) is not None]
        if model._parameters or len(inner) != 1 or inner[0]._parameters:
            return found
        model = inner[0]
        found.add(id(model))


def _number(sets: list[ExpertSet]) -> list[ExpertSet]:
    """The sets whose members all have pages of their own; the others run in their given order."""
    free: list[ExpertSet] = []
    for experts in sets:
        if all(member.owned for member in experts.members):
            for member in experts.members:
                member.set_index = len(free)
            free.append(experts)
    return free


def _walk(
    module: nn.Module,
    fqn: str,
    parents: list[Unit],
    layer: int,
    units: list[Unit],
    sets: list[ExpertSet],
    around: set[int],
) -> None:
    """Find the units below ``module``; ``parents`` innermost first."""
    for name, child in module.named_children():
        child_fqn = f"{fqn}.{name}" if fqn else name
        if isinstance(child, nn.ModuleList):
            _walk_list(module, child, child_fqn, parents, layer, units, sets, around)
        elif len(parents) == 1 and _stands_alone(module, child, around):
            units.append(Unit(child_fqn, child, parents=list(parents)))
        else:
            _walk(child, child_fqn, parents, layer, units, sets, around)


def _stands_alone(owner: nn.Module, child: nn.Module, around: set[int]) -> bool:
    """Whether a module outside every list is a unit: an embedding, or a head.

    A linear layer inside some other module may be used without being called (as
    ``nn.MultiheadAttention`` does), so it belongs to what is left.
    """
    core = getattr(child, "base_layer", child)  # peft's wrapper around one layer
    if isinstance(core, nn.Embedding):
        return True
    calls = id(owner) in around or isinstance(owner, nn.Sequential) or not _has_forward(owner)
    return isinstance(core, nn.Linear) and calls


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _walk_list(
    owner: nn.Module,
    children: nn.Module,
    fqn: str,
    parents: list[Unit],
    layer: int,
    units: list[Unit],
    sets: list[ExpertSet],
    around: set[int],
) -> None:
    """The children of a container are units; those of a container in it as well."""
    named = [(name, child) for name, child in children._modules.items() if child is not None]
    asks = _who_orders(owner, children)
    free = asks is not None and all(_has_forward(child) for _, child in named)
    members: list[Unit] = []
    for index, (name, child) in enumerate(named):
        child_fqn = f"{fqn}.{name}"
        child_layer = index if layer < 0 else layer
        if not _has_forward(child):  # it is never called, its children are
            _walk_list(owner, child, child_fqn, parents, child_layer, units, sets, around)
            continue
        unit = Unit(child_fqn, child, parents=list(parents), layer=child_layer)
        if free:
            unit.expert = index
        units.append(unit)
        members.append(unit)
        if not free:
            _walk(child, unit.fqn, [unit, *parents], unit.layer, units, sets, around)
    if free and asks is not None:
        sets.append(ExpertSet(asks, members))


def _who_orders(owner: nn.Module, children: nn.Module) -> nn.Module | None:
    """The module whose ``expert_order`` says in which order ``children`` run, if there is one."""
    if hasattr(children, "expert_order"):
        return children
    asks = hasattr(owner, "expert_order") and getattr(owner, "experts", None) is children
    return owner if asks else None


def _own(model: nn.Module, units: list[Unit]) -> None:
    by_module = {id(u.module): u for u in units}
    owner_of: dict[int, Unit] = {}
    for fqn, module, unit in _modules(model, by_module):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = Place(module, name, f"{fqn}.{name}" if fqn else name, parameter)
            owner = owner_of.get(id(parameter))
            if owner is None:
                owner_of[id(parameter)] = unit
                unit.owned.append(place)
            else:
                owner.aliases.append(place)
                if owner is unit or owner in unit.parents:
                    continue
                unit.borrowed.append(place)
                if owner not in unit.tied:
                    unit.tied.append(owner)


def _modules(model: nn.Module, by_module: dict[int, Unit]) -> list[tuple[str, nn.Module, Unit]]:
    """(fqn, module, innermost unit) of every module, in order of registration."""
    found: list[tuple[str, nn.Module, Unit]] = []

    def visit(module: nn.Module, fqn: str, unit: Unit) -> None:
        unit = by_module.get(id(module), unit)
        found.append((fqn, module, unit))
        for name, child in module.named_children():
            visit(child, f"{fqn}.{name}" if fqn else name, unit)

    visit(model, "", by_module[id(model)])
    return found
