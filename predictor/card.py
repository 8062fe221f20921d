"""Model cards: what a predictor was made for and from, and how good it was on unseen visits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.features import HELD_OUT, TRAIN, VALIDATION, Visits
from predictor.model import FitReport, Predictor

CARD_FORMAT = "odc-predictor-card/1"
PARTS = {"train": TRAIN, "validation": VALIDATION, "held_out": HELD_OUT}


def make_card(
    predictor: Predictor,
    visits: Visits,
    part: npt.NDArray[np.uint8],
    report: FitReport,
    quality: Mapping[str, Mapping[str, Any]],
    traces: Sequence[Mapping[str, Any]],
    seed: int,
    fit_seconds: float,
) -> dict[str, Any]:
    """The model card as JSON values.

    Args:
        predictor: the fitted predictor.
        visits: everything it was trained, stopped and judged on.
        part: (n,) the part of each visit.
        report: of the training.
        quality: `predictor.quality.compare_quality` on the held-out part.
        traces: `trace_record` of each run, in the order of `visits.run`.
        seed: of the training.
        fit_seconds: time that the training took.
    """
    structure = predictor.structure
    return {
        "format": CARD_FORMAT,
        "kind": predictor.kind,
        "settings": predictor.settings,
        "seed": seed,
        "structure": {
            "hash": structure.hash,
            "num_sets": structure.num_sets,
            "members": list(structure.members),
            "layout": structure.to_json(),
        },
        "parameters": int(sum(array.size for array in predictor.arrays.values())),
        "traces": [dict(trace) for trace in traces],
        "parts": {name: _extent(visits, part == which) for name, which in PARTS.items()},
        "training": {**asdict(report), "seconds": round(fit_seconds, 2)},
        "held_out": {name: dict(result) for name, result in quality.items()},
    }


def trace_record(run_dir: Path, visits: Visits) -> dict[str, Any]:
    """Names a trace: its path, and a digest of the visits taken from it."""
    digest = hashlib.sha256()
    for column in (visits.step, visits.phase, visits.set_index, visits.tokens, visits.used):
        digest.update(np.ascontiguousarray(column).tobytes())
    return {"run": str(run_dir), "sha256": digest.hexdigest(), "visits": len(visits)}


def _extent(visits: Visits, rows: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Visits of a part, and the first and last step that it has of each run."""
    steps = {}
    for run in np.unique(visits.run[rows]):
        of_run = visits.step[rows & (visits.run == run)]
        steps[str(run)] = [int(of_run.min()), int(of_run.max())]
    return {"visits": int(rows.sum()), "steps": steps}
