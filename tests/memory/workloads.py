"""Workloads made by hand: plain reference strings, a dense model, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Workload
from odc.memory.replay.workload import Bundle, RecordedVisit

COMPUTE_NS = 20_000_000
P, G, M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT


def page_columns(rows: list[tuple[int, Kind, int, int, int]]) -> dict[str, np.ndarray]:
    """``pages.arrow`` from (group, kind, slot, set, expert); every page is one frame."""
    groups, kinds, slots, sets, experts = (np.array(c, np.int64) for c in zip(*rows, strict=True))
    count = len(rows)
    return {
        "page": np.arange(count),
        "group": groups,
        "kind": kinds,
        "slot": slots,
        "part": np.zeros(count, np.int64),
        "bytes": np.full(count, FRAME_BYTES),
        "module_path": np.array([f"g{g}" for g in groups]),
        "layer": groups,
        "expert": experts,
        "set": sets,
    }


def references(groups: Sequence[int], num_groups: int) -> Workload:
    """One step that reads single-page groups in the given order."""
    pages = page_columns([(g, P, 0, -1, -1) for g in range(num_groups)])
    visits = [
        RecordedVisit(0, 0, Phase.FORWARD, 0, 1, [Bundle(g, [(P, Op.READ, 0)], COMPUTE_NS)])
        for g in groups
    ]
    visits[0].begins_pass = True
    return Workload(pages, visits, [])


def _update(group: int) -> list[tuple[Kind, Op, int]]:
    return [
        (P, Op.READ, 0),
        (G, Op.CREATE, COMPUTE_NS),
        (P, Op.WRITE, 0),
        (M, Op.WRITE, 0),
        (G, Op.DROP, COMPUTE_NS // 4),
    ]


def dense(num_layers: int, steps: int) -> Workload:
    """Forward through all layers, backward with the update of each layer in it."""
    rows = [
        row
        for g in range(num_layers)
        for row in ((g, P, 0, -1, -1), (g, G, 0, -1, -1), (g, M, 0, -1, -1), (g, M, 1, -1, -1))
    ]
    visits = []
    for step in range(steps):
        first = len(visits)
        for g in range(num_layers):
            bundle = Bundle(g, [(P, Op.READ, 0)], COMPUTE_NS)
            visits.append(RecordedVisit(step, 0, Phase.FORWARD, 0, 1, [bundle]))
        visits += [
            RecordedVisit(step, 0, Phase.BACKWARD, 0, 1, [Bundle(g, _update(g))])
            for g in reversed(range(num_layers))
        ]
        visits[first].begins_pass = True
    return Workload(page_columns(rows), visits, [])


def with_evaluation(workload: Workload, num_layers: int) -> Workload:
    """An evaluation behind each step, then a save that reads all moments."""
    visits: list[RecordedVisit] = []
    for step in workload.steps:
        visits += [v for v in workload.visits if v.step == step]
        first = len(visits)
        for g in range(num_layers):
            bundle = Bundle(g, [(P, Op.READ, 0)], COMPUTE_NS)
            visits.append(RecordedVisit(step, 0, Phase.EVALUATION, 1, 1, [bundle]))
        for g in range(num_layers):
            bundle = Bundle(g, [(M, Op.READ, 0)])
            visits.append(RecordedVisit(step, 0, Phase.OTHER, 1, 0, [bundle]))
        visits[first].begins_pass = True
    return Workload(workload.pages, visits, workload.sets)


def experts(num_sets: int, members: int, top: int, steps: int, seed: int = 0) -> Workload:
    """Sets of which ``top`` members are used, some far oftener than others; with a backward."""
    rng = np.random.default_rng(seed)
    groups = [tuple(range(s * members, (s + 1) * members)) for s in range(num_sets)]
    rows = [
        row
        for s in range(num_sets)
        for e, g in enumerate(groups[s])
        for row in ((g, P, 0, s, e), (g, G, 0, s, e), (g, M, 0, s, e), (g, M, 1, s, e))
    ]
    weight = 1.0 / np.arange(1, members + 1)
    visits = []
    for step in range(steps):
        first = len(visits)
        used = [
            sorted(rng.choice(members, top, False, weight / weight.sum())) for _ in range(num_sets)
        ]
        for s in range(num_sets):
            bundles = [Bundle(groups[s][e], [(P, Op.READ, 0)], COMPUTE_NS) for e in used[s]]
            visits.append(RecordedVisit(step, 0, Phase.FORWARD, 0, 64, bundles))
        for s in reversed(range(num_sets)):
            bundles = [Bundle(groups[s][e], _update(groups[s][e])) for e in reversed(used[s])]
            visits.append(RecordedVisit(step, 0, Phase.BACKWARD, 0, 64, bundles))
        visits[first].begins_pass = True
    return Workload(page_columns(rows), visits, groups)


def updated_in_step(workload: Workload, members: int) -> Workload:
    """``experts`` with all updates behind the last backward, group by group."""
    visits: list[RecordedVisit] = []
    for step in workload.steps:
        touched: dict[int, list[int]] = {}
        for visit in (v for v in workload.visits if v.step == step):
            if visit.phase == Phase.BACKWARD:
                bundles = [Bundle(b.group, b.rows[:2]) for b in visit.bundles]
                groups = sorted(b.group for b in bundles)
                touched[groups[0] // members] = groups
                visit = replace(visit, bundles=bundles)
            visits.append(visit)
        for _, groups in sorted(touched.items()):
            bundles = [Bundle(g, [(G, Op.READ, 0), *_update(g)[2:]]) for g in groups]
            visits.append(RecordedVisit(step, 0, Phase.OPTIMIZER, 0, 64, bundles))
    return Workload(workload.pages, visits, workload.sets)


def in_turn(pattern: str, num_layers: int = 8, compute_ns: int = COMPUTE_NS) -> Workload:
    """A pass a letter, each a step of its own; layers of one frame.

    T trains (context 0), A and B go forward and backward through frozen weights (0 and 2, as
    micro-steps do), E and R only forward: E through the same layers (1), R through others (3).
    """
    rows = [
        row
        for g in range(num_layers)
        for row in ((g, P, 0, -1, -1), (g, G, 0, -1, -1), (g, M, 0, -1, -1), (g, M, 1, -1, -1))
    ]
    rows += [(g, P, 0, -1, -1) for g in range(num_layers, 2 * num_layers)]
    visits: list[RecordedVisit] = []
    for step, letter in enumerate(pattern):
        ctx, first = {"T": 0, "A": 0, "B": 2, "E": 1, "R": 3}[letter], len(visits)
        groups = range(num_layers, 2 * num_layers) if letter == "R" else range(num_layers)
        phase = Phase.FORWARD if letter in "TAB" else Phase.EVALUATION
        for g in groups:
            bundle = Bundle(g, [(P, Op.READ, 0)], compute_ns)
            visits.append(RecordedVisit(step, 0, phase, ctx, 1, [bundle]))
        for g in reversed(groups) if letter in "TAB" else ():
            bundle = Bundle(g, [(P, Op.READ, 0)], compute_ns)
            if letter == "T":
                bundle = Bundle(g, _update(g))
            visits.append(RecordedVisit(step, 0, Phase.BACKWARD, ctx, 1, [bundle]))
        visits[first].begins_pass = True
    return Workload(page_columns(rows), visits, [])
