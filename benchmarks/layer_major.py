"""Layer-major against micro-major accumulation: bytes and time of a step over an emulated link.

    python benchmarks/layer_major.py [-o FILE.md] [--repeats 9]

Two runs of one model take steps in turn, with the same micro-batches and activation checkpointing;
pages have 30 % of the state. The link's speed is chosen so that the transfers of a micro-major step
take r times its computation. "frozen" trains embedding and head around frozen blocks, "full" all
parameters, each group in backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import odc
from odc.memory.events import Act, Kind
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import MemoryManager
from odc.train.config_model import ModelConfig
from odc.train.models import Transformer, build_model
from odc.train.run_dir import machine

SHAPE = {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "mlp_size": 2048}
VOCAB, TOKENS = 384, 24
SHARE = 0.3
WARM_UP = 3
ORDERS = ("micro_major", "layer_major")


class Bytes:
    """A sink that adds up what is loaded and stored, by kind of page."""

    def __init__(self, memory: MemoryManager) -> None:
        self._pages = memory.table.pages
        self.loaded: Counter[Kind] = Counter()
        self.stored: Counter[Kind] = Counter()
        memory.set_sink(self)  # type: ignore[arg-type]

    def action(
        self, t_ns: int, seq: int, page: int, act: int, src: int, dst: int, num_bytes: int, *_: int
    ) -> None:
        if act in (Act.LOAD, Act.PREFETCH):
            self.loaded[self._pages[page].kind] += num_bytes
        elif act in (Act.WRITE_BACK, Act.EARLY_WRITE_BACK):
            self.stored[self._pages[page].kind] += num_bytes

    def need(self, *_: int) -> None:
        """Of no interest here."""

    mem = step = need


@dataclass
class Step:
    """A measured step; times in s."""

    elapsed: float
    stall: float
    misses: int
    loaded: Counter[Kind]
    stored: Counter[Kind]


class Run:
    """One model in one order.

    Args:
        order: One of ``ORDERS``.
        k: Micro-batches of a step.
        frozen: The blocks are not trained.
        bandwidth: Of the link, bytes/s each way; None: not emulated.
    """

    def __init__(self, order: str, k: int, frozen: bool, bandwidth: float | None) -> None:
        model = build_model(ModelConfig(**SHAPE), VOCAB)
        model.layers.requires_grad_(not frozen)
        self.memory = MemoryManager(page_budget=_budget(model), link_bandwidth=bandwidth)
        self.model, self.optimizer = odc.paged(
            model, update="backward", accumulate=k, activations="checkpoint", memory=self.memory
        )
        self._k, self._number = k, 0
        self._chain = odc.layer_major(self.model) if order == "layer_major" else None
        self._bytes = Bytes(self.memory)

    def step(self) -> Step:
        """One step."""
        batches = [_batch(self._number, micro) for micro in range(self._k)]
        self._number += 1
        self.memory.take()
        self._bytes.loaded, self._bytes.stored = Counter(), Counter()
        start = time.perf_counter()
        if self._chain is not None:
            self._chain.step(batches)
        else:
            for batch in batches:
                (self.model(*batch) / self._k).backward()
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        elapsed = time.perf_counter() - start
        counted, moved = self.memory.take(), self._bytes
        return Step(elapsed, counted.stall_ns / 1e9, counted.misses, moved.loaded, moved.stored)

    def close(self) -> None:
        self.memory.transfers.drain()
        self.model.close()


def _budget(model: Transformer) -> int:
    """30 % of parameters, gradients and moments, in whole frames."""
    state = sum(
        p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters()
    )
    return int(SHARE * state) // FRAME_BYTES * FRAME_BYTES


def _batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def calibrate(k: int, frozen: bool) -> tuple[float, int]:
    """(compute in s, bytes in) of a micro-major step with a link as fast as memory is."""
    run = Run("micro_major", k, frozen, None)
    try:
        steps = [run.step() for _ in range(WARM_UP + 3)][WARM_UP:]
    finally:
        run.close()
    compute = statistics.median(s.elapsed - s.stall for s in steps)
    return compute, int(statistics.median(sum(s.loaded.values()) for s in steps))


def measure(k: int, frozen: bool, bandwidth: float, repeats: int) -> dict[str, list[Step]]:
    """Steps of both orders, in turn."""
    runs = {order: Run(order, k, frozen, bandwidth) for order in ORDERS}
    found: dict[str, list[Step]] = {order: [] for order in ORDERS}
    try:
        for number in range(WARM_UP + repeats):
            for order, run in runs.items():
                step = run.step()
                if number >= WARM_UP:
                    found[order].append(step)
    finally:
        for run in runs.values():
            run.close()
    return found


def _median(steps: list[Step], kind: Kind | None, stored: bool = False) -> float:
    """MB a step, of one kind or of those that are no parameters."""
    totals = []
    for step in steps:
        counts = step.stored if stored else step.loaded
        kinds = [kind] if kind is not None else [Kind.GRADIENT, Kind.MOMENT]
        totals.append(sum(counts[k] for k in kinds) / 1e6)
    return statistics.median(totals)


def rows(models: list[str], ratios: list[float], ks: list[int], repeats: int) -> Iterator[str]:
    yield (
        "| model | k | r | MB of parameters in, micro / layer | their ratio x k | other MB in | "
        "MB out | demand loads | step s | step ratio (pairs: least-most) | stall s |"
    )
    yield "|---" * 11 + "|"
    for model in models:
        for k in ks:
            compute, loaded = calibrate(k, model == "frozen")
            for r in ratios:
                found = measure(k, model == "frozen", loaded / (r * compute), repeats)
                yield _row(model, k, r, found)


def _row(name: str, k: int, r: float, found: dict[str, list[Step]]) -> str:
    micro, layer = (found[order] for order in ORDERS)
    params = [_median(steps, Kind.PARAMETER) for steps in (micro, layer)]
    others = [_median(steps, None) for steps in (micro, layer)]
    out = [
        _median(steps, Kind.PARAMETER, True) + _median(steps, None, True)
        for steps in (micro, layer)
    ]
    pairs = [b.elapsed / a.elapsed for a, b in zip(micro, layer, strict=True)]
    times = [statistics.median(s.elapsed for s in steps) for steps in (micro, layer)]
    stalls = [statistics.median(s.stall for s in steps) for steps in (micro, layer)]
    misses = [statistics.median(s.misses for s in steps) for steps in (micro, layer)]
    cells = [
        name,
        str(k),
        f"{r:g}",
        f"{params[0]:.0f} / {params[1]:.0f}",
        f"**{params[1] * k / params[0]:.3f}**",
        f"{others[0]:.0f} / {others[1]:.0f}",
        f"{out[0]:.0f} / {out[1]:.0f}",
        f"{misses[0]:g} / {misses[1]:g}",
        f"{times[0]:.3f} / {times[1]:.3f}",
        f"**{times[1] / times[0]:.2f}** ({min(pairs):.2f}-{max(pairs):.2f})",
        f"{stalls[0]:.3f} / {stalls[1]:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="frozen,full")
    parser.add_argument("--k", default="2,4,8")
    parser.add_argument("--r", default="1,2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Layer-major against micro-major accumulation",
        "",
        json.dumps(machine()),
        "",
        f"{SHAPE}, {TOKENS} tokens a micro-batch, pages {SHARE:.0%} of the state, medians of "
        f"{args.repeats} steps of each order taken in turn, after {WARM_UP}. Where two figures "
        "stand: micro-major / layer-major. r: time of a micro-major step's transfers over its "
        "computation.",
        "",
    ]
    ratios, ks = [float(r) for r in args.r.split(",")], [int(k) for k in args.k.split(",")]
    for line in rows(args.model.split(","), ratios, ks, args.repeats):
        print(line, flush=True)
        lines.append(line)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
