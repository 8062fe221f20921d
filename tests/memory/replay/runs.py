"""Runs for the bounds, as arrays: passes over equal pages, and small random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay.accesses import Accesses, Residency

COMPUTE_NS = 1_000_000
Hold = tuple[int, int, int, bool, bool, bool, bool]  # page, first, last, through, c, d, dies


def accesses_of(
    compute_ns: Sequence[int],
    holds: Sequence[Hold],
    frames: Sequence[int],
    in_pass: Sequence[int] | None = None,
) -> Accesses:
    n = len(compute_ns)
    holds = sorted(holds, key=lambda hold: (hold[1], hold[0]))
    columns = [np.array(c) for c in zip(*holds, strict=True)]
    passes = np.zeros(n, np.int64) if in_pass is None else np.array(in_pass)
    return Accesses(
        np.array(compute_ns, np.int64),
        passes,
        passes,
        np.ones(n, bool),
        np.array(frames, np.int64) * FRAME_BYTES,
        np.array(frames, np.int64),
        *columns,
    )


def passes(kind: str, num_pages: int, repeats: int, frames: int = 1) -> Accesses:
    """Passes over equal pages, each pinned while it computes.

    ``forward``: 0..N-1; ``palindrome``: forward and backward; ``dirty``: the same, pages change
    in the backward; ``optimizer``: forward, backward, and a third sweep in which they change.
    """
    up = list(range(num_pages))
    sweeps = {
        "forward": [(up, False)],
        "palindrome": [(up, False), (up[::-1], False)],
        "dirty": [(up, False), (up[::-1], True)],
        "optimizer": [(up, False), (up[::-1], False), (up, True)],
    }[kind]
    order = [(p, d, r) for r in range(repeats) for pages, d in sweeps for p in pages]
    holds = [(p, i, i, True, False, d, False) for i, (p, d, _) in enumerate(order)]
    return accesses_of(
        [COMPUTE_NS] * len(order), holds, [frames] * num_pages, [r for *_, r in order]
    )


def bandwidth(ratio: float, frames: int = 1) -> float:
    """Bytes/s at which moving a page takes ``ratio`` times the computation of an access."""
    return frames * FRAME_BYTES / (ratio * COMPUTE_NS / 1e9)


@dataclass(frozen=True)
class Tiny:
    """A run small enough for brute force. ``load_ticks``, ``store_ticks``: for one frame."""

    accesses: Accesses
    capacity: int
    load_ticks: int
    store_ticks: int
    half_duplex: bool
    initial: Residency

    @property
    def rates(self) -> tuple[float, float]:
        tick_s = COMPUTE_NS / 1e9
        return FRAME_BYTES / (self.load_ticks * tick_s), FRAME_BYTES / (self.store_ticks * tick_s)


def tiny(seed: int, most_pages: int = 5, most_accesses: int = 8) -> Tiny:
    """A random run: sizes of 1 to 3 frames, holds over several accesses, all kinds of content."""
    rng = random.Random(seed)
    num_pages = rng.randint(2, most_pages)
    n = rng.randint(3, most_accesses)
    frames = [rng.choice((1, 1, 1, 2, 3)) for _ in range(num_pages)]
    compute = [rng.choice((0, 1, 1, 2, 3)) * COMPUTE_NS for _ in range(n)]
    soil = rng.choice((0.0, 0.4, 0.8))  # how much is dirtied
    holds: list[Hold] = []
    until = [-1] * num_pages
    for at in range(n):
        for page in rng.sample(range(num_pages), rng.choice((0, 1, 1, 1, 2))):
            if until[page] >= at:
                continue
            last = min(at + rng.choice((0, 0, 0, 1)), n - 1)
            through = compute[last] > 0 and rng.random() < 0.7
            until[page] = last
            creates = soil > 0 and rng.random() < 0.25
            dirties = creates or rng.random() < soil
            holds.append((page, at, last, through, creates, dirties, False))
    if not holds:
        return tiny(seed + 1_000_000, most_pages, most_accesses)
    holds = _with_deaths(holds, rng if soil else None)
    accesses = accesses_of(compute, holds, frames)
    least = int(accesses.pinned_frames().max())
    capacity = rng.randint(least, max(least, sum(frames) - 1))
    return Tiny(
        accesses,
        capacity,
        rng.choice((1, 1, 2, 3)),
        rng.choice((1, 1, 2, 3)),
        rng.random() < 0.4,
        _residency(accesses, capacity, rng),
    )


def _with_deaths(holds: list[Hold], rng: random.Random | None) -> list[Hold]:
    """Content dies before it is created anew, and now and then for good."""
    made = []
    for page, first, last, through, creates, dirties, _ in holds:
        after = [h for h in holds if h[0] == page and h[1] > first]
        dies = after[0][4] if after else rng is not None and rng.random() < 0.3
        made.append((page, first, last, through, creates, dirties, dies))
    return made


def _residency(accesses: Accesses, capacity: int, rng: random.Random) -> Residency:
    initial = Residency.cold(accesses.num_pages)
    if rng.random() < 0.5:
        return initial
    for page in rng.sample(range(accesses.num_pages), accesses.num_pages):
        taken = int(accesses.page_frames[initial.resident].sum())
        if taken + accesses.page_frames[page] <= capacity and rng.random() < 0.6:
            initial.resident[page] = True
            initial.dirty[page] = rng.random() < 0.5
    return accesses.start_from(initial)
