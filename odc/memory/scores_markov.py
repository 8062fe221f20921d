"""Transitions from set to set: what the members used in set l say of those of set l + 1.

For each pair of sets that follow one another there is a matrix of decayed means, P(j of the next
set is used | i of this one is). The evidence for j is the sum over the members i that were used,

    e[j] = sum over i of confidence(i) * (P(j | i) - P(j)),  confidence = visits / (visits + prior),

so that what was seldom seen says little. The score is P(j) + w * e[j], P(j) being the popularity.
The weight w of a pair is a running least-squares fit of what came on what the evidence had said
before: 1 where each member sends its tokens to members of its own, 1 / n where n members say the
same, and 0 where sets are independent and all evidence is noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odc.memory.scores import (
    DEFAULT_HALF_LIFE,
    DEFAULT_PRIOR,
    BoolArray,
    FloatArray,
    PopularityScorer,
    half_life_to_decay,
)

_PAIR_HALF_LIFE = 64.0  # visits that used a member, after which an observation counts half
_FIT_HALF_LIFE = 32.0  # visits of a pair, the same for its weight
_SELDOM = 4.0  # visits at which a member's transitions count half
_RIDGE = 1.0  # squared evidence that is needed before it counts


class _Pair:
    """Transitions from a set to the one behind it."""

    def __init__(self, members: int, following: int) -> None:
        self.means: FloatArray = np.zeros((members, following), np.float32)
        self.confidence: FloatArray = np.zeros(members, np.float32)
        self.evidence: FloatArray = np.zeros(following, np.float32)
        self._visits = np.zeros(members, np.int64)
        self._least_rate = np.float32(1.0 - half_life_to_decay(_PAIR_HALF_LIFE))
        self._keep = half_life_to_decay(_FIT_HALF_LIFE)
        self._agreed = 0.0  # sum of evidence x what came beyond popularity
        self._squares = 0.0

    @property
    def weight(self) -> float:
        return min(max(self._agreed / (self._squares + _RIDGE), 0.0), 1.0)

    def predict(self, used: np.ndarray, popularity: FloatArray, out: FloatArray) -> None:
        """Write the scores of the next set after the members ``used`` (their indices)."""
        confidence = self.confidence.take(used)
        evidence = self.evidence
        np.dot(confidence, self.means.take(used, axis=0), out=evidence)
        np.multiply(popularity, confidence.sum(), out=out)
        np.subtract(evidence, out, out=evidence)
        np.multiply(evidence, self.weight, out=out)
        np.add(out, popularity, out=out)
        np.maximum(out, 0.0, out=out)
        np.minimum(out, 1.0, out=out)

    def learn(self, used: np.ndarray, came: BoolArray, popularity: FloatArray) -> None:
        """The next set used ``came``; ``popularity`` and the evidence are from before."""
        evidence = self.evidence
        self._agreed = self._keep * self._agreed + float(evidence.dot(came - popularity))
        self._squares = self._keep * self._squares + float(evidence.dot(evidence))
        visits = self._visits.take(used) + 1
        self._visits[used] = visits
        self.confidence[used] = visits / (visits + _SELDOM)
        rates = np.maximum(1.0 / visits, self._least_rate).astype(np.float32)
        rows = self.means.take(used, axis=0)
        rows += (came - rows) * rates[:, None]
        self.means[used] = rows


class MarkovScorer:
    """Popularity, moved by the members that the set before has used in this pass.

    The first set of a pass, sets whose predecessor was not visited in it, and those further ahead
    score their popularity.

    Args:
        members: members of each set, in the order in which a pass visits the sets.
        half_life: of the popularity, in visits of a set.
        prior: score before the first visit.
    """

    def __init__(
        self,
        members: Sequence[int],
        half_life: float = DEFAULT_HALF_LIFE,
        prior: float = DEFAULT_PRIOR,
    ) -> None:
        self._popularity = PopularityScorer(members, half_life, prior)
        self.members = self._popularity.members
        popular = self._popularity.scores()
        self._scores: FloatArray = popular.copy()
        self._rows = [row[:count] for row, count in zip(self._scores, self.members, strict=True)]
        self._popular = [row[:count] for row, count in zip(popular, self.members, strict=True)]
        pairs = zip(self.members, self.members[1:], strict=False)
        self._pairs = [_Pair(count, following) for count, following in pairs]
        self._last = -1  # the set visited before
        self._used = np.zeros(0, np.int64)  # its members

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        """Takes in one forward visit (see ``SetScorer.observe``)."""
        last = self._last
        if 0 <= last == set_index - 1:
            self._pairs[last].learn(self._used, used, self._popular[set_index])
        elif last >= 0:
            self._forget_evidence(last)
        self._popularity.observe(set_index, used, tokens)
        self._rows[set_index][:] = self._popular[set_index]
        self._last = set_index
        self._used = np.flatnonzero(used)
        if set_index < len(self._pairs):
            following = set_index + 1
            self._pairs[set_index].predict(
                self._used, self._popular[following], self._rows[following]
            )

    def _forget_evidence(self, last: int) -> None:
        """The set behind ``last`` was not visited: what was said of it was of that pass."""
        if last + 1 < len(self._rows):
            self._rows[last + 1][:] = self._popular[last + 1]

    def scores(self) -> FloatArray:
        """Scores as of the last visit (see ``SetScorer.scores``)."""
        return self._scores

    def later_scores(self) -> FloatArray:
        """Popularity: of the visits behind the next nothing else is known."""
        return self._popularity.scores()
