"""Set visits as arrays, and the running features that training and the hook path share.

A *visit* is one forward use of a set: which of its members (experts) got tokens. Features are
structural: set, member, popularity, earlier masks of this pass and the one before. Page numbers and
addresses never enter, so a predictor stays valid when the page size changes. `PopularityBank` and
`PassMemory` are updated by one visit at a time; training runs the same objects over a whole trace,
so what the model saw in training is what it sees in the hook.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.memory.scores import DEFAULT_HALF_LIFE, DEFAULT_PRIOR, half_life_to_decay

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

HALF_LIVES = (2.0, DEFAULT_HALF_LIFE, 128.0)  # visits; the middle one is the popularity baseline
MEDIUM = 1  # its position in HALF_LIVES
FLOOR = 1e-3  # keeps popularity's logit finite: p becomes (p + FLOOR) / (1 + 2 FLOOR)
TRAIN, VALIDATION, HELD_OUT = 0, 1, 2


@dataclass(frozen=True)
class Structure:
    """Which sets a model has: `sets[s][m]` is the (layer, expert) of member m of set s."""

    sets: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        if not self.sets or not all(self.sets):
            raise ValueError("a structure needs at least one set, and every set a member")

    @property
    def num_sets(self) -> int:
        return len(self.sets)

    @property
    def members(self) -> tuple[int, ...]:
        """Number of members of each set."""
        return tuple(len(members) for members in self.sets)

    @property
    def max_members(self) -> int:
        return max(self.members)

    @property
    def hash(self) -> str:
        """Twelve hex digits that change whenever a set, a member, a layer or an expert does."""
        return hashlib.sha256(json.dumps(self.sets).encode()).hexdigest()[:12]

    def member_mask(self) -> BoolArray:
        """(num_sets, max_members) bool: True where the member exists."""
        return np.arange(self.max_members) < np.asarray(self.members)[:, None]

    def to_json(self) -> list[list[list[int]]]:
        return [[[layer, expert] for layer, expert in members] for members in self.sets]

    @classmethod
    def from_json(cls, sets: Iterable[Iterable[Sequence[int]]]) -> Structure:
        return cls(tuple(tuple((int(m[0]), int(m[1])) for m in members) for members in sets))

    @classmethod
    def regular(cls, num_sets: int, num_members: int) -> Structure:
        """`num_sets` layers of `num_members` experts each."""
        return cls(tuple(tuple((s, m) for m in range(num_members)) for s in range(num_sets)))


@dataclass(frozen=True, eq=False)
class Visits:
    """Forward visits in the order in which they happened, run after run; n rows.

    Attributes:
        structure: the sets that are visited.
        run: (n,) number of the run, not descending.
        step: (n,) optimizer step.
        phase: (n,) phase code of the trace (0 forward, 4 evaluation, 5 generation).
        set_index: (n,) position of the set in a pass.
        tokens: (n,) tokens that the visit routed.
        used: (n, max_members) bool.
    """

    structure: Structure
    run: IntArray
    step: IntArray
    phase: IntArray
    set_index: IntArray
    tokens: IntArray
    used: BoolArray

    def __len__(self) -> int:
        return len(self.set_index)

    def take(self, rows: Any) -> Visits:
        """The chosen rows (a mask, a slice or positions), in their order."""
        return replace(
            self,
            run=self.run[rows],
            step=self.step[rows],
            phase=self.phase[rows],
            set_index=self.set_index[rows],
            tokens=self.tokens[rows],
            used=self.used[rows],
        )

    def members_used(self, row: int) -> BoolArray:
        """(num_members,) bool of one visit, without the padding."""
        return self.used[row, : self.structure.members[self.set_index[row]]]


def join_runs(runs: Sequence[Visits]) -> Visits:
    """Puts runs of one structure behind one another and numbers them.

    Raises:
        ValueError: there is no run, or the structures differ.
    """
    if not runs:
        raise ValueError("expected the visits of at least one run, got none")
    hashes = [visits.structure.hash for visits in runs]
    if len(set(hashes)) > 1:
        raise ValueError(
            f"the runs are of different models (structures {hashes}); train one predictor for each"
        )
    return Visits(
        structure=runs[0].structure,
        run=np.concatenate([np.full(len(v), i, dtype=np.int64) for i, v in enumerate(runs)]),
        step=np.concatenate([v.step for v in runs]),
        phase=np.concatenate([v.phase for v in runs]),
        set_index=np.concatenate([v.set_index for v in runs]),
        tokens=np.concatenate([v.tokens for v in runs]),
        used=np.concatenate([v.used for v in runs]),
    )


def split_by_time(
    visits: Visits, validation: float = 0.15, held_out: float = 0.15
) -> npt.NDArray[np.uint8]:
    """Which part each visit belongs to, (n,) uint8: TRAIN, then VALIDATION, then HELD_OUT.

    Every run is cut by its steps: the latest steps are held out, those before them validate. All
    visits of a step stay together, and no visit of a later part comes before one of an earlier
    part.
    """
    part = np.full(len(visits), TRAIN, dtype=np.uint8)
    for run in np.unique(visits.run):
        rows = np.flatnonzero(visits.run == run)
        steps, rank = np.unique(visits.step[rows], return_inverse=True)
        share = rank / len(steps)
        part[rows[share >= 1.0 - held_out - validation]] = VALIDATION
        part[rows[share >= 1.0 - held_out]] = HELD_OUT
    return part


def next_visits(visits: Visits) -> IntArray:
    """(n, num_sets): row of each set's next visit after each row of its run; -1 if none."""
    n = len(visits)
    following = np.full((n, visits.structure.num_sets), -1, dtype=np.int64)
    run_end = np.searchsorted(visits.run, visits.run, side="right")
    for index in range(visits.structure.num_sets):
        rows = np.append(np.flatnonzero(visits.set_index == index), n)
        candidate = rows[np.searchsorted(rows, np.arange(n), side="right")]
        following[:, index] = np.where(candidate < run_end, candidate, -1)
    return following


