"""Batches as a pure function of the step, so that a run resumes from a step number alone.

Every epoch shuffles the documents by (seed, epoch) and lays them end to end. That stream is cut
into `micro_batch` lanes of equal length, and each call takes the next `seq_len + 1` tokens of every
lane. A long document therefore spans consecutive steps of one lane, as in sequential packing; the
last token of a window is the first of the next, so that every token of a lane is predicted once.
What is left at the end of a lane, less than one window, is not used in that epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odc.errors import DataError
from odc.train.tokens import DocumentSet

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Order:
    """The documents of one epoch as one stream: `ends` are positions in that stream."""

    epoch: int
    documents: np.ndarray
    ends: np.ndarray


class Sampler:
    """Cuts documents into batches.

    Args:
        documents: What to draw from.
        seq_len: Tokens that a window predicts.
        micro_batch: Lanes, the rows of a batch.
        accumulate: Micro-steps of one step; each takes windows of its own.
        seed: Seed of the shuffles.

    Raises:
        DataError: The documents are too short for one window in each lane.
    """

    def __init__(
        self,
        documents: DocumentSet,
        *,
        seq_len: int,
        micro_batch: int,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        self._documents = documents
        self._seq_len, self._lanes, self._accumulate = seq_len, micro_batch, accumulate
        self._seed = seed
        self._lane_len = documents.num_tokens // micro_batch
        self.windows_per_epoch = (self._lane_len - 1) // seq_len
        if self.windows_per_epoch < 1:
            raise DataError(
                f"{documents.num_tokens} tokens are too few for {micro_batch} windows of "
                f"{seq_len} + 1; give more text (data.corpus, data.eval_fraction), or lower "
                "train.micro_batch or train.seq_len"
            )
        self._order: _Order | None = None

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Returns inputs and targets, int64 (B, T) each, of one micro-step.

        Args:
            step: Step, from 0.
            micro: Micro-step within the step, from 0 to `accumulate - 1`.
        """
        epoch, window = divmod(self._window(step, micro), self.windows_per_epoch)
        order = self._order_of(epoch)
        rows = np.empty((self._lanes, self._seq_len + 1), dtype=np.int64)
        for lane, row in enumerate(rows):
            self._fill(row, order, lane * self._lane_len + window * self._seq_len)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def epoch(self, step: int) -> int:
        """Returns the epoch, from 0, in which a step begins."""
        return self._window(step, 0) // self.windows_per_epoch

    def _window(self, step: int, micro: int) -> int:
        if step < 0 or not 0 <= micro < self._accumulate:
            raise ValueError(
                f"step must be at least 0 and micro from 0 to {self._accumulate - 1}, "
                f"got step {step}, micro {micro}"
            )
        return step * self._accumulate + micro

    def _order_of(self, epoch: int) -> _Order:
        """Keeps the last epoch's order: it saves a shuffle a step and changes no result."""
        if self._order is None or self._order.epoch != epoch:
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self._documents))
            lengths = (self._documents.ends - self._documents.starts)[shuffled]
            self._order = _Order(epoch, shuffled, np.cumsum(lengths))
        return self._order

    def _fill(self, row: np.ndarray, order: _Order, position: int) -> None:
        """Copies tokens from `position` of the stream on, across as many documents as it takes."""
        filled, index = 0, int(np.searchsorted(order.ends, position, side="right"))
        while filled < len(row):
            document = order.documents[index]
            left_in_document = int(order.ends[index]) - position
            count = min(left_in_document, len(row) - filled)
            end = int(self._documents.ends[document])
            start = end - left_in_document
            row[filled : filled + count] = self._documents.tokens[start : start + count]
            filled, position, index = filled + count, position + count, index + 1


def evaluation_batches(
    documents: DocumentSet, *, seq_len: int, micro_batch: int, num_batches: int
) -> Iterator[Batch]:
    """Yields the same batches at every call, at most as many as the documents give once.

    Lanes are fewer than `micro_batch` where there is too little text for so many.

    Raises:
        DataError: The documents are shorter than one window.
    """
    lanes = max(1, min(micro_batch, documents.num_tokens // (seq_len + 1)))
    sampler = Sampler(documents, seq_len=seq_len, micro_batch=lanes)
    for step in range(min(num_batches, sampler.windows_per_epoch)):
        yield sampler.batch(step)
