"""Partitions of a multiset of tensors into at most K sub-buffers, as arrays of indices.

A sub-multiset is a number in mixed radix: digit j counts the units of kind j. A unit is one tensor,
or several that are kept together where separating them would make too many partitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from odc.sharding.fit import Piece

MAX_ROWS = 400_000  # partitions counted with their order, before equal ones are merged
SOFT_ROWS = 3_000  # above these, tensors without blocks stay together


@lru_cache(maxsize=64)
def _rows(counts: tuple[int, ...], num_parts: int) -> np.ndarray:
    """All partitions of the multiset into `num_parts` parts, each as its sub-multisets."""
    rows = np.zeros((1, num_parts), np.int64)
    weight = 1
    for count in counts:
        splits = np.array(_splits(count, num_parts), np.int64) * weight
        rows = (rows[:, None, :] + splits[None, :, :]).reshape(-1, num_parts)
        weight *= count + 1
    ordered = np.all(rows[:, :-1] >= rows[:, 1:], axis=1)
    return np.ascontiguousarray(rows[ordered].T)


def _splits(count: int, num_parts: int) -> list[tuple[int, ...]]:
    if num_parts == 1:
        return [(count,)]
    return [
        (first, *rest)
        for first in range(count + 1)
        for rest in _splits(count - first, num_parts - 1)
    ]


@lru_cache(maxsize=64)
def _digits(counts: tuple[int, ...]) -> np.ndarray:
    """Digits (num_subsets, num_kinds) of every sub-multiset."""
    index = np.arange(math.prod(count + 1 for count in counts))
    columns = []
    for count in counts:
        columns.append(index % (count + 1))
        index = index // (count + 1)
    return np.stack(columns, axis=1).astype(np.int64)


def num_rows(counts: Sequence[int], num_parts: int) -> int:
    """How many partitions there are, counted with their order."""
    return math.prod(math.comb(count + num_parts - 1, num_parts - 1) for count in counts)


@dataclass(frozen=True)
class Partitions:
    """The partitions of units into at most `num_parts` parts.

    Attributes:
        units: the pieces of one unit of each kind, as (piece, how many).
        counts: how many units there are of each kind.
        num_parts: parts of a partition; some may be empty.
    """

    units: tuple[tuple[tuple[Piece, int], ...], ...]
    counts: tuple[int, ...]
    num_parts: int

    @property
    def rows(self) -> np.ndarray:
        """(num_parts, num_partitions) sub-multisets, in descending order within a partition."""
        return _rows(self.counts, self.num_parts)

    @property
    def digits(self) -> np.ndarray:
        """(num_subsets, num_kinds) units of each kind in every sub-multiset."""
        return _digits(self.counts)

    def kinds_of(self, subset: int) -> list[tuple[Piece, int]]:
        """The pieces of a sub-multiset and how many there are of each."""
        found: dict[Piece, int] = {}
        for unit, count in zip(self.units, self.counts, strict=True):
            subset, digit = divmod(subset, count + 1)
            for piece, size in unit if digit else ():
                found[piece] = found.get(piece, 0) + size * digit
        return list(found.items())

    def least(self, slices: np.ndarray) -> int:
        """Row of the partition with the least sum of S; of equal ones that with fewer parts."""
        weighted = slices * (self.num_parts + 1) + (slices > 0)
        keys = weighted[self.rows[0]]
        for column in self.rows[1:]:
            keys = keys + weighted[column]
        return int(keys.argmin())


def rigid_kinds(kinds: Sequence[tuple[Piece, int]], num_parts: int) -> list[tuple[Piece, int]]:
    """Returns the kinds whose partitions can all be gone over, those of long blocks first."""
    rigid: list[tuple[Piece, int]] = []
    for kind in sorted(kinds, key=lambda kind: (-kind[0].block, kind)):
        limit = MAX_ROWS if kind[0].block > 1 else SOFT_ROWS
        if num_rows([count for _, count in [*rigid, kind]], num_parts) <= limit:
            rigid.append(kind)
    return rigid


def split_units(
    kinds: Sequence[tuple[Piece, int]], num_parts: int, max_rows: int = MAX_ROWS
) -> Partitions:
    """Returns the partitions to go over.

    Where there are too many, first the tensors without blocks stay together (they fit anywhere),
    then those of the kind with most tensors, then the kinds with the fewest elements.
    """
    if num_parts == 1:
        return Partitions((tuple(kinds),), (1,), 1)
    single: list[tuple[Piece, int]] = list(kinds)
    together: list[tuple[Piece, int]] = []
    bundles: list[tuple[Piece, int]] = []

    def rows() -> int:
        counts = [count for _, count in single] + [1] * (len(bundles) + bool(together))
        return num_rows(counts, num_parts)

    if rows() > SOFT_ROWS:
        together = [kind for kind in single if kind[0].block == 1]
        single = [kind for kind in single if kind[0].block > 1]
    while rows() > max_rows and any(count > 1 for _, count in single):
        most = max(single, key=lambda kind: kind[1])
        single.remove(most)
        bundles.append(most)
    while rows() > max_rows:
        pool = single if single else bundles
        smallest = min(pool, key=lambda kind: kind[0].numel * kind[1])
        pool.remove(smallest)
        together.append(smallest)
    units: list[tuple[tuple[Piece, int], ...]] = [((piece, 1),) for piece, _ in single]
    units += [(kind,) for kind in bundles]
    counts = [count for _, count in single] + [1] * len(bundles)
    if together:
        units.append(tuple(together))
        counts.append(1)
    return Partitions(tuple(units), tuple(counts), num_parts)
