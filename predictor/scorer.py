"""Scorers of the hook path: numpy only, one small matrix product after another, no allocation.

Both learned models end in a logit that contains popularity's own logit, so a model that has learned
nothing scores as popularity does. Everything fixed is folded into the weights beforehand: the
halving that turns tanh into a sigmoid, the embedding into the LSTM's input matrix, biases into a
constant input of 1. `observe` advances the state, `scores` computes the probabilities once for each
observed visit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from predictor.features import (
    MEDIUM,
    BoolArray,
    FloatArray,
    PassMemory,
    PopularityBank,
    Structure,
    token_feature,
)

ABSENT = -40.0  # half a logit whose sigmoid is 0 in float32: members that a set does not have
HALF: FloatArray = np.array(0.5, dtype=np.float32)  # 0-d: a Python number is converted at each call
ZERO: FloatArray = np.array(0.0, dtype=np.float32)


class _LearnedScorer(ABC):
    """Popularity state, and the last stage: stack, then the one sigmoid.

    Args:
        structure: the sets to score.
        arrays: `stack` (num_sets, num_sets, 2 + K), halved: for each observed and each scored set
            the constant, the weight of the learned logit and the weights of the popularity logits;
            `start_values`, `start_seen` of the popularity bank.
    """

    def __init__(self, structure: Structure, arrays: Mapping[str, FloatArray]) -> None:
        self.structure = structure
        self._members = structure.members
        self._bank = PopularityBank(structure)
        self._bank.start(arrays["start_values"], arrays["start_seen"].tolist())
        self._used: FloatArray = self._bank.row[0]
        shape = (structure.num_sets, structure.max_members)
        self._scores: FloatArray = np.zeros(shape, dtype=np.float32)
        self._half: FloatArray = np.zeros((shape[0], 1, shape[1]), dtype=np.float32)
        self._half_rows = self._half[:, 0, :]
        stack, exists = arrays["stack"], structure.member_mask()
        self._constant = list(np.where(exists, stack[:, :, :1], np.float32(ABSENT)))
        self._learned_weight = list(np.where(exists, stack[:, :, 1:2], np.float32(0.0)))
        self._popularity_weight = list(np.ascontiguousarray(stack[:, :, None, 2:]))
        self._observed = structure.num_sets - 1  # before the first visit a pass is about to begin
        self._stale = True

    def scores(self) -> FloatArray:
        """Probabilities for every set's next visit (see `SetScorer.scores`)."""
        if self._stale:
            observed, half, learned = self._observed, self._half_rows, self.learned_logits()
            np.multiply(learned, self._learned_weight[observed], out=learned)
            np.matmul(self._popularity_weight[observed], self._bank.logits, out=self._half)
            np.add(half, learned, out=half)
            np.add(half, self._constant[observed], out=half)
            # sigmoid(2x) = tanh(x) / 2 + 1/2: one transcendental function, and it cannot overflow.
            np.tanh(half, out=self._scores)
            np.multiply(self._scores, HALF, out=self._scores)
            np.add(self._scores, HALF, out=self._scores)
            self._stale = False
        return self._scores

    @abstractmethod
    def learned_logits(self) -> FloatArray:
        """The network's part, (num_sets, max_members); the caller may write to it."""

    def _take_in(self, set_index: int, used: BoolArray) -> FloatArray:
        """Writes a visit into the bank's row; returns it padded, (max_members,) float32."""
        row, count = self._bank.row, self._members[set_index]
        if count == len(self._used):
            row[:] = used
        else:
            row[:, :count] = used
            row[:, count:] = 0.0
        self._observed = set_index
        self._stale = True
        return self._used


