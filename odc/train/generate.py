"""Generation token by token, with the keys and values of earlier positions kept."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odc.train.kv_cache import KVCache
from odc.train.models import Transformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the next token; without it generation is greedy.

    Attributes:
        temperature: Divides the logits; small values sharpen the choice.
        top_k: Keep the k most probable tokens only.
        top_p: Keep the fewest most probable tokens whose probabilities add up to this.
        seed: Seed of the draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}; pass no Sampling for greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def generate(
    model: nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
) -> Tensor:
    """Continues a prompt.

    Args:
        model: A `Transformer`, or a causal language model of transformers; in evaluation mode
            meanwhile.
        prompt: Token ids (B, T), T at least 1.
        max_new_tokens: Largest number of tokens to add.
        sampling: How to draw; `None` takes the most probable token.
        stop_token: Ends a row; generation ends when all rows have ended, and what follows the
            token in a row that ended before the others is `stop_token` again.

    Returns:
        Token ids (B, T + n), the prompt included.
    """
    new = list(stream(model, prompt, max_new_tokens, sampling=sampling, stop_token=stop_token))
    return torch.cat([prompt, *(token.unsqueeze(1) for token in new)], dim=1)


def stream(
    model: nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
) -> Iterator[Tensor]:
    """Yields the tokens (B,) that `generate` would append, each as soon as it is known."""
    if prompt.dim() != 2 or prompt.size(1) < 1:
        raise ValueError(f"prompt must be (B, T) with T at least 1, got {tuple(prompt.shape)}")
    if max_new_tokens < 1:
        return
    generator = None
    if sampling is not None:
        generator = torch.Generator(device=prompt.device).manual_seed(sampling.seed)
    # The last token is never fed back, so that its keys and values need no place.
    forward = _cached_forward(model, prompt.size(0), prompt.size(1) + max_new_tokens - 1)
    ended = torch.zeros(prompt.size(0), dtype=torch.bool, device=prompt.device)
    idx = prompt
    for _ in range(max_new_tokens):
        token = _choose(_last_logits(model, forward, idx), sampling, generator)
        if stop_token is not None:
            token = torch.where(ended, stop_token, token)
            ended |= token == stop_token
        yield token
        if stop_token is not None and bool(ended.all()):
            return
        idx = token.unsqueeze(1)


def _cached_forward(model: nn.Module, batch_size: int, capacity: int) -> Callable[[Tensor], Tensor]:
    """A forward (B, T) -> (B, T, V) that remembers the positions it has seen."""
    if isinstance(model, Transformer):
        cache = KVCache(
            model.config, batch_size=batch_size, capacity=capacity, like=model.embed.weight
        )
        return lambda idx: model(idx, cache=cache)
    from transformers import DynamicCache

    config: Any = model.config
    theirs = DynamicCache(config=config)
    # its name before transformers 5.24
    known = "cache" in inspect.signature(type(model).forward).parameters
    option = {"cache" if known else "past_key_values": theirs}
    return lambda idx: model(input_ids=idx, use_cache=True, **option).logits


def _last_logits(model: nn.Module, forward: Callable[[Tensor], Tensor], idx: Tensor) -> Tensor:
    """Sets evaluation mode for this call alone: a reader may train between two tokens."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return forward(idx)[:, -1].float()
    finally:
        model.train(was_training)


def _choose(logits: Tensor, sampling: Sampling | None, generator: torch.Generator | None) -> Tensor:
    """(B, V) -> (B,)."""
    if sampling is None:
        return logits.argmax(dim=-1)
    ordered, ids = (logits / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    probs = ordered.softmax(dim=-1)
    if sampling.top_p is not None:
        # A token stays while those before it have not reached top_p; the first always does.
        before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    drawn = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(1, drawn).squeeze(1)
