"""The groups of pages that a model has under a choice: what `odc.paged` would make of it.

The page table is the runtime's own (`odc.memory.pages`): frames, compact groups and the smallest
budget are not estimated but asked for.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from odc.fsdp.blocks import BLOCK, BlockCodec, BlockFormat, is_coded
from odc.fsdp.group import Slot, lay_out_shapes
from odc.fsdp.lora import ALL_LINEAR, LoraConfig
from odc.memory.coded import page_bytes
from odc.memory.frames import FRAME_BYTES
from odc.memory.home_plan import HomeOptions
from odc.memory.pages import GroupSpec, PageTable, StoredBytes
from odc.train.fit.choice import Choice
from odc.train.fit.model import ALIGNMENT, ModelShape, Role, Shape, Unit

NUM_MOMENTS = 2
_ROUTER = re.compile(r"\.(?:router|mlp\.gate)$")  # read without a call: nothing can lie beside
MASTER_BYTES = 4  # of parameters and moments that are updated


@dataclass(frozen=True)
class PagedGroup:
    """A group and the unit whose it is.

    Attributes:
        group: Its id.
        units: Those that pin it: its unit; of adapters, the layers that they change.
        spec: As the page table has it.
        numel: Its parameters.
    """

    group: int
    units: tuple[Unit, ...]
    spec: GroupSpec
    numel: int

    @property
    def unit(self) -> Unit:
        """The one that owns it."""
        return self.units[0]

    @property
    def adapter(self) -> bool:
        """Whether it lies beside a frozen group."""
        return self.trainable and self.spec.name.endswith("(adapter default)")

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
        """The groups that each unit pins, by its name, its own first."""
        found: dict[str, list[PagedGroup]] = {}
        for group in self.groups:
            found.setdefault(group.unit.name, []).append(group)
        for group in self.groups:
            for guest in group.units[1:]:
                found.setdefault(guest.name, []).append(group)
        return found

    @property
    def all_bytes(self) -> int:
        """Frames of all pages: what keeps everything resident."""
        return int(self.table.num_frames.sum()) * FRAME_BYTES

    @property
    def trained_numel(self) -> int:
        """Parameters that are updated."""
        return sum(g.numel for g in self.groups if g.trainable)


def _packed(unit: Unit, choice: Choice, slots: list[Slot]) -> StoredBytes | None:
    """What frozen parameters take at home in a format of few bits; None: as on the device.

    Of experts in a bundle it is their share, of all else what the codec says.
    """
    form = BlockFormat.of(choice.frozen_format)
    if form is None or not any(
        is_coded(torch.Size(s), _dtype(choice)) for s in unit.parameters.values()
    ):
        return None
    if unit.count > 1:
        each = sum(form.sizes(1)) / (BLOCK * choice.item_bytes)
        return lambda begin, end: -(-math.ceil((end - begin) * each) // ALIGNMENT) * ALIGNMENT
    codec = BlockCodec(slots, form)
    block = HomeOptions(choice.home).block_bytes
    return partial(page_bytes, codec, block_bytes=block)


def _dtype(choice: Choice) -> torch.dtype:
    return torch.bfloat16 if choice.dtype == "bfloat16" else torch.float32


def _held(model: ModelShape, groups: list[PagedGroup]) -> dict[int, list[int]]:
    """For each group, those pinned while it runs: of its units, and of the layer around them."""
    by_unit: dict[str, list[int]] = {}
    for group in groups:
        for unit in group.units:
            by_unit.setdefault(unit.name, []).append(group.group)
    layers = {u.layer: by_unit.get(u.name, []) for u in model.of(Role.LAYER)}
    root = [g for u in model.of(Role.ROOT) for g in by_unit.get(u.name, [])]
    embedding = [g for u in model.of(Role.EMBEDDING) for g in by_unit.get(u.name, [])]
    held: dict[int, list[int]] = {}
    for group in groups:
        found = held[group.group] = []
        for unit in group.units:
            found += root
            if unit.role == Role.EXPERT:
                found += layers[unit.layer]
            if unit.role == Role.HEAD and model.tied:
                found += embedding
            found += by_unit[unit.name]
            if group.adapter:  # it counts with what its first unit owns
                break
    return {g: [o for o in dict.fromkeys(found) if o != g] for g, found in held.items()}


def page(model: ModelShape, choice: Choice) -> Paged:
    """Makes the groups and their page table."""
    table = PageTable(max(choice.page_size // FRAME_BYTES, 1) * FRAME_BYTES)
    groups: list[PagedGroup] = []
    members: dict[int, list[int]] = {}

    def add(
        units: tuple[Unit, ...], spec: GroupSpec, numel: int, stored: StoredBytes | None
    ) -> int:
        number = table.add_group(spec, {}, stored)
        groups.append(PagedGroup(number, units, spec, numel))
        return number

    sides_of: dict[str, list[Side]] = {}  # by the unit that owns them
    for side in find_sides(model, choice):
        sides_of.setdefault(side.hosts[0].name, []).append(side)
    for unit in model.units:
        set_index = unit.layer if unit.role == Role.EXPERT else -1
        spec, stored = _own(unit, choice)
        number = add((unit,), replace(spec, set_index=set_index), unit.numel, stored)
        if set_index >= 0:
            members.setdefault(set_index, []).append(number)
        for side in sides_of.get(unit.name, ()):
            add(tuple(side.hosts), side.spec(choice), side.numel, None)
    table.seal()
    numbered = tuple(tuple(members[s]) for s in sorted(members))
    frames, owner = table.smallest_budget(_held(model, groups))
    least = frames * FRAME_BYTES, groups[max(owner, 0)]
    return Paged(model, choice, table, tuple(groups), numbered, least)


def _own(unit: Unit, choice: Choice) -> tuple[GroupSpec, StoredBytes | None]:
    """A unit's own group: trained, or frozen under adapters, with its form at home."""
    if choice.rank is None:
        return _trained(unit, unit.num_bytes(choice.item_bytes), choice), None
    slots: list[Slot] = []
    num_bytes = max(unit.num_bytes(choice.item_bytes), ALIGNMENT)
    if unit.count == 1:
        tensors = ((n, torch.Size(s), _dtype(choice)) for n, s in unit.parameters.items())
        slots, num_bytes = lay_out_shapes(tensors, choice.frozen_format != "native")
    spec = GroupSpec(f"{unit.name} (frozen)", num_bytes, 0, False, unit.layer, unit.expert)
    return spec, _packed(unit, choice, slots)


