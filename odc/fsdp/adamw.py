"""AdamW on pieces of parameters, wherever they lie: torch's fused kernel, on the device or at home.

The bits are those of ``torch.optim.AdamW(fused=True)``: the kernel works element by element, so it
does not matter how parameters are cut. Where a piece has a *master* (its value in float32 beside
parameters of bfloat16), that is what is updated, with the gradient in float32, and the parameter
is its value rounded once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Chunk:
    """The piece of a parameter that lies in one part (page) of its ranges; 1-D views.

    Attributes:
        index: of the parameter in its group.
        master: float32, or None where the parameter itself is updated.
    """

    index: int
    parameter: torch.Tensor
    gradient: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    master: torch.Tensor | None = None

    def take_written(self) -> None:
        """The parameter was written by somebody: the master follows where it is not its value."""
        if self.master is not None:
            changed = self.master.to(self.parameter.dtype) != self.parameter
            self.master.copy_(torch.where(changed, self.parameter.float(), self.master))


@dataclass(frozen=True, slots=True)
class Settings:
    """What an update depends on beside values, as it held when the step was made."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool

    @staticmethod
    def of(options: dict[str, Any]) -> Settings:
        """The settings in one of an optimizer's parameter groups."""
        beta1, beta2 = options["betas"]
        return Settings(
            float(options["lr"]),
            beta1,
            beta2,
            options["weight_decay"],
            options["eps"],
            options["maximize"],
        )


_PROBE_NUMEL = 1 << 20
_PROBES = 4  # the first of them warms up


def measure_update_rate() -> float:
    """Bytes/s of float32 parameters that the kernel updates on this machine, best of a few."""
    parameter, gradient, first, second = (torch.zeros(_PROBE_NUMEL) for _ in range(4))
    chunk = Chunk(0, parameter, gradient, (first, second))
    settings = Settings(1e-3, 0.9, 0.999, 0.0, 1e-8, False)
    best = float("inf")
    for _ in range(_PROBES):
        start = time.perf_counter()
        update([chunk], [torch.ones(())], settings)
        best = min(best, time.perf_counter() - start)
    return 4 * _PROBE_NUMEL / max(best, 1e-9)


@torch.no_grad()
def update(
    chunks: Sequence[Chunk],
    steps: Sequence[torch.Tensor],
    settings: Settings,
    coefficient: torch.Tensor | None = None,
) -> None:
    """Update pieces in place.

    Args:
        chunks: what is updated.
        steps: () float32 for each, the number of the step, counted from 1.
        settings: of all of them.
        coefficient: what their gradients are multiplied by first; None: nothing.
    """
    if coefficient is not None:
        for chunk in chunks:
            chunk.gradient.mul_(coefficient)
    torch._fused_adamw_(
        [c.parameter if c.master is None else c.master for c in chunks],
        [c.gradient if c.master is None else c.gradient.float() for c in chunks],
        [c.moments[0] for c in chunks],
        [c.moments[1] for c in chunks],
        [],
        list(steps),
        amsgrad=False,
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=settings.maximize,
        grad_scale=None,
        found_inf=None,
    )
    for chunk in chunks:
        if chunk.master is not None:
            chunk.parameter.copy_(chunk.master)
