"""Puts columns together: batches into tables, sessions into one history. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Table = dict[str, np.ndarray]
"""Equally long columns by name."""


def num_rows(table: Table) -> int:
    """Return the number of rows."""
    return len(next(iter(table.values()))) if table else 0


def concatenate(parts: Sequence[Table], empty: Table) -> Table:
    """Join tables; `empty` gives the columns and types.

    The columns of `parts` are taken out while they are joined, so that only one of them is held
    twice at a time.
    """
    joined: Table = {}
    for name, nothing in empty.items():
        joined[name] = np.concatenate([nothing, *(part.pop(name) for part in parts)])
    return joined


def select(table: Table, rows: np.ndarray) -> Table:
    """Return the rows of a mask or index array."""
    return {name: column[rows] for name, column in table.items()}


def latest_rows(
    step: np.ndarray, session: np.ndarray, finished: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return a mask of the rows whose step was not done again by a later session.

    A step is taken from the last session that finished it (wrote a `step` row), else from the last
    one that began it.

    Args:
        step: Step of every row.
        session: Session of every row.
        finished: Steps and sessions of all `step` rows.
    """
    if not len(step):
        return np.zeros(0, bool)
    span = int(session.max(initial=0)) + 1
    pairs = step.astype(np.int64) * span + session
    unique, inverse = np.unique(pairs, return_inverse=True)
    done_step, done_session = finished
    inside = done_session < span
    done = done_step[inside].astype(np.int64) * span + done_session[inside]
    score = unique % span + span * np.isin(unique, done)
    pair_step = unique // span
    steps, step_index = np.unique(pair_step, return_inverse=True)
    best = np.full(len(steps), -1, np.int64)
    np.maximum.at(best, step_index, score)
    keep: np.ndarray = (score == best[step_index])[inverse]
    return keep


def action_steps(actions: Table, need: Table) -> np.ndarray:
    """Return the step in which each action happened, i64; -1 if there is no need to tell by.

    An action that served a need belongs to the need's step; any other (a prefetch, a write-back)
    to the step of the last need before it, and to the first step if there is none. Rows of
    different sessions are never matched.
    """
    found = np.full(num_rows(actions), -1, np.int64)
    action_session = actions.get("session", np.zeros(len(found), np.int16))
    need_session = need.get("session", np.zeros(num_rows(need), np.int16))
    for session in np.unique(action_session):
        rows = np.flatnonzero(action_session == session)
        needs = np.flatnonzero(need_session == session)
        if len(needs):
            found[rows] = _steps_in_session(select(actions, rows), select(need, needs))
    return found


def _steps_in_session(actions: Table, need: Table) -> np.ndarray:
    by_time = np.argsort(need["t_ns"], kind="stable")
    at = np.searchsorted(need["t_ns"][by_time], actions["t_ns"], side="right") - 1
    steps = need["step"][by_time][np.maximum(at, 0)].astype(np.int64)
    by_seq = np.argsort(need["seq"], kind="stable")
    seqs = need["seq"][by_seq]
    at = np.minimum(np.searchsorted(seqs, actions["seq"]), len(seqs) - 1)
    served = (actions["seq"] >= 0) & (seqs[at] == actions["seq"])
    steps[served] = need["step"][by_seq][at[served]]
    return steps
