"""The free order of experts: chosen in forward, recorded, and the same again in recompute.

If a recompute ran equal-shaped experts in another order, autograd would match saved tensors to
the wrong experts without an error. The order is therefore a function of the routing for as long as
a step lasts: the first forward with a routing chooses, every later one with the same routing (its
recompute among them) repeats the choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from odc.memory.events import Phase

Choose = Callable[[list[int]], list[int]]


class ExpertOrder:
    """The ``expert_order`` of one mixture-of-experts module.

    Args:
        choose: gives the order for the members that are needed.
        phase: the phase that a forward is in now.
    """

    def __init__(self, choose: Choose, phase: Callable[[], Phase]) -> None:
        self._choose = choose
        self._phase = phase
        self._recorded: dict[bytes, list[int]] = {}

    def __call__(self, experts: list[int], routing: torch.Tensor) -> list[int]:
        phase = self._phase()
        if phase == Phase.EVALUATION:
            return self._choose(experts)
        key = hashlib.blake2b(routing.contiguous().numpy().tobytes(), digest_size=16).digest()
        order = self._recorded.get(key)
        if order is None:
            if phase == Phase.RECOMPUTE:
                raise RuntimeError(
                    "a recomputed layer routes its tokens otherwise than its forward did: the "
                    "model is not deterministic under activation checkpointing"
                )
            order = self._recorded[key] = self._choose(experts)
        elif phase == Phase.FORWARD:
            self._choose(order)
        return list(order)

    def forget(self) -> None:
        """A step is over; its graphs are gone."""
        self._recorded.clear()
