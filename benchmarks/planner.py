"""The planner: padding beside its bound and beside two other rules, and the time it takes.

    python benchmarks/planner.py [FILE.csv.gz ...] [--optima FILE.json] [--prove] [--out FILE]

Without files, the models of `benchmarks/shapes.py`. Times are of whole models (all distinct groups)
in processes of their own that have imported the planner: cold is the first plan of a process, each
further number of ranks follows in the same one. `--optima` is a list of proven optima (`model`,
`layer`, `numel`, `rows`, `ranks`, `padding`), against which every cell is held.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odc.sharding import TensorSpec, plan_group
from odc.sharding.groups import Group, layer_groups, read_shapes
from odc.sharding.planner import fsdp2_padding, lcm_padding
from odc.train.run_dir import machine

HERE = Path(__file__).parent
ROWS = (1, 16, 32, 128)
RANKS = (8, 64, 256, 1024)
TIMED_RANKS = (1024, 100_000)
FURTHER_RANKS = (8, 16, 24, 64, 96, 128, 256, 384, 512, 777, 1000, 2048, 4096, 10_000, 65_536)
REPEATS = 9


def load(paths: Sequence[Path]) -> dict[str, list[TensorSpec]]:
    """The models by name."""
    if paths:
        return {path.name.split(".csv")[0]: read_shapes(path) for path in paths}
    from shapes import MODELS

    return {name: build() for name, build in MODELS.items()}


def layers_of(tensors: Sequence[TensorSpec]) -> list[Group]:
    """The distinct decoder layers."""
    return [group for group in layer_groups(tensors) if group.name != "root"]


def cell(tensors: Sequence[TensorSpec], rows: int, ranks: int, prove: bool) -> dict[str, Any]:
    """One plan with what it is held against; unaligned and in one dtype, as the optima are."""
    chosen: dict[str, Any] = {
        "granularity": f"rows:{rows}",
        "alignment": 1,
        "gather_dtype": "bf16",
    }
    began = time.perf_counter()
    plan = plan_group(tensors, ranks, prove=prove, **chosen)
    plan_s = time.perf_counter() - began
    plan.verify()
    aligned = plan_group(tensors, ranks, **{**chosen, "alignment": 64})
    return {
        "rows": rows,
        "ranks": ranks,
        "padding": plan.padding,
        "bound": plan.lower_bound_padding,
        "aligned": aligned.padding,
        "aligned_gap": aligned.gap,
        "greedy": plan_group(tensors, ranks, planner="greedy", **chosen).padding,
        "fsdp2": fsdp2_padding(tensors, ranks),
        "lcm": lcm_padding(tensors, ranks),
        "plan_s": plan_s,
    }


def padding_table(models: dict[str, list[TensorSpec]]) -> list[str]:
    """Padding of every layer kind, rows and ranks, beside its bound and the other rules."""
    lines = [
        "| layer | rows | ranks | optimal | at least | 64-byte aligned | greedy | FSDP2 "
        "| LCM rule |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, tensors in models.items():
        for group in layers_of(tensors):
            for rows in ROWS:
                for ranks in RANKS:
                    c = cell(group.tensors, rows, ranks, prove=False)
                    numbers = (c[k] for k in ("padding", "bound", "aligned", "greedy"))
                    lines.append(
                        f"| {name} {group.name} | {rows} | {ranks} | "
                        + " | ".join(f"{100 * value:.3f}" for value in numbers)
                        + f" | {100 * c['fsdp2']:.2f} | {100 * c['lcm']:.2f} |"
                    )
    return lines


def against_optima(
    models: dict[str, list[TensorSpec]], optima: Sequence[dict[str, Any]], prove: bool
) -> list[str]:
    """How far every plan is from the proven optimum, and how long it took."""
    above, gaps, times, aligned_gaps, aligned_above = [], [], [], [], []
    for known in optima:
        group = next(
            group
            for group in layers_of(models[known["model"]])
            if sum(t.numel for t in group.tensors) == known["numel"]
        )
        c = cell(group.tensors, known["rows"], known["ranks"], prove)
        above.append(100 * (c["padding"] - known["padding"]))
        aligned_above.append(100 * (c["aligned"] - known["padding"]))
        gaps.append(100 * (c["padding"] - c["bound"]))
        aligned_gaps.append(100 * c["aligned_gap"])
        times.append(c["plan_s"])
        if c["bound"] > known["padding"] + 1e-12:
            raise AssertionError(f"the bound lies above the optimum: {known}")
    return [
        f"- {len(optima)} cells; above the proven optimum by at most {max(above):.5f} points, "
        f"equal to it (1e-9) in {sum(a < 1e-7 for a in above)}",
        f"- gap to our own bound: 0 in {sum(g < 1e-7 for g in gaps) / len(gaps):.1%} of the cells, "
        f"at most {max(gaps):.5f} points; aligned to 64 bytes at most {max(aligned_gaps):.5f} "
        f"points, and at most {max(aligned_above):.5f} points above the unaligned optimum",
        f"- time of a plan: median {statistics.median(times) * 1e3:.1f} ms, "
        f"at most {max(times) * 1e3:.0f} ms",
    ]


def timed(path: str, rows: int, ranks: Sequence[int]) -> list[float]:
    """Seconds for each number of ranks, whole model, in this process."""
    tensors = read_shapes(path) if path.endswith((".csv", ".csv.gz")) else load([])[path]
    groups = layer_groups(tensors)
    found = []
    for count in ranks:
        began = time.perf_counter()
        for group in groups:
            plan_group(group.tensors, count, granularity=f"rows:{rows}")
        found.append(time.perf_counter() - began)
    return found


def time_lines(path: str) -> list[str]:
    """Cold times in processes of their own, and those of further numbers of ranks."""
    lines = []
    for rows in ROWS:
        words = []
        for first in TIMED_RANKS:
            runs = [
                json.loads(
                    subprocess.run(
                        [sys.executable, __file__, "--timed", path, str(rows), str(first)],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                )
                for _ in range(REPEATS)
            ]
            cold = [run[0] for run in runs]
            further = [statistics.median(run[1:]) for run in runs]
            words.append(
                f"cold at {first:,} ranks {statistics.median(cold):.3f} s "
                f"({min(cold):.3f}-{max(cold):.3f}), each further "
                f"{statistics.median(further):.3f} s at the median "
                f"({min(further):.3f}-{max(further):.3f})"
            )
        lines.append(f"- {rows} rows: {'; '.join(words)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--optima", type=Path)
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--timed", nargs=3, metavar=("MODEL", "ROWS", "RANKS"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.timed:
        path, rows, first = args.timed
        print(json.dumps(timed(path, int(rows), [int(first), *FURTHER_RANKS])))
        return
    models = load(args.files)
    today = datetime.date.today().isoformat()
    text = [f"# Planner, {today}", "", f"{json.dumps(machine())}.", ""]
    large = next((str(p) for p in args.files if "deepseek" in p.name), "deepseek-v3-671b")
    text += [f"Whole DeepSeek-V3, `optimal`, {REPEATS} processes:", "", *time_lines(large), ""]
    if args.optima is not None:
        optima = json.loads(args.optima.read_text())
        text += ["Against proven optima:", "", *against_optima(models, optima, args.prove), ""]
    text += ["Padding in % of the layer (unaligned unless said):", "", *padding_table(models), ""]
    out = args.out or HERE / "results" / f"planner-{today}.md"
    out.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