def last_visits(visits: Visits) -> IntArray:
    """(n, num_sets): row of each set's last visit up to and with each row; -1 if none."""
    previous = np.full((len(visits), visits.structure.num_sets), -1, dtype=np.int64)
    run_start = np.searchsorted(visits.run, visits.run, side="left")
    for index in range(visits.structure.num_sets):
        rows = np.where(visits.set_index == index, np.arange(len(visits)), -1)
        latest = np.maximum.accumulate(rows)
        previous[:, index] = np.where(latest >= run_start, latest, -1)
    return previous


def labelled_rows(visits: Visits, part: npt.NDArray[np.uint8], which: int) -> IntArray:
    """Rows of a part for which the next visits of all sets are known and of the same part.

    Raises:
        ValueError: there are fewer than two.
    """
    following = next_visits(visits)
    inside = (following >= 0) & (part[following] == which)
    rows = np.flatnonzero(inside.all(axis=1) & (part == which))
    if len(rows) < 2:
        raise ValueError(
            f"expected at least 2 visits of part {which} (0 train, 1 validation) whose next visits "
            f"are known, got {len(rows)} of {len(visits)}; record more steps"
        )
    return rows


def token_feature(tokens: int) -> float:
    """Tokens of a visit on a scale of about 0 to 1: log2(1 + tokens) / 16."""
    return math.log2(1 + tokens) / 16.0


class PopularityBank:
    """Every member's decayed popularity at `HALF_LIVES`, and its logit.

    Updates follow `odc.memory.scores.PopularityScorer`: row `MEDIUM` is that scorer.

    Attributes:
        values: (num_sets, K, max_members) float32, share of visits that used the member.
        logits: (num_sets, K, max_members) float32, log-odds of `values` pulled inside by `FLOOR`.
        seen: visits of each set so far.
        row: (K, max_members) float32: write a visit's used members here, in each of the K rows, and
            call `update`.
    """

    def __init__(self, structure: Structure) -> None:
        shape = (structure.num_sets, len(HALF_LIVES), structure.max_members)
        # A member that a set does not have keeps popularity 0, hence a surprise of 0.
        prior = np.where(structure.member_mask(), np.float32(DEFAULT_PRIOR), np.float32(0.0))
        self.values: FloatArray = np.repeat(prior[:, None, :], shape[1], axis=1)
        self.logits: FloatArray = np.zeros(shape, dtype=np.float32)
        self.seen = [0] * structure.num_sets
        rates = [1.0 - half_life_to_decay(half_life) for half_life in HALF_LIVES]
        # Constants of full shape and 0-d arrays: numpy takes twice as long to broadcast a row or to
        # convert a Python number as to do the arithmetic on arrays this small.
        self._rates: FloatArray = np.repeat(np.array(rates, np.float32)[:, None], shape[2], axis=1)
        self._floor: FloatArray = np.array(FLOOR, dtype=np.float32)
        self._top: FloatArray = np.array(1.0 + 2.0 * FLOOR, dtype=np.float32)
        self.row: FloatArray = np.zeros(shape[1:], dtype=np.float32)
        self._steady = math.ceil(1.0 / min(rates)) - 2  # from here on every rate is the decay's
        self._change: FloatArray = np.empty(shape[1:], dtype=np.float32)

    def start(self, values: FloatArray, seen: Sequence[int]) -> None:
        """Goes on from popularity known before, of shape `values`."""
        self.values[:] = values
        self.seen = [int(count) for count in seen]
        for index in range(len(self.values)):
            self._write_logits(index)

    def update(self, set_index: int) -> None:
        """Takes in the visit that stands in `row`."""
        values, change, seen = self.values[set_index], self._change, self.seen[set_index]
        rates = self._rates
        if seen < self._steady:
            rates = np.maximum(rates, np.float32(1.0 / (seen + 2)))
        np.subtract(self.row, values, out=change)
        np.multiply(change, rates, out=change)
        np.add(values, change, out=values)
        self.seen[set_index] = seen + 1
        self._write_logits(set_index)

    def _write_logits(self, set_index: int) -> None:
        logits, rest = self.logits[set_index], self._change
        np.add(self.values[set_index], self._floor, out=logits)
        np.subtract(self._top, logits, out=rest)
        np.divide(logits, rest, out=logits)
        np.log(logits, out=logits)


