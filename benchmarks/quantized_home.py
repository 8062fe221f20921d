"""A frozen base at home in 8 and 4 bits: what it costs, and what it does to training.

    python benchmarks/quantized_home.py [--pretrain 240] [--steps 60] [--kernels]

First the kernels: GB/s of values on the device, beside a plain copy of the same bytes. Then
losses: odc's transformer is trained on Python's own sources, frozen, and trained on with matrices
of low rank beside its linear layers, once for each format, under a page budget and over an emulated
bus. Losses of all formats are printed beside each other, with the bytes that crossed the bus and
the time that training waited for them. -> benchmarks/results/quantized-home-DATE.md
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import odc
from odc.fsdp.blocks import BLOCK, FORMATS, BlockFormat
from odc.memory.manager import MemoryManager
from odc.memory.pager import Counters
from odc.train.config_model import DataConfig, ModelConfig
from odc.train.models import Transformer, build_model
from odc.train.run_dir import machine
from odc.train.sampler import Sampler, evaluation_batches
from odc.train.tokens import TokenData, load_tokens

MIB = 1 << 20
MODEL = ModelConfig(hidden_size=384, num_layers=4, num_heads=6)
DATA = DataConfig(vocab_size=2048)
SEQ_LEN, MICRO_BATCH = 64, 8
RANK, LR = 8, 2e-3
BUDGET, BANDWIDTH = 20 * MIB, 0.1e9
REPEATS = 25


class LowRank(nn.Module):
    """A frozen linear layer and a product of two small matrices beside it; zero at the start."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@dataclass
class Curve:
    """What training with one format gave."""

    before: float = 0.0  # loss on held-back text, as the base came out of its format
    after: float = 0.0
    losses: list[float] = field(default_factory=list)
    home_bytes: int = 0
    step_s: float = 0.0
    counters: list[Counters] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrain", type=int, default=240, help="steps of the base")
    parser.add_argument("--steps", type=int, default=60, help="steps of the low-rank matrices")
    parser.add_argument("--kernels", action="store_true", help="only the kernels")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = [kernels()]
    print(parts[0], flush=True)
    if not args.kernels:
        parts.append(curves(args.pretrain, args.steps))
        print(parts[1])
        out = Path(__file__).parent / "results"
        out /= f"quantized-home-{datetime.date.today().isoformat()}.md"
        head = f"# A frozen base in 8 and 4 bits\n\n{json.dumps(machine())}\n"
        out.write_text("\n".join([head, *parts]), encoding="utf-8")
        print(out)


# -- kernels -------------------------------------------------------------------------------------


