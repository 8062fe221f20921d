"""Markov scores: transitions where there are some, and popularity where there are none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from odc.memory.scores import PopularityScorer, SetScorer
from odc.memory.scores_markov import MarkovScorer

SETS, MEMBERS, TOP = 4, 32, 4


def independent(seed: int, passes: int) -> Iterator[np.ndarray]:
    """(SETS, MEMBERS) bool a pass; each set draws for itself, some members far oftener."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, MEMBERS + 1)
    for _ in range(passes):
        used = np.zeros((SETS, MEMBERS), bool)
        for row in used:
            row[rng.choice(MEMBERS, TOP, False, weight / weight.sum())] = True
        yield used


def chained(seed: int, passes: int) -> Iterator[np.ndarray]:
    """The same for the first set; the members of the others are a permutation of those before."""
    rng = np.random.default_rng([seed, 1])
    ways = [rng.permutation(MEMBERS) for _ in range(SETS - 1)]
    for used in independent(seed, passes):
        for at, way in enumerate(ways):
            used[at + 1] = False
            used[at + 1, way[np.flatnonzero(used[at])]] = True
        yield used


def topics(seed: int, passes: int) -> Iterator[np.ndarray]:
    """Each pass has one of four topics, and each topic members of its own in every set."""
    rng = np.random.default_rng([seed, 2])
    of_topic = rng.integers(0, 4, (SETS, MEMBERS))
    for _ in range(passes):
        likely = np.where(of_topic == rng.integers(4), 0.7, 0.03)
        yield rng.random((SETS, MEMBERS)) < likely


def recall(scorer: SetScorer, passes: Iterator[np.ndarray], skip: int = 60) -> float:
    """Share of the members used behind the first set that were among the best so many scores."""
    found = total = 0
    for number, used in enumerate(passes):
        for set_index, row in enumerate(used):
            if number >= skip and set_index:
                scores = scorer.scores()[set_index]
                best = np.argsort(-scores, kind="stable")[: row.sum()]
                found += int(row[best].sum())
                total += int(row.sum())
            scorer.observe(set_index, row, 64)
    return found / total


def log_loss(scorer: SetScorer, passes: Iterator[np.ndarray], skip: int = 60) -> float:
    losses = []
    for number, used in enumerate(passes):
        for set_index, row in enumerate(used):
            if number >= skip and set_index:
                score = np.clip(scorer.scores()[set_index].astype(np.float64), 0.01, 0.99)
                losses.append(-np.log(np.where(row, score, 1.0 - score)).mean())
            scorer.observe(set_index, row, 64)
    return float(np.mean(losses))


def pair() -> tuple[MarkovScorer, PopularityScorer]:
    return MarkovScorer([MEMBERS] * SETS), PopularityScorer([MEMBERS] * SETS)


@pytest.mark.parametrize("seed", range(3))
def test_where_members_follow_from_those_before_recall_is_near_one(seed: int) -> None:
    markov, popular = pair()
    found, base = recall(markov, chained(seed, 260)), recall(popular, chained(seed, 260))
    assert found > 0.9 and base < 0.6


@pytest.mark.parametrize("seed", range(3))
def test_members_that_say_the_same_do_not_count_twice(seed: int) -> None:
    markov, popular = pair()
    assert log_loss(markov, topics(seed, 260)) < 0.8 * log_loss(popular, topics(seed, 260))


@pytest.mark.parametrize("seed", range(3))
def test_where_sets_are_independent_it_is_as_good_as_popularity(seed: int) -> None:
    markov, popular = pair()
    found, base = recall(markov, independent(seed, 260)), recall(popular, independent(seed, 260))
    assert found > base - 0.015
    markov, popular = pair()
    loss, base = log_loss(markov, independent(seed, 260)), log_loss(popular, independent(seed, 260))
    assert loss < 1.01 * base


def test_scores_are_probabilities_of_the_members_there_are() -> None:
    members = [5, 8, 3]
    scorer, rng = MarkovScorer(members), np.random.default_rng(0)
    for number in range(90):
        set_index = number % 3
        scorer.observe(set_index, rng.random(members[set_index]) < 0.4, 16)
        scores = scorer.scores()
        assert scores.shape == (3, 8) and scores.dtype == np.float32
        assert (scores >= 0).all() and (scores <= 1).all()
        assert not scores[0, 5:].any() and not scores[2, 3:].any()


def test_only_the_set_behind_the_last_visit_speaks_of_it() -> None:
    """The first set and those further ahead are popularity's, and so is one whose pass is over."""
    markov, popular = pair()
    for used in chained(0, 100):
        for set_index, row in enumerate(used):
            markov.observe(set_index, row, 64)
            popular.observe(set_index, row, 64)
            same = (markov.scores() == popular.scores()).all(axis=1)
            assert same[np.arange(SETS) != set_index + 1].all()
    used = next(chained(0, 1))
    for scorer in (markov, popular):
        scorer.observe(0, used[0], 64)
    assert (markov.scores()[1] != popular.scores()[1]).any()
    for scorer in (markov, popular):
        scorer.observe(0, used[0], 64)  # a pass that ended behind its first set, and a new one
        scorer.observe(2, used[2], 64)
    assert (markov.scores()[1] == popular.scores()[1]).all()


def test_a_transition_seen_once_moves_nothing_far() -> None:
    markov, popular = pair()
    used = next(independent(0, 1))
    for scorer in (markov, popular):
        for set_index, row in enumerate(used):
            scorer.observe(set_index, row, 64)
        scorer.observe(0, used[0], 64)
    assert np.abs(markov.scores() - popular.scores()).max() < 0.05
