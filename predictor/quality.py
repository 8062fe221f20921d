"""How good scores are, offline: log-loss, Brier score, recall under a budget, calibration.

Every measure is taken for each pair of an observed visit and a set's next visit, and given for
three
horizons besides the mean of all: the set that comes next in this pass, the later sets of this pass,
and the sets of the next pass. What a predictor saves in seconds is not told here but by
re-simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.memory.scores import PopularityScorer, ReplayScorer
from predictor.features import HELD_OUT, BoolArray, FloatArray, IntArray, Visits, next_visits
from predictor.model import Predictor, run_scorer

BUDGET = 1.25  # members that may be loaded ahead, as a multiple of those that will be used
CLIP = 1e-3  # scores of 0 and 1 are judged as this far inside: replay's log-loss is else infinite
BINS = 10
BLOCK = 1024  # visits judged at a time, to bound memory
HORIZONS = ("next_set", "later_sets", "next_pass")
_LEGEND = (
    "log-loss of each expert's predicted use: lower is better; recall, the share of used experts\n"
    f"among {BUDGET:g} times as many rated highest: higher is better; next_set: the next layer, "
    "later_sets:\nthe layers behind it, next_pass: the next forward"
)


@dataclass
class _Sums:
    """Running sums over (visit, set) pairs of one horizon."""

    pairs: int = 0
    log_loss: float = 0.0
    brier: float = 0.0
    recall: float = 0.0
    touched: float = 0.0

    def means(self) -> dict[str, float]:
        n = max(1, self.pairs)
        return {
            "log_loss": self.log_loss / n,
            "brier": self.brier / n,
            "recall": self.recall / n,
            "touched": self.touched / n,
        }


def judge_scores(
    scores: FloatArray,
    visits: Visits,
    part: npt.NDArray[np.uint8] | None = None,
    which: int = HELD_OUT,
) -> dict[str, Any]:
    """Judges the scores of one scorer.

    Args:
        scores: (n, num_sets, max_members), what was said after each visit.
        visits: the n visits.
        part: (n,) part of each visit; None judges all of them.
        which: the part to judge; both the visit and the one it speaks of must belong to it.

    Returns:
        `log_loss`, `brier` (means over members), `recall` (of the used members, when `BUDGET` times
        their number may be chosen), `touched` (share of members used), `pairs`, `calibration`
        (expected calibration error and bins), `by_horizon` (the first four for each horizon).
    """
    following = next_visits(visits)
    valid = following >= 0
    if part is not None:
        valid &= (part[following] == which) & (part == which)[:, None]
    ahead = np.arange(visits.structure.num_sets) - visits.set_index[:, None]
    horizon = np.where(ahead == 1, 0, np.where(ahead > 1, 1, 2))
    sums = {name: _Sums() for name in (*HORIZONS, "all")}
    bins = np.zeros((3, BINS))  # members, sum of scores, members used
    rows, sets = np.nonzero(valid)
    for first in range(0, len(rows), BLOCK):
        r, s = rows[first : first + BLOCK], sets[first : first + BLOCK]
        exists = visits.structure.member_mask()[s]
        used = visits.used[following[r, s]]
        measures = _measure(scores[r, s], used, exists)
        for number, name in enumerate(HORIZONS):
            _add(sums[name], measures, horizon[r, s] == number)
        _add(sums["all"], measures, np.ones(len(r), dtype=bool))
        _add_to_bins(bins, scores[r, s][exists], used[exists])
    return {
        **sums["all"].means(),
        "pairs": sums["all"].pairs,
        "calibration": _calibration(bins),
        "by_horizon": {name: sums[name].means() for name in HORIZONS if sums[name].pairs},
    }


def compare_quality(
    visits: Visits,
    part: npt.NDArray[np.uint8] | None = None,
    predictors: Sequence[Predictor] = (),
    which: int = HELD_OUT,
) -> dict[str, dict[str, Any]]:
    """Judges popularity, replay and the given predictors on the same visits.

    Every scorer sees all visits from the start of each run; only those of `part` count.

    Returns:
        `judge_scores` by `popularity`, `replay` and each predictor's kind.
    """
    members = visits.structure.members
    table = {
        "popularity": run_scorer(lambda: PopularityScorer(members), visits),
        "replay": run_scorer(lambda: ReplayScorer(members), visits),
        **{predictor.kind: predictor.predict(visits) for predictor in predictors},
    }
    return {name: judge_scores(scores, visits, part, which) for name, scores in table.items()}


def quality_table(quality: Mapping[str, Mapping[str, Any]]) -> str:
    """`compare_quality` as text: a line a scorer, log-loss and recall by horizon, a legend."""
    horizons = ["all", *HORIZONS]
    header = f"{'scorer':<12}" + "".join(f"{name:>20}" for name in horizons)
    lines = [header, f"{'':<12}" + f"{'log-loss  recall':>20}" * len(horizons)]
    for name, result in quality.items():
        cells = [result, *(result["by_horizon"].get(h) for h in HORIZONS)]
        lines.append(f"{name:<12}" + "".join(_cell(cell) for cell in cells))
    lines.append(_LEGEND)
    return "\n".join(lines)


def _cell(result: Mapping[str, Any] | None) -> str:
    return (
        f"{'-':>20}" if result is None else f"{result['log_loss']:>12.4f}{result['recall']:>8.3f}"
    )


def _measure(scores: FloatArray, used: BoolArray, exists: BoolArray) -> dict[str, FloatArray]:
    """Log-loss, Brier score, recall and touched share of (r, max_members) pairs, each (r,)."""
    size = exists.sum(axis=1)
    p = np.clip(scores.astype(np.float64), CLIP, 1.0 - CLIP)
    loss = -np.log(np.where(used, p, 1.0 - p))
    error = (scores - used) ** 2
    count = used.sum(axis=1)
    return {
        "log_loss": (loss * exists).sum(axis=1) / size,
        "brier": (error * exists).sum(axis=1) / size,
        "recall": _recall(np.where(exists, scores, -1.0), used, count, size),
        "touched": count / size,
    }


def _recall(scores: FloatArray, used: BoolArray, count: IntArray, size: IntArray) -> FloatArray:
    """Share of the used members among the best `BUDGET` * count ones; 1 where none is used."""
    budget = np.minimum(np.ceil(BUDGET * count), size).astype(np.int64)
    order = np.argsort(-scores, axis=1, kind="stable")
    hits = np.take_along_axis(used, order, axis=1).cumsum(axis=1)
    found = np.take_along_axis(hits, np.maximum(budget - 1, 0)[:, None], axis=1)[:, 0]
    return np.asarray(np.where(count > 0, found / np.maximum(count, 1), 1.0), dtype=np.float32)


def _add(sums: _Sums, measures: Mapping[str, FloatArray], chosen: BoolArray) -> None:
    sums.pairs += int(chosen.sum())
    sums.log_loss += float(measures["log_loss"][chosen].sum())
    sums.brier += float(measures["brier"][chosen].sum())
    sums.recall += float(measures["recall"][chosen].sum())
    sums.touched += float(measures["touched"][chosen].sum())


def _add_to_bins(bins: npt.NDArray[np.float64], scores: FloatArray, used: BoolArray) -> None:
    number = np.minimum((scores * BINS).astype(np.int64), BINS - 1)
    bins[0] += np.bincount(number, minlength=BINS)
    bins[1] += np.bincount(number, weights=scores, minlength=BINS)
    bins[2] += np.bincount(number, weights=used, minlength=BINS)


def _calibration(bins: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Expected calibration error, and for each filled bin: mean score, share used, members."""
    members = np.maximum(bins[0], 1.0)
    score, share = bins[1] / members, bins[2] / members
    error = float((np.abs(score - share) * bins[0]).sum() / max(1.0, bins[0].sum()))
    filled = np.flatnonzero(bins[0])
    return {
        "expected_error": error,
        "score": [float(score[i]) for i in filled],
        "used": [float(share[i]) for i in filled],
        "members": [int(bins[0][i]) for i in filled],
    }
