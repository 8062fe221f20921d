"""Scorers: how likely each member of each set is to be used at the set's next forward visit.

A set (the experts of a layer) is a station whose members are chosen at run time. The scheduler asks
one `SetScorer` which of them to load ahead and which to keep. The two scorers here need no
training: decayed popularity and the replay of the last visit. A learned one must beat them.

A scorer only advises. Wrong scores cost transfers and stalls, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

DEFAULT_HALF_LIFE = 16.0  # visits of a set after which an observation counts half
DEFAULT_PRIOR = 0.5  # probability of a member nothing is known of


class SetScorer(Protocol):
    """Gives each set's members the probability of being used at the set's next forward visit."""

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        """Takes in one forward visit. A `set_index` of 0 starts a new pass.

        Args:
            set_index: position of the set in the pass, 0 <= set_index < num_sets.
            used: (num_members,) bool, the members of this set that were used.
            tokens: tokens that the visit routed.
        """

    def scores(self) -> FloatArray:
        """P(member is used at the next forward visit of its set), (num_sets, max_members) float32.

        After set l was observed, rows above l speak of this pass, rows up to l of the next pass.
        Members that a smaller set does not have score 0. The array belongs to the scorer and
        changes at the next `observe`: read it at once, copy it to keep it.

        A scorer may also have `later_scores`, of the same shape: of the visits behind the next
        one. Without it `scores` stands for those too.
        """


def half_life_to_decay(half_life: float) -> float:
    """Factor per visit under which an observation counts half after `half_life` visits."""
    if not half_life > 0:
        raise ValueError(f"half_life must be above 0 visits, got {half_life}")
    return float(0.5 ** (1.0 / half_life))


class _SetScores:
    """The (num_sets, max_members) array that both scorers keep, with a view of each set's row."""

    def __init__(self, members: Sequence[int], initial: float) -> None:
        if not members or min(members) < 1:
            raise ValueError(f"members must give at least one member per set, got {list(members)}")
        self.members = tuple(int(count) for count in members)
        self._scores: FloatArray = np.zeros((len(members), max(members)), dtype=np.float32)
        self._rows = [row[:count] for row, count in zip(self._scores, self.members, strict=True)]
        for row in self._rows:
            row.fill(initial)

    def scores(self) -> FloatArray:
        return self._scores


class PopularityScorer(_SetScores):
    """Exponentially decayed share of a set's visits that used each member.

    The first visits count alike (a plain mean, the prior counting as one visit) until the decay's
    rate is reached, so that early scores do not hang on the prior: with n visits seen, the next one
    moves the score by max(1 - decay, 1 / (n + 2)) of its distance.

    Args:
        members: members of each set, in the order in which a pass visits the sets.
        half_life: visits of a set after which an observation counts half.
        prior: score before the first visit.
    """

    def __init__(
        self,
        members: Sequence[int],
        half_life: float = DEFAULT_HALF_LIFE,
        prior: float = DEFAULT_PRIOR,
    ) -> None:
        super().__init__(members, prior)
        self._rate = 1.0 - half_life_to_decay(half_life)
        self._visits = [0] * len(self.members)
        self._change: FloatArray = np.zeros(max(self.members), dtype=np.float32)
        self._changes = [self._change[:count] for count in self.members]

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        row, change = self._rows[set_index], self._changes[set_index]
        seen = self._visits[set_index]
        np.subtract(used, row, out=change)
        change *= max(self._rate, 1.0 / (seen + 2))
        row += change
        self._visits[set_index] = seen + 1


class ReplayScorer(_SetScores):
    """The members of each set's last visit score 1, all others 0. Before the first visit: 0.

    Args:
        members: members of each set, in the order in which a pass visits the sets.
    """

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(members, 0.0)

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        self._rows[set_index][:] = used