def kernels() -> str:
    """GB/s of values on the device, of one slice (8 MiB), one thread."""
    rows = [
        "## Kernels",
        "",
        f"A slice of 8 MiB, one thread, GB/s of values on the device: medians of {REPEATS} (most).",
        "",
        "| values | plain copy | int8 decode | int8 encode | int4 decode | int4 encode |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(8 * MIB // dtype.itemsize // BLOCK, BLOCK).to(dtype)
        out = torch.empty_like(values)
        calls: list[Callable[[], object]] = [_copy(values, out)]
        for bits in (8, 4):
            format = BlockFormat(bits)
            image = torch.empty(sum(format.sizes(len(values))), dtype=torch.uint8)
            format.encode(values, image)
            calls += [_decode(format, image, out), _encode(format, values, image.clone())]
        rates: list[list[float]] = [[] for _ in calls]
        for _ in range(REPEATS):  # in turn, so that whatever else runs hits all of them
            for call, found in zip(calls, rates, strict=True):
                start = time.perf_counter()
                call()
                found.append(values.numel() * dtype.itemsize / (time.perf_counter() - start) / 1e9)
        cells = [f"{statistics.median(r):.1f} ({max(r):.1f})" for r in rates]
        rows.append(f"| {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |")
    return "\n".join([*rows, ""])


def _copy(values: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: ctypes.memmove(out.data_ptr(), values.data_ptr(), values.nbytes)


def _decode(format: BlockFormat, image: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: format.decode(image, out)


def _encode(format: BlockFormat, values: Tensor, image: Tensor) -> Callable[[], object]:
    return lambda: format.encode(values, image)


# -- losses --------------------------------------------------------------------------------------


def curves(pretrain: int, steps: int) -> str:
    """Train the base, then low-rank matrices beside it in every format."""
    data = load_tokens(DATA)
    base = pretrained(data, pretrain)
    found = {name: adapt(base, data, name, steps) for name in FORMATS}
    values = sum(p.numel() for p in build_model(MODEL, data.tokenizer.vocab_size).parameters())
    rows = [
        "## Losses",
        "",
        f"odc's transformer ({values / 1e6:.1f} M parameters, fp32), {pretrain} steps on `stdlib`, "
        f"then frozen; rank {RANK} beside every linear layer of its blocks, {steps} steps of "
        f"{SEQ_LEN * MICRO_BATCH} tokens, AdamW at {LR}. {BUDGET // MIB} MiB of pages, bus "
        f"{BANDWIDTH / 1e9:g} GB/s each way. Held back: {len(held_back(data))} batches. "
        "Bytes and times of a step are medians; the machine did other work meanwhile.",
        "",
        "| | " + " | ".join(FORMATS) + " |",
        "|---|" + "---|" * len(FORMATS),
    ]
    lines: list[tuple[str, Callable[[Curve], str]]] = [
        ("pages at home, MiB", lambda c: f"{c.home_bytes / MIB:.1f}"),
        ("MiB in a step", lambda c: f"{_median(c, 'bytes_in') / MIB:.1f}"),
        ("waiting a step, s", lambda c: f"{_median(c, 'stall_ns') / 1e9:.2f}"),
        ("step, s", lambda c: f"{c.step_s:.2f}"),
        ("held back, before", lambda c: f"{c.before:.4f}"),
        ("held back, after", lambda c: f"{c.after:.4f}"),
    ]
    tens = range(0, steps, 10)
    lines += [(f"loss, steps {first}-{first + 9}", _mean_of(first)) for first in tens]
    for title, text in lines:
        rows.append(f"| {title} | " + " | ".join(text(found[name]) for name in FORMATS) + " |")
    return "\n".join([*rows, ""])


def _median(curve: Curve, name: str) -> float:
    return statistics.median(getattr(counters, name) for counters in curve.counters)


def _mean_of(first: int) -> Callable[[Curve], str]:
    return lambda curve: f"{statistics.fmean(curve.losses[first : first + 10]):.4f}"


def batches(data: TokenData, seed: int) -> Sampler:
    """Batches of the text to learn from."""
    return Sampler(data.train, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, seed=seed)


def held_back(data: TokenData) -> list[tuple[Tensor, Tensor]]:
    """Batches of the text that is held back."""
    return list(
        evaluation_batches(data.evaluation, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, num_batches=8)
    )


def evaluate(model: nn.Module, data: TokenData) -> float:
    """Mean loss on the text that is held back."""
    with torch.no_grad():
        return statistics.fmean(model(x, y).item() for x, y in held_back(data))


def pretrained(data: TokenData, steps: int) -> dict[str, Tensor]:
    """Weights of a base, trained by plain PyTorch."""
    model = build_model(MODEL, data.tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sampler = batches(data, seed=0)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*sampler.batch(step))
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"base, step {step}: {loss.item():.3f}", flush=True)
    return model.state_dict()


def adapt(weights: dict[str, Tensor], data: TokenData, name: str, steps: int) -> Curve:
    """Train matrices of low rank beside the frozen base."""
    memory = MemoryManager(page_budget=BUDGET, page_size=4 * MIB, link_bandwidth=BANDWIDTH)
    model, optimizer = odc.paged(
        adapted(weights, data), memory=memory, frozen_format=name, update="backward", lr=LR
    )
    assert optimizer is not None
    sampler, curve = batches(data, seed=1), Curve(home_bytes=memory.table.home_bytes)
    curve.before, times = evaluate(model, data), []
    memory.take()
    for step in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(*sampler.batch(step))
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        curve.losses.append(loss.item())
        curve.counters.append(memory.take())
    curve.step_s, curve.after = statistics.median(times), evaluate(model, data)
    print(f"{name}: {curve.losses[-1]:.3f}, step {curve.step_s:.2f} s", flush=True)
    model.close()
    return curve


def adapted(weights: dict[str, Tensor], data: TokenData) -> Transformer:
    """The frozen base with something to train beside each linear layer of its blocks."""
    model = build_model(MODEL, data.tokenizer.vocab_size)
    model.load_state_dict(weights)
    model.requires_grad_(False)
    torch.manual_seed(0)
    for layer in model.layers:
        for owner in list(layer.modules()):
            for attribute, child in list(owner.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(owner, LowRank):
                    setattr(owner, attribute, LowRank(child))
    return model


if __name__ == "__main__":
    main()
