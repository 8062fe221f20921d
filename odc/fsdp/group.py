"""A parameter group: views over its pages, and where its gradients are.

All kinds (parameters, gradient, each moment) share one layout: every parameter starts at a
multiple of 64 bytes of its range, since misaligned views change the bits of fused optimizers and
matrix products. The group knows which of its parameters have a gradient in the page; the bytes of
the others are whatever the frame held before, and nobody reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from odc.fsdp.adamw import Chunk
from odc.fsdp.blocks import BLOCK, BlockCodec, BlockFormat, is_coded
from odc.fsdp.parameter import (
    AbsentParameter,
    PagedParameter,
    has_autograd_grad,
    set_plain_grad,
    take_autograd_grad,
)
from odc.fsdp.wrap import ALIGNMENT, Place, Unit
from odc.memory.events import Kind, Op, Phase
from odc.memory.manager import Buffers, MemoryManager
from odc.memory.pages import GroupSpec

if TYPE_CHECKING:
    from odc.fsdp.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies in each of its group's ranges, in bytes.

    Attributes:
        fqn, shape, dtype: of the parameter.
        offset, num_bytes: its bytes.
        room_bytes: until the next one begins.
        coded: it lies at home in blocks of few bits.
    """

    fqn: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    num_bytes: int
    room_bytes: int
    coded: bool = False


def lay_out(places: list[Place], in_blocks: bool = False) -> tuple[list[Slot], int]:
    """Slots of parameters in order, and the bytes they span (see ``lay_out_shapes``)."""
    tensors = ((p.fqn, p.parameter.shape, p.parameter.dtype) for p in places)
    return lay_out_shapes(tensors, in_blocks)


