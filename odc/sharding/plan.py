"""A plan: where every tensor of a group starts, and what each rank holds of it.

A group has one or more sub-buffers. A sub-buffer is `ranks` slices of `slice_numel` elements, one
after another; rank r owns `[r * S, (r + 1) * S)`. Tensors lie in it whole and contiguous, padding
only between them. Everything a plan claims is checked by `validate` (the constraints) and `verify`
(the certificate) from what is written in it, without the search that found it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from odc.errors import DBufferAlignmentError, PlanError, RaggedShardBoundaryError
from odc.sharding.tensors import ITEM_BYTES, TensorSpec


@dataclass(frozen=True)
class Placement:
    """A tensor's place: sub-buffer, offset in it in elements, and elements of a block."""

    tensor: TensorSpec
    block_numel: int
    buffer: int
    offset: int

    @property
    def end(self) -> int:
        """First element after the tensor."""
        return self.offset + self.tensor.numel

    @property
    def num_blocks(self) -> int:
        """Blocks, the last one perhaps short."""
        return -(-self.tensor.numel // self.block_numel)


@dataclass(frozen=True)
class SubBuffer:
    """One flat buffer of a dtype: equal slices of `slice_numel` elements, one a rank."""

    dtype: str
    slice_numel: int

    @property
    def slice_bytes(self) -> int:
        """Bytes of one rank's slice."""
        return self.slice_numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Span:
    """What one rank holds of one tensor.

    Blocks `[first_block, first_block + num_blocks)` of the tensor, `numel` elements from
    `tensor_offset` on, which lie at `slice_offset` of the rank's slice of `buffer`.
    """

    fqn: str
    rank: int
    buffer: int
    first_block: int
    num_blocks: int
    tensor_offset: int
    slice_offset: int
    numel: int


@dataclass(frozen=True)
class Rules:
    """What a plan was made under.

    Attributes:
        ranks: slices of every buffer.
        alignment: bytes that every start and every slice boundary is a multiple of.
        unit_numel: elements that every slice is a multiple of.
        max_buffers: sub-buffers at most; one for each dtype in any case.
        gather_dtype: the dtype all are gathered in; `None` where each keeps its own.
    """

    ranks: int
    alignment: int = 64
    unit_numel: int = 128
    max_buffers: int = 3
    gather_dtype: str | None = None

    def aligned_numel(self, dtype: str) -> int:
        """Elements of `dtype` that a start is a multiple of."""
        return self.alignment // math.gcd(self.alignment, ITEM_BYTES[dtype])

    def unit(self, dtype: str) -> int:
        """Elements of `dtype` that a slice is a multiple of."""
        return math.lcm(self.unit_numel, self.aligned_numel(dtype))

    def dtype_of(self, tensor: TensorSpec) -> str:
        """The dtype a tensor is gathered in."""
        return self.gather_dtype or tensor.dtype


@dataclass(frozen=True)
class Plan:
    """The plan of one group on `rules.ranks` ranks.

    Attributes:
        rules: what it was made under.
        planner: `greedy` or `optimal`.
        buffers: the sub-buffers.
        placements: one a tensor, in the order the group was given.
        lower_bound_bytes: bytes that any plan under these rules needs on every rank, at least.
    """

    rules: Rules
    planner: str
    buffers: tuple[SubBuffer, ...]
    placements: tuple[Placement, ...]
    lower_bound_bytes: int

    @property
    def ranks(self) -> int:
        """Ranks that share the group."""
        return self.rules.ranks

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(place.tensor.numel for place in self.placements)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the dtypes they are gathered in."""
        return sum(
            place.tensor.numel * ITEM_BYTES[self.rules.dtype_of(place.tensor)]
            for place in self.placements
        )

    @property
    def slice_numel(self) -> int:
        """Elements that every rank holds, padding included, over all buffers."""
        return sum(buffer.slice_numel for buffer in self.buffers)

    @property
    def slice_bytes(self) -> int:
        """Bytes that every rank holds, padding included, over all buffers."""
        return sum(buffer.slice_bytes for buffer in self.buffers)

    @property
    def padding(self) -> float:
        """Bytes added so that slices are equal, as a fraction of the tensors' bytes."""
        return self._padding(self.slice_bytes)

    @property
    def lower_bound_padding(self) -> float:
        """The padding that no plan under these rules can go below."""
        return self._padding(self.lower_bound_bytes)

    @property
    def gap(self) -> float:
        """How much less padding a better plan could have, at most, in the same fraction."""
        return self.padding - self.lower_bound_padding

    def _padding(self, slice_bytes: int) -> float:
        total = self.num_bytes
        return (slice_bytes * self.ranks - total) / total if total else 0.0

    def spans(self, rank: int) -> list[Span]:
        """Returns what a rank holds, in the order of its slices.

        Raises:
            PlanError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise PlanError(f"rank {rank} does not exist; the plan has ranks 0-{self.ranks - 1}")
        found = [span for place in self.placements if (span := self._span(place, rank))]
        return sorted(found, key=lambda span: (span.buffer, span.slice_offset))

    def _span(self, place: Placement, rank: int) -> Span | None:
        slice_numel = self.buffers[place.buffer].slice_numel
        low = max(place.offset, rank * slice_numel)
        high = min(place.end, (rank + 1) * slice_numel)
        if low >= high:
            return None
        first = (low - place.offset) // place.block_numel
        last = -(-(high - place.offset) // place.block_numel)
        return Span(
            place.tensor.fqn,
            rank,
            place.buffer,
            first,
            last - first,
            low - place.offset,
            low - rank * slice_numel,
            high - low,
        )

    def local_units(self, fqn: str) -> tuple[int, ...]:
        """Blocks of a tensor that every rank holds, rank by rank; 0 where it holds none.

        Raises:
            PlanError: the group has no such tensor.
        """
        for place in self.placements:
            if place.tensor.fqn == fqn:
                spans = (self._span(place, rank) for rank in range(self.ranks))
                return tuple(span.num_blocks if span else 0 for span in spans)
        raise PlanError(f"{fqn}: no such tensor in the group")

    def validate(self) -> None:
        """Checks every constraint from scratch.

        Raises:
            RaggedShardBoundaryError: a block is cut, tensors overlap, or one lies outside.
            DBufferAlignmentError: a start or a slice is not aligned.
            PlanError: a buffer holds another dtype, or there are too many of them.
        """
        dtypes = {self.rules.dtype_of(place.tensor) for place in self.placements}
        if len(self.buffers) > max(self.rules.max_buffers, len(dtypes)):
            raise PlanError(
                f"{len(self.buffers)} buffers; allowed: max_buffers {self.rules.max_buffers}, and "
                f"one for each of {len(dtypes)} dtypes"
            )
        for number, buffer in enumerate(self.buffers):
            self._check_buffer(number, buffer)
        names = [place.tensor.fqn for place in self.placements]
        if len(set(names)) < len(names):
            raise PlanError(f"{next(n for n in names if names.count(n) > 1)} is placed twice")

    def _check_buffer(self, number: int, buffer: SubBuffer) -> None:
        inside = [p for p in self.placements if p.buffer == number and p.tensor.numel]
        inside.sort(key=lambda place: place.offset)
        unit = self.rules.unit(buffer.dtype)
        if buffer.slice_numel % unit:
            first = inside[0] if inside else None
            raise DBufferAlignmentError(
                f"the slice of buffer {number} has {buffer.slice_numel} elements; "
                f"expected a multiple of {unit}, such as {_nearest(buffer.slice_numel, unit)}",
                fqn=first.tensor.fqn if first else "",
                rank=0,
                offset=first.offset if first else 0,
                nearest=_nearest(buffer.slice_numel, unit),
            )
        free, before = 0, ""
        for place in inside:
            self._check_place(place, buffer, free, before)
            free, before = place.end, place.tensor.fqn

    def _check_place(self, place: Placement, buffer: SubBuffer, free: int, before: str) -> None:
        fqn, offset, slice_numel = place.tensor.fqn, place.offset, buffer.slice_numel
        rank = offset // slice_numel if slice_numel else 0
        aligned = self.rules.aligned_numel(buffer.dtype)
        if self.rules.dtype_of(place.tensor) != buffer.dtype:
            raise PlanError(
                f"{fqn}: {self.rules.dtype_of(place.tensor)} in a buffer of {buffer.dtype}"
            )
        if offset < free or place.end > self.ranks * slice_numel:
            problem = f"overlaps {before}" if 0 <= offset < free else "lies outside its buffer"
            raise RaggedShardBoundaryError(
                f"{problem}: {place.tensor.numel} elements, buffer of {self.ranks} x {slice_numel}",
                fqn=fqn,
                rank=rank,
                offset=offset,
                nearest=free if offset < free else None,
            )
        if offset % aligned:
            nearest = _nearest(offset, aligned)
            raise DBufferAlignmentError(
                f"starts off the alignment of {aligned} elements; the nearest legal start is "
                f"{nearest}",
                fqn=fqn,
                rank=rank,
                offset=offset,
                nearest=nearest,
            )
        for boundary in range((rank + 1) * slice_numel, place.end, slice_numel):
            cut = (boundary - offset) % place.block_numel
            if cut:
                legal = self._nearest_start(place, slice_numel, aligned)
                raise RaggedShardBoundaryError(
                    f"the boundary at {boundary} cuts a block of {place.block_numel} elements "
                    f"after {cut}; the nearest legal start is {legal}",
                    fqn=fqn,
                    rank=boundary // slice_numel - 1,
                    offset=offset,
                    nearest=legal,
                )

    def _nearest_start(self, place: Placement, slice_numel: int, aligned: int) -> int | None:
        """The legal start nearest to a placement's, whatever else lies there."""
        from odc.sharding.fit import earliest_start, make_piece

        numel = place.tensor.numel
        piece = make_piece(numel, place.block_numel, aligned)
        limit = self.ranks * slice_numel
        around = []
        for back in (0, piece.stride, numel, slice_numel, numel + slice_numel):
            free = max(0, place.offset - back) // aligned * aligned
            start = earliest_start(piece, free, slice_numel)
            if start >= 0 and start + numel <= limit:
                around.append(start)
        return min(around, key=lambda start: abs(start - place.offset), default=None)

    def verify(self) -> None:
        """Checks the certificate: the constraints hold, and the lower bound is one.

        The bound is computed again from the tensors and the rules that the plan states.

        Raises:
            PlanError: the written bound is not the one that follows, or lies above the plan.
        """
        from odc.sharding.certificate import lower_bound_bytes

        self.validate()
        tensors = [(place.tensor, place.block_numel) for place in self.placements]
        bound = lower_bound_bytes(tensors, self.rules)
        if self.lower_bound_bytes > bound:
            raise PlanError(
                f"the plan claims that every rank needs {self.lower_bound_bytes} bytes; "
                f"what can be shown is {bound}"
            )
        if self.lower_bound_bytes > self.slice_bytes:
            raise PlanError(
                f"the plan needs {self.slice_bytes} bytes a rank and claims that none needs less "
                f"than {self.lower_bound_bytes}"
            )

    def explain(self) -> str:
        """Says in words what the padding is, what binds, and what would help."""
        from odc.sharding.explain import explain

        return explain(self)

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as plain values; `from_json` reads them back."""
        return {
            "rules": asdict(self.rules),
            "planner": self.planner,
            "buffers": [asdict(buffer) for buffer in self.buffers],
            "placements": [
                {
                    "fqn": place.tensor.fqn,
                    "shape": list(place.tensor.shape),
                    "dtype": place.tensor.dtype,
                    "block_numel": place.block_numel,
                    "buffer": place.buffer,
                    "offset": place.offset,
                }
                for place in self.placements
            ],
            "lower_bound_bytes": self.lower_bound_bytes,
        }

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Plan:
        """Reads what `as_json` returned; call `verify` before trusting it.

        Raises:
            PlanError: something is missing or of another type.
        """
        try:
            return cls(
                Rules(**written["rules"]),
                written["planner"],
                tuple(SubBuffer(**buffer) for buffer in written["buffers"]),
                tuple(_read_placements(written["placements"])),
                int(written["lower_bound_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"no plan: {type(error).__name__}: {error}") from error


def _read_placements(written: list[Mapping[str, Any]]) -> Iterator[Placement]:
    for one in written:
        tensor = TensorSpec(one["fqn"], tuple(one["shape"]), one["dtype"])
        block, buffer, offset = (int(one[key]) for key in ("block_numel", "buffer", "offset"))
        if block < 1:
            raise ValueError(f"{tensor.fqn}: block_numel {block}")
        yield Placement(tensor, block, buffer, offset)


def _nearest(value: int, unit: int) -> int:
    return max(0, (value + unit // 2) // unit * unit)
