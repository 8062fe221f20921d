"""Both models: exports equal their libraries, they learn, and they do no harm."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from odc.memory.scores import PopularityScorer
from predictor.baseline import Examples, SklearnTraining, fit_network, network_arrays
from predictor.features import HALF_LIVES, Structure, join_runs, make_features, split_by_time
from predictor.lstm import LSTMNetwork, LSTMPredictor, _Sequence, export_arrays
from predictor.model import KINDS, cold_start, predictor_class, run_scorer
from predictor.quality import compare_quality
from predictor.scorer import LSTMScorer, MLPScorer


def randomized_network(structure: Structure, seed: int = 0) -> LSTMNetwork:
    torch.manual_seed(seed)
    network = LSTMNetwork(structure, hidden=24).eval()
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    return network


def quick(kind: str, structure: Structure):
    predictor = predictor_class(kind)(structure)
    changes = (
        {"candidates": ((32,),), "max_epochs": 20} if kind == "sklearn" else {"max_epochs": 50}
    )
    predictor.training = dataclasses.replace(predictor.training, **changes)
    return predictor


@pytest.mark.parametrize("shape", ["even", "uneven"])
def test_the_numpy_lstm_equals_the_torch_forward(shape, random_visits, uneven_visits):
    visits = random_visits(passes=30) if shape == "even" else uneven_visits(passes=40)
    network = randomized_network(visits.structure)
    sequence = _Sequence(visits, split_by_time(visits))
    with torch.no_grad():
        logits, _ = network(sequence.batch(np.arange(len(visits))[None]))
    expected = torch.sigmoid(logits)[0].numpy() * visits.structure.member_mask()
    arrays = {**export_arrays(network), **cold_start(visits.structure)}
    scores = run_scorer(lambda: LSTMScorer(visits.structure, arrays), visits)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_the_untrained_lstm_is_popularity(random_visits):
    visits = random_visits(passes=60)
    network = LSTMNetwork(visits.structure, hidden=16)
    arrays = {**export_arrays(network), **cold_start(visits.structure)}
    scores = run_scorer(lambda: LSTMScorer(visits.structure, arrays), visits)
    popularity = run_scorer(lambda: PopularityScorer(visits.structure.members), visits)
    np.testing.assert_allclose(scores, popularity, atol=2e-3)


@pytest.mark.parametrize("hidden", [(), (12,), (12, 7)])
def test_the_numpy_network_equals_sklearn_predict_proba(hidden, random_visits):
    visits = random_visits(passes=40)
    structure, rows = visits.structure, np.arange(len(visits))
    masks = make_features(visits, rows).masks
    labels = np.random.default_rng(0).random((len(rows), structure.num_sets * 16)) < 0.3
    examples = Examples(rows, masks, labels)
    training = SklearnTraining(max_epochs=3)
    network = fit_network(examples, examples, hidden, training, seed=0).network
    stack = np.zeros((structure.num_sets, structure.num_sets, 2 + len(HALF_LIVES)), np.float32)
    stack[:, :, 1] = 0.5  # half of the network's logit alone
    arrays = {**network_arrays(network), "stack": stack, **cold_start(structure)}
    scores = run_scorer(lambda: MLPScorer(structure, arrays), visits)
    expected = network.predict_proba(masks).reshape(scores.shape)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dependence_between_sets_is_learned(kind, dependent_visits):
    visits = dependent_visits(passes=350)
    part = split_by_time(visits)
    predictor = quick(kind, visits.structure)
    predictor.fit(visits, part)
    quality = compare_quality(visits, part, [predictor])
    learned, popularity = quality[kind]["by_horizon"], quality["popularity"]["by_horizon"]
    for horizon in ("next_set", "later_sets"):
        assert popularity[horizon]["recall"] < 0.5
        assert learned[horizon]["recall"] > 0.85
        assert learned[horizon]["log_loss"] < 0.5 * popularity[horizon]["log_loss"]
    # Nothing links one pass to the next: there the model may only match popularity.
    assert learned["next_pass"]["log_loss"] < popularity["next_pass"]["log_loss"] + 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_on_random_routing_nothing_is_lost_against_popularity(kind, seed, random_visits):
    visits = random_visits(passes=250, seed=seed)
    part = split_by_time(visits)
    predictor = quick(kind, visits.structure)
    predictor.fit(visits, part, seed=seed)
    quality = compare_quality(visits, part, [predictor])
    assert quality[kind]["log_loss"] < quality["popularity"]["log_loss"] + 0.01
    assert quality[kind]["recall"] > quality["popularity"]["recall"] - 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_weights(kind, random_visits):
    visits = random_visits(passes=60)
    part = split_by_time(visits)
    fitted = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(fitted))  # the caller's random state must not matter
        predictor = quick(kind, visits.structure)
        predictor.fit(visits, part, seed=seed)
        fitted.append(predictor.predict(visits))
    np.testing.assert_array_equal(fitted[0], fitted[1])
    assert not np.array_equal(fitted[0], fitted[2])


def test_training_leaves_torchs_random_state_alone(random_visits):
    visits = random_visits(passes=40)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    quick("lstm", visits.structure).fit(visits, split_by_time(visits), seed=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_visits_do_not_change_the_weights(kind, dependent_visits):
    visits = dependent_visits(passes=120)
    part = split_by_time(visits)
    changed = dataclasses.replace(visits, used=visits.used ^ (part == 2)[:, None])
    weights = []
    for each in (visits, changed):
        predictor = quick(kind, visits.structure)
        predictor.fit(each, part)
        weights.append({k: v for k, v in predictor.arrays.items() if not k.startswith("start")})
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name])


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_a_set_does_not_have_score_zero(kind, uneven_visits):
    visits = uneven_visits()
    predictor = quick(kind, visits.structure)
    predictor.fit(visits, split_by_time(visits))
    scores = predictor.predict(visits)
    assert (scores[:, ~visits.structure.member_mask()] == 0).all()
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_each_run_is_scored_from_a_fresh_start(kind, random_visits):
    first, second = random_visits(passes=60), random_visits(passes=20, seed=9)
    both = join_runs([first, second])
    predictor = quick(kind, first.structure)
    predictor.fit(both, split_by_time(both))
    np.testing.assert_array_equal(predictor.predict(both)[len(first) :], predictor.predict(second))


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_scorer_starts_with_the_popularity_of_training(kind, random_visits):
    visits = random_visits(passes=200)
    predictor = quick(kind, visits.structure)
    predictor.fit(visits, split_by_time(visits))
    popularity = PopularityScorer(visits.structure.members)
    for row in range(len(visits)):
        popularity.observe(int(visits.set_index[row]), visits.members_used(row), 1)
    warm, cold = predictor.scorer().scores(), predictor.scorer(warm=False).scores()
    expected = popularity.scores()
    assert np.abs(warm - expected).mean() < 0.5 * np.abs(cold - expected).mean()


def test_too_few_visits_are_refused_with_what_to_do(random_visits):
    visits = random_visits(passes=3)
    with pytest.raises(ValueError, match="record more steps"):
        LSTMPredictor(visits.structure).fit(visits, split_by_time(visits))


def test_scoring_before_fitting_says_what_must_come_first():
    with pytest.raises(RuntimeError, match="call fit or load first"):
        LSTMPredictor(Structure.regular(2, 4)).scorer()