def lay_out_shapes(
    tensors: Iterable[tuple[str, torch.Size, torch.dtype]], in_blocks: bool = False
) -> tuple[list[Slot], int]:
    """Slots of parameters in order, and the bytes they span.

    Args:
        tensors: name, shape and type of each.
        in_blocks: matrices are stored in blocks: each then has whole blocks for itself.

    Returns:
        Slots, each at a multiple of 64 bytes.
    """
    slots = []
    offset = 0
    for fqn, shape, dtype in tensors:
        coded = in_blocks and is_coded(shape, dtype)
        unit = max(BLOCK * dtype.itemsize if coded else 0, ALIGNMENT)
        offset = -(-offset // unit) * unit
        num_bytes = shape.numel() * dtype.itemsize
        room = -(-num_bytes // unit) * unit
        slots.append(Slot(fqn, shape, dtype, offset, num_bytes, room, coded))
        offset += room
    return slots, max(offset, ALIGNMENT)


@dataclass(slots=True)
class GroupLayout:
    """What becomes a group.

    Attributes:
        unit: the unit whose group it is.
        places: the parameters.
        trainable: whether they have gradients and moments.
        at_home: whether moments stay at home, where the group is then updated.
        masters: whether parameters of less than float32 have a value in float32 at home.
        frozen_format: how matrices lie at home if they are not trained; None: as they are.
        in_set: whether it is the group that stands for an expert in the set of its layer.
        name: for messages; that of the unit where it is empty.
        adapter: the adapter that the parameters are; the group rests while another is active.
        guests: other units that pin the group.
    """

    unit: Unit
    places: list[Place]
    trainable: bool
    at_home: bool = False
    masters: bool = False
    frozen_format: BlockFormat | None = None
    in_set: bool = True
    name: str = ""
    adapter: str = ""
    guests: list[Unit] = field(default_factory=list)

    @property
    def in_blocks(self) -> bool:
        """Whether its matrices lie at home in blocks."""
        return self.frozen_format is not None and not self.trainable

    @property
    def num_bytes(self) -> int:
        """Of its parameters."""
        return lay_out(self.places, self.in_blocks)[1]


class ParamGroup:
    """Parameters that are loaded, updated and evicted together.

    Args:
        manager: owns the pages.
        layout: what it consists of.
        num_moments: optimizer moments, if it is trained.
    """

    def __init__(self, manager: MemoryManager, layout: GroupLayout, num_moments: int) -> None:
        unit, places, trainable = layout.unit, layout.places, layout.trainable
        self.manager = manager
        self.unit = unit
        self.places = places
        self.trainable = trainable
        self.slots, num_bytes = lay_out(places, layout.in_blocks)
        at_home = layout.at_home and trainable
        reduced = any(s.dtype.itemsize < 4 for s in self.slots)
        self.masters = layout.masters and at_home and reduced
        moments = num_moments + self.masters if trainable else 0
        self.adapter = layout.adapter
        self.rests = False  # another adapter is active
        name = layout.name or unit.fqn or "(root)"
        self.spec = GroupSpec(
            name if trainable else f"{name} (frozen)",
            num_bytes,
            moments,
            trainable,
            unit.layer,
            unit.expert,
            unit.set_index if layout.in_set else -1,
            at_home,
            2 if self.masters else 1,
        )
        self.codec: BlockCodec | None = None
        if layout.frozen_format is not None and any(slot.coded for slot in self.slots):
            self.codec = BlockCodec(self.slots, layout.frozen_format)
        self.group, buffers = manager.add_group(self.spec, self.codec)
        self._flat = {key: torch.frombuffer(b, dtype=torch.uint8) for key, b in buffers.items()}
        if self.codec is not None:
            self.codec.flat = self._flat[Kind.PARAMETER, 0][:num_bytes]
        self._buffers: Buffers = buffers
        self.parameters: list[PagedParameter] = []
        self.has_gradient = [False] * len(self.slots)
        self.gradient_live = False  # the gradient page has content
        self.gradient_pinned = False
        self.used: dict[int, int] = {}  # gradients not zeroed since: the step that used each
        self.received: set[int] = set()  # in this backward
        self.unsettled = False  # gradients came since the group was last updated or parked
        self.written: set[int] = set()  # parts that somebody else than an update has written
        self.updates = 0
        self.plain_grad = False
        self.frozen = not trainable  # for good: it has no pages for a gradient
        self.norms: dict[int, torch.Tensor] = {}
        self.in_page: set[int] = set()  # gradients computed there in this backward
        self.runtime: Runtime | None = None
        self._pins = 0
        self._chunks: list[list[Chunk]] | None = None

    # -- views -----------------------------------------------------------------------------------

    def view(self, kind: Kind, index: int, slot: int = 0) -> torch.Tensor:
        """A parameter-shaped view of one of the group's ranges; valid while that is resident."""
        place = self.slots[index]
        flat = self._flat[kind, slot]
        piece = flat[place.offset : place.offset + place.num_bytes]
        return piece.view(place.dtype).view(place.shape)

    def make_parameters(self) -> None:
        """Replace the modules' parameters by views of this group's pages."""
        for index, place in enumerate(self.places):
            made = PagedParameter.over(
                self.view(Kind.PARAMETER, index), place.parameter.requires_grad, place.fqn
            )
            made._group, made._index = self, index
            self.parameters.append(made)
            setattr(place.module, place.name, made)  # some modules keep lists of their own

    def chunks(self, part: int) -> list[Chunk]:
        """The pieces of parameters in one part of the ranges, for the optimizer's walk."""
        if self._chunks is None:
            self._chunks = [self._cut(p) for p in range(self.manager.table.parts(self.group))]
        return self._chunks[part]

    def cuts(self, part: int) -> list[tuple[int, int, int]]:
        """(index, begin, end) in bytes of a range, of the parameters that lie in one part."""
        page_size = self.manager.table.page_size
        start, end = part * page_size, (part + 1) * page_size
        if self.spec.compact:
            start, end = 0, self.spec.num_bytes
        cuts = []
        for index, slot in enumerate(self.slots):
            low, high = max(start, slot.offset), min(end, slot.offset + slot.num_bytes)
            if low < high:
                cuts.append((index, low, high))
        return cuts

    def indices(self, part: int) -> list[int]:
        """The parameters that lie in one part, by index."""
        return [index for index, _, _ in self.cuts(part)]

    def _cut(self, part: int) -> list[Chunk]:
        chunks = []
        for index, low, high in self.cuts(part):

            def piece(
                kind: Kind,
                moment: int = 0,
                low: int = low,
                high: int = high,
                dtype: torch.dtype = self.slots[index].dtype,
            ) -> torch.Tensor:
                return self._flat[kind, moment][low:high].view(dtype)

            chunks.append(
                Chunk(
                    index,
                    piece(Kind.PARAMETER),
                    piece(Kind.GRADIENT),
                    tuple(piece(Kind.MOMENT, m) for m in range(self.spec.num_moments)),
                )
            )
        return chunks

    # -- what stays at home ----------------------------------------------------------------------

    def has_master(self, index: int) -> bool:
        """Whether a parameter has a value in float32 at home."""
        return self.masters and self.slots[index].dtype.itemsize < 4

    def moment_dtype(self, index: int) -> torch.dtype:
        """Of a parameter's moments."""
        return torch.float32 if self.has_master(index) else self.slots[index].dtype

    def home_view(self, buffer: Any, index: int) -> torch.Tensor:
        """A parameter-shaped view of a range of moments at home, which ``buffer`` holds."""
        slot, dtype = self.slots[index], self.moment_dtype(index)
        numel = slot.shape.numel()
        if not numel:
            return torch.empty(slot.shape, dtype=dtype)
        offset = slot.offset * self.spec.moment_scale
        flat = torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset)
        return flat.view(slot.shape)

    def note_written(self) -> None:
        """Parameters are about to be written by somebody else than an update."""
        if self.masters:
            self.written.update(range(self.manager.table.parts(self.group)))

    # -- gradients -------------------------------------------------------------------------------

    def add_gradient(self, index: int, phase: Phase) -> None:
        """Take a parameter's new gradient from autograd into its page."""
        if self.plain_grad:
            self._show_gradient(index, phase)
            return
        if not has_autograd_grad(self.parameters[index]):
            if index in self.in_page:  # all of it lies in its page already
                self.received.add(index)
            return
        view, has_content = self.gradient_page(index, phase)
        gradient = take_autograd_grad(self.parameters[index])
        if has_content:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.received.add(index)

    def gradient_page(self, index: int, phase: Phase) -> tuple[torch.Tensor, bool]:
        """A parameter's gradient in its page, about to be written, and whether it has content."""
        if index in self.used:
            raise RuntimeError(
                f"a backward after an update without opt.zero_grad() (parameter "
                f"{self.slots[index].fqn}): a paged gradient is gone once it was used; call "
                "opt.zero_grad() after every opt.step()"
            )
        self._pin_gradient(phase)
        has_content, self.has_gradient[index] = self.has_gradient[index], True
        self.unsettled = True
        self.norms.pop(index, None)
        return self.view(Kind.GRADIENT, index), has_content

    def _show_gradient(self, index: int, phase: Phase) -> None:
        """Everything is resident: ``.grad`` is a view of the page, as plain PyTorch has it."""
        parameter = self.parameters[index]
        view = self.view(Kind.GRADIENT, index)
        shown = parameter.grad
        self._pin_gradient(phase)
        self.received.add(index)
        if shown is None or shown.data_ptr() == view.data_ptr():
            return
        view.copy_(take_autograd_grad(parameter))
        set_plain_grad(parameter, view)

    def _pin_gradient(self, phase: Phase) -> None:
        if self.gradient_pinned:
            return
        op = Op.WRITE if self.gradient_live else Op.CREATE
        self.manager.access(self.group, [(Kind.GRADIENT, op)], phase)
        self.gradient_live = self.gradient_pinned = True

    def unpin_gradient(self) -> None:
        """The group got all gradients of this backward; they stay for later."""
        if self.gradient_pinned:
            self.manager.release(self.group, Kind.GRADIENT)
            self.gradient_pinned = False

    def take_norms(self) -> None:
        """Remember the norm of each new gradient while the page is here."""
        for index in self.received:
            self.norms[index] = torch.linalg.vector_norm(self.view(Kind.GRADIENT, index))

    def norm(self, index: int) -> torch.Tensor:
        """The norm of a gradient; loads the page if a backward ended before it was taken."""
        if index not in self.norms:
            self.manager.access(self.group, [(Kind.GRADIENT, Op.READ)], Phase.OPTIMIZER)
            self.norms[index] = torch.linalg.vector_norm(self.view(Kind.GRADIENT, index))
            self.manager.release(self.group, Kind.GRADIENT)
        return self.norms[index]

    def end_gradient(self) -> None:
        """The gradient is dead: its frames are given back and it is never stored."""
        if self.gradient_pinned:
            self.manager.drop(self.group, Kind.GRADIENT)
        elif self.gradient_live:
            self.manager.forget(self.group, Kind.GRADIENT)
        self._forget_pages()

    def _forget_pages(self) -> None:
        self.gradient_live = self.gradient_pinned = False
        self.has_gradient = [False] * len(self.slots)
        self.norms.clear()

    def use_gradients(self, step: int) -> None:
        """The update of ``step`` used the gradients."""
        self.used.update((i, step) for i, present in enumerate(self.has_gradient) if present)
        if self.spec.at_home:  # they have left, and are at home until the update has run
            self._forget_pages()
        else:
            self.end_gradient()

    def forget_gradient(self, index: int) -> None:
        """``p.grad = None`` for one parameter."""
        self.used.pop(index, None)
        if not self.has_gradient[index]:
            return
        self.has_gradient[index] = False
        self.norms.pop(index, None)
        if not any(self.has_gradient):
            self.end_gradient()

    def forget_gradients(self) -> None:
        """``p.grad = None`` for all."""
        self.used.clear()
        if self.plain_grad:
            for parameter in self.parameters:
                parameter.grad = None
        elif self.gradient_live:
            self.end_gradient()

    @property
    def complete(self) -> bool:
        """Whether every parameter got its gradient in this backward."""
        return len(self.received) == len(self.slots)

    # -- values ----------------------------------------------------------------------------------

    @property
    def is_pinned(self) -> bool:
        return self._pins > 0

    def pin_parameters(self, phase: Phase, op: Op = Op.READ) -> None:
        if op != Op.READ:
            self.note_written()
        self.manager.access(self.group, [(Kind.PARAMETER, op)], phase)
        self._pins += 1
        if self._pins == 1:
            self._be(PagedParameter)

    def round_values(self) -> None:
        """Parameters were written, and are pinned: make them what a load from home would give.

        Raises:
            QuantizationError: one holds NaN or infinity, and is stored in few bits.
        """
        if self.codec is not None:
            self.codec.round_values()

    def unpin_parameters(self) -> None:
        self._pins -= 1
        if self._pins == 0 and not (self.spec.pinned or self.manager.unlimited):
            self._be(AbsentParameter)
        self.manager.release(self.group, Kind.PARAMETER)

    def _be(self, kind: type[PagedParameter]) -> None:
        for parameter in self.parameters:
            parameter.__class__ = kind


def num_elements(groups: list[ParamGroup]) -> int:
    """Parameters in groups."""
    return sum(math.prod(s.shape) for g in groups for s in g.slots)


@dataclass(slots=True)
class UnitGroups:
    """The groups of a unit: its own, and those that it shares with the units that own them."""

    own: list[ParamGroup] = field(default_factory=list)
    tied: list[ParamGroup] = field(default_factory=list)

    @property
    def all(self) -> list[ParamGroup]:
        """Those that the unit pins."""
        return [group for group in (*self.own, *self.tied) if not group.rests]
