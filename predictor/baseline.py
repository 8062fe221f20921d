"""scikit-learn baseline: a multi-label network on this pass's and the last pass's masks.

The network (`MLPClassifier`, without hidden layers a plain logistic regression for each label)
reads which members were used by the sets already visited in this pass and by all sets in the pass
before. Its logit and the popularity logits are then stacked by one small `LogisticRegression` for
each distance from the observed to the scored set, so that popularity is never lost. The size of the
network, and when to stop, are chosen on the validation part; scikit-learn's own early stopping
draws random rows and is not used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from odc.memory.scores import SetScorer
from predictor.features import (
    HALF_LIVES,
    MEDIUM,
    TRAIN,
    VALIDATION,
    BoolArray,
    Features,
    FloatArray,
    IntArray,
    Structure,
    Visits,
    make_features,
)
from predictor.model import Advance, FitReport, Predictor, ignore_progress, warm_start
from predictor.scorer import MLPScorer

CLIP = 1e-6  # of probabilities before a logarithm


@dataclass(frozen=True, kw_only=True)
class SklearnTraining:
    """Settings of the training.

    Attributes:
        candidates: hidden layer sizes to choose from; () is logistic regression.
        max_epochs: upper limit; `visit_budget` lowers it on long traces.
        visit_budget: visits trained on for each candidate, which bounds the time.
        patience: epochs without a better validation loss before stopping.
        learning_rate, alpha: of `MLPClassifier` (Adam; L2 penalty).
        stack_rows: most (visit, member) pairs that one stacking regression is fitted on.
    """

    candidates: tuple[tuple[int, ...], ...] = ((), (64,), (128,))
    max_epochs: int = 60
    visit_budget: int = 200_000
    patience: int = 6
    learning_rate: float = 2e-3
    alpha: float = 1.0
    stack_rows: int = 20_000


@dataclass(frozen=True)
class Examples:
    """Rows whose labels stand in one part: inputs (r, F), labels (r, num_sets * max_members)."""

    rows: IntArray
    inputs: FloatArray
    labels: BoolArray


@dataclass(frozen=True)
class NetworkFit:
    """A network at its best epoch, with its validation log-loss."""

    loss: float
    epochs: int
    best_epoch: int
    network: MLPClassifier


class SklearnPredictor(Predictor):
    """See the module's text."""

    kind = "sklearn"

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        self.training = SklearnTraining()

    def fit(
        self,
        visits: Visits,
        part: npt.NDArray[np.uint8],
        seed: int = 0,
        advance: Advance = ignore_progress,
    ) -> FitReport:
        """Fits each candidate, keeps the best by validation and stacks it (see `Predictor.fit`)."""
        features = make_features(visits, masks=True)
        train = _examples(visits, features, part, TRAIN)
        judge = _examples(visits, features, part, VALIDATION)
        fits = []
        for number, hidden in enumerate(self.training.candidates):
            fits.append(fit_network(train, judge, hidden, self.training, seed))
            advance((number + 1) / len(self.training.candidates))
        best = min(fits, key=lambda fit: fit.loss)
        stack = fit_stack(best.network, features, visits, judge, self.training.stack_rows, seed)
        self.arrays = network_arrays(best.network)
        self.arrays["stack"] = stack / 2
        self.arrays.update(warm_start(features.final_values, features.final_seen))
        logits = features.base_logits(judge.rows)[:, :, MEDIUM].reshape(len(judge.rows), -1)
        popularity = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
        return FitReport(
            epochs=best.epochs,
            best_epoch=best.best_epoch,
            start_loss=_log_loss(popularity, judge.labels),
            best_loss=best.loss,
            choices={"hidden": list(best.network.hidden_layer_sizes)},
        )

    def expected_shapes(self, arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        num_sets, members = self.structure.num_sets, self.structure.max_members
        weights = sorted(name for name in arrays if name.startswith("weight_"))
        widths = [arrays[name].shape[-1] for name in weights[:-1]]
        sizes = [2 * num_sets * members + num_sets + 1, *widths, num_sets * members]
        expected: dict[str, tuple[int, ...]] = {
            "stack": (num_sets, num_sets, 2 + len(HALF_LIVES)),
            "start_values": (num_sets, len(HALF_LIVES), members),
            "start_seen": (num_sets,),
        }
        for i in range(max(1, len(weights))):
            expected[f"weight_{i}"] = (sizes[i], sizes[i + 1])
            expected[f"bias_{i}"] = (sizes[i + 1],)
        return expected

    def _make_scorer(self, arrays: Mapping[str, np.ndarray]) -> SetScorer:
        return MLPScorer(self.structure, arrays)


def _examples(
    visits: Visits, features: Features, part: npt.NDArray[np.uint8], which: int
) -> Examples:
    inside = (features.following >= 0) & (part[features.following] == which)
    rows = np.flatnonzero(inside.all(axis=1) & (part == which))
    assert features.masks is not None, "the features must be made with masks"
    labels = visits.used[features.following[rows]]
    return Examples(rows, features.masks[rows], labels.reshape(len(rows), -1))


def fit_network(
    train: Examples,
    judge: Examples,
    hidden: tuple[int, ...],
    training: SklearnTraining,
    seed: int,
) -> NetworkFit:
    """Fits one network epoch by epoch and keeps the weights of its best validation loss."""
    network = MLPClassifier(
        hidden_layer_sizes=hidden,
        alpha=training.alpha,
        learning_rate_init=training.learning_rate,
        batch_size=min(64, len(train.rows)),
        random_state=seed,
    )
    best, best_epoch, best_loss, epoch = network, 0, np.inf, 0
    epochs = max(2, min(training.max_epochs, training.visit_budget // len(train.rows)))
    labels = train.labels.astype(np.int8)
    for epoch in range(1, epochs + 1):
        network.partial_fit(train.inputs, labels, classes=np.arange(labels.shape[1]))
        loss = _log_loss(network.predict_proba(judge.inputs), judge.labels)
        if loss < best_loss:
            best, best_epoch, best_loss = copy.deepcopy(network), epoch, loss
        if epoch - best_epoch >= training.patience:
            break
    return NetworkFit(best_loss, epoch, best_epoch, best)


def network_arrays(network: MLPClassifier) -> dict[str, np.ndarray]:
    """The layers of a fitted network as `predictor.scorer.MLPScorer` takes them."""
    arrays = {}
    for i, (weight, bias) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        arrays[f"weight_{i}"] = np.ascontiguousarray(weight, dtype=np.float32)
        arrays[f"bias_{i}"] = np.asarray(bias, dtype=np.float32)
    return arrays


def fit_stack(
    network: MLPClassifier,
    features: Features,
    visits: Visits,
    judge: Examples,
    max_rows: int,
    seed: int,
) -> FloatArray:
    """Weights of [1, network logit, popularity logits] for each observed and each scored set.

    One regression serves all pairs of sets that are equally far apart in the order of a pass. Where
    the labels of a distance are all alike, popularity is kept as it is.

    Returns:
        (num_sets, num_sets, 2 + K): by observed set, by scored set.
    """
    structure = visits.structure
    num_sets = structure.num_sets
    rng = np.random.default_rng(seed)
    observed, exists = visits.set_index[judge.rows], structure.member_mask()
    learned = _logit(network.predict_proba(judge.inputs)).reshape(len(judge.rows), num_sets, -1)
    stack = np.zeros((num_sets, num_sets, 2 + len(HALF_LIVES)), dtype=np.float32)
    at = np.arange(len(judge.rows))
    for distance in range(1, num_sets + 1):
        scored = (observed + distance) % num_sets
        base = features.base_logits(judge.rows)[at, scored]  # (r, K, max_members)
        inputs = np.concatenate([learned[at, scored][:, None], base], axis=1)
        labels = judge.labels.reshape(learned.shape)[at, scored]
        keep = exists[scored]
        x, y = inputs.transpose(0, 2, 1)[keep], labels[keep]
        sets = np.arange(num_sets)
        stack[sets, (sets + distance) % num_sets] = _fit_one_stack(x, y, max_rows, rng)
    return stack


def _fit_one_stack(
    inputs: FloatArray, labels: BoolArray, max_rows: int, rng: np.random.Generator
) -> FloatArray:
    weights = np.zeros(2 + len(HALF_LIVES), dtype=np.float32)
    weights[2 + MEDIUM] = 1.0
    if labels.all() or not labels.any():
        return weights
    if len(labels) > max_rows:
        chosen = rng.choice(len(labels), max_rows, replace=False)
        inputs, labels = inputs[chosen], labels[chosen]
        if labels.all() or not labels.any():
            return weights
    model = LogisticRegression(C=1.0, max_iter=200).fit(inputs, labels)
    weights[0] = model.intercept_[0]
    weights[1:] = model.coef_[0]
    return weights


def _log_loss(probability: FloatArray, labels: BoolArray) -> float:
    p = np.clip(probability, CLIP, 1.0 - CLIP)
    return float(-np.log(np.where(labels, p, 1.0 - p)).mean())


def _logit(probability: FloatArray) -> FloatArray:
    p = np.clip(probability, CLIP, 1.0 - CLIP)
    return np.asarray(np.log(p / (1.0 - p)), dtype=np.float32)