class LSTMScorer(_LearnedScorer):
    """One LSTM cell step for each visit, one head for the next visit of every set.

    Args:
        structure: the sets to score.
        arrays: `step` (num_sets, 1 + H + max_members + 1, 4H), the matrix from [1, h, surprise,
            tokens] to the gates in the order input, forget, output (halved), cell; `head` (1 + H,
            num_sets * max_members); those of the last stage.
    """

    def __init__(self, structure: Structure, arrays: Mapping[str, FloatArray]) -> None:
        super().__init__(structure, arrays)
        self._step = list(np.ascontiguousarray(arrays["step"]))
        self._head = np.ascontiguousarray(arrays["head"])
        hidden = len(self._head) - 1
        self._input: FloatArray = np.zeros(self._step[0].shape[0], dtype=np.float32)
        self._input[0] = 1.0
        self._one_and_hidden = self._input[: 1 + hidden]
        self._hidden = self._input[1 : 1 + hidden]
        self._surprise = self._input[1 + hidden : -1]
        self._gates: FloatArray = np.zeros(4 * hidden, dtype=np.float32)
        self._sigmoid_gates = self._gates[: 3 * hidden]
        self._in, self._forget, self._out, self._new = self._gates.reshape(4, hidden)
        self._cell: FloatArray = np.zeros(hidden, dtype=np.float32)
        self._learned: FloatArray = np.zeros_like(self._scores)
        self._flat_learned = self._learned.reshape(-1)

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        """Takes in one forward visit (see `SetScorer.observe`)."""
        padded = self._take_in(set_index, used)
        np.subtract(padded, self._bank.values[set_index, MEDIUM], out=self._surprise)
        self._input[-1] = token_feature(tokens)
        self._advance(set_index)
        self._bank.update(set_index)

    def learned_logits(self) -> FloatArray:
        """What the head adds to popularity (see `_LearnedScorer.learned_logits`)."""
        np.dot(self._one_and_hidden, self._head, out=self._flat_learned)
        return self._learned

    def _advance(self, set_index: int) -> None:
        gates, sigmoid_gates, cell = self._gates, self._sigmoid_gates, self._cell
        np.dot(self._input, self._step[set_index], out=gates)
        np.tanh(gates, out=gates)
        np.multiply(sigmoid_gates, HALF, out=sigmoid_gates)
        np.add(sigmoid_gates, HALF, out=sigmoid_gates)
        np.multiply(cell, self._forget, out=cell)
        np.multiply(self._in, self._new, out=self._new)
        np.add(cell, self._new, out=cell)
        np.tanh(cell, out=self._hidden)
        np.multiply(self._hidden, self._out, out=self._hidden)


class MLPScorer(_LearnedScorer):
    """A multi-label network on the masks of this pass and the last, stacked with popularity.

    Args:
        structure: the sets to score.
        arrays: `weight_i`, `bias_i` of each layer (ReLU between them), the last one of num_sets *
            max_members outputs; those of the last stage.
    """

    def __init__(self, structure: Structure, arrays: Mapping[str, FloatArray]) -> None:
        super().__init__(structure, arrays)
        self._memory = PassMemory(structure)
        count = sum(name.startswith("weight_") for name in arrays)
        self._weights = [np.ascontiguousarray(arrays[f"weight_{i}"]) for i in range(count)]
        self._biases = [arrays[f"bias_{i}"] for i in range(count)]
        self._layers = [np.zeros(len(bias), dtype=np.float32) for bias in self._biases]
        self._output = self._layers[-1].reshape(self._scores.shape)

    def observe(self, set_index: int, used: BoolArray, tokens: int) -> None:
        """Takes in one forward visit (see `SetScorer.observe`)."""
        self._memory.update(set_index, self._take_in(set_index, used), tokens)
        self._bank.update(set_index)

    def learned_logits(self) -> FloatArray:
        """The network's logits (see `_LearnedScorer.learned_logits`)."""
        current = self._memory.vector
        last = len(self._layers) - 1
        for i, (weight, bias, layer) in enumerate(
            zip(self._weights, self._biases, self._layers, strict=True)
        ):
            np.dot(current, weight, out=layer)
            np.add(layer, bias, out=layer)
            if i < last:
                np.maximum(layer, ZERO, out=layer)
            current = layer
        return self._output
