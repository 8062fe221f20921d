"""RaggedShard: a tensor lies on the ranks of a mesh axis as contiguous flat spans of whole blocks.

Spans are uneven, and empty where a rank holds nothing. Source: veScale-FSDP, arXiv 2602.22437,
section 3. There `local_units` are ratios; here they are absolute blocks, and the last block of the
tensor may be short. What follows from a placement is computed here, from integers alone: spans of
ranks, and boxes of a span; and the specs by which DTensors carry it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from odc.errors import OdcError

Span = tuple[int, int]  # flat elements [low, high)
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


class RaggedOpError(OdcError, NotImplementedError):
    """An op that a RaggedTensor does not have."""


class RaggedLayoutError(OdcError, ValueError):
    """Tensors that do not lie alike, or a span that is not the placement's."""


class RaggedShard(Placement):
    """Contiguous flat spans of whole blocks, rank by rank of a mesh axis.

    Attributes:
        block_numel: elements of a block; the tensor's last block may be short.
        local_units: blocks of every rank, 0 where it holds none.
    """

    def __init__(self, block_numel: int, local_units: Sequence[int]) -> None:
        super().__init__()
        self.block_numel = int(block_numel)
        self.local_units = tuple(int(units) for units in local_units)
        if self.block_numel < 1 or not self.local_units or min(self.local_units) < 0:
            raise RaggedLayoutError(
                "a RaggedShard has block_numel >= 1 and, for every rank, local_units >= 0; got "
                f"{block_numel} and {tuple(local_units)}"
            )
        self._hash = hash((self.block_numel, self.local_units))

    @classmethod
    def from_bounds(cls, bounds: Sequence[int], block_numel: int) -> RaggedShard:
        """Rank r holds `[bounds[r], bounds[r + 1])`; blocks shrink until no bound cuts one."""
        block = math.gcd(block_numel, *(bound for bound in bounds if bound != bounds[-1]))
        return cls(block, [high - low for low, high in pairwise(-(-b // block) for b in bounds)])

    def bounds(self, numel: int) -> tuple[int, ...]:
        """Flat elements between ranks: rank r holds `[bounds[r], bounds[r + 1])`."""
        blocks = accumulate(self.local_units, initial=0)
        return tuple(min(block * self.block_numel, numel) for block in blocks)

    def span(self, numel: int, rank: int) -> tuple[int, int]:
        """(offset, numel) of a rank's span of a tensor of `numel` elements."""
        low, high = self.bounds(numel)[rank : rank + 2]
        return low, high - low

    def is_shard(self, dim: int | None = None) -> bool:
        return False  # callers that hear True go on to read `.dim`

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, RaggedShard)
            and self.block_numel == other.block_numel
            and self.local_units == other.local_units
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(block_numel={self.block_numel}, local_units={self.local_units})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"RaggedShard": RaggedShard}

    def __reduce__(self) -> tuple[type, tuple[int, tuple[int, ...]]]:
        return RaggedShard, (self.block_numel, self.local_units)


def boxes(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Cuts the flat span `[low, high)` into boxes, in order: at most `2 * ndim - 1`."""
    if low >= high:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = low // row, high // row
    if low % row and high <= (first + 1) * row:
        return _inside(shape, first, low, high)
    start = first + bool(low % row)
    head = _inside(shape, first, low, start * row) if low % row else []
    zeros = (0,) * (len(shape) - 1)
    body = [((start, *zeros), (last - start, *shape[1:]))] if last > start else []
    return head + body + (_inside(shape, last, last * row, high) if high % row else [])


def _inside(shape: Sequence[int], index: int, low: int, high: int) -> list[Box]:
    """The boxes of a span within one row of dim 0."""
    base = index * math.prod(shape[1:])
    return [
        ((index, *offsets), (1, *sizes))
        for offsets, sizes in boxes(shape[1:], low - base, high - base)
    ]


def spans_of(placement: Placement, shape: Sequence[int], ranks: int) -> list[Span]:
    """The flat span of every rank of the last axis; all of it on every rank if replicated."""
    numel = math.prod(shape)
    if placement.is_replicate():
        return [(0, numel)] * ranks
    if isinstance(placement, RaggedShard):
        return list(pairwise(placement.bounds(numel)))
    if isinstance(placement, Shard) and shape and placement.dim in (0, -len(shape)):
        rows = -(-shape[0] // ranks)  # torch.chunk's
        row = math.prod(shape[1:])
        edges = [min(rank * rows, shape[0]) * row for rank in range(ranks + 1)]
        return list(pairwise(edges))
    raise RaggedOpError(
        f"a RaggedShard tensor goes to RaggedShard, Replicate() and Shard(0), not to {placement!r}"
    )


def overlap(one: Span, other: Span) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


# -- specs ---------------------------------------------------------------------------------------

# Equal layouts share one spec, so that comparing them is mostly `is`.
_SPECS: WeakValueDictionary[Any, DTensorSpec] = WeakValueDictionary()


def spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    # By the mesh itself, which a found spec keeps alive; an equal one may be of another world.
    key = (id(mesh), placements, tuple(shape), dtype)
    found = _SPECS.get(key)
    if found is None:
        steps = accumulate((max(size, 1) for size in reversed(shape[1:])), int.__mul__, initial=1)
        stride = tuple(reversed(list(steps))) if len(shape) else ()
        meta = TensorMeta(torch.Size(shape), stride, dtype)
        found = _SPECS[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return found


def retyped(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    meta = meta_of(spec)
    return spec if meta.dtype == dtype else spec_of(spec.mesh, spec.placements, meta.shape, dtype)


def meta_of(spec: DTensorSpec) -> TensorMeta:
    assert spec.tensor_meta is not None, "a RaggedTensor without shape"
    return spec.tensor_meta


def shard_of(spec: DTensorSpec) -> RaggedShard:
    shard = spec.placements[-1]
    assert isinstance(shard, RaggedShard), f"no RaggedShard on the last axis of {spec.placements}"
    return shard


def own_rank(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RaggedLayoutError(f"this rank is not part of the mesh {mesh}")
    return coordinate[-1]


def own_span(spec: DTensorSpec) -> Span:
    low, numel = shard_of(spec).span(meta_of(spec).shape.numel(), own_rank(spec.mesh))
    return low, low + numel


def own_part(full: Tensor, spec: DTensorSpec) -> Tensor:
    """This rank's span of a full tensor, a view where that is possible."""
    low, high = own_span(spec)
    return full.reshape(-1)[low:high]


def axis_placements(
    mesh: DeviceMesh, placement: Placement | Sequence[Placement]
) -> tuple[Placement, ...]:
    """One placement an axis, the given one last; what cannot be told apart from it is refused."""
    if isinstance(placement, Placement):
        placement = (*[Replicate()] * (mesh.ndim - 1), placement)
    placements = tuple(placement)
    if len(placements) != mesh.ndim or any(not p.is_replicate() for p in placements[:-1]):
        raise RaggedLayoutError(
            f"expected a placement on the last of {mesh.ndim} mesh axes and Replicate() on the "
            f"others, got {placements}"
        )
    return placements
