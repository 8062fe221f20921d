"""Decoders of the Llama family of transformers as a chain of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# Families whose loss is loss_function(lm_head(norm(state))), checked by tests/fsdp.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2")


class _Recorder(nn.Module):
    """Stands where a block stood: notes how it is called, and hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        self.options = options
        return hidden_states


class DecoderChain:
    """A causal language model of transformers.

    A micro-batch is what the model takes by name: ``input_ids``, ``labels``, ``attention_mask``
    and so on. A state is the hidden states and, for each block, its other arguments (masks,
    positions), as the decoder's own forward makes them.

    Args:
        model: a model for which ``is_decoder`` holds.
    """

    def __init__(self, model: nn.Module) -> None:
        whole: Any = model
        self._model, self._decoder = whole, whole.model
        self.blocks: Sequence[nn.Module] = list(whole.model.layers)

    def embed(self, batch: Mapping[str, Any]) -> tuple[Tensor, list[dict[str, Any]]]:
        options = {name: value for name, value in batch.items() if name != "labels"}
        recorders = [_Recorder() for _ in self.blocks]
        with self._standing_in(recorders):
            made = self._decoder(**options, use_cache=False)
        return made.last_hidden_state, [r.options for r in recorders]

    @contextmanager
    def _standing_in(self, recorders: Sequence[nn.Module]) -> Iterator[None]:
        """The decoder's forward makes the arguments of blocks and runs none of them."""
        modules = self._decoder._modules
        kept = modules["layers"], modules["norm"]
        modules["layers"], modules["norm"] = nn.ModuleList(recorders), nn.Identity()
        try:
            yield
        finally:
            modules["layers"], modules["norm"] = kept

    def block(
        self, index: int, state: tuple[Tensor, list[dict[str, Any]]]
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        hidden, options = state
        return self.blocks[index](hidden, **options[index]), options

    def loss(self, state: tuple[Tensor, list[dict[str, Any]]], batch: Mapping[str, Any]) -> Tensor:
        logits = self._model.lm_head(self._decoder.norm(state[0]))
        found: Tensor = self._model.loss_function(
            logits=logits, labels=batch["labels"], vocab_size=self._model.config.vocab_size
        )
        return found


def is_decoder(model: nn.Module) -> bool:
    """Whether a model is a causal language model of one of ``FAMILIES``."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    decoder = getattr(model, "model", None)
    return (
        family in FAMILIES
        and isinstance(getattr(decoder, "layers", None), nn.ModuleList)
        and hasattr(model, "lm_head")
    )
