"""Our collectives over gloo against torch's -> benchmarks/results/collectives-DATE.md.

    python benchmarks/collectives.py [--ranks 2 4] [--mib 1 4 16 64 256] [--out FILE]

Sizes are of the whole buffer. Each repeat runs torch's call, ours, and the other dtype, in turn;
torch gets its buffers allocated beforehand, as ours are. Wall time is from a barrier to the last
rank's end; CPU time is the process's own, helper threads included, in the mean of the ranks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from odc.fsdp.comm import GroupComm, make_comm
from odc.train.run_dir import machine

MIB = 2**20
REPEATS = 9
Sample = tuple[float, float]  # seconds of wall and of CPU


def variants(comm: GroupComm, buffer: torch.Tensor, out: torch.Tensor) -> dict[str, Callable]:
    """Every call ends when its result is there."""
    own = buffer.chunk(comm.size)[comm.rank]
    divisor = comm.size

    def torch_reduce() -> None:
        dist.reduce_scatter_single(out, buffer)
        out.div_(divisor)

    return {
        "all_gather torch": lambda: dist.all_gather_single(buffer, own),
        "all_gather odc": lambda: comm.all_gather(buffer).wait(),
        "reduce_scatter torch": torch_reduce,
        "reduce_scatter odc": lambda: comm.reduce_scatter(buffer, divide_by=divisor).wait(),
    }


def measure(call: Callable, times: int) -> Sample:
    """Mean of a call over ranks: wall by the slowest, CPU by the mean."""
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(times):
        call()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    longest, total = torch.tensor(wall), torch.tensor(cpu)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return longest.item() / times, total.item() / dist.get_world_size() / times


def run_rank(rank: int, size: int, store: str, sizes: list[int], repeats: int, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    comm = make_comm(group)
    for mib in sizes:
        samples: dict[tuple[str, str], list[Sample]] = {}
        calls = {}
        for dtype in (torch.float32, torch.bfloat16):
            buffer = torch.ones(mib * MIB // dtype.itemsize, dtype=dtype)
            out = torch.ones(buffer.numel() // size, dtype=dtype)
            for name, call in variants(comm, buffer, out).items():
                calls[name, str(dtype).removeprefix("torch.")] = call
        times = max(1, min(8, 16 // mib))
        for repeat in range(-1, repeats):
            for key, call in calls.items():
                sample = measure(call, times)
                if repeat >= 0:
                    samples.setdefault(key, []).append(sample)
        if rank == 0:
            found[mib] = samples
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def row(size: int, mib: int, op: str, dtype: str, samples: dict) -> str:
    """One line of the table: medians, with (min max) of the wall time."""
    words = [str(size), str(mib), op, dtype]
    medians = {}
    for who in ("torch", "odc"):
        wall, cpu = zip(*samples[f"{op} {who}", dtype], strict=True)
        medians[who] = statistics.median(wall), statistics.median(cpu)
        words.append(f"{medians[who][0] * 1e3:.2f} ({min(wall) * 1e3:.2f} {max(wall) * 1e3:.2f})")
        words.append(f"{medians[who][1] * 1e3:.2f}")
    ratios = [
        statistics.median(
            theirs[i] / max(ours[i], 1e-9)
            for theirs, ours in zip(
                samples[f"{op} torch", dtype], samples[f"{op} odc", dtype], strict=True
            )
        )
        for i in (0, 1)
    ]
    words += [f"**{ratios[0]:.2f}**", f"**{ratios[1]:.2f}**"]
    words.append(f"{mib * MIB * (size - 1) / size / medians['odc'][0] / 1e9:.2f}")
    return "| " + " | ".join(words) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    today = datetime.date.today().isoformat()
    default = Path(__file__).parent / "results" / f"collectives-{today}.md"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = [
        f"# Collectives over gloo, {today}",
        "",
        f"`python benchmarks/collectives.py {' '.join(sys.argv[1:])}`. {machine()}",
        f"Load before: {os.getloadavg()[0]:.1f}; the machine was shared with other work. "
        f"{args.repeats} interleaved repeats, ms a call: median (min max), CPU: median of the mean "
        "over ranks. Ratios are torch / odc, repeat by repeat (more than 1: odc is faster). GB/s: "
        "payload that a rank receives, over wall time.",
        "",
        "| ranks | MiB | op | dtype | torch wall | torch CPU | odc wall | odc CPU | wall ratio "
        "| CPU ratio | odc GB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            found = manager.dict()
            arguments = (size, f"{folder}/store", args.mib, args.repeats, found)
            mp.spawn(run_rank, arguments, nprocs=size)
            for mib, samples in found.items():
                for op in ("all_gather", "reduce_scatter"):
                    for dtype in ("float32", "bfloat16"):
                        lines.append(row(size, mib, op, dtype, samples))
                        print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
