"""Least elapsed time of passes over equal clean pages, which move whole: Albers, Garg, Leonardi.

S. Albers, N. Garg, S. Leonardi, "Minimizing stall time in single and parallel disk systems" (2000):
a load that takes F computations begins right after request i and ends right before request j; the
requests between overlap with it, and F - (j - i - 1) is stall. With whole F and computations of one
unit every schedule can be written so. Their program is a lower bound for whole pages as it stands;
where a schedule meets it, both are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

Terms = list[tuple[int, float]]


def least_elapsed(order: Sequence[int], capacity: int, load_units: int) -> float:
    """In units of one computation; nothing is there at the start."""
    n = len(order)
    spans = [(i, j) for i in range(n) for j in range(i + 1, min(n, i + load_units + 1) + 1)]
    cost = [float(load_units - (j - i - 1)) for i, j in spans]
    loaded: list[Terms] = [[] for _ in spans]  # of each span: what may be loaded, evicted in it
    evicted: list[Terms] = [[] for _ in spans]
    at_most: list[tuple[Terms, float]] = [(terms, 1.0) for terms in _overlaps(spans, n)]
    equal: list[tuple[Terms, float]] = []

    def variables(inside: list[int], of_span: list[Terms]) -> Terms:
        made = []
        for span in inside:
            made.append((len(cost), 1.0))
            of_span[span].append(made[-1])
            cost.append(0.0)
        return made

    for page in set(order):
        uses = [0, *(t + 1 for t, p in enumerate(order) if p == page), n + 1]
        for at in range(len(uses) - 1):
            inside = [s for s, (i, j) in enumerate(spans) if i >= uses[at] and j <= uses[at + 1]]
            loads = variables(inside, loaded) if at < len(uses) - 2 else []
            goes = variables(inside, evicted) if at else []
            if not at:
                equal.append((loads, 1.0))
            elif loads:
                equal.append((loads + [(v, -1.0) for v, _ in goes], 0.0))
            at_most.append((goes, 1.0))
    at_most.append((variables(list(range(len(spans))), evicted), float(capacity)))  # free frames
    for span in range(len(spans)):
        equal += [(of[span] + [(span, -1.0)], 0.0) for of in (loaded, evicted)]
    upper, limit = _matrix(at_most, len(cost))
    same, value = _matrix(equal, len(cost))
    found = linprog(cost, upper, limit, same, value, bounds=(0, 1), method="highs")
    return n + float(found.fun)


def _overlaps(spans: list[tuple[int, int]], n: int) -> list[Terms]:
    """One load at a time: in every request, and in every pause that lies inside a load."""
    busy: list[Terms] = [[] for _ in range(2 * n + 2)]
    for span, (i, j) in enumerate(spans):
        for request in range(i + 1, j):
            busy[request].append((span, 1.0))
        pauses = range(i + 1, j - 1) if j > i + 1 else range(i, j)
        for pause in pauses:
            busy[n + 1 + pause].append((span, 1.0))
    return busy


def _matrix(
    rows: list[tuple[Terms, float]], num_variables: int
) -> tuple[sparse.csr_array, np.ndarray]:
    entries = [(r, v, x) for r, (terms, _) in enumerate(rows) for v, x in terms]
    row, variable, value = zip(*entries, strict=True)
    matrix = sparse.csr_array((value, (row, variable)), (len(rows), num_variables))
    return matrix, np.array([limit for _, limit in rows])
