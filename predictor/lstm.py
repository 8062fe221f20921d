"""LSTM predictor: trained with torch over the sequence of visits, run in the hook as numpy arrays.

One cell step for each visit. Input: the surprise of the visited set (which members were used, less
their popularity), embedded by set and member, with the set and the number of tokens. One head gives
the next visit of every set at once, so looking several sets ahead needs no feeding back of guesses.
The head starts
at zero and adds to a learned mixture of popularity logits that starts as popularity alone: before
training the model *is* popularity, and early stopping keeps that if nothing better was found.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from odc.memory.scores import SetScorer
from predictor.features import (
    HALF_LIVES,
    MEDIUM,
    TRAIN,
    VALIDATION,
    Features,
    Structure,
    Visits,
    make_features,
    token_feature,
)
from predictor.model import Advance, FitReport, Predictor, ignore_progress, warm_start
from predictor.scorer import LSTMScorer


@dataclass(frozen=True, kw_only=True)
class LSTMTraining:
    """Settings of the training.

    Attributes:
        streams: stretches of the sequence trained side by side, their states kept across windows.
        window: visits through which a gradient flows back.
        max_epochs: upper limit; `visit_budget` lowers it on long traces.
        visit_budget: visits trained on in all, which bounds the time.
        patience: epochs without a better validation loss before stopping.
        learning_rate, weight_decay: of AdamW.
        mix_learning_rate: of the mixture of popularity logits.
        dropout: of the input members and of the hidden state.
    """

    streams: int = 8
    window: int = 32
    max_epochs: int = 60
    visit_budget: int = 200_000
    patience: int = 8
    learning_rate: float = 4e-3
    mix_learning_rate: float = 2e-2
    weight_decay: float = 0.2
    dropout: float = 0.4


class LSTMNetwork(nn.Module):
    """The torch side of the model.

    Args:
        structure: the sets to score.
        hidden: size of the state.
        dropout: of the input members and of the hidden state, in training.
    """

    def __init__(self, structure: Structure, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        num_sets, members = structure.num_sets, structure.max_members
        self.shape = (num_sets, members)
        self.embedding = nn.Parameter(torch.randn(num_sets, members, hidden) * members**-0.5)
        self.set_bias = nn.Parameter(torch.randn(num_sets, hidden) * 0.5)
        self.token_weight = nn.Parameter(torch.randn(hidden) * 0.5)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_sets * members)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        mix = torch.zeros(num_sets, len(HALF_LIVES))
        mix[:, MEDIUM] = 1.0
        self.mix = nn.Parameter(mix)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        batch: Batch,
        state: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Logits of every set's next visit after each of T visits of B streams.

        Args:
            batch: inputs of (B, T) visits.
            state: LSTM state (1, B, H) each, or None for zeros.

        Returns:
            Logits (B, T, num_sets, max_members), and the state after the last visit.
        """
        streams, time = batch.set_index.shape
        num_sets, members = self.shape
        placed = batch.surprise.new_zeros(streams, time, num_sets, members)
        surprise = self.dropout(batch.surprise)
        place = batch.set_index[:, :, None, None].expand(-1, -1, 1, members)
        placed.scatter_(2, place, surprise[:, :, None, :])
        embedded = placed.flatten(2) @ self.embedding.flatten(0, 1)
        embedded = embedded + self.set_bias[batch.set_index]
        embedded = embedded + batch.tokens[:, :, None] * self.token_weight
        hidden, state = self.lstm(embedded, state)
        learned = self.head(self.dropout(hidden)).unflatten(-1, self.shape)
        return learned + torch.einsum("btskm,sk->btsm", batch.base, self.mix), state


@dataclass(frozen=True)
class Batch:
    """Inputs of (B, T) visits, and their labels where the labels count.

    Attributes:
        surprise: (B, T, max_members). set_index: (B, T). tokens: (B, T) token feature.
        base: (B, T, num_sets, K, max_members) popularity logits.
        label: (B, T, num_sets, max_members) of 0 and 1.
        weight: the same shape; 0 for members that do not exist and labels that may not be used.
    """

    surprise: torch.Tensor
    set_index: torch.Tensor
    tokens: torch.Tensor
    base: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor


