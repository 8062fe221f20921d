"""The last stage of both models: a regression weighs what was learned against popularity.

A network may know the rest of this pass well and guess at the next pass worse than popularity does.
So its logit is combined with the popularity logits by one `LogisticRegression` for each distance in
the pass from the observed to the scored set, fitted on the validation part, which the network was
not fitted on.
"""

from __future__ import annotations

import numpy as np

from predictor.features import HALF_LIVES, BoolArray, Features, FloatArray, IntArray, Visits

MAX_ROWS = 20_000  # most (visit, member) pairs that one regression is fitted on
WIDTH = 2 + len(HALF_LIVES)  # constant, learned logit, popularity logits


def plain_stack(num_sets: int) -> FloatArray:
    """The stack that takes the learned logit as it is, (num_sets, num_sets, WIDTH)."""
    stack = np.zeros((num_sets, num_sets, WIDTH), dtype=np.float32)
    stack[:, :, 1] = 1.0
    return stack


def fit_stack(
    learned: FloatArray, features: Features, visits: Visits, rows: IntArray, seed: int
) -> FloatArray:
    """Weights of the constant, the learned logit and the popularity logits.

    One regression serves all pairs of sets that are equally far apart and both in one pass, one all
    pairs equally far apart across the border of passes. Where the labels of a group are all alike,
    the learned logit stays as it is.

    Args:
        learned: (r, num_sets, max_members) logits of the network after the visits `rows`.
        features: of all visits.
        visits: all visits.
        rows: (r,) rows of the validation part whose labels are known.
        seed: of the choice of pairs where there are more than `MAX_ROWS`.

    Returns:
        (num_sets, num_sets, WIDTH): by observed set, by scored set.
    """
    num_sets = visits.structure.num_sets
    rng = np.random.default_rng(seed)
    exists = visits.structure.member_mask()
    positions = np.arange(num_sets)
    ahead = positions - positions[:, None]  # (observed, scored)
    row_ahead = ahead[visits.set_index[rows]]
    stack = plain_stack(num_sets)
    for distance in range(1 - num_sets, num_sets):
        at, sets = np.nonzero(row_ahead == distance)
        if len(at) * exists.shape[1] > MAX_ROWS:
            chosen = rng.choice(len(at), max(1, MAX_ROWS // exists.shape[1]), replace=False)
            at, sets = at[chosen], sets[chosen]
        base = features.base_logits(rows[at])[np.arange(len(at)), sets]  # (p, K, max_members)
        inputs = np.concatenate([learned[at, sets][:, None], base], axis=1).swapaxes(1, 2)
        labels = visits.used[features.following[rows[at], sets]]
        weights = _fit(inputs[exists[sets]], labels[exists[sets]])
        if weights is not None:
            stack[ahead == distance] = weights
    return stack


def _fit(inputs: FloatArray, labels: BoolArray) -> FloatArray | None:
    if labels.all() or not labels.any():
        return None
    # Here, so that loading an LSTM for the hook does not wait for scikit-learn.
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=200).fit(inputs, labels)
    return np.concatenate([model.intercept_, model.coef_[0]]).astype(np.float32)
