"""Brute force, written from the constraints alone: every partition, order, start and S."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

Tensor = tuple[int, int]  # elements, elements of a block


def cuts_no_block(start: int, tensor: Tensor, slice_numel: int) -> bool:
    """Whether every boundary inside the tensor falls between two of its blocks."""
    numel, block = tensor
    boundaries = [k for k in range(start + 1, start + numel) if k % slice_numel == 0]
    return all((boundary - start) % block == 0 for boundary in boundaries)


def fits(tensors: Sequence[Tensor], slice_numel: int, ranks: int, alignment: int) -> bool:
    """Whether some order and some starts put the tensors into one buffer."""
    limit = ranks * slice_numel

    @lru_cache(None)
    def place(rest: tuple[Tensor, ...], free: int) -> bool:
        if not rest:
            return True
        for number, tensor in enumerate(rest):
            if tensor in rest[:number]:
                continue
            others = rest[:number] + rest[number + 1 :]
            for start in range(-(-free // alignment) * alignment, limit - tensor[0] + 1, alignment):
                if cuts_no_block(start, tensor, slice_numel) and place(others, start + tensor[0]):
                    return True
        return False

    return place(tuple(sorted(tensors)), 0)


def partitions(count: int, parts: int) -> Iterator[list[int]]:
    """Every way to give `count` tensors one of `parts` labels, equal ways once."""

    def label(chosen: list[int]) -> Iterator[list[int]]:
        if len(chosen) == count:
            yield chosen
            return
        for number in range(min(max(chosen, default=-1) + 2, parts)):
            yield from label([*chosen, number])

    yield from label([])


def best_slices(
    tensors: Sequence[Tensor], ranks: int, max_buffers: int, alignment: int, unit: int
) -> int:
    """The least sum of S over all partitions."""

    @lru_cache(None)
    def alone(part: tuple[Tensor, ...]) -> int:
        slice_numel = unit
        while not fits(part, slice_numel, ranks, alignment):
            slice_numel += unit
        return slice_numel

    best = 1 << 60
    for labels in partitions(len(tensors), max_buffers):
        parts = [
            tuple(sorted(t for t, own in zip(tensors, labels, strict=True) if own == label))
            for label in set(labels)
        ]
        best = min(best, sum(alone(part) for part in parts))
    return best


def random_instance(rng: random.Random) -> tuple[list[Tensor], int, int, int, int]:
    """Tensors, ranks, buffers, alignment and unit, small enough for brute force."""
    tensors = []
    for _ in range(rng.randint(1, 5)):
        row, rows = rng.choice([1, 1, 2, 3, 4, 5, 6, 7]), rng.randint(1, 8)
        numel, block = row * rows, row * rng.choice([1, 1, 2, 3])
        kind = rng.random()
        if kind < 0.2:
            block = 1
        elif kind < 0.3:
            block = numel
        tensors.append((numel, min(block, numel)))
    alignment = rng.choice([1, 1, 1, 2, 4])
    return tensors, rng.randint(1, 5), rng.randint(1, 3), alignment, alignment * rng.randint(1, 3)