class _Sequence:
    """The visits as training takes them: batches of rows."""

    def __init__(self, visits: Visits, part: npt.NDArray[np.uint8]) -> None:
        self.visits, self.part = visits, part
        self.features: Features = make_features(visits)
        self.tokens = np.array([token_feature(int(t)) for t in visits.tokens], dtype=np.float32)
        self.exists = visits.structure.member_mask()

    def batch(self, rows: npt.NDArray[np.int64], learn: int) -> Batch:
        """The batch of `rows` (B, T); labels count where row and label are both of part `learn`."""
        flat = rows.reshape(-1)
        following = self.features.following[flat]
        valid = (following >= 0) & (self.part[following] == learn)
        valid &= (self.part[flat] == learn)[:, None]
        arrays = (
            self.features.surprise[flat],
            self.visits.set_index[flat],
            self.tokens[flat],
            self.features.base_logits(flat),
            self.visits.used[following].astype(np.float32),
            (valid[:, :, None] & self.exists).astype(np.float32),
        )
        return Batch(*(torch.from_numpy(a.reshape(*rows.shape, *a.shape[1:])) for a in arrays))


class LSTMPredictor(Predictor):
    """See the module's text.

    Args:
        structure: the sets to score.
        hidden: size of the LSTM's state.
    """

    kind = "lstm"

    def __init__(self, structure: Structure, hidden: int = 64) -> None:
        super().__init__(structure)
        self.hidden = hidden
        self.training = LSTMTraining()

    @property
    def settings(self) -> dict[str, Any]:
        return {"hidden": self.hidden}

    def fit(
        self,
        visits: Visits,
        part: npt.NDArray[np.uint8],
        seed: int = 0,
        advance: Advance = ignore_progress,
    ) -> FitReport:
        """Trains by truncated backpropagation through time (see `Predictor.fit`)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = LSTMNetwork(self.structure, self.hidden, self.training.dropout)
            sequence = _Sequence(visits, part)
            report = _train(network, sequence, self.training, np.random.default_rng(seed), advance)
        self.arrays = export_arrays(network)
        features = sequence.features
        self.arrays.update(warm_start(features.final_values, features.final_seen))
        return report

    def expected_shapes(self, arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        num_sets, members, hidden = self.structure.num_sets, self.structure.max_members, self.hidden
        return {
            "step": (num_sets, hidden + members + 2, 4 * hidden),
            "head": (hidden + 1, num_sets * members),
            "mix": (num_sets, len(HALF_LIVES)),
            "start_values": (num_sets, len(HALF_LIVES), members),
            "start_seen": (num_sets,),
        }

    def _make_scorer(self, arrays: Mapping[str, np.ndarray]) -> SetScorer:
        return LSTMScorer(self.structure, arrays)


def _train(
    network: LSTMNetwork,
    sequence: _Sequence,
    training: LSTMTraining,
    rng: np.random.Generator,
    advance: Advance,
) -> FitReport:
    rows = np.flatnonzero(sequence.part == TRAIN)
    epochs = max(2, min(training.max_epochs, training.visit_budget // max(1, len(rows))))
    # Few parameters, shared by all labels of a set: they may move faster, and must not shrink to 0.
    fast: dict[str, Any] = {
        "params": [network.mix],
        "lr": training.mix_learning_rate,
        "weight_decay": 0.0,
    }
    rest = [value for name, value in network.named_parameters() if name != "mix"]
    optimizer = torch.optim.AdamW(
        [fast, {"params": rest}], lr=training.learning_rate, weight_decay=training.weight_decay
    )
    start_loss = best_loss = _validation_loss(network, sequence)
    best, best_epoch, epoch = copy.deepcopy(network.state_dict()), 0, 0
    for epoch in range(1, epochs + 1):
        _train_epoch(network, sequence, _streams(rows, training.streams, rng), optimizer, training)
        loss = _validation_loss(network, sequence)
        if loss < best_loss:
            best, best_epoch, best_loss = copy.deepcopy(network.state_dict()), epoch, loss
        advance(epoch / epochs)
        if epoch - best_epoch >= training.patience:
            break
    network.load_state_dict(best)
    advance(1.0)
    return FitReport(epoch, best_epoch, start_loss, best_loss, {"hidden": network.lstm.hidden_size})


def _streams(
    rows: npt.NDArray[np.int64], streams: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Cuts the training rows into equal stretches, (streams, length), at a new place each epoch."""
    length = len(rows) // streams
    if length < 2:
        return rows[None]
    spare = len(rows) - length * streams
    # Starting elsewhere each time moves the borders at which a stream's state begins at zero.
    shift = int(rng.integers(0, length)) if length > 2 else 0
    rolled = np.roll(rows, -shift)
    return rolled[: len(rows) - spare].reshape(streams, length)


