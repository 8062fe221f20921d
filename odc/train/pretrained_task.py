"""Training on with a Hugging Face model on plain text: its own tokenizer, its logits, its loss.

A folder with `tokenizer.json` gives the token ids, so that the model reads what it was trained on.
Without one a tokenizer is learned from the corpus, of at most as many ids as the model has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch.nn.functional as F
from torch import Tensor, nn

from odc.errors import ConfigError, DataError
from odc.fsdp.activations import wrap_forward
from odc.fsdp.chunked_loss import chunked_cross_entropy
from odc.train.config import Config
from odc.train.models import IGNORE_INDEX
from odc.train.pretrained import read_config
from odc.train.ranks import Ranks
from odc.train.sampler import Batch
from odc.train.tasks import Pretrain
from odc.train.tokenizer import END_OF_TEXT, Tokenizer
from odc.train.tokens import TokenData, load_tokens

TOKENIZER = "tokenizer.json"
# Keys of models that change the logits of their head.
_SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")
TOKENIZER_CONFIG = "tokenizer_config.json"
SMALLEST = 258  # token ids: the bytes, an end marker and one more


class ContinuePretraining(Pretrain):
    """Next-token prediction with the model in `model.path`.

    Args:
        config: Sections `model`, `data` and `train` are read.
        ranks: As `Pretrain` takes it.

    Raises:
        ConfigError: The folder holds no model, or one for shorter sequences or fewer token ids.
        DataError: As of `Pretrain`; or the folder's tokenizer cannot be read.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        assert config.model.path is not None, "without a folder there is nothing to go on from"
        folder = Path(config.model.path).expanduser()
        model = read_config(folder)
        longest = getattr(model, "max_position_embeddings", None)
        if longest is not None and config.train.seq_len > longest:
            raise ConfigError(
                f"train.seq_len: got {config.train.seq_len}; allowed: at most {longest}, the "
                f"positions of the model in {folder}"
            )
        super().__init__(config, _load_tokens(config, folder, model), ranks)
        self._loss_chunk = config.activations.loss_chunk
        scaled = [key for key in _SCALED if getattr(model, key, None) is not None]
        if self._loss_chunk is not None and scaled:
            raise ConfigError(
                f"activations.loss_chunk: got {self._loss_chunk} for a model with {scaled[0]}, "
                "which changes its logits behind the head; allowed: null"
            )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy.

        While training, plus the routers' auxiliary loss where the model's own configuration asks
        for it (`output_router_logits`).
        """
        inputs, targets = batch
        if self._loss_chunk is None:
            answer: Any = model(input_ids=inputs, use_cache=False)
            logits = answer.logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX)
        else:
            with _head_gives_loss(model, targets, self._loss_chunk):
                answer = model(input_ids=inputs, use_cache=False)
            loss = answer.logits
        auxiliary = getattr(answer, "aux_loss", None)
        if model.training and isinstance(auxiliary, Tensor):
            loss = loss + model.config.router_aux_loss_coef * auxiliary  # type: ignore[union-attr, operator]
        return loss


@contextmanager
def _head_gives_loss(model: Any, targets: Tensor, chunk: int) -> Iterator[None]:
    """What a model answers as its logits is its loss, without logits, meanwhile."""
    head = model.get_output_embeddings()
    before = head.__dict__.get("forward")

    def loss(module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return chunked_cross_entropy(
            args[0], module.weight, targets, module.bias, chunk=chunk, ignore_index=IGNORE_INDEX
        )

    wrap_forward(head, loss)
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def _load_tokens(config: Config, folder: Path, model: Any) -> TokenData:
    tokenizer = load_tokenizer(folder, model)
    known = int(model.vocab_size)
    if tokenizer is None:
        if known < SMALLEST:
            raise ConfigError(
                f"model.path: {folder} has no {TOKENIZER}, and its model only {known} token ids; "
                f"a tokenizer of any text needs {SMALLEST}"
            )
        data = dataclasses.replace(config.data, vocab_size=min(config.data.vocab_size, known))
        return load_tokens(data)
    if tokenizer.vocab_size > known:
        raise ConfigError(
            f"model.path: {folder / TOKENIZER} has {tokenizer.vocab_size} token ids, the model "
            f"{known}; use the tokenizer that the model was trained with"
        )
    return load_tokens(config.data, tokenizer)


def load_tokenizer(folder: Path, model: Any) -> Tokenizer | None:
    """The tokenizer in a model's folder, `None` where there is no `tokenizer.json`.

    Args:
        folder: Of the model.
        model: Its configuration.

    Raises:
        DataError: It cannot be read, or no token of it ends a text.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise DataError(f"{path}: is no tokenizer: {error}") from error
    return Tokenizer(inner, _end_of_text(folder, model, inner))


def _end_of_text(folder: Path, model: Any, inner: tokenizers.Tokenizer) -> str:
    """The token that ends a text: as the tokenizer's configuration says, else as the model's."""
    told: Any = {}
    if (folder / TOKENIZER_CONFIG).is_file():
        try:
            told = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{folder / TOKENIZER_CONFIG}: is no JSON: {error}") from error
    token = told.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
        return token
    number = getattr(model, "eos_token_id", None)
    number = number[0] if isinstance(number, list) else number
    named = None if number is None else inner.id_to_token(number)
    return named or END_OF_TEXT
