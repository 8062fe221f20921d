"""Earliest fit: where a tensor may start, and whether a set of tensors fits m slices of S.

A buffer of `ranks * slice_numel` elements is cut at every multiple of S. A tensor is contiguous,
and a cut inside it must fall on one of its blocks: the cut at `k * S` is legal where
`k * S - start` is a multiple of the block. Starts are multiples of the alignment, and so is S; both
together mean that a tensor which crosses a cut starts a multiple of
`stride = lcm(block, alignment)` before it.

[Note: an order and a slice decide everything]
For a given order and S, giving each tensor the least legal start is optimal: the least legal start
grows with the free position, so starting earlier never hurts those that follow. A set fits exactly
where some order does, and the least end over all orders of a set depends only on the set
(Held-Karp). Both are used here; the earliest fit of one tensor costs O(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """What the layout needs of a tensor, in elements: equal pieces are interchangeable."""

    numel: int
    block: int  # at most numel
    stride: int  # lcm(block, alignment)


def make_piece(numel: int, block: int, alignment: int) -> Piece:
    """Returns the piece of a tensor of `numel` elements; all three are at least 1."""
    block = min(block, numel)
    return Piece(numel, block, math.lcm(block, alignment))


@dataclass(frozen=True)
class Space:
    """Ranks, and the alignment of starts and the unit of slices in elements."""

    ranks: int
    alignment: int
    unit: int  # a multiple of the alignment

    def aligned(self, position: int) -> int:
        """Returns the first aligned position from `position` on."""
        return -(-position // self.alignment) * self.alignment


def earliest_start(piece: Piece, free: int, slice_numel: int) -> int:
    """Returns the least legal start from the aligned position `free` on, or -1.

    A piece that needs two cuts, and whose stride does not divide S, starts nowhere.
    """
    numel, _, stride = piece
    cut = (free // slice_numel + 1) * slice_numel
    if free + numel <= cut:
        return free
    start = cut - (cut - free) // stride * stride
    if slice_numel % stride == 0:
        return start
    if start < cut and start + numel <= cut + slice_numel:
        return start
    if numel <= slice_numel:
        return cut
    start = cut + slice_numel - slice_numel // stride * stride
    return start if start + numel <= cut + 2 * slice_numel else -1


def lay_in_order(
    pieces: Sequence[Piece], slice_numel: int, space: Space, *, refill: bool = False
) -> list[int] | None:
    """Returns the start of every piece by earliest fit in the given order, or None.

    With `refill`, a piece goes into the first gap left by earlier ones that holds it.
    """
    limit, free = space.ranks * slice_numel, 0
    starts: list[int] = []
    gaps: list[tuple[int, int]] = []
    for piece in pieces:
        start = _from_gaps(piece, gaps, slice_numel, space) if gaps else -1
        if start < 0:
            start = earliest_start(piece, free, slice_numel)
            if start < 0 or start + piece.numel > limit:
                return None
            if refill and start > free:
                gaps.append((free, start))
            free = space.aligned(start + piece.numel)
        starts.append(start)
    return starts


def _from_gaps(piece: Piece, gaps: list[tuple[int, int]], slice_numel: int, space: Space) -> int:
    for place, (low, high) in enumerate(gaps):
        if high - low < piece.numel:
            continue
        start = earliest_start(piece, low, slice_numel)
        if start < 0 or start + piece.numel > high:
            continue
        rest = [(low, start), (space.aligned(start + piece.numel), high)]
        gaps[place : place + 1] = [gap for gap in rest if gap[1] > gap[0]]
        return start
    return -1


def num_states(kinds: Sequence[tuple[Piece, int]]) -> int:
    """How many sub-multisets there are: what `lay_any_order` goes over."""
    return math.prod(count + 1 for _, count in kinds)


def lay_any_order(
    kinds: Sequence[tuple[Piece, int]], slice_numel: int, space: Space
) -> list[tuple[Piece, int]] | None:
    """Returns (piece, start) of every piece in an order that fits, or None where none does.

    Exact: goes over all sub-multisets of `kinds`, which are (piece, how many of it).
    """
    steps, states = _steps(kinds)
    limit = space.ranks * slice_numel
    slack = limit - sum(piece.numel * count for piece, count in kinds)
    alignment = space.alignment
    ends = [-1] * states  # aligned end of the best order of each multiset
    used = [0] * states  # elements in each multiset
    came = [-1] * states  # the last piece of that order
    at = [0] * states  # where it starts
    ends[0] = 0
    for state in range(states - 1):
        free, taken = ends[state], used[state]
        if free < 0:
            continue
        for number, weight, period, full, piece in steps:
            if state % period >= full:
                continue
            start = earliest_start(piece, free, slice_numel)
            after = taken + piece.numel
            if start < 0 or start + piece.numel - after > slack:
                continue
            end = -(-(start + piece.numel) // alignment) * alignment
            following = state + weight
            if ends[following] < 0 or end < ends[following]:
                ends[following], came[following], at[following] = end, number, start
                used[following] = after
    if states > 1 and came[-1] < 0:
        return None
    found, state = [], states - 1
    while state:
        number = came[state]
        found.append((kinds[number][0], at[state]))
        state -= steps[number][1]
    return found[::-1]


def _steps(
    kinds: Sequence[tuple[Piece, int]],
) -> tuple[list[tuple[int, int, int, int, Piece]], int]:
    """Returns how a piece of each kind changes a state (a mixed-radix number), and how many
    states there are: (kind, its weight, period of its digit, weight of a full digit, piece).
    """
    steps, states = [], 1
    for number, (piece, count) in enumerate(kinds):
        steps.append((number, states, states * (count + 1), states * count, piece))
        states *= count + 1
    return steps, states
