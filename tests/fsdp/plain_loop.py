"""The loop that every paged run is compared with: plain PyTorch, and of odc only the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from odc.train.kv_cache import KVCache

VOCAB = 384
LR = 3e-3


@dataclass(frozen=True)
class Loop:
    """What a training loop does, paged or not."""

    steps: int = 20
    accumulate: int = 2
    max_grad_norm: float | None = None
    decay_groups: bool = False
    evaluate: bool = False
    forwards_first: str = ""  # "one backward" or "two backwards": after both forwards of a step
    seed: int = 0


@dataclass
class Result:
    """What must be equal to the last bit."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    evaluations: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def batch(loop: Loop, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """(1, 8) tokens and the (1, 8) tokens after them."""
    generator = torch.Generator().manual_seed(1000 * loop.seed + 10 * step + micro)
    tokens = torch.randint(0, VOCAB, (1, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def parameter_groups(loop: Loop, model: nn.Module) -> list[dict[str, object]]:
    """One group, or matrices that decay and vectors that do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not loop.decay_groups:
        return [{"params": trainable}]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0, "lr": LR / 3},
    ]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Three steps of warm-up, then slowly down."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 3, 1.0) * 0.97**step
    )


def losses_of_step(loop: Loop, model: nn.Module, step: int) -> Iterator[Tensor]:
    """The losses of a step, each after its backward."""

    def forward(micro: int) -> Tensor:
        return model(*batch(loop, step, micro)) / loop.accumulate

    if not loop.forwards_first:
        for micro in range(loop.accumulate):
            loss = forward(micro)
            loss.backward()
            yield loss.detach()
        return
    losses = [forward(micro) for micro in range(loop.accumulate)]
    if loop.forwards_first == "one backward":
        torch.stack(losses).sum().backward()
    else:
        for loss in losses:
            loss.backward()
    yield from (loss.detach() for loss in losses)


@torch.no_grad()
def evaluate(loop: Loop, model: nn.Module, step: int) -> list[Tensor]:
    """A loss without a graph, and four tokens written with a cache of keys and values."""
    model.eval()
    found = [model(*batch(loop, step, 7))]
    if "cache" in inspect.signature(model.forward).parameters:
        tokens = batch(loop, step, 8)[0][:, :5]
        like = torch.zeros(0, dtype=next(model.parameters()).dtype)
        cache = KVCache(model.config, batch_size=1, capacity=12, like=like)
        for _ in range(4):
            logits = model(tokens, cache=cache)
            found.append(logits)
            tokens = logits[:, -1:].argmax(dim=-1)
    model.train()
    return found


def train_plainly(
    model: nn.Module, loop: Loop, after_step: Callable[[int], None] = lambda step: None
) -> Result:
    """Train with ``torch.optim.AdamW`` and torch's own clipping."""
    optimizer = torch.optim.AdamW(parameter_groups(loop, model), lr=LR, fused=True)
    rates = schedule(optimizer)
    result = Result()
    for step in range(loop.steps):
        optimizer.zero_grad()
        result.losses += losses_of_step(loop, model, step)
        if loop.max_grad_norm is not None:
            result.norms.append(
                nn.utils.clip_grad_norm_(model.parameters(), loop.max_grad_norm, foreach=False)
            )
        optimizer.step()
        rates.step()
        if loop.evaluate:
            result.evaluations += evaluate(loop, model, step)
        after_step(step)
    result.weights = {name: value.clone() for name, value in model.state_dict().items()}
    result.moments = moments_by_name(model, optimizer.state_dict())
    return result


def moments_by_name(model: nn.Module, state: dict) -> dict[str, dict[str, Tensor]]:
    """An optimizer's state by the names of parameters; the order of groups is that of a loop."""
    by_id = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, dict[str, Tensor]] = {}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if len(state["param_groups"]) == 2:
        trainable = [p for p in trainable if p.dim() >= 2] + [p for p in trainable if p.dim() < 2]
    for number, parameter in enumerate(trainable):
        if number in state["state"]:
            found[by_id[id(parameter)]] = dict(state["state"][number])
    return found


def assert_equal(paged: Result, plain: Result) -> None:
    """Every loss, norm, weight and moment, to the last bit."""
    for name in ("losses", "norms", "evaluations"):
        ours, theirs = getattr(paged, name), getattr(plain, name)
        assert len(ours) == len(theirs), name
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"{name}[{index}]: {a} != {b}"
    assert paged.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert torch.equal(paged.weights[name], value), name
    assert paged.moments.keys() == plain.moments.keys()
    for name, state in plain.moments.items():
        for key, value in state.items():
            assert torch.equal(paged.moments[name][key], value), f"{key} of {name}"
