"""The certificate: what every rank needs at least, whatever the plan, and which tensor binds.

Computed from the tensors, their blocks and the rules alone; a plan's `verify` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from odc.sharding.bounds import SliceTable, bound_partitions, floor_slice, round_up, volume
from odc.sharding.fit import Piece, Space, make_piece
from odc.sharding.partitions import rigid_kinds, split_units
from odc.sharding.plan import Rules
from odc.sharding.tensors import ITEM_BYTES, TensorSpec

T = TypeVar("T")
SEARCH_BUFFERS = 4  # more buy nothing, and each is one more collective
Blocks = Sequence[tuple[TensorSpec, int]]  # (tensor, elements of a block)


def space_of(rules: Rules, dtype: str) -> Space:
    """The integers of one dtype's buffers."""
    return Space(rules.ranks, rules.aligned_numel(dtype), rules.unit(dtype))


def kinds_of(tensors: Blocks, rules: Rules) -> dict[str, tuple[tuple[Piece, int], ...]]:
    """The pieces of every gathered dtype and how many there are of each, largest first."""
    found: dict[str, Counter[Piece]] = {}
    for tensor, block in tensors:
        dtype = rules.dtype_of(tensor)
        kinds = found.setdefault(dtype, Counter())
        if tensor.numel:
            kinds[make_piece(tensor.numel, block, rules.aligned_numel(dtype))] += 1
    return {
        dtype: tuple(sorted(kinds.items(), key=lambda kind: (-kind[0].numel, kind)))
        for dtype, kinds in sorted(found.items())
        if kinds
    }


@lru_cache(maxsize=4096)
def bound_slices(kinds: tuple[tuple[Piece, int], ...], space: Space, num_parts: int) -> int:
    """The least sum of S over at most `num_parts` buffers of one dtype, in elements."""
    total = sum(piece.numel * count for piece, count in kinds)
    pooled = max(
        floor_slice(kinds, Space(space.ranks, 1, 1)),
        round_up(-(-total // space.ranks), space.unit),
    )
    if num_parts == 1:
        pooled = max(pooled, -(-volume(kinds, space) // space.ranks))
    if num_parts > SEARCH_BUFFERS:
        return pooled
    rigid = list(kinds) if num_parts == 1 else rigid_kinds(kinds, num_parts)
    # The other tensors count as volume that goes anywhere.
    best, _ = bound_partitions(SliceTable(split_units(rigid, num_parts), space))
    return round_up(max(pooled, best), space.unit)


def share_buffers(
    dtypes: Sequence[str], max_buffers: int, cost: Callable[[str, int], tuple[int, T]]
) -> tuple[int, list[T]]:
    """Shares the buffers among dtypes so that the bytes are least; each dtype gets one or more.

    Args:
        dtypes: what is gathered.
        max_buffers: buffers in all.
        cost: (dtype, buffers) -> (bytes, what comes of it).
    """
    spare = max(0, max_buffers - len(dtypes))
    best: dict[int, tuple[int, list[T]]] = {0: (0, [])}
    for dtype in dtypes:
        grown: dict[int, tuple[int, list[T]]] = {}
        for used, (total, chosen) in best.items():
            for extra in range(spare - used + 1):
                num_bytes, result = cost(dtype, extra + 1)
                after = (total + num_bytes, [*chosen, result])
                if used + extra not in grown or after[0] < grown[used + extra][0]:
                    grown[used + extra] = after
        best = grown
    return min(best.values(), key=lambda found: found[0])


def lower_bound_bytes(tensors: Blocks, rules: Rules) -> int:
    """Returns the bytes that every rank needs at least, padding included."""
    kinds = kinds_of(tensors, rules)

    def cost(dtype: str, num_parts: int) -> tuple[int, None]:
        slices = bound_slices(kinds[dtype], space_of(rules, dtype), num_parts)
        return slices * ITEM_BYTES[dtype], None

    return share_buffers(list(kinds), rules.max_buffers, cost)[0]


def binding_tensor(tensors: Blocks, rules: Rules) -> tuple[TensorSpec | None, int]:
    """Returns (tensor, bound in bytes without its blocks): the one whose blocks cost most.

    `None` where no tensor's blocks raise the bound by themselves.
    """
    best: tuple[TensorSpec | None, int] = (None, lower_bound_bytes(tensors, rules))
    equal: dict[tuple[int, int, str], TensorSpec] = {}
    for tensor, block in tensors:
        if block > 1:
            equal.setdefault((tensor.numel, block, rules.dtype_of(tensor)), tensor)
    for kind, first in equal.items():
        softer = [
            (tensor, 1 if (tensor.numel, block, rules.dtype_of(tensor)) == kind else block)
            for tensor, block in tensors
        ]
        without = lower_bound_bytes(softer, rules)
        if without < best[1]:
            best = (first, without)
    return best
