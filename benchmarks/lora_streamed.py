"""LoRA over a base that streams through little memory: the scheduler against one layer at a time.

    python benchmarks/lora_streamed.py [--layers 8] [--ratio 1.0]

"One layer at a time" keeps the adapters and one decoder layer on the device, loads each layer when
it is needed and drops it for the next: `lru+none` in the least budget that trains the model. Beside
it the default policy in the same budget, with room for one layer more, and for half of the base.
The bus is emulated; its speed is such that loading the base twice, for forward and backward, takes
`--ratio` times the computation. All contenders live in one process, train the same batches with
the same adapter, and take turns; ratios are of pairs of one turn.

Writes benchmarks/results/lora-streamed-DATE.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import odc
from odc.memory.frames import FRAME_BYTES, frames_for
from odc.memory.manager import MemoryManager, popularity
from odc.memory.pages import GroupSpec
from odc.memory.victims import CostAware, Lru
from odc.sizes import format_bytes
from odc.train.compose import prepare_process
from odc.train.config import load_config
from odc.train.config_model import ModelConfig
from odc.train.models import build_model, initializer
from odc.train.run_dir import machine

REPEATS = 9
WARM_STEPS = 5
STEPS = 1  # of one turn
VOCAB = 512
OPTIONS = {"rank": 8, "targets": ("q_proj", "v_proj")}
BASELINE = "one layer at a time"


@dataclass
class Contender:
    """A model in pages, and what its steps took."""

    name: str
    policy: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_in: list[int] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    peak: int = 0

    def turn(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Train on some batches; notes the means of a step."""
        memory = self.model.memory
        memory.take()
        start = time.perf_counter()
        for inputs, targets in batches:
            loss = self.model(inputs, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        count = len(batches)
        self.step_s.append((time.perf_counter() - start) / count)
        counters = memory.take()
        self.stall_s.append(counters.stall_ns / 1e9 / count)
        self.bytes_in.append(counters.bytes_in // count)
        self.bytes_out.append(counters.bytes_out // count)
        self.peak = max(self.peak, counters.peak_page_bytes)

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        for figures in (self.step_s, self.stall_s, self.bytes_in, self.bytes_out):
            figures.clear()
        self.peak = 0


def make(config: ModelConfig, name: str, policy: str, **memory: object) -> Contender:
    """The model under a policy."""
    model = odc.lora(build_model(config, VOCAB, device="meta"), **OPTIONS)
    lru = policy == "lru+none"
    manager = MemoryManager(
        page_size=FRAME_BYTES * 8,
        eviction=Lru() if lru else CostAware(),
        prefetch=(lambda library, limits: None) if lru else popularity,
        **memory,
    )
    model, optimizer = odc.paged(
        model,
        torch.optim.AdamW,
        memory=manager,
        init=initializer(config, 0),
        update="backward",
        lr=1e-3,
    )
    return Contender(name, policy, model.train(), optimizer)


def batches_of(turn: int, shape: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(turn)
    made = [torch.randint(0, VOCAB, shape, generator=generator) for _ in range(STEPS)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in made]


def adapter_frames(specs: list[GroupSpec], layers: int) -> str:
    """What adapters take beside what a group for each layer or for each matrix would take."""
    own = [spec for spec in specs if spec.has_gradient]
    size = sum(spec.state_bytes for spec in own)
    frames = sum(frames_for(spec.state_bytes) for spec in own)
    per_layer = layers * frames_for(size // layers)
    per_matrix = layers * 2 * len(OPTIONS["targets"])
    return (
        f"Adapters: {format_bytes(size)} of state (values, gradients, moments); frames of "
        f"{format_bytes(FRAME_BYTES)} that they take: {frames}. A group for each layer would take "
        f"{per_layer}, a group for each matrix {per_matrix}."
    )


def measure(args: argparse.Namespace) -> tuple[list[Contender], dict[str, float], str]:
    """Every contender after nine turns, what is known of all, and a line on the adapters."""
    config = ModelConfig(hidden_size=512, num_layers=args.layers, num_heads=8)
    shape = (args.batch, args.tokens + 1)
    resident = make(config, "all resident", "", total_mem=None)
    specs = resident.model.memory.table.groups
    base = sum(spec.num_bytes for spec in specs if not spec.has_gradient)
    layer = max(frames_for(s.num_bytes) for s in specs if s.layer >= 0) * FRAME_BYTES
    least = resident.model.memory._least_frames * FRAME_BYTES
    for turn in range(3):
        resident.turn(batches_of(turn, shape))
    compute = statistics.median(resident.step_s[1:])
    bandwidth = 2 * base / (args.ratio * compute)
    resident.model.close()
    print(f"base {format_bytes(base)}, compute {compute:.3f} s, link {bandwidth / 1e9:.2f} GB/s")
    plan = [
        (BASELINE, "lru+none", least),
        ("the same budget", "cost_aware+popularity", least),
        ("one layer more", "lru+none", least + layer),
        ("one layer more", "cost_aware+popularity", least + layer),
        ("half of the base", "lru+none", least + base // 2),
        ("half of the base", "cost_aware+popularity", least + base // 2),
    ]
    contenders = [
        make(config, name, policy, page_budget=budget, link_bandwidth=bandwidth)
        for name, policy, budget in plan
    ]
    for contender in contenders:
        for turn in range(WARM_STEPS // STEPS):
            contender.turn(batches_of(turn, shape))
        contender.forget()
    for repeat in range(REPEATS):
        turns = contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]
        for contender in turns:
            contender.turn(batches_of(100 + repeat, shape))
    assert all(c.losses == contenders[0].losses for c in contenders), "results differ"
    facts = {"base": base, "layer": layer, "compute": compute, "bandwidth": bandwidth}
    line = adapter_frames(specs, args.layers)
    for contender in contenders:
        contender.model.close()
    return contenders, facts, line


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def write(contenders: list[Contender], facts: dict[str, float], line: str, args: object) -> str:
    """The results as a page."""
    first = contenders[0]
    rows = [
        "| budget | policy | peak of pages | step s | waiting s | MiB in | MiB out | "
        "step / one layer at a time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in contenders:
        ratios = [a / b for a, b in zip(one.step_s, first.step_s, strict=True)]
        rows.append(
            f"| {one.name} | `{one.policy}` | {format_bytes(one.peak)} | {quartiles(one.step_s)} | "
            f"{statistics.median(one.stall_s):.3f} | {statistics.median(one.bytes_in) / 2**20:.0f} "
            f"| {statistics.median(one.bytes_out) / 2**20:.1f} | {quartiles(ratios)} |"
        )
    head = [
        f"# LoRA over a streamed base, {datetime.date.today().isoformat()}",
        "",
        json.dumps(machine()),
        "",
        f"`python benchmarks/lora_streamed.py` with {vars(args)}: a base of "  # type: ignore[call-overload]
        f"{format_bytes(int(facts['base']))} in float32, layers of "
        f"{format_bytes(int(facts['layer']))}, bus emulated at {facts['bandwidth'] / 1e9:.2f} GB/s "
        f"each way; a step with all resident computes for {facts['compute']:.3f} s. Medians of "
        f"{REPEATS} turns of {STEPS} steps (quartiles), all contenders in turn; losses of all "
        "rows are equal to the last bit.",
        "",
        line,
        "",
    ]
    return "\n".join([*head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ratio", type=float, default=1.0)
    args = parser.parse_args()
    prepare_process(load_config()[0])
    text = write(*measure(args), args)
    suffix = "" if args.ratio == 1.0 else f"-r{args.ratio:g}"
    today = datetime.date.today().isoformat()
    out = Path(__file__).parent / "results" / f"lora-streamed-{today}{suffix}.md"
    out.write_text(text, encoding="utf-8")
    print(text, out, sep="\n")


if __name__ == "__main__":
    main()
