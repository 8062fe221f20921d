"""A model whose state is larger than a memory ceiling trains from disk, within it, at disk speed.

    python benchmarks/ceiling.py [--home-dir DIR] [--json]

A process that may not have more than 4 GB of memory trains a transformer of 6 GB of state
(parameters, gradients and both moments; fp32) on Python's own sources. It reports

* the peak of its resident size (`VmHWM`), which must stay below the ceiling, and
* the time of a step against `max(compute, bytes read / read rate + bytes written / write rate)`,
  with the rates of this disk measured before and after the steps, in the same process. Compute is
  the step without waiting for pages. What is asked is a step of at most that divided by 0.85.
* the bytes moved against those of the best schedule that a search finds for the accesses of these
  steps, from the residency they began with, in the same frames, at the same rates (the disk goes
  one way at a time). Best is the fastest; of schedules equally fast, the one that moves least. A
  slower one could move fewer bytes. What is asked is 1.02 times as many at most.

The ceiling is that of a control group, if this runs in one (`systemd-run --user --scope -p
MemoryMax=4G python benchmarks/ceiling.py`). Otherwise the process limits its private memory itself
(RLIMIT_DATA), which is stricter: frames count twice there, where they are and where they came from.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from odc.memory.events import Sink, StepRow
from odc.memory.frames import FRAME_BYTES
from odc.memory.machine import find_cgroup
from odc.memory.pages import PageState, PageTable
from odc.memory.replay import Accesses, Residency, Workload, best_found
from odc.memory.replay.best_found import BestFound
from odc.memory.replay.synthetic import page_columns

GIB = 1 << 30
CEILING_BYTES = 4 * GIB
ASKED_SHARE, ASKED_BYTES = 0.85, 1.02
WARM_UP, STEPS = 2, 6
WIDTH, LAYERS, TOKENS = 1536, 14, 96
PAGE_BYTES = 32 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(args.home_dir)))
        return 0
    command = [sys.executable, __file__, "--child", "--home-dir", str(args.home_dir)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout)
    print(json.dumps(found, indent=1) if args.json else describe(found))
    return 0 if all(verdicts(found)) else 1


def verdicts(found: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether memory, time and bytes are as asked."""
    return (
        found["within_ceiling"],
        found["share"] >= ASKED_SHARE,
        found["over_best_bytes"] <= ASKED_BYTES,
    )


def set_ceiling() -> str:
    """Limit this process, unless its control group does; returns how."""
    group = find_cgroup()
    if group is not None and group.limit_bytes <= CEILING_BYTES:
        return f"control group {group.path}"
    resource.setrlimit(resource.RLIMIT_DATA, (CEILING_BYTES, CEILING_BYTES))
    return "RLIMIT_DATA"


def train(folder: Path) -> dict[str, Any]:
    """What the limited process does; returns its figures."""
    limit = set_ceiling()
    import torch

    from odc.fsdp.paged import paged
    from odc.memory.ledger import resident_bytes
    from odc.memory.manager import MemoryManager
    from odc.train.config_model import ModelConfig
    from odc.train.links import measure_disk
    from odc.train.models import build_model, initializer
    from odc.train.run_dir import machine

    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    before = measure_disk(folder, GIB, 1.0)
    config = ModelConfig(hidden_size=WIDTH, num_layers=LAYERS, num_heads=12, mlp_size=4096)
    # Twice the pool, a few hundred MiB of torch and activations: within RLIMIT_DATA.
    pool = 2 * GIB + GIB // 2 if limit != "RLIMIT_DATA" else GIB + GIB // 2
    memory = MemoryManager(page_budget=pool, page_size=PAGE_BYTES, home="disk", home_dir=folder)
    start = time.perf_counter()
    model, optimizer = paged(
        build_model(config, 256, device="meta"),
        torch.optim.AdamW,
        init=initializer(config, 0),
        update="backward",
        memory=memory,
        lr=1e-4,
    )
    assert optimizer is not None
    built_s = time.perf_counter() - start
    batches = text_batches(WARM_UP + STEPS)
    steps = []
    for number, tokens in enumerate(batches):
        memory.take()
        memory.step = number
        if number == WARM_UP:
            started_from, needs = residency(memory.table), Needs()
            memory.set_sink(needs)
        begin = time.perf_counter_ns()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_ns = time.perf_counter_ns() - begin
        counters = memory.take()
        steps.append(
            {
                "loss": loss.item(),
                "step_s": step_ns / 1e9,
                "compute_s": (step_ns - counters.stall_ns) / 1e9,
                "bytes_in": counters.bytes_in,
                "bytes_out": counters.bytes_out,
            }
        )
        print(f"step {len(steps)}: {steps[-1]}", file=sys.stderr, flush=True)
    memory.set_sink(None)
    workload = needs.workload(memory.table)
    state = memory.table.home_bytes + memory.table.gradient_bytes
    peak = resident_bytes()[1]
    model.close()
    after = measure_disk(folder, GIB, 1.0)
    rates = [statistics.fmean(pair) for pair in zip(before, after, strict=True)]
    best = best_schedule(workload, started_from, pool, rates)
    return (
        figures(steps[WARM_UP:], rates)
        | compare_bytes(steps[WARM_UP:], best)
        | {
            "machine": machine(),
            "limit": limit,
            "state_bytes": state,
            "pool_bytes": pool,
            "peak_bytes": peak,
            "within_ceiling": peak <= CEILING_BYTES,
            "rates_before_after": [before, after],
            "built_s": built_s,
            "steps": steps,
        }
    )


