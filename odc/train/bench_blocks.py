"""A stack of blocks of a chosen number of bytes, with little to compute for each of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCKS = 3
# So that a step computes about as long as it communicates, on a CPU that has no bf16 of its own.
TOKENS = {"fp32": 128, "bf16": 16}
_ROUND = 32


class Block(nn.Module):
    """Two matrices with a residual; the inner width is about four times the outer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks on the meta device.

    Args:
        group_bytes: of a block's parameters in fp32, to within a percent where it is 4 MB or more.

    Attributes:
        width: of the input and of every block's output.
    """

    def __init__(self, group_bytes: int) -> None:
        super().__init__()
        numel = group_bytes / 4
        self.width = max(round((numel / 8) ** 0.5 / _ROUND), 1) * _ROUND
        inner = max(round(numel / (2 * self.width)), 1)
        with torch.device("meta"):
            self.layers = nn.ModuleList(Block(self.width, inner) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
