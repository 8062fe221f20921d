"""Steps of odc and of DeepSpeed's ZeRO-3 in turn: everything resident, and offload.

    DS_ENV/bin/python benchmarks/peers/zero3.py [--only TEXT] [--repeats N] [--folder DIR]

`README.md` in this folder says how to make the environment. All contenders of a set live at once,
each in processes of its own (one compute thread a rank), and take one step at a time, in turn; what
is compared is the same model, optimizer, tokens and type, and losses are printed beside the times.

Memory is the peak resident size (`VmHWM`) less what was resident after imports, since DeepSpeed
imports more than odc does. Bytes are those of the block device, from `/proc/self/io`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from zero3_contenders import SETS, Set
from zero3_ranks import Contender, Work, make_step

from odc.train.bench_ranks import ask, ranks_of

WARM_UP = 2
QUIET = {"PYTHONWARNINGS": "ignore"}  # DeepSpeed has a deprecated call for every collective
MB = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sets whose name begins so, comma-separated")
    parser.add_argument("--skip", default="", help="contenders whose name contains one of these")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank and step")
    parser.add_argument(
        "--set-s", type=float, default=85.0, help="no further turn after this long in a set"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "zero3")
    parser.add_argument("--json", type=Path, help="where every step goes")
    args = parser.parse_args()
    names = tuple(args.only.split(","))
    skip = [text for text in args.skip.split(",") if text]
    everything = {}
    for one in SETS:
        if one.name.startswith(names):
            members = [c for c in one.contenders if not any(text in c.name for text in skip)]
            work = Work(layers=args.layers, batch=args.batch, sequence=one.sequence)
            rows = measure(one, members, work, args.folder, args.repeats, args.set_s)
            print(table(one, members, rows), flush=True)
            everything[one.name] = {c.name: r for c, r in zip(members, rows, strict=True)}
    if args.json is not None:
        args.json.write_text(json.dumps(everything), encoding="utf-8")
    return 0


def measure(
    one: Set,
    contenders: Sequence[Contender],
    work: Work,
    folder: Path,
    repeats: int,
    most_s: float,
) -> list[dict[str, Any]]:
    """Steps of all contenders in turn; a row of lists for each, or its error."""
    rows: list[dict[str, Any]] = [{"steps": []} for _ in contenders]
    started = time.monotonic()
    with ExitStack() as stack:
        running: dict[int, Any] = {}
        for number, contender in enumerate(contenders):
            target = folder / f"{number}"
            target.mkdir(parents=True, exist_ok=True)
            make = partial(make_step, contender, work, str(target))
            try:
                running[number] = stack.enter_context(
                    ranks_of(make, one.ranks, QUIET | contender.env)
                )
            except RuntimeError as error:
                rows[number]["error"] = f"while building: {error}"
            print(f"{contender.name}: {rows[number].get('error', 'built')}", file=sys.stderr)
        for turn in range(WARM_UP + repeats):
            if turn > WARM_UP and time.monotonic() - started > most_s:
                break
            for number in sorted(running, reverse=bool(turn % 2)):
                try:
                    answers = ask(running[number])
                except RuntimeError as error:
                    rows[number]["error"] = f"step {turn + 1}: {error}"
                    del running[number]
                    print(f"{contenders[number].name}: {error}", file=sys.stderr)
                    continue
                print(
                    f"{turn}: {contenders[number].name} {answers[0]['wall_s']:.2f}", file=sys.stderr
                )
                if turn >= WARM_UP:
                    rows[number]["steps"].append(answers)
        return rows


def table(one: Set, contenders: Sequence[Contender], rows: Sequence[dict[str, Any]]) -> str:
    """Medians over steps in Markdown; a factor is the median of pairs of steps."""
    lines = [
        f"### {one.name}: {one.title}; {len(rows[0]['steps'])} steps each",
        "",
        "| | step s (least-most) | CPU s a rank | peak MB (whole) | read, written MB a step "
        "| paged in, out MB | loss | factor to the first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reference = [max(a["wall_s"] for a in row) for row in rows[0]["steps"]]
    for contender, row in zip(contenders, rows, strict=True):
        if "error" in row or not row["steps"]:
            lines.append(f"| {contender.name} | failed: {row.get('error')} | | | | | | |")
            continue
        walls = [max(a["wall_s"] for a in answers) for answers in row["steps"]]
        ratios = sorted(w / r for w, r in zip(walls, reference, strict=False))
        last = row["steps"][-1]
        lines.append(
            f"| {contender.name} | {statistics.median(walls):.3f} ({min(walls):.3f}-"
            f"{max(walls):.3f}) | {_median(row, 'cpu_s'):.2f} | {_peak(last) / MB:.0f} "
            f"({max(a['peak_bytes'] for a in last) / MB:.0f}) | "
            f"{_median(row, 'read_bytes') / MB:.0f}, {_median(row, 'written_bytes') / MB:.0f} | "
            f"{_median(row, 'paged_in_bytes') / MB:.0f}, {_median(row, 'paged_out_bytes') / MB:.0f}"
            f" | {last[0]['loss']:.4f} | "
            + (
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |"
                if ratios
                else "|"
            )
        )
    notes = [
        f"* {c.name}: {row['steps'][-1][0]['note']}"
        for c, row in zip(contenders, rows, strict=True)
        if row["steps"] and row["steps"][-1][0]["note"]
    ]
    return "\n".join([*lines, "", *notes, ""])


def _median(row: dict[str, Any], name: str) -> float:
    return statistics.median(
        statistics.fmean(answer[name] for answer in answers) for answers in row["steps"]
    )


def _peak(answers: list[dict[str, Any]]) -> int:
    return max(answer["peak_bytes"] - answer["imported_bytes"] for answer in answers)


if __name__ == "__main__":
    sys.exit(main())
