"""A training loop in a process of its own; what it takes is read by whoever started it.

Usage: ``python budget_program.py '{"mode": "paged", ...}'``. Prints JSON lines: the ranges of the
model's pages, ``step`` after each step, and at the end the peak resident size.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import odc


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def reset(fqn: str, module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def peak_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def build(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    width, layers = options["width"], options["layers"]
    if options["mode"] == "plain":
        model: nn.Module = Net(width, layers)
        return model, torch.optim.AdamW(model.parameters(), fused=True)
    with torch.device("meta"):
        model = Net(width, layers)
    model, opt = odc.paged(model, init=reset, **options["memory"])
    assert opt is not None
    pages = model.memory.table.pages  # type: ignore[operator,union-attr]
    say(ranges=[(p.address, p.num_frames * 2**21) for p in pages])
    return model, opt


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, opt = build(options)
    x = torch.randn(options["rows"], 64)
    for step in range(options["steps"]):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        say(step=step, loss=loss.item(), pool=_pool(model))
        if options.get("wait"):
            sys.stdin.readline()
    say(peak=peak_bytes())


def _pool(model: nn.Module) -> int:
    return model.memory.pool.num_bytes if isinstance(model, odc.PagedModule) else 0  # type: ignore[operator,union-attr]


if __name__ == "__main__":
    main()
