"""`odc bench`: measurements beside what they are held against, in one run."""

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.cli import bench_paging
from odc.cli.exits import UsageError

if TYPE_CHECKING:
    from odc.train.bench_fsdp import Measured

_EXAMPLES = """\
examples:
  odc bench fsdp --model dense --dtype fp32
  odc bench paging --workload W1 --r 1

odc bench NAME --help says what is measured, and how.
"""

_EPILOG = """\
examples:
  odc bench fsdp
  odc bench fsdp --model dense --dtype fp32,bf16 --ranks 2 --repeats 9 -o fsdp.md
  odc bench fsdp --dtype bf16 --tokens 16
  odc bench fsdp --sizes 8,16,32,64,128,256 -o fsdp.md

With --sizes a stack of 3 blocks is measured in place of the models, each block one group of that
many MB of fp32 parameters; its table is appended to the file. Processes of all contenders are
there at once: together they need 2 GB and about 45 times a size.

Steps of all contenders are taken in turn, each in processes of its own with one thread a rank.
exposed: the step less the same step with collectives that move nothing. odc faster: median (least
and most) of FSDP2's step over odc's in the same turn. odc CPU: odc's CPU time over FSDP2's. huge
pages: torch's allocator with THP_MEM_ALLOC_ENABLE=1. per expert: fully_shard on every expert too.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure odc beside what it is held against",
        description="Measures odc beside what it is held against, in one run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    fsdp = kinds.add_parser(
        "fsdp",
        help="fully_shard beside torch's FSDP2: step, exposed communication, bytes, memory",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    fsdp.add_argument("--model", default="dense,moe", metavar="dense,moe", help="default: both")
    fsdp.add_argument("--dtype", default="fp32,bf16", metavar="fp32,bf16", help="default: both")
    fsdp.add_argument(
        "--sizes", metavar="8,16,...", help="MB of a group: measure blocks in place of the models"
    )
    fsdp.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of a rank's step, not with --sizes; default: 128. Fewer show communication "
        "better where a processor has no bf16 arithmetic",
    )
    fsdp.add_argument("--ranks", type=int, default=2, metavar="N", help="processes; default: 2")
    fsdp.add_argument("--repeats", type=int, default=9, metavar="N", help="steps each; default: 9")
    fsdp.add_argument("-o", "--output", type=Path, metavar="FILE.md", help="write the tables too")
    fsdp.add_argument("--json", action="store_true", help="print all figures")
    fsdp.set_defaults(run=run)
    bench_paging.add_parser(kinds)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    from odc.train.bench_fsdp import DTYPES, MODELS

    models, dtypes = (
        choices(args.model, MODELS, "--model"),
        choices(args.dtype, DTYPES, "--dtype"),
    )
    _check(args)
    if args.output is not None:
        check_output(args.output)
    if args.sizes is not None:
        return _run_grid(args, _sizes(args.sizes), dtypes)
    tables = {}
    for model in models:
        for dtype in dtypes:
            tables[model, dtype] = _compare(args, model, dtype)
            if not args.json:
                print("\n".join(_lines(model, dtype, tables[model, dtype])), flush=True)
    if args.json:
        rows = [dataclasses.asdict(one) for found in tables.values() for one in found]
        print(json.dumps(rows, indent=2))
    if args.output is not None:
        title = f"# fully_shard beside FSDP2, {args.ranks} ranks over gloo"
        text = [line for key, rows in tables.items() for line in _lines(*key, rows)]
        _write(args.output, "\n".join([title, "", _setting(args), "", *text]), "w")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.ranks < 2 or args.repeats < 1:
        raise UsageError("--ranks must be at least 2 and --repeats at least 1")
    if args.sizes is not None and args.tokens is not None:
        raise UsageError(
            "--tokens has no effect with --sizes, whose blocks set theirs; leave it out"
        )
    args.tokens = 128 if args.tokens is None else args.tokens
    if not 1 <= args.tokens <= 1 << 16:
        raise UsageError(f"--tokens must be 1 to 65536, got {args.tokens}")


def _run_grid(args: argparse.Namespace, sizes: list[int], dtypes: list[str]) -> int:
    """A line for each size and dtype, printed and written as soon as it is measured."""
    from odc.train.bench_fsdp import Contender, measure

    title = f"# fully_shard beside FSDP2 by size of a group, {args.ranks} ranks over gloo"
    _put(args, [title, "", _setting(args), ""], printed=False)
    _put(args, _GRID)
    found = []
    for dtype in dtypes:
        for size in sizes:
            ours = Contender("odc", "odc", "blocks", dtype, size * 10**6)
            plain = dataclasses.replace(ours, name="FSDP2", impl="fsdp2")
            huge = dataclasses.replace(plain, name="FSDP2, huge pages", huge_pages=True)
            rows = measure([ours, plain, huge], args.ranks, args.repeats)
            found += rows
            _put(args, [_grid_line(size, rows)])
    _put(args, [""], printed=False)
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    return 0


def _put(args: argparse.Namespace, lines: Sequence[str], printed: bool = True) -> None:
    """Appends lines to the file, if there is one, and shows them."""
    text = "".join(f"{line}\n" for line in lines)
    if printed and not args.json:
        print(text, end="", flush=True)
    if args.output is not None:
        _write(args.output, text, "a")


_GRID = (
    "| MB a group | dtype | odc s (least-most) | FSDP2 s | FSDP2, huge pages s | "
    "peak MB of the three | odc faster than the better (least-most of pairs) |",
    "|---|---|---|---|---|---|---|",
)


def _grid_line(size: int, rows: "Sequence[Measured]") -> str:
    """One size: all contenders, and odc against the FSDP2 whose median is less."""
    ours, *theirs = rows
    steps = [f"{one.step_s:.3f} ({one.least_s:.3f}-{one.most_s:.3f})" for one in rows]
    peaks = " / ".join(f"{one.peak_bytes / 1e6:.0f}" for one in rows)
    ratio = _ratio(ours, min(theirs, key=lambda one: one.step_s))
    cells = (str(size), ours.contender.dtype, *steps, peaks, ratio)
    return f"| {' | '.join(cells)} |"


def _ratio(ours: "Measured", other: "Measured") -> str:
    pairs = [b / a for a, b in zip(ours.steps, other.steps, strict=True)]
    return f"{statistics.median(pairs):.2f}x ({min(pairs):.2f}-{max(pairs):.2f})"


def _compare(args: argparse.Namespace, model: str, dtype: str) -> "list[Measured]":
    """odc first, then each way of FSDP2 beside it, then what is null."""
    from odc.train.bench_fsdp import Contender, measure

    ours = Contender("odc", "odc", model, dtype, tokens=args.tokens)
    plain = dataclasses.replace(ours, name="FSDP2", impl="fsdp2")
    theirs = [plain, dataclasses.replace(plain, name="FSDP2, huge pages", huge_pages=True)]
    if model == "moe":
        theirs += [
            dataclasses.replace(
                one, name=one.name.replace("FSDP2", "FSDP2 per expert"), per_expert=True
            )
            for one in theirs
        ]
    found: list[Measured] = []
    for other in theirs:
        null = dataclasses.replace(other, name=f"{other.name}, null", null=True)
        null_ours = dataclasses.replace(ours, name="odc, null", null=True)
        found += measure([ours, other, null_ours, null], args.ranks, args.repeats)
    return found


def _lines(model: str, dtype: str, rows: "Sequence[Measured]") -> list[str]:
    """A table: each four rows are odc, a way of FSDP2, and both without communication."""
    lines = [
        f"### {model}, {dtype}",
        "",
        "| | step s (least-most) | CPU s a rank | exposed s | gathered MB | reduced MB | peak MB | "
        "odc faster | odc CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for at in range(0, len(rows), 4):
        ours, other, null_ours, null_other = rows[at : at + 4]
        ratio = _ratio(ours, other)
        for one, null, said in ((ours, null_ours, ""), (other, null_other, ratio)):
            cpu = f"{ours.cpu_s / other.cpu_s:.2f}" if said else ""
            lines.append(
                f"| {one.contender.name} | {one.step_s:.3f} ({one.least_s:.3f}-{one.most_s:.3f}) "
                f"| {one.cpu_s:.3f} | {one.step_s - null.step_s:.3f} "
                f"| {one.gathered_bytes / 1e6:.0f} | {one.reduced_bytes / 1e6:.0f} "
                f"| {one.peak_bytes / 1e6:.0f} | {said} | {cpu} |"
            )
    return [*lines, ""]


def _setting(args: argparse.Namespace) -> str:
    from odc.train.run_dir import machine

    of = "" if args.sizes else f" of {args.tokens} tokens a rank"
    return f"{json.dumps(machine())}; {args.repeats} steps{of} each, in turn; medians."


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def check_output(path: Path) -> None:
    """Refuses a file that could not be written when the measurements are done.

    Raises:
        UsageError: Its folder does not exist or cannot be written.
    """
    there = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{path}: cannot be written; name a file in a folder that can")


def choices(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """Returns the words of a list.

    Raises:
        UsageError: One of them is not allowed.
    """
    chosen = text.split(",")
    wrong = [word for word in chosen if word not in allowed]
    if wrong:
        raise UsageError(f"{option}: got {wrong[0]!r}; allowed: {', '.join(allowed)}")
    return chosen


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--sizes: expected whole numbers of MB, as in 8,32; got {text!r}")
    return sizes