class PassMemory:
    """The masks of this pass and of the last one, the set visited and its tokens, as one vector.

    Attributes:
        vector: (2 * num_sets * max_members + num_sets + 1,) float32: masks of the sets visited in
            this pass (0 for those still to come), masks of the pass before, one-hot set, token
            feature.
    """

    def __init__(self, structure: Structure) -> None:
        size = structure.num_sets * structure.max_members
        self.vector: FloatArray = np.zeros(2 * size + structure.num_sets + 1, dtype=np.float32)
        self._this_pass = self.vector[:size]
        self._last_pass = self.vector[size : 2 * size]
        self._this_rows = self._this_pass.reshape(structure.num_sets, structure.max_members)
        self._position = self.vector[2 * size : -1]
        self._last_set = -1

    def update(self, set_index: int, used: FloatArray, tokens: int) -> None:
        """Takes in one visit; `used` is (max_members,) float32 of 0 and 1."""
        last = self._last_set
        if set_index <= last:  # sets come in a fixed order, so a step back starts a new pass
            self._last_pass[:] = self._this_pass
            self._this_pass.fill(0.0)
        self._this_rows[set_index] = used
        self._position[last] = 0.0
        self._position[set_index] = 1.0
        self.vector[-1] = token_feature(tokens)
        self._last_set = set_index


@dataclass(frozen=True, eq=False)
class Features:
    """What a trace gives the models, row by row after the visit was observed.

    Attributes:
        surprise: (n, max_members) float32, used minus the set's medium popularity before the visit.
        logits: (n, K, max_members) float32, popularity logits of the visited set after the visit.
        last: (n, num_sets) from `last_visits`, to look up the other sets' logits.
        following: (n, num_sets) from `next_visits`: where the labels stand.
        masks: (r, F) float32 of `PassMemory` at the rows asked for.
        final_values, final_seen: popularity after the last visit.
    """

    surprise: FloatArray
    logits: FloatArray
    last: IntArray
    following: IntArray
    masks: FloatArray
    final_values: FloatArray
    final_seen: tuple[int, ...]

    def base_logits(self, rows: IntArray) -> FloatArray:
        """(r, num_sets, K, max_members): every set's popularity logits as known at r `rows`."""
        last = self.last[rows]
        # A set that was not yet visited has the prior of one half: a logit of zero.
        return np.where(last[:, :, None, None] >= 0, self.logits[last], np.float32(0.0))


def make_features(visits: Visits, mask_rows: IntArray | None = None) -> Features:
    """Runs the popularity bank and the pass memory over the visits; each run starts afresh.

    Args:
        visits: n visits.
        mask_rows: rows whose masks are kept, ascending; None keeps none. They are the one large
            part of the features, so that only those needed are made.
    """
    structure, n = visits.structure, len(visits)
    used = visits.used.astype(np.float32)
    surprise = np.empty_like(used)
    logits = np.empty((n, len(HALF_LIVES), structure.max_members), dtype=np.float32)
    bank, memory = PopularityBank(structure), PassMemory(structure)
    wanted = np.empty(0, dtype=np.int64) if mask_rows is None else mask_rows
    kept = np.empty((len(wanted), len(memory.vector)), dtype=np.float32)
    filled = 0
    for row in range(n):
        if row and visits.run[row] != visits.run[row - 1]:
            bank, memory = PopularityBank(structure), PassMemory(structure)
        index = int(visits.set_index[row])
        surprise[row] = used[row] - bank.values[index, MEDIUM]
        bank.row[:] = used[row]
        bank.update(index)
        logits[row] = bank.logits[index]
        memory.update(index, used[row], int(visits.tokens[row]))
        if filled < len(wanted) and wanted[filled] == row:
            kept[filled] = memory.vector
            filled += 1
    return Features(
        surprise=surprise,
        logits=logits,
        last=last_visits(visits),
        following=next_visits(visits),
        masks=kept,
        final_values=bank.values,
        final_seen=tuple(bank.seen),
    )
