"""A plain PyTorch training loop: what every paged run is compared with."""

import torch
from torch import nn

from odc.train.config import Config
from odc.train.tasks import Task


def train_plainly(config: Config, task: Task, model: nn.Module) -> list[float]:
    """Trains with `torch.optim.AdamW` and a constant rate; returns the loss of each step."""
    chosen = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=tuple(chosen.betas),
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
    )
    losses = []
    for step in range(config.train.steps):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in range(config.train.accumulate):
            loss = task.loss(model, task.batch(step, micro)) / config.train.accumulate
            loss.backward()
            total += loss.item()
        if chosen.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm)
        optimizer.step()
        losses.append(total)
    return losses