@dataclass
class Side:
    """Adapters that share a group, as `odc.fsdp.sides` joins them.

    Attributes:
        hosts: Layers that pin it; the first owns it.
        shapes: Of the two matrices of each adapted layer.
    """

    hosts: list[Unit]
    shapes: list[Shape]

    @property
    def num_bytes(self) -> int:
        """Adapters are float32, each matrix at a multiple of 64 bytes."""
        return adapter_bytes(self.shapes)

    @property
    def numel(self) -> int:
        """Its parameters."""
        return sum(map(math.prod, self.shapes))

    def spec(self, choice: Choice) -> GroupSpec:
        """As the page table has it."""
        first, last = self.hosts[0], self.hosts[-1]
        span = first.name if first is last else f"{first.name} to {last.name}"
        return GroupSpec(
            f"{span} (adapter default)",
            max(self.num_bytes, ALIGNMENT),
            NUM_MOMENTS,
            True,
            first.layer,
            -1,
            at_home=choice.where == "home",
        )


def adapter_bytes(shapes: Iterable[Shape]) -> int:
    """Bytes of matrices in float32, each at a multiple of 64."""
    return sum(-(-math.prod(s) * MASTER_BYTES // ALIGNMENT) * ALIGNMENT for s in shapes)


def find_sides(model: ModelShape, choice: Choice) -> list[Side]:
    """The groups of adapters: neighbouring layers share one while its state fits a frame.

    What lies beside experts belongs to their layer.
    """
    if choice.rank is None:
        return []
    layers = {u.layer: u for u in model.of(Role.LAYER)}
    latest: dict[tuple[bool, bool], Side] = {}
    found: list[Side] = []
    for unit in model.units:
        shapes = adapter_shapes(unit, choice)
        if not shapes:
            continue
        in_set = unit.role == Role.EXPERT
        host = layers[unit.layer] if in_set else unit
        side = latest.get((in_set, host.role == Role.ROOT))
        if side is not None and _joins(side, host, shapes):
            side.shapes += shapes
            if side.hosts[-1] is not host:
                side.hosts.append(host)
            continue
        side = latest[in_set, host.role == Role.ROOT] = Side([host], shapes)
        found.append(side)
    return found


def _joins(side: Side, host: Unit, shapes: list[Shape]) -> bool:
    """Whether a unit's adapters may join those of the units before it."""
    last = side.hosts[-1]
    if last is host:
        return True
    if last.layer < 0 or host.layer < 0:
        return False
    return (2 + NUM_MOMENTS) * adapter_bytes([*side.shapes, *shapes]) <= FRAME_BYTES


def adapter_shapes(unit: Unit, choice: Choice) -> list[Shape]:
    """Of a unit's LoRA adapters: (rank, in) and (out, rank) of each target."""
    if choice.rank is None or unit.role == Role.EMBEDDING:
        return []
    found: list[Shape] = []
    for name, shape in unit.parameters.items():
        module, _, last = name.rpartition(".")
        if last == "weight" and len(shape) == 2 and is_target(module, unit, choice.targets):
            found += [(choice.rank, shape[1]), (shape[0], choice.rank)]
    return found * unit.count


def is_target(module: str, unit: Unit, targets: tuple[str, ...]) -> bool:
    """Whether a linear layer gets an adapter (see `adapter.targets`)."""
    if targets == (ALL_LINEAR,):
        return unit.layer >= 0 and not _ROUTER.search(module)
    if len(targets) == 1 and not re.fullmatch(r"[\w.]+", targets[0]):
        return LoraConfig(targets=targets[0]).matches(module)
    return LoraConfig(targets=targets).matches(module)


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


def largest_gradient_bytes(paged: Paged) -> int:
    """Of a single parameter: autograd holds it beside the page until it is copied there."""
    choice = paged.choice
    if choice.rank is None:
        return choice.item_bytes * max(unit.largest_numel for unit in paged.model.units)
    units = paged.model.units
    shapes = (s for unit in units for s in adapter_shapes(replace(unit, count=1), choice))
    return MASTER_BYTES * max(map(math.prod, shapes), default=0)
