"""The interface of both learned models: fit on visits, score in the hook, save, load."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from odc.memory.scores import SetScorer
from predictor.features import FloatArray, PopularityBank, Structure, Visits
from predictor.io import PredictorError, load_predictor, write_predictor

KINDS = ("lstm", "sklearn")
MAX_SEEN = 32  # how much a popularity from training weighs when a scorer starts, in visits

Advance = Callable[[float], None]  # told the share of the training that is done, 0 to 1


def ignore_progress(share: float) -> None:
    """The `Advance` of whoever shows no progress."""


@dataclass(frozen=True)
class FitReport:
    """How a training went.

    Attributes:
        epochs: passes over the training visits that were made.
        best_epoch: the one whose weights were kept; 0 is plain popularity.
        start_loss: validation log-loss of popularity.
        best_loss: validation log-loss of the weights kept.
        choices: settings chosen by validation.
    """

    epochs: int
    best_epoch: int
    start_loss: float
    best_loss: float
    choices: dict[str, Any]


class Predictor(ABC):
    """Learns which members of which sets are used; kept as structure, settings and arrays."""

    kind: ClassVar[str]

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.arrays: dict[str, np.ndarray] = {}

    def fit(
        self,
        visits: Visits,
        part: npt.NDArray[np.uint8],
        seed: int = 0,
        advance: Advance = ignore_progress,
    ) -> FitReport:
        """Trains on the visits whose `part` is TRAIN, stops and chooses by those of VALIDATION.

        State runs through all visits in order; labels beyond a part's end are left out, so nothing
        of the held-out part is learned.

        Raises:
            ValueError: a part has too few visits.
        """
        from threadpoolctl import threadpool_limits

        # Matrices this small gain nothing from more threads, and on a busy machine threads that
        # waited for one another made a fit 9 times slower. One thread sums in one order, too.
        with threadpool_limits(limits=1):  # torch's threads are among them
            return self._fit(visits, part, seed, advance)

    @abstractmethod
    def _fit(
        self, visits: Visits, part: npt.NDArray[np.uint8], seed: int, advance: Advance
    ) -> FitReport: ...

    @abstractmethod
    def expected_shapes(self, arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        """Names and shapes that the arrays must have; `arrays` may tell free sizes."""

    @abstractmethod
    def _make_scorer(self, arrays: Mapping[str, np.ndarray]) -> SetScorer: ...

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor needs beside the structure."""
        return {}

    def scorer(self, warm: bool = True) -> SetScorer:
        """A new scorer for the hook path.

        Args:
            warm: start from the popularity at the end of training, for a run that goes on from
                there; False starts knowing no popularity.
        """
        arrays = dict(self._fitted())
        if not warm:
            arrays.update(cold_start(self.structure))
        return self._make_scorer(arrays)

    def predict(self, visits: Visits) -> FloatArray:
        """What a cold scorer says after each visit, (n, num_sets, max_members)."""
        return run_scorer(lambda: self.scorer(warm=False), visits)

    def set_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes over weights.

        Raises:
            ValueError: a name or a shape is not what this structure needs.
        """
        expected = self.expected_shapes(arrays)
        got = {name: array.shape for name, array in arrays.items()}
        if got != expected:
            raise ValueError(f"expected arrays {expected}, got {got}")
        self.arrays = {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}

    def save(
        self, directory: str | os.PathLike[str], card: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes a predictor directory (see `predictor.io`); returns its path."""
        header = {
            "kind": self.kind,
            "structure": self.structure.to_json(),
            "structure_hash": self.structure.hash,
            "settings": self.settings,
        }
        return write_predictor(directory, header, self._fitted(), card)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], structure: Structure | None = None) -> Self:
        """Loads a predictor of this kind (see `predictor.io.load_predictor`)."""
        predictor = load_predictor(directory, structure)
        if not isinstance(predictor, cls):
            raise PredictorError(
                f"{directory} holds a predictor of kind {predictor.kind!r}, expected {cls.kind!r}"
            )
        return predictor

    def _fitted(self) -> dict[str, np.ndarray]:
        if not self.arrays:
            raise RuntimeError(f"this {self.kind} predictor has no weights; call fit or load first")
        return self.arrays


def predictor_class(kind: str) -> type[Predictor]:
    """The class of a kind; torch or scikit-learn are imported only for the one that is asked for.

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "lstm":
        from predictor.lstm import LSTMPredictor

        return LSTMPredictor
    if kind == "sklearn":
        from predictor.baseline import SklearnPredictor

        return SklearnPredictor
    raise ValueError(f"expected a predictor kind of {KINDS}, got {kind!r}")


def run_scorer(make: Callable[[], SetScorer], visits: Visits) -> FloatArray:
    """Scores after each visit, (n, num_sets, max_members) float32; a new scorer for every run."""
    structure = visits.structure
    shape = (len(visits), structure.num_sets, structure.max_members)
    scores = np.empty(shape, dtype=np.float32)
    scorer = make()
    for row in range(len(visits)):
        if row and visits.run[row] != visits.run[row - 1]:
            scorer = make()
        used = visits.members_used(row)
        scorer.observe(int(visits.set_index[row]), used, int(visits.tokens[row]))
        scores[row] = scorer.scores()
    return scores


def cold_start(structure: Structure) -> dict[str, np.ndarray]:
    """Start arrays of a scorer that knows no popularity."""
    bank = PopularityBank(structure)
    return warm_start(bank.values, bank.seen)


def warm_start(values: FloatArray, seen: list[int] | tuple[int, ...]) -> dict[str, np.ndarray]:
    """Start arrays of a scorer that goes on from popularity seen in training.

    The visits behind it count as at most `MAX_SEEN`, so that a run whose routing differs is
    followed within about as many visits.
    """
    capped = np.minimum(np.asarray(seen, dtype=np.float32), MAX_SEEN)
    return {"start_values": values.copy(), "start_seen": capped}
