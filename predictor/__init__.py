"""Learns from traces which members of which sets will be used: LSTM (torch) and scikit-learn
models.

`train_predictor` turns run directories into a predictor directory; `load_predictor(dir).scorer()`
is the `SetScorer` that the scheduler asks. Names are imported when they are first used, so that
scoring does not wait for scikit-learn and listing the kinds not for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predictor.baseline import SklearnPredictor
    from predictor.features import Structure, Visits, join_runs, split_by_time
    from predictor.io import PredictorError, PredictorMismatchError, load_predictor, read_card
    from predictor.lstm import LSTMPredictor
    from predictor.model import KINDS, Predictor
    from predictor.quality import compare_quality, judge_scores, quality_table
    from predictor.train import read_visits, structure_from_pages, train_predictor

_HOMES = {
    "SklearnPredictor": "baseline",
    "Structure": "features",
    "Visits": "features",
    "join_runs": "features",
    "split_by_time": "features",
    "PredictorError": "io",
    "PredictorMismatchError": "io",
    "load_predictor": "io",
    "read_card": "io",
    "LSTMPredictor": "lstm",
    "KINDS": "model",
    "Predictor": "model",
    "compare_quality": "quality",
    "judge_scores": "quality",
    "quality_table": "quality",
    "read_visits": "train",
    "structure_from_pages": "train",
    "train_predictor": "train",
}

__all__ = [
    "KINDS",
    "LSTMPredictor",
    "Predictor",
    "PredictorError",
    "PredictorMismatchError",
    "SklearnPredictor",
    "Structure",
    "Visits",
    "compare_quality",
    "join_runs",
    "judge_scores",
    "load_predictor",
    "quality_table",
    "read_card",
    "read_visits",
    "split_by_time",
    "structure_from_pages",
    "train_predictor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'predictor' has no attribute {name!r}")
    return getattr(import_module(f"predictor.{_HOMES[name]}"), name)