class Needs:
    """A sink that keeps what was needed, in the columns of a trace."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []

    def need(self, *row: int) -> None:
        """Kept."""
        self._rows.append(row)

    def action(self, *row: int) -> None:
        """Not kept, as what follows."""

    mem = action

    def step(self, row: StepRow) -> None:
        """Not kept."""

    def workload(self, table: PageTable) -> Workload:
        """What was needed, to run again."""
        names = tuple(signature(Sink.need).parameters)[1:]
        columns = dict(zip(names, np.array(self._rows, np.int64).T, strict=True))
        return Workload.from_trace(columns, page_columns(table))


def residency(table: PageTable) -> Residency:
    """What is on the device; what is on its way counts as there, to the benefit of the best."""
    here = [state in (PageState.RESIDENT, PageState.LOADING) for state in table.state]
    resident = np.array(here)
    return Residency(resident, np.frombuffer(bytes(table.is_dirty), bool) & resident)


def best_schedule(
    workload: Workload, start: Residency, pool_bytes: int, rates: list[float]
) -> BestFound:
    """The best schedule of the measured steps, on a disk that goes one way at a time."""
    return best_found(
        Accesses.from_workload(workload),
        pool_bytes // FRAME_BYTES,
        *rates,
        half_duplex=True,
        initial=start,
    )


def compare_bytes(steps: list[dict[str, float]], best: BestFound) -> dict[str, Any]:
    """Bytes moved in all measured steps, over those of the best schedule."""
    moved = [sum(s[way] for s in steps) for way in ("bytes_in", "bytes_out")]
    return {
        "over_best_bytes": sum(moved) / (best.bytes_in + best.bytes_out),
        "best_bytes": [best.bytes_in / len(steps), best.bytes_out / len(steps)],
        "best_step_s": best.elapsed_s / len(steps),
        "best_is_optimal": best.certificate.optimal,
    }


def text_batches(count: int) -> Iterator[Any]:
    """(1, TOKENS + 1) bytes of Python's sources for each step."""
    import torch

    source = Path(argparse.__file__).read_bytes()
    for step in range(count):
        piece = source[step * TOKENS : (step + 1) * TOKENS + 1]
        yield torch.tensor([list(piece)])


def figures(steps: list[dict[str, float]], rates: list[float]) -> dict[str, Any]:
    """Medians over the steps, and each step's bound as a share of the step."""
    bounds = [
        max(s["compute_s"], s["bytes_in"] / rates[0] + s["bytes_out"] / rates[1]) for s in steps
    ]
    shares = [bound / s["step_s"] for bound, s in zip(bounds, steps, strict=True)]
    middle = {name: statistics.median(s[name] for s in steps) for name in steps[0]}
    return {
        "medians": middle,
        "bound_s": statistics.median(bounds),
        "share": statistics.median(shares),
        "shares": shares,
        "read_rate": rates[0],
        "write_rate": rates[1],
    }


def describe(found: dict[str, Any]) -> str:
    """The figures in words."""
    middle, rates = found["medians"], (found["read_rate"] / 1e9, found["write_rate"] / 1e9)
    moved = middle["bytes_in"] / 1e9, middle["bytes_out"] / 1e9
    best = [one / 1e9 for one in found["best_bytes"]]
    kept = ["kept" if ok else "MISSED" for ok in verdicts(found)]
    return "\n".join(
        (
            f"{json.dumps(found['machine'])}; limit: {found['limit']}",
            f"state {found['state_bytes'] / GIB:.2f} GiB, frames {found['pool_bytes'] / GIB:.2f} "
            f"GiB, built in {found['built_s']:.1f} s",
            f"peak resident size {found['peak_bytes'] / GIB:.2f} GiB of {CEILING_BYTES / GIB:.0f} "
            f"({kept[0]})",
            f"disk: reads {rates[0]:.2f}, writes {rates[1]:.2f} GB/s",
            f"a step of {TOKENS} tokens: {middle['step_s']:.2f} s, compute "
            f"{middle['compute_s']:.2f} s, {moved[0]:.2f} GB in, {moved[1]:.2f} GB out, loss "
            f"{middle['loss']:.2f}",
            f"bound {found['bound_s']:.2f} s: {found['share']:.2f} of the step, asked "
            f"{ASKED_SHARE} ({kept[1]}); steps: "
            + ", ".join(f"{share:.2f}" for share in found["shares"]),
            f"best schedule found: {found['best_step_s']:.2f} s a step, {best[0]:.2f} GB in, "
            f"{best[1]:.2f} GB out; moved {found['over_best_bytes']:.3f} times as much, asked "
            f"{ASKED_BYTES} ({kept[2]})",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