def _train_epoch(
    network: LSTMNetwork,
    sequence: _Sequence,
    streams: npt.NDArray[np.int64],
    optimizer: torch.optim.Optimizer,
    training: LSTMTraining,
) -> None:
    network.train()
    state = None
    for first in range(0, streams.shape[1], training.window):
        batch = sequence.batch(streams[:, first : first + training.window], TRAIN)
        logits, state = network(batch, state)
        state = (state[0].detach(), state[1].detach())
        loss = _loss_sum(logits, batch) / batch.weight.sum().clamp(min=1.0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()


def _loss_sum(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        logits, batch.label, weight=batch.weight, reduction="sum"
    )


@torch.no_grad()
def _validation_loss(network: LSTMNetwork, sequence: _Sequence) -> float:
    """Mean log-loss on the validation part, after a warm-up on the visits of training before it."""
    network.eval()
    total = count = 0.0
    for run in np.unique(sequence.visits.run):
        rows = np.flatnonzero(sequence.visits.run == run)
        judged = np.flatnonzero(sequence.part[rows] == VALIDATION)
        if not len(judged):
            continue
        rows, state = rows[max(0, judged[0] - 256) : judged[-1] + 1], None
        for first in range(0, len(rows), 256):
            batch = sequence.batch(rows[None, first : first + 256], VALIDATION)
            logits, state = network(batch, state)
            total += float(_loss_sum(logits, batch))
            count += float(batch.weight.sum())
    return total / max(1.0, count)


@torch.no_grad()
def export_arrays(network: LSTMNetwork) -> dict[str, np.ndarray]:
    """The weights as `predictor.scorer.LSTMScorer` takes them, without the start arrays."""
    num_sets, members = network.shape
    hidden = network.lstm.hidden_size
    lstm = {name: value.double() for name, value in network.lstm.named_parameters()}
    into = lstm["weight_ih_l0"].T  # (H, 4H), gates in torch's order i, f, g, o
    bias = lstm["bias_ih_l0"] + lstm["bias_hh_l0"]
    step = torch.empty(num_sets, 1 + hidden + members + 1, 4 * hidden, dtype=torch.float64)
    step[:, 0] = network.set_bias.double() @ into + bias
    step[:, 1 : 1 + hidden] = lstm["weight_hh_l0"].T
    step[:, 1 + hidden : -1] = network.embedding.double() @ into
    step[:, -1] = network.token_weight.double() @ into
    i, f, g, o = step.split(hidden, dim=-1)
    # sigmoid(x) = tanh(x / 2) / 2 + 1/2: halved here, one tanh serves all four gates in the hook.
    step = torch.cat([i / 2, f / 2, o / 2, g], dim=-1)
    head = torch.cat([network.head.bias[None], network.head.weight.T]) / 2
    return {
        "step": step.float().numpy(),
        "head": head.contiguous().numpy(),
        "mix": (network.mix / 2).numpy(),
    }
