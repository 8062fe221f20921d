"""What a run trains for: where its batches come from, what their loss is, how it is judged.

The trainer calls a `Task` and knows nothing else of data and objectives. Names in `config.yaml`
are resolved here; whoever has a task of their own passes the object.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from odc.train.config import Config
from odc.train.ranks import Ranks
from odc.train.sampler import Batch, Sampler, evaluation_batches
from odc.train.tokenizer import Tokenizer
from odc.train.tokens import TokenData, load_tokens


class Task(Protocol):
    """An objective over batches that depend on the step alone."""

    def batch(self, step: int, micro: int) -> Batch:
        """Returns inputs and targets (B, T) of one micro-step; steps count from 0."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the scalar to differentiate."""

    def evaluate(self, model: nn.Module) -> float:
        """Returns the loss on text that is held back."""

    def epoch(self, step: int) -> int:
        """Returns the epoch, from 0, in which a step begins."""


class Pretrain:
    """Next-token prediction on the corpus that the configuration names.

    Args:
        config: Sections `train` and `data` are read.
        data: The tokens; read (and made, the first time) as `config.data` says where not given.
        ranks: Who shares the batches: micro-step m of rank r is number m * size + r of its step,
            and so is its part of an evaluation.

    Attributes:
        tokenizer: Tokenizer of the corpus; its `vocab_size` is the model's.
        corpus_hash: What the run is trained on.
    """

    def __init__(
        self, config: Config, data: TokenData | None = None, ranks: Ranks | None = None
    ) -> None:
        self._ranks = ranks or Ranks()
        self._data = _load_tokens(config, self._ranks) if data is None else data
        self._train = config.train
        self.tokenizer: Tokenizer = self._data.tokenizer
        self.corpus_hash = self._data.corpus_hash
        self._sampler = Sampler(
            self._data.train,
            seq_len=config.train.seq_len,
            micro_batch=config.train.micro_batch,
            accumulate=config.train.accumulate * self._ranks.size,
            seed=config.train.seed,
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model must know."""
        return self.tokenizer.vocab_size

    def batch(self, step: int, micro: int) -> Batch:
        """Returns inputs and targets (B, T) of one micro-step."""
        return self._sampler.batch(step, micro * self._ranks.size + self._ranks.rank)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy, plus the routers' auxiliary losses while training."""
        inputs, targets = batch
        return model(inputs, targets)

    def evaluate(self, model: nn.Module) -> float:
        """Returns the mean cross-entropy on the same held-back batches at every call.

        Raises:
            DataError: The held-back text is shorter than one window.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                own, count = self._own_losses(model, self._held_back())
        finally:
            model.train(was_training)
        return self._ranks.total([own])[0] / count

    def _own_losses(self, model: nn.Module, batches: list[Batch]) -> tuple[float, int]:
        """Sum of the losses of this rank's batches, and the number of all ranks' batches.

        A forward of a sharded model needs every rank, so that all run equally many; what is one
        too many counts for nothing.
        """
        total = 0.0
        for first in range(0, len(batches), self._ranks.size):
            number = first + self._ranks.rank
            loss = self.loss(model, batches[min(number, len(batches) - 1)]).item()
            total += loss if number < len(batches) else 0.0
        return total, len(batches)

    def epoch(self, step: int) -> int:
        """Returns the epoch, from 0, in which a step begins."""
        return self._sampler.epoch(step)

    def _held_back(self) -> list[Batch]:
        return list(
            evaluation_batches(
                self._data.evaluation,
                seq_len=self._train.seq_len,
                micro_batch=self._train.micro_batch,
                num_batches=self._train.eval_batches,
            )
        )


def _load_tokens(config: Config, ranks: Ranks) -> TokenData:
    """Rank 0 makes the tokens where there are none yet; the others find them."""
    if ranks.size > 1:
        ranks.on_root(lambda: bool(load_tokens(config.data)))
    return load_tokens(config.data)


def make_task(config: Config, ranks: Ranks | None = None) -> Pretrain:
    """Returns the task that `train.task` names; its corpus is read, and tokenized the first time.

    Raises:
        DataError: The corpus cannot be read, or is too small for the batches.
    """
    # The configuration accepts no other name, so that there is nothing to choose from yet.
    assert config.train.task == "pretrain", config.train.task
    if config.model.path is not None:
        from odc.train.pretrained_task import ContinuePretraining  # which builds upon this module

        return ContinuePretraining(config, ranks=ranks)
    return Pretrain(config, ranks=ranks)
