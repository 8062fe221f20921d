"""A step with the optimizer at home beside one with it on the device, over an emulated link.

    python benchmarks/home_optimizer.py [-o FILE] [--repeats 9]

Both train the same transformer on the same batches under the same page budget, in one process, in
turn; their losses must be equal to the last bit. The link is emulated at the bandwidth at which the
*device* optimizer's step spends rho times its computation on the link (the busier direction): its
bytes are counted in steps before. Both then run over that link, and the step times of the repeats
are compared pairwise. "With the optimizer in the step" is with clipping by the global norm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from odc.fsdp.paged import paged
from odc.memory.manager import MemoryManager
from odc.train.config_model import ModelConfig
from odc.train.models import build_model, initializer
from odc.train.run_dir import machine

MIB = 1 << 20
SHAPE = {"hidden_size": 384, "num_layers": 6, "num_heads": 6, "mlp_size": 1536}
TOKENS, VOCAB = 64, 512
SHARE = 0.3  # of the device optimizer's state that pages get
WARM_UP, SETTLE = 2, 3
SETTINGS = ((2.0, "backward"), (2.0, "step"))


@dataclass
class Contender:
    """A model whose optimizer is in one place."""

    where: str
    model: Any
    optimizer: Any
    memory: MemoryManager
    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    bytes_in: list[int] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, number: int) -> None:
        """One step, measured; what it left in flight is the next one's."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=generator)
        self.memory.take()
        start = time.perf_counter()
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        counters = self.memory.take()
        self.stalls.append(counters.stall_ns / 1e9)
        self.bytes_in.append(counters.bytes_in)
        self.bytes_out.append(counters.bytes_out)
        self.losses.append(loss.item())

    def settle(self) -> None:
        """Let nothing of this contender run beside the other's step."""
        self.memory.transfers.drain()

    def set_link(self, bandwidth: float) -> None:
        """Emulate another link from now on."""
        self.settle()
        self.memory.transfers.engine.link_bandwidth = bandwidth  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Steps so far do not count."""
        for figures in (self.seconds, self.stalls, self.bytes_in, self.bytes_out):
            figures.clear()

    @property
    def compute_s(self) -> float:
        return statistics.median(t - s for t, s in zip(self.seconds, self.stalls, strict=True))

    @property
    def busier_bytes(self) -> float:
        """Of the busier direction of the link, median."""
        return max(statistics.median(self.bytes_in), statistics.median(self.bytes_out))


def make(where: str, update: str) -> Contender:
    """A contender with its model, which has the same weights wherever the optimizer is."""
    config = ModelConfig(**SHAPE)
    model = build_model(config, VOCAB, device="meta")
    budget = int(SHARE * 16 * sum(p.numel() for p in model.parameters()))
    memory = MemoryManager(page_budget=budget)
    made, optimizer = paged(
        model,
        torch.optim.AdamW,
        init=initializer(config, 0),
        update=update,
        max_grad_norm=1.0 if update == "step" else None,
        where=where,
        memory=memory,
        lr=1e-4,
    )
    return Contender(where, made, optimizer, memory)


def measure(rho: float, update: str, repeats: int) -> dict[str, Any]:
    """The figures of a setting."""
    both = [make("device", update), make("home", update)]
    device, home = both
    number = 0

    def steps(count: int, contenders: list[Contender]) -> None:
        nonlocal number
        for _ in range(count):
            for one in contenders:
                one.step(number)
                one.settle()
            number += 1

    try:
        steps(WARM_UP, both)
        for _ in range(2):  # what is moved depends on the link: once more with the link found
            for one in both:
                one.forget()
            steps(SETTLE, both)
            bandwidth = device.busier_bytes / (rho * device.compute_s)
            for one in both:
                one.set_link(bandwidth)
        steps(SETTLE, both)
        for one in both:
            one.forget()
        steps(repeats, both)
        assert device.losses == home.losses, "losses differ"
        return {
            "rho": device.busier_bytes / bandwidth / device.compute_s,
            "update": update,
            "bandwidth": bandwidth,
            "numel": sum(p.numel() for p in device.model.parameters()),
            "frames": device.memory.pool.num_bytes if device.memory.pool else 0,
            "pairs": [h / d for d, h in zip(device.seconds, home.seconds, strict=True)],
            "contenders": [figures(one) for one in both],
        }
    finally:
        for one in both:
            one.model.close()


def figures(one: Contender) -> dict[str, Any]:
    """Medians of a contender, and the spread of its steps."""
    transfers = one.memory.transfers
    return {
        "where": one.where,
        "step_s": statistics.median(one.seconds),
        "least_s": min(one.seconds),
        "most_s": max(one.seconds),
        "stall_s": statistics.median(one.stalls),
        "compute_s": one.compute_s,
        "bytes_in": statistics.median(one.bytes_in),
        "bytes_out": statistics.median(one.bytes_out),
        "update_rate": transfers.update_bytes / max(transfers.update_ns, 1) * 1e9,
    }


def describe(found: list[dict[str, Any]], repeats: int) -> str:
    """The page of results."""
    first = found[0]
    lines = [
        f"# The optimizer at home, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/home_optimizer.py --repeats {repeats}`: {first['numel'] / 1e6:.1f} M "
        f"parameters in fp32, {first['frames'] / MIB:.0f} MiB of frames ({SHARE:.0%} of the state "
        f"with moments), {TOKENS} tokens, one compute thread; medians of {repeats} steps of each "
        "in turn, losses equal to the last bit. rho is the device optimizer's link time over its "
        "computation, as it was in the steps that count. Ratio: home over device, of the pairs.",
        "",
        json.dumps(machine()),
        "",
        "| rho | update in | link GB/s | optimizer | step s (least-most) | compute s | stall s | "
        "bytes in, out per parameter | ratio (least-most) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        for row in one["contenders"]:
            ratio = ""
            if row["where"] == "home":
                pairs = one["pairs"]
                ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"
            ways = [row[way] / one["numel"] for way in ("bytes_in", "bytes_out")]
            lines.append(
                f"| {one['rho']:.2f} | {one['update']} | {one['bandwidth'] / 1e9:.2f} | "
                f"{row['where']} | {row['step_s']:.3f} ({row['least_s']:.3f}-{row['most_s']:.3f}) "
                f"| {row['compute_s']:.3f} | {row['stall_s']:.3f} | {ways[0]:.1f}, {ways[1]:.1f} "
                f"| {ratio} |"
            )
    rates = [row["update_rate"] for one in found for row in one["contenders"] if row["update_rate"]]
    lines += ["", f"Updates at home: {statistics.median(rates) / 1e9:.1f} GB/s of parameters."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / f"home-optimizer-{datetime.date.today()}.md"
    parser.add_argument("-o", "--out", type=Path, default=default)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    found = []
    for rho, update in SETTINGS:
        found.append(measure(rho, update, args.repeats))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    page = describe(found, args.repeats)
    args.out.write_text(page, encoding="utf-8")
    print(page)
    at_two = [one for one in found if 1.5 <= one["rho"] <= 2.5]
    return 0 if at_two and all(statistics.median(one["pairs"]) < 1 for one in at_two) else 1


if __name__ == "__main__":
    sys.exit(main())
