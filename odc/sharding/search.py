"""The search for the least sum of slices: which tensors share a sub-buffer, in which order, at
which S.

Best first over all partitions: of the partition with the least sum of known bounds, a part that has
no layout yet is laid out at its bound; where no order fits, its bound moves to the next S that the
cuts allow. The first partition whose parts all have a layout is the best there is. A part is shared
by many partitions, so what is learned of it counts for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from odc.sharding.bounds import Kinds, SliceTable, floor_slice, least_slice
from odc.sharding.fit import Piece, Space, lay_any_order, lay_in_order, num_states
from odc.sharding.partitions import split_units

Layout = list[tuple[Piece, int]]  # (piece, start)


@dataclass(frozen=True)
class Effort:
    """How far the search goes.

    Attributes:
        tolerance: S may be this much (relative) above the least one: the step of the scan, and the
            gap at which the search ends.
        max_states: sub-multisets over which all orders of a part are tried; above it a few are.
        max_rounds: layouts and refinements, before the best partition found so far is taken.
        max_rows: partitions, counted with their order.
    """

    tolerance: float = 5e-5
    max_states: int = 4_000
    max_rounds: int = 600
    max_rows: int = 400_000


PROVE = Effort(tolerance=2e-6, max_states=400_000, max_rounds=100_000, max_rows=4_000_000)


@dataclass(frozen=True)
class Buffer:
    """A sub-buffer: S and where its pieces start."""

    slice_numel: int
    layout: Layout


@dataclass
class Found:
    """What a search found: the buffers, and what their S add up to."""

    buffers: list[Buffer]

    @property
    def slice_numel(self) -> int:
        """Sum of S over the buffers."""
        return sum(buffer.slice_numel for buffer in self.buffers)


@dataclass
class Search:
    """The state of one search over the partitions of `kinds` into at most `max_buffers` parts."""

    kinds: Kinds
    space: Space
    max_buffers: int
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        partitions = split_units(self.kinds, self.max_buffers, self.effort.max_rows)
        self.table = SliceTable(partitions, self.space, self.effort.max_states)
        self.layouts: dict[int, Buffer] = {0: Buffer(0, [])}

    def run(self, start: Found | None = None) -> Found:
        """Returns the best buffers found; `start` is what is known already."""
        best, table = start, self.table
        for _ in range(self.effort.max_rounds):
            parts = table.least_partition()
            bound = int(table.slices[parts].sum())
            if best is not None and best.slice_numel <= bound * (1 + self.effort.tolerance):
                return best
            unknown = [subset for subset in parts if subset not in self.layouts]
            if not unknown:
                return self._take(parts, best)
            if not any([table.raise_bound(subset) for subset in unknown]):
                self._lay_out(max(unknown, key=lambda subset: int(table.slices[subset])))
        return self._finish(best)

    def _lay_out(self, subset: int) -> None:
        """Lays a part out at its bound, or raises the bound."""
        slice_numel = int(self.table.slices[subset])
        kinds = self.table.partitions.kinds_of(subset)
        layout = lay_out(kinds, slice_numel, self.space, self.effort.max_states)
        if layout is not None:
            self.layouts[subset] = Buffer(slice_numel, layout)
        else:
            self.table.step_over(subset, max(1, int(slice_numel * self.effort.tolerance)))

    def _take(self, row: Sequence[int], best: Found | None) -> Found:
        found = Found([self.layouts[s] for s in row if s])
        return found if best is None or found.slice_numel < best.slice_numel else best

    def _finish(self, best: Found | None) -> Found:
        """Lays out the parts of the partition that looks best now, whatever it takes."""
        parts = self.table.least_partition()
        for subset in parts:
            while subset not in self.layouts:
                if best is not None and int(self.table.slices[parts].sum()) >= best.slice_numel:
                    return best
                if not self.table.raise_bound(subset):
                    self._lay_out(subset)
        return self._take(parts, best)


def lay_out(kinds: Kinds, slice_numel: int, space: Space, max_states: int) -> Layout | None:
    """Returns a layout at S, or None: a few orders first, then all where there are few enough."""
    for key in (_long_first, _wide_first, _short_last):
        order = [piece for piece, count in sorted(kinds, key=key) for _ in range(count)]
        starts = lay_in_order(order, slice_numel, space, refill=True)
        if starts is not None:
            return list(zip(order, starts, strict=True))
    if num_states(kinds) > max_states:
        return None
    return lay_any_order(kinds, slice_numel, space)


def _long_first(kind: tuple[Piece, int]) -> tuple[int, ...]:
    return (-kind[0].numel, -kind[0].stride)


def _wide_first(kind: tuple[Piece, int]) -> tuple[int, ...]:
    return (-kind[0].stride, -kind[0].numel)


def _short_last(kind: tuple[Piece, int]) -> tuple[int, ...]:
    return (kind[0].block == 1, kind[0].stride, -kind[0].numel)


def first_slice(order: Sequence[Piece], space: Space, tolerance: float) -> tuple[int, list[int]]:
    """Returns (S, starts) of the least S found at which the pieces fit in the given order.

    The scan goes in steps of `tolerance * S`, and of a fiftieth of what it is above its bound.
    """
    counted: dict[Piece, int] = {}
    for piece in order:
        counted[piece] = counted.get(piece, 0) + 1
    kinds = list(counted.items())
    slice_numel = bound = least_slice(kinds, floor_slice(kinds, space), space)
    while True:
        starts = lay_in_order(order, slice_numel, space)
        if starts is not None:
            return slice_numel, starts
        step = max(1, int(slice_numel * tolerance), (slice_numel - bound) // 50)
        slice_numel = least_slice(kinds, slice_numel + step, space)
