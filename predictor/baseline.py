"""scikit-learn baseline: a multi-label network on this pass's and the last pass's masks.

The network (`MLPClassifier`, without hidden layers a plain logistic regression for each label)
reads which members were used by the sets already visited in this pass and by all sets in the pass
before; popularity comes in by the stack (`predictor.stack`). The size of the network, and when to
stop, are chosen on the validation part; scikit-learn's own early stopping draws random rows and is
not used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
    labelled_rows,
    make_features,
)
from predictor.model import Advance, FitReport, Predictor, warm_start
from predictor.scorer import MLPScorer
from predictor.stack import WIDTH, fit_stack

CLIP = 1e-6  # of probabilities before a logarithm


@dataclass(frozen=True, kw_only=True)
class SklearnTraining:
    """Settings of the training.

    Attributes:
        candidates: hidden layer sizes to choose from; () is logistic regression.
        max_weights: candidates with more weights are left out.
        max_epochs: upper limit; `label_budget` lowers it on long traces.
        label_budget: (visit, member) pairs trained on for each candidate, which bounds the time.
        max_inputs: values of the inputs of training; the latest visits are taken.
        patience: epochs without a better validation loss before stopping.
        learning_rate, alpha: of `MLPClassifier` (Adam; L2 penalty).
    """

    candidates: tuple[tuple[int, ...], ...] = ((), (64,), (128,))
    max_weights: int = 4_000_000
    max_epochs: int = 60
    label_budget: int = 25_000_000
    max_inputs: int = 50_000_000
    patience: int = 6
    learning_rate: float = 2e-3
    alpha: float = 1.0


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

    def _fit(
        self, visits: Visits, part: npt.NDArray[np.uint8], seed: int, advance: Advance
    ) -> FitReport:
        """Fits each candidate, keeps the best by validation and stacks it."""
        most = self.training.max_inputs // self._num_inputs
        rows = [labelled_rows(visits, part, which)[-most:] for which in (TRAIN, VALIDATION)]
        both = np.union1d(*rows)
        features = make_features(visits, mask_rows=both)
        train, judge = (_examples(visits, features, both, chosen) for chosen in rows)
        fits = []
        candidates = self._candidates()
        for number, hidden in enumerate(candidates):
            fits.append(fit_network(train, judge, hidden, self.training, seed))
            advance((number + 1) / len(candidates))
        best = min(fits, key=lambda fit: fit.loss)
        learned = _logit(best.network.predict_proba(judge.inputs))
        learned = learned.reshape(-1, self.structure.num_sets, self.structure.max_members)
        stack = fit_stack(learned, features, visits, judge.rows, seed)
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
        sizes = [self._num_inputs, *widths, num_sets * members]
        expected: dict[str, tuple[int, ...]] = {
            "stack": (num_sets, num_sets, WIDTH),
            "start_values": (num_sets, len(HALF_LIVES), members),
            "start_seen": (num_sets,),
        }
        for i in range(max(1, len(weights))):
            expected[f"weight_{i}"] = (sizes[i], sizes[i + 1])
            expected[f"bias_{i}"] = (sizes[i + 1],)
        return expected

    @property
    def _num_inputs(self) -> int:
        num_sets, members = self.structure.num_sets, self.structure.max_members
        return 2 * num_sets * members + num_sets + 1

    def _candidates(self) -> list[tuple[int, ...]]:
        """The candidates that are small enough; the one with the fewest weights in any case."""
        outputs = self.structure.num_sets * self.structure.max_members
        weights = {}
        for hidden in self.training.candidates:
            sizes = [self._num_inputs, *hidden, outputs]
            weights[hidden] = sum(a * b for a, b in zip(sizes, sizes[1:], strict=False))
        smallest = min(weights.values())
        limit = max(smallest, self.training.max_weights)
        return [hidden for hidden, count in weights.items() if count <= limit]

    def _make_scorer(self, arrays: Mapping[str, np.ndarray]) -> SetScorer:
        return MLPScorer(self.structure, arrays)


def _examples(visits: Visits, features: Features, kept: IntArray, rows: IntArray) -> Examples:
    labels = visits.used[features.following[rows]]
    inputs = features.masks[np.searchsorted(kept, rows)]
    return Examples(rows, inputs, labels.reshape(len(rows), -1))


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
    epochs = max(2, min(training.max_epochs, training.label_budget // train.labels.size))
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


def _log_loss(probability: FloatArray, labels: BoolArray) -> float:
    p = np.clip(probability, CLIP, 1.0 - CLIP)
    return float(-np.log(np.where(labels, p, 1.0 - p)).mean())


def _logit(probability: FloatArray) -> FloatArray:
    p = np.clip(probability, CLIP, 1.0 - CLIP)
    return np.asarray(np.log(p / (1.0 - p)), dtype=np.float32)
