"""Lower bounds of S: what no layout can go below, whatever its order.

For one buffer, S is legal only where all of these hold (`least_slice` finds the least such S):

- volume: m * S holds all elements, with aligned starts;
- block: the largest block lies in one slice;
- packing: a slice holds at most floor(S / g) blocks of g elements or more, and for any set of
  tensors whose blocks are multiples of G at most floor(S / G) * G of their elements;
- one cut: a tensor longer than S crosses a cut, so some multiple of its stride leaves at most S on
  either side;
- two cuts: a tensor longer than 2 * S crosses two, so its stride divides S.

What these let through is refuted by looking at all orders, where there are few enough of them (see
[Note: refuted slices]). For a group, the least sum over all partitions of its tensors into at most
K buffers counts (`bound_partitions`), each buffer at its own least S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from odc.sharding.fit import Piece, Space, lay_any_order, num_states
from odc.sharding.partitions import Partitions

Kinds = list[tuple[Piece, int]]  # (piece, how many of it)


def round_up(value: int, unit: int) -> int:
    """Returns the first multiple of `unit` from `value` on."""
    return -(-value // unit) * unit


def volume(kinds: Sequence[tuple[Piece, int]], space: Space) -> int:
    """Elements that the pieces take one after another with aligned starts, at least."""
    total = sum(space.aligned(piece.numel) * count for piece, count in kinds)
    return total - max((space.aligned(p.numel) - p.numel for p, _ in kinds), default=0)


def floor_slice(kinds: Sequence[tuple[Piece, int]], space: Space) -> int:
    """The bounds of one buffer that do not depend on S: volume, block and packing."""
    if not kinds:
        return 0
    ranks = space.ranks
    least = -(-volume(kinds, space) // ranks)
    num_blocks, in_blocks, common = 0, 0, 0
    for piece, count in sorted(kinds, key=lambda kind: -kind[0].block):
        full = piece.numel // piece.block
        num_blocks += full * count
        in_blocks += full * piece.block * count
        common = math.gcd(common, piece.block)
        least = max(
            least,
            piece.block * -(-num_blocks // ranks),
            common * -(-in_blocks // (common * ranks)),
        )
    return least


def least_slice(kinds: Sequence[tuple[Piece, int]], at_least: int, space: Space) -> int:
    """Returns the least S from `at_least` on that the cuts allow; `floor_slice` holds beside it."""
    if not kinds:
        return 0
    pieces = [piece for piece, _ in kinds]
    halves = sorted({-(-piece.numel // 2) for piece in pieces})
    now = at_least
    while True:
        ahead = next((half for half in halves if half > now), None)
        step = math.lcm(space.unit, *(p.stride for p in pieces if p.numel > 2 * now))
        found = round_up(now, step)
        if ahead is not None and found >= ahead:
            now = ahead
            continue
        now = _past_one_cut(pieces, found)
        if now == found:
            return found


def _past_one_cut(pieces: Sequence[Piece], slice_numel: int) -> int:
    """The least S from `slice_numel` on that the piece which asks most allows to cut once."""
    now = slice_numel
    for numel, _, stride in pieces:
        if numel <= now or now % stride == 0:
            continue
        whole = now // stride
        if numel > now + whole * stride:
            now = min(numel - whole * stride, (whole + 1) * stride)
    return now


@dataclass
class SliceTable:
    """The least S known for every sub-multiset of the kinds, raised only where it is asked for.

    [Note: refuted slices]
    Where all lengths and blocks of some tensors are multiples of G, and G of the alignment, every
    slice holds a multiple of G of them. Moving what crosses a cut to that end of the slice, and the
    rest together, turns a layout at S into one at floor(S / G) * G. So one look at all orders at
    that multiple of G speaks for all S up to the next. Tensors without blocks are left out of it:
    they fit into what is left, or only ask for more.

    Attributes:
        slices: lower bounds of S for every sub-multiset, in elements.
        max_states: sub-multisets over which all orders of a part are tried.
    """

    partitions: Partitions
    space: Space
    max_states: int = 4_000
    slices: np.ndarray = field(init=False)
    _floored: set[int] = field(default_factory=set)
    _settled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.slices = self._first()
        self._floored.add(0)
        self._settled.add(0)

    def raise_bound(self, subset: int) -> bool:
        """Raises the S of a sub-multiset if it can; returns False where nothing more is known."""
        if subset in self._settled:
            return False
        kinds = self.partitions.kinds_of(subset)
        before = int(self.slices[subset])
        if subset not in self._floored:
            self._floored.add(subset)
            least = max(before, floor_slice(kinds, self.space))
            self.slices[subset] = least_slice(kinds, least, self.space)
            return True
        after = self._refute(kinds, before)
        if after == before:
            self._settled.add(subset)
            return False
        self.slices[subset] = after
        return True

    def step_over(self, subset: int, step: int) -> None:
        """Goes on to the least S that the cuts allow, `step` or more above the present one."""
        kinds = self.partitions.kinds_of(subset)
        self.slices[subset] = least_slice(kinds, int(self.slices[subset]) + step, self.space)
        self._settled.discard(subset)

    def _refute(self, kinds: Kinds, slice_numel: int) -> int:
        """Returns the least S from `slice_numel` on that no look at all orders rules out."""
        rigid = [(piece, count) for piece, count in kinds if piece.block > 1]
        common = math.gcd(*(size for piece, _ in rigid for size in piece[:2]))
        if not rigid or common % self.space.alignment or num_states(rigid) > self.max_states:
            return slice_numel
        multiple = slice_numel // common * common
        if lay_any_order(rigid, multiple, self.space) is not None:
            return slice_numel
        return least_slice(kinds, multiple + common, self.space)

    def least_partition(self) -> list[int]:
        """The parts, as sub-multisets, of the partition with the least sum of bounds."""
        rows = self.partitions.rows
        return [int(subset) for subset in rows[:, self.partitions.least(self.slices)]]

    def _first(self) -> np.ndarray:
        """Volume, block and two cuts of all sub-multisets at once."""
        parts, space = self.partitions, self.space
        digits = parts.digits
        sizes = np.array([sum(p.numel * c for p, c in unit) for unit in parts.units], np.int64)
        base = -(-(digits @ sizes) // space.ranks)
        for j, unit in enumerate(parts.units):
            largest = max(piece.block for piece, _ in unit)
            np.maximum(base, np.where(digits[:, j] > 0, largest, 0), out=base)
        longest = sorted(
            ((p.numel, p.stride, j) for j, unit in enumerate(parts.units) for p, _ in unit),
            reverse=True,
        )
        limit = 1 << 61
        found = np.full(len(base), limit, np.int64)
        step = np.full(len(base), space.unit, np.int64)
        edges = [numel for numel, _, _ in longest]
        for j in range(len(longest) + 1):
            # Here 2 * S >= numel of piece j and of all shorter ones, so those ask for nothing.
            low = -(-edges[j] // 2) if j < len(edges) else 0
            start = np.maximum(base, low)
            slices = -(-start // step) * step
            high = -(-edges[j - 1] // 2) if j else limit
            has = digits[:, longest[j - 1][2]] > 0 if j else np.ones(len(base), bool)
            legal = (slices < high) | ~has
            np.minimum(found, np.where(legal, slices, limit), out=found)
            if j < len(longest):
                step = _lcm_where(step, longest[j][1], digits[:, longest[j][2]] > 0)
        found[0] = 0
        return found


def _lcm_where(step: np.ndarray, stride: int, where: np.ndarray) -> np.ndarray:
    """lcm(step, stride) where asked; one too large to matter stays at 2**40 * its own factor."""
    cofactor = stride // np.gcd(step, stride)
    fits = step <= (1 << 60) // cofactor
    return np.where(where, np.where(fits, step * np.where(fits, cofactor, 1), 1 << 60), step)


def bound_partitions(table: SliceTable, max_rounds: int = 400) -> tuple[int, list[int]]:
    """Returns (least sum of S, the sub-multisets that reach it) over all partitions.

    Best first: the partition with the least sum has its parts raised until it stays the least.
    Fewer rounds give a lower bound that is lower.
    """
    for _ in range(max_rounds):
        parts = table.least_partition()
        if not any([table.raise_bound(subset) for subset in parts]):
            break
    parts = table.least_partition()
    return int(table.slices[parts].sum()), [subset for subset in parts if subset]
