"""`odc bench paging`: the pager measured, beside its own simulation."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.cli.exits import UsageError

if TYPE_CHECKING:
    from odc.train.bench_paging import PagingRow

_HOMES = ("host", "disk")

_POLICY = "EVICTION+PREFETCH; default: cost_aware+popularity"

_EPILOG = """\
examples:
  odc bench paging --workload W1 --r 1
  odc bench paging --workload W1,W2,W3,W4,W5 --home host,disk -o paging.md

Each row pages a made workload for real: frames, copies to and from the home, and one thread that
computes with the bytes that are there. It runs cycles of a few steps from an empty device, in turn
with a second run of the same. The second gives the times of all computations, the pager's own time
between them and the link's figures; with these the same needs are simulated.

Half of the state fits the device (C = 50 %). Figures are medians of a step. stall: waiting for
transfers to end. own: what the pager itself takes, waking up behind a transfer included.
difference: simulated stall less measured, as a share of the measured step. over best: measured
step over the best schedule that a search found for the same computation and link; the first step
of a cycle, which fills the device, and the others. alone: computation without paging; copies slow
it down where they share memory or a core with it.
A row counts if the interquartile range of its repeats, in both runs, is at most 5 % of the step. A
home in host memory is reached over an emulated link of the ratio r; a disk is as fast as it is.
"""


def add_parser(kinds: Any) -> None:
    """Adds the command's arguments."""
    parser = kinds.add_parser(
        "paging",
        help="the pager, measured and simulated side by side: step, stall, bounds",
        description="Measures the pager, and how far its simulation is from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--workload",
        default="W1,W2,W3,W4,W5p20",
        metavar="NAME[,...]",
        help="see odc simulate --help; default: W1,W2,W3,W4,W5p20",
    )
    add(
        "--r",
        default="0.5,1,2",
        metavar="R[,...]",
        help="of a home in host memory; default: 0.5,1,2",
    )
    add("--home", default="host", metavar="host,disk", help="default: host")
    add("--home-dir", type=Path, metavar="DIR", help="of a disk home; default: a temporary one")
    add("--policy", default="cost_aware+popularity", metavar="NAME", help=_POLICY)
    add("--repeats", type=int, default=9, metavar="N", help="cycles a row; default: 9")
    add("--moves", type=int, default=50, metavar="N", help="of the search; 0: none; default: 50")
    add("-o", "--output", type=Path, metavar="FILE.md", help="write the table too")
    add("--json", action="store_true", help="print all figures")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    from odc.cli.bench import check_output, choices
    from odc.cli.simulate import numbers
    from odc.train.policies import parse_policies

    if args.repeats < 1 or args.moves < 0:
        raise UsageError("--repeats must be at least 1 and --moves at least 0")
    homes = choices(args.home, _HOMES, "--home")
    policies = parse_policies(args.policy)
    if len(policies) != 1:
        raise UsageError(f"--policy: got {args.policy!r}; allowed: one policy")
    if args.output is not None:
        check_output(args.output)
    rows = []
    for row in _rows(args, homes, numbers(args.r, "--r"), policies[0]):
        rows.append(row)
        if not args.json:
            print("\n".join(format_rows([row])[0 if row is rows[0] else -1 :]), flush=True)
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
    if args.output is not None:
        _write(args, rows)
    return 0


def _rows(
    args: argparse.Namespace, homes: Sequence[str], ratios: Sequence[float], policy: str
) -> "Iterator[PagingRow]":
    from odc.train.bench_paging import make_tasks, measure
    from odc.train.progress import Work

    tasks = make_tasks(
        args.workload.split(","), ratios, homes, policy=policy, home_dir=args.home_dir
    )
    with Work(len(tasks)) as work:
        for task in tasks:
            where = "on disk" if task.r is None else f"r {task.r:g}"
            work.begin(f"{task.workload}, {where}")
            yield measure(task, repeats=args.repeats, moves=args.moves)


_HEAD = (
    "workload",
    "home",
    "r asked, was",
    "step s (IQR)",
    "stall s",
    "own s",
    "simulated step s",
    "simulated stall s",
    "difference",
    "window bound s",
    "over best (first; later)",
    "compute s (alone)",
    "link GB/s in, out",
    "counts",
)


def format_rows(rows: "Sequence[PagingRow]") -> list[str]:
    """Returns the table as lines of Markdown."""
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    return lines + [f"| {' | '.join(_cells(row))} |" for row in rows]


def _cells(row: "PagingRow") -> tuple[str, ...]:
    asked = "-" if row.asked_r is None else f"{row.asked_r:g}"
    best = "-"
    if row.over_best is not None:
        whole, first, later = row.over_best
        best = f"{whole:.3f} ({first:.3f}; {later:.3f})"
    measured, simulated = row.measured, row.simulated
    return (
        row.workload,
        row.home,
        f"{asked}, {row.r:.2f}",
        f"{measured.step_s:.4f} ({row.spread:.1%})",
        f"{measured.stall_s:.4f}",
        f"{measured.own_s:.4f}",
        f"{simulated.step_s:.4f}",
        f"{simulated.stall_s:.4f}",
        f"{row.difference:+.1%}",
        f"{row.window_bound_s:.4f}",
        best,
        f"{row.compute_s:.4f} ({row.alone_s:.4f})",
        f"{row.bandwidth_in / 1e9:.2f}, {row.bandwidth_out / 1e9:.2f}",
        "yes" if row.counts else "no",
    )


def _write(args: argparse.Namespace, rows: "Sequence[PagingRow]") -> None:
    from odc.train.run_dir import machine

    text = [
        f"# The pager measured and simulated, {rows[0].policy}, C = {rows[0].budget:.0%}",
        "",
        f"{json.dumps(machine())}; {args.repeats} cycles a row from an empty device, in turn with "
        "a second run that gives the simulation its times; medians of a step; load "
        f"{' '.join(map('{:.1f}'.format, os.getloadavg()))} at the end.",
        "",
        *format_rows(rows),
        "",
    ]
    try:
        args.output.write_text("\n".join(text), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{args.output}: cannot be written ({error.strerror})") from error
