"""Synthetic visits: a learnable dependence between sets, random routing, and traces of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from predictor.features import Structure, Visits
from profiler.writer import TraceWriter

MakeVisits = Callable[..., Visits]
WriteRun = Callable[[Path, Visits], Path]


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


def as_visits(structure: Structure, used: np.ndarray, tokens: int = 32) -> Visits:
    """Visits of whole passes, one pass a step; `used` is (num_passes * num_sets, max_members)."""
    n = len(used)
    return Visits(
        structure=structure,
        run=np.zeros(n, dtype=np.int64),
        step=np.arange(n) // structure.num_sets,
        phase=np.zeros(n, dtype=np.int64),
        set_index=np.arange(n) % structure.num_sets,
        tokens=np.full(n, tokens, dtype=np.int64),
        used=used & structure.member_mask()[np.arange(n) % structure.num_sets],
    )


def make_dependent(
    passes: int = 300, num_sets: int = 4, members: int = 16, seed: int = 0
) -> Visits:
    """Set 0 draws 4 members at random; each later set uses a permutation of the one before."""
    rng = np.random.default_rng(seed)
    permutations = [rng.permutation(members) for _ in range(num_sets)]
    used = np.zeros((passes * num_sets, members), dtype=bool)
    for first in range(0, len(used), num_sets):
        chosen = rng.choice(members, 4, replace=False)
        for index in range(num_sets):
            used[first + index, chosen] = True
            chosen = permutations[index][chosen]
    return as_visits(Structure.regular(num_sets, members), used)


def make_random(passes: int = 300, num_sets: int = 4, members: int = 16, seed: int = 0) -> Visits:
    """Each member is used independently, with a probability of its own that never changes."""
    rng = np.random.default_rng(seed)
    share = rng.beta(1.0, 2.0, size=(num_sets, members))
    used = rng.random((passes, num_sets, members)) < share
    return as_visits(Structure.regular(num_sets, members), used.reshape(-1, members))


def make_uneven(passes: int = 80, seed: int = 0) -> Visits:
    """Random visits of three sets of 5, 8 and 3 members."""
    rng = np.random.default_rng(seed)
    structure = Structure(
        tuple(tuple((2 * s, m) for m in range(n)) for s, n in enumerate((5, 8, 3)))
    )
    return as_visits(structure, rng.random((passes * 3, 8)) < 0.4)


@pytest.fixture(scope="session")
def dependent_visits() -> MakeVisits:
    return make_dependent


@pytest.fixture(scope="session")
def random_visits() -> MakeVisits:
    return make_random


@pytest.fixture(scope="session")
def uneven_visits() -> MakeVisits:
    return make_uneven


def write_trace(run_dir: Path, visits: Visits) -> Path:
    """Writes the visits as the trace of a run, among needs that no predictor may learn from."""
    structure = visits.structure
    group = {}
    rows = []
    for s, members in enumerate(structure.sets):
        for m, (layer, expert) in enumerate(members):
            group[s, m] = 100 + len(group)
            for kind in (0, 1):
                rows.append(
                    {
                        "page": len(rows),
                        "group": group[s, m],
                        "kind": kind,
                        "slot": 0,
                        "part": 0,
                        "bytes": 4096,
                        "module_path": f"layers.{layer}.moe.experts.{expert}",
                        "layer": layer,
                        "expert": expert,
                        "set": s,
                    }
                )
    with TraceWriter(run_dir / "trace") as writer:
        writer.write_pages(rows)
        for i in range(len(visits)):
            s, step = int(visits.set_index[i]), int(visits.step[i])
            for m in np.flatnonzero(visits.used[i])[::-1].tolist():  # any order within a station
                writer.need(2 * i, i, step, 0, int(visits.phase[i]), 0, group[s, m], 0, 0, 5,
                            int(visits.tokens[i]))  # fmt: skip
            # The backward of the set, and a gradient: neither is a forward visit.
            writer.need(2 * i + 1, i, step, 0, 2, 0, group[s, 0], 0, 0, 5, 1)
            writer.need(2 * i + 1, i, step, 0, 2, 0, group[s, 0], 1, 2, 0, 1)
    return run_dir


@pytest.fixture
def write_run() -> WriteRun:
    return write_trace
