"""Learning-rate schedules as pure functions of the step."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from odc.train.config_training import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Returns what `optimizer.lr` is multiplied with in a step, counted from 0.

    Warmup rises linearly and reaches 1 with its last step; then the rate stays, or falls to
    `min_lr_ratio` in the run's last step.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    progress = min((step - warmup) / max(num_steps - 1 - warmup, 1), 1.0)
    falling = 1.0 - progress
    if config.schedule == "cosine":
        falling = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * falling


def make_schedule(
    optimizer: Optimizer, config: OptimizerConfig, num_steps: int, first_step: int = 0
) -> LambdaLR:
    """Returns the scheduler, standing at `first_step`; a resumed run gets the same rates."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return LambdaLR(
        optimizer, lambda step: lr_factor(config, step, num_steps), last_epoch=first_step - 1
    )
