"""The two scorers that need no training, and the popularity that the learned ones contain."""

from __future__ import annotations

import numpy as np
import pytest

from odc.memory.scores import PopularityScorer, ReplayScorer
from predictor.features import MEDIUM, PopularityBank


def reference_popularity(history: list[np.ndarray], half_life: float, prior: float) -> np.ndarray:
    """A decayed mean written as the sum over all visits that it is."""
    decay = 0.5 ** (1 / half_life)
    rates = [max(1 - decay, 1 / (n + 2)) for n in range(len(history))]
    keep = np.array([np.prod([1 - r for r in rates[n + 1 :]]) for n in range(len(history))])
    seen = sum(k * r * used for k, r, used in zip(keep, rates, history, strict=True))
    return prior * np.prod([1 - r for r in rates]) + seen


@pytest.mark.parametrize("visits", [1, 5, 200])
def test_popularity_equals_a_decayed_mean_over_the_whole_history(visits):
    rng = np.random.default_rng(0)
    scorer = PopularityScorer([3, 5], half_life=8.0, prior=0.3)
    history = [[], []]
    for _ in range(visits):
        for index, size in enumerate((3, 5)):
            used = rng.random(size) < 0.4
            history[index].append(used)
            scorer.observe(index, used, tokens=7)
    scores = scorer.scores()
    np.testing.assert_allclose(scores[0, :3], reference_popularity(history[0], 8.0, 0.3), atol=1e-5)
    np.testing.assert_allclose(scores[1], reference_popularity(history[1], 8.0, 0.3), atol=1e-5)
    assert (scores[0, 3:] == 0).all()
    assert scores.dtype == np.float32


def test_popularity_before_any_visit_is_the_prior_of_members_that_exist():
    scores = PopularityScorer([2, 3], prior=0.25).scores()
    np.testing.assert_array_equal(scores, [[0.25, 0.25, 0], [0.25, 0.25, 0.25]])


def test_replay_scores_the_last_visit_of_each_set():
    scorer = ReplayScorer([3, 2])
    scorer.observe(0, np.array([True, False, True]), tokens=1)
    scorer.observe(1, np.array([False, True]), tokens=1)
    scorer.observe(0, np.array([False, True, False]), tokens=1)
    np.testing.assert_array_equal(scorer.scores(), [[0, 1, 0], [0, 1, 0]])


def test_the_middle_of_the_bank_is_the_popularity_scorer(uneven_visits):
    visits = uneven_visits()
    scorer, bank = PopularityScorer(visits.structure.members), PopularityBank(visits.structure)
    for row in range(len(visits)):
        index = int(visits.set_index[row])
        scorer.observe(index, visits.members_used(row), 1)
        bank.row[:] = visits.used[row]
        bank.update(index)
        np.testing.assert_allclose(bank.values[:, MEDIUM], scorer.scores(), atol=1e-6)


@pytest.mark.parametrize("members", [[], [3, 0]])
def test_a_set_without_members_is_refused(members):
    with pytest.raises(ValueError, match="at least one member"):
        PopularityScorer(members)
