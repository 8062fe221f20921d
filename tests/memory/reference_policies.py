"""Eviction policies written anew in a few lines, for strings of references to pages of one size."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Link, Workload, simulate
from odc.memory.victims import EvictionPolicy

FAST = Link(1e15, latency_ns=0, frame_move_ns=0)


def random_order(seed: int, num_groups: int = 12, length: int = 300) -> list[int]:
    rng = random.Random(seed)
    weights = [1 / (1 + g) for g in range(num_groups)] if seed % 2 else None
    order = rng.choices(range(num_groups), weights, k=length)
    return [g for at, g in enumerate(order) if at == 0 or order[at - 1] != g]


def total_misses(workload: Workload, room: int, eviction: EvictionPolicy, **options: object) -> int:
    """What the shipped pager misses with room for so many pages, on a link that takes no time."""
    result = simulate(
        workload,
        budget_bytes=room * FRAME_BYTES,
        link=FAST,
        eviction=eviction,
        **options,  # type: ignore[arg-type]
    )
    return sum(result.misses)


def lru_misses(order: Sequence[int], room: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for group in order:
        if group in cache:
            cache.move_to_end(group)
            continue
        misses += 1
        if len(cache) == room:
            cache.popitem(last=False)
        cache[group] = None
    return misses


def mru_misses(order: Sequence[int], room: int) -> int:
    stack: list[int] = []  # the last used last
    misses = 0
    for group in order:
        if group in stack:
            stack.remove(group)
        else:
            misses += 1
            if len(stack) == room:
                stack.pop()
        stack.append(group)
    return misses


def fifo_misses(order: Sequence[int], room: int) -> int:
    queue: list[int] = []
    misses = 0
    for group in order:
        if group not in queue:
            misses += 1
            queue = [*queue[len(queue) == room :], group]
    return misses


def lfu_misses(order: Sequence[int], room: int, half_life: float) -> int:
    """A use counts half after ``half_life`` accesses; counts outlive an eviction."""
    cache: set[int] = set()
    misses = 0
    for now, group in enumerate(order):
        if group not in cache:
            misses += 1
            if len(cache) == room:
                counts = {
                    g: sum(0.5 ** ((now - t) / half_life) for t in range(now) if order[t] == g)
                    for g in cache
                }
                cache.remove(min(cache, key=lambda g: counts[g]))
            cache.add(group)
    return misses


def gdsf_misses(order: Sequence[int], room: int) -> int:
    """All of one size and cost; of equal values the page with the highest number goes."""
    clock, misses = 0, 0
    value: dict[int, int] = {}
    frequency: dict[int, int] = {}
    for group in order:
        if group not in value:
            misses += 1
            if len(value) == room:
                victim = min(value, key=lambda g: (value[g], -g))
                clock = value.pop(victim)
            frequency[group] = 0
        frequency[group] += 1
        value[group] = clock + frequency[group]
    return misses


def fewest_misses(order: Sequence[int], room: int) -> int:
    """L. A. Belady's MIN."""
    cache: set[int] = set()
    misses = 0
    for at, group in enumerate(order):
        if group in cache:
            continue
        misses += 1
        if len(cache) == room:
            rest = order[at + 1 :]
            cache.remove(max(cache, key=lambda g: rest.index(g) if g in rest else len(order)))
        cache.add(group)
    return misses
