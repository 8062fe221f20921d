"""The groups of pages that a model has under a choice: what `odc.paged` would make of it.

The page table is the runtime's own (`odc.memory.pages`): frames, compact groups and the smallest
budget are not estimated but asked for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from odc.memory.frames import FRAME_BYTES
from odc.memory.pages import GroupSpec, PageTable, StoredBytes
from odc.train.fit.choice import FROZEN_BYTES, Choice
from odc.train.fit.model import ALIGNMENT, ModelShape, Role, Unit

NUM_MOMENTS = 2
MASTER_BYTES = 4  # of parameters and moments that are updated


@dataclass(frozen=True)
class PagedGroup:
    """A group and the unit whose it is.

    Attributes:
        group: Its id.
        unit: The unit; of an adapter, the unit that it changes.
        spec: As the page table has it.
        numel: Its parameters.
    """

    group: int
    unit: Unit
    spec: GroupSpec
    numel: int

    @property
    def trainable(self) -> bool:
        """Whether it has gradients and an update."""
        return self.spec.has_gradient


@dataclass(frozen=True)
class Paged:
    """All groups of a model.

    Attributes:
        model, choice: What they are made for.
        table: Sealed page table.
        groups: In order of their ids.
        sets: Groups of the experts of each layer.
        least: (bytes, group) of the smallest budget for pages, and the group that needs it.
    """

    model: ModelShape
    choice: Choice
    table: PageTable
    groups: tuple[PagedGroup, ...]
    sets: tuple[tuple[int, ...], ...]
    least: tuple[int, PagedGroup]

    @cached_property
    def of_unit(self) -> dict[str, list[PagedGroup]]:
        """The groups of each unit by its name, trainable ones first."""
        found: dict[str, list[PagedGroup]] = {}
        for group in self.groups:
            found.setdefault(group.unit.name, []).append(group)
        return found

    @property
    def all_bytes(self) -> int:
        """Frames of all pages: what keeps everything resident."""
        return int(self.table.num_frames.sum()) * FRAME_BYTES

    @property
    def trained_numel(self) -> int:
        """Parameters that are updated."""
        return sum(g.numel for g in self.groups if g.trainable)


def _packed(choice: Choice) -> StoredBytes | None:
    """What frozen parameters take at home in a format of few bits; None: as on the device."""
    each = FROZEN_BYTES[choice.frozen_format] / choice.item_bytes
    if not each:
        return None
    return lambda begin, end: -(-math.ceil((end - begin) * each) // ALIGNMENT) * ALIGNMENT


def _held(model: ModelShape, groups: list[PagedGroup]) -> dict[int, list[int]]:
    """For each group, those pinned while it runs: of its unit, and of the layer around it."""
    by_unit: dict[str, list[int]] = {}
    by_layer: dict[int, list[int]] = {}
    for group in groups:
        by_unit.setdefault(group.unit.name, []).append(group.group)
        if group.unit.role == Role.LAYER:
            by_layer.setdefault(group.unit.layer, []).append(group.group)
    root = [g.group for g in groups if g.unit.role == Role.ROOT]
    embedding = [g.group for g in groups if g.unit.role == Role.EMBEDDING]
    held = {}
    for group in groups:
        around = list(root)
        if group.unit.role == Role.EXPERT:
            around += by_layer[group.unit.layer]
        if group.unit.role == Role.HEAD and model.tied:
            around += embedding
        around += by_unit[group.unit.name]
        held[group.group] = [g for g in dict.fromkeys(around) if g != group.group]
    return held


def page(model: ModelShape, choice: Choice) -> Paged:
    """Makes the groups and their page table."""
    table = PageTable(max(choice.page_size // FRAME_BYTES, 1) * FRAME_BYTES)
    groups: list[PagedGroup] = []
    members: dict[int, list[int]] = {}
    packed = _packed(choice)
    for unit in model.units:
        set_index = unit.layer if unit.role == Role.EXPERT else -1
        for place, (spec, numel) in enumerate(_specs(unit, choice)):
            made = replace(spec, set_index=set_index if spec.has_gradient else -1)
            number = table.add_group(made, {}, None if made.has_gradient else packed)
            groups.append(PagedGroup(number, unit, made, numel))
            if set_index >= 0 and place == 0:
                members.setdefault(set_index, []).append(number)
    table.seal()
    numbered = tuple(tuple(members[s]) for s in sorted(members))
    frames, owner = table.smallest_budget(_held(model, groups))
    least = frames * FRAME_BYTES, groups[max(owner, 0)]
    return Paged(model, choice, table, tuple(groups), numbered, least)


def _specs(unit: Unit, choice: Choice) -> Iterator[tuple[GroupSpec, int]]:
    """A unit's groups and the parameters in each, the trainable one first."""
    if choice.rank is None:
        yield _trained(unit, unit.num_bytes(choice.item_bytes), choice), unit.numel
        return
    adapter = adapter_numel(unit, choice)
    if adapter:
        num_bytes = -(-adapter * choice.item_bytes // ALIGNMENT) * ALIGNMENT
        yield _trained(unit, num_bytes, choice), adapter
    num_bytes = max(unit.num_bytes(choice.item_bytes), ALIGNMENT)
    yield (
        GroupSpec(f"{unit.name} (frozen)", num_bytes, 0, False, unit.layer, unit.expert),
        unit.numel,
    )


def _trained(unit: Unit, num_bytes: int, choice: Choice) -> GroupSpec:
    """A group with gradient and moments; at home masters stand beside moments of a low dtype."""
    at_home = choice.where == "home"
    masters = at_home and choice.item_bytes < MASTER_BYTES
    return GroupSpec(
        unit.name,
        max(num_bytes, ALIGNMENT),
        NUM_MOMENTS + masters,
        True,
        unit.layer,
        unit.expert,
        at_home=at_home,
        moment_scale=MASTER_BYTES // choice.item_bytes if masters else 1,
    )


def adapter_numel(unit: Unit, choice: Choice) -> int:
    """Parameters of a unit's LoRA adapters: rank x (rows + columns) of each target."""
    if choice.rank is None or unit.role == Role.EMBEDDING:
        return 0
    total = 0
    for name, shape in unit.parameters.items():
        target = name.removesuffix(".weight").rpartition(".")[2]
        if target in choice.targets and len(shape) == 2:
            total += choice.rank * sum(shape)
    return total * unit.count


def largest_gradient_bytes(paged: Paged) -> int:
    """Of a single parameter: autograd holds it beside the page until it is copied there."""
    largest = 0
    for group in paged.groups:
        if group.trainable and paged.choice.rank is None:
            largest = max(largest, group.unit.largest_numel)
        elif group.trainable:
            rows = [max(s) for s in group.unit.parameters.values() if len(s) == 2]
            largest = max(largest, (paged.choice.rank or 0) * max(rows, default=0))
    return math.ceil(largest * paged.choice.item_bytes)
