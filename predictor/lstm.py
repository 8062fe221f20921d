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
    labelled_rows,
    make_features,
    token_feature,
)
from predictor.model import Advance, FitReport, Predictor, warm_start
from predictor.scorer import LSTMScorer
from predictor.stack import WIDTH, fit_stack, plain_stack

WARM_UP = 256  # visits that bring the LSTM's state close to that of a run from its start


@dataclass(frozen=True, kw_only=True)
class LSTMTraining:
    """Settings of the training.

    Attributes:
        streams: stretches of the sequence trained side by side, their states kept across windows.
        window: visits through which a gradient flows back.
        max_epochs: upper limit; `label_budget` lowers it on long traces.
        label_budget: (visit, member) pairs trained on in all, which bounds the time.
        patience: epochs without a better validation loss before stopping.
        learning_rate, weight_decay: of AdamW.
        mix_learning_rate: of the mixture of popularity logits.
        dropout: of the input members and of the hidden state.
    """

    streams: int = 4
    window: int = 16
    max_epochs: int = 120
    label_budget: int = 80_000_000
    patience: int = 15
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
        labelled_rows(visits, part, TRAIN)
        self.judged = labelled_rows(visits, part, VALIDATION)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """The batch of `rows` (B, T); labels count where row and label are both of TRAIN."""
        flat = rows.reshape(-1)
        following = self.features.following[flat]
        valid = (following >= 0) & (self.part[following] == TRAIN)
        valid &= (self.part[flat] == TRAIN)[:, None]
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

    def _fit(
        self, visits: Visits, part: npt.NDArray[np.uint8], seed: int, advance: Advance
    ) -> FitReport:
        """Trains by truncated backpropagation through time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = LSTMNetwork(self.structure, self.hidden, self.training.dropout)
            sequence = _Sequence(visits, part)
            report = _train(network, sequence, self.training, np.random.default_rng(seed), advance)
            learned = _validation_logits(network, sequence)
        stack = fit_stack(learned, sequence.features, visits, sequence.judged, seed)
        self.arrays = export_arrays(network, stack)
        features = sequence.features
        self.arrays.update(warm_start(features.final_values, features.final_seen))
        return report

    def expected_shapes(self, arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        num_sets, members, hidden = self.structure.num_sets, self.structure.max_members, self.hidden
        return {
            "step": (num_sets, hidden + members + 2, 4 * hidden),
            "head": (hidden + 1, num_sets * members),
            "stack": (num_sets, num_sets, WIDTH),
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
    labels = max(1, len(rows) * sequence.exists.size)
    epochs = max(2, min(training.max_epochs, training.label_budget // labels))
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
    start = _losses(network, sequence)
    num_labels = len(sequence.judged) * sequence.exists.sum()
    best_loss = float(start.sum())
    best, best_epoch, epoch = copy.deepcopy(network.state_dict()), 0, 0
    for epoch in range(1, epochs + 1):
        _train_epoch(network, sequence, _streams(rows, training.streams, rng), optimizer, training)
        # The stack falls back on popularity wherever it is better: count what is left then.
        loss = float(np.minimum(start, _losses(network, sequence)).sum())
        if loss < best_loss:
            best, best_epoch, best_loss = copy.deepcopy(network.state_dict()), epoch, loss
        advance(epoch / epochs)
        if epoch - best_epoch >= training.patience:
            break
    network.load_state_dict(best)
    advance(1.0)
    return FitReport(
        epochs=epoch,
        best_epoch=best_epoch,
        start_loss=float(start.sum()) / num_labels,
        best_loss=best_loss / num_labels,
        choices={"hidden": network.lstm.hidden_size},
    )


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
        batch = sequence.batch(streams[:, first : first + training.window])
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
def _validation_logits(network: LSTMNetwork, sequence: _Sequence) -> npt.NDArray[np.float32]:
    """Logits after the validation rows, (r, num_sets, max_members).

    The state is warmed up on `WARM_UP` visits before each run's first validation row.
    """
    network.eval()
    logits = []
    for run in np.unique(sequence.visits.run[sequence.judged]):
        of_run = np.flatnonzero(sequence.visits.run == run)
        judged = np.isin(of_run, sequence.judged)
        first, last = np.flatnonzero(judged)[[0, -1]]
        span, state = slice(max(0, int(first) - WARM_UP), int(last) + 1), None
        of_run, judged = of_run[span], judged[span]
        for start in range(0, len(of_run), WARM_UP):
            rows = of_run[start : start + WARM_UP]
            output, state = network(sequence.batch(rows[None]), state)
            logits.append(output[0].numpy()[judged[start : start + WARM_UP]])
    return np.concatenate(logits)


def _losses(network: LSTMNetwork, sequence: _Sequence) -> npt.NDArray[np.float64]:
    """Validation log-loss summed for each distance in the pass, (2 * num_sets - 1,)."""
    visits, rows = sequence.visits, sequence.judged
    logits = torch.from_numpy(_validation_logits(network, sequence))
    labels = torch.from_numpy(visits.used[sequence.features.following[rows]]).float()
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    by_set = (loss.numpy() * sequence.exists).sum(axis=2)  # (r, num_sets)
    num_sets = visits.structure.num_sets
    ahead = np.arange(num_sets) - visits.set_index[rows][:, None] + num_sets - 1
    sums = np.bincount(ahead.ravel(), weights=by_set.ravel(), minlength=2 * num_sets - 1)
    return sums.astype(np.float64)


@torch.no_grad()
def export_arrays(
    network: LSTMNetwork, stack: npt.NDArray[np.float32] | None = None
) -> dict[str, np.ndarray]:
    """The weights as `predictor.scorer.LSTMScorer` takes them, without the start arrays.

    The network's mixture of popularity logits is folded into the stack's.

    Args:
        network: the trained network.
        stack: from `fit_stack`; None takes the network's logits as they are.
    """
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
    head = torch.cat([network.head.bias[None], network.head.weight.T])
    last = plain_stack(num_sets) if stack is None else stack.copy()
    last[:, :, 2:] += last[:, :, 1:2] * network.mix.numpy()
    return {
        "step": step.float().numpy(),
        "head": head.contiguous().numpy(),
        "stack": last / 2,
    }
