"""`odc simulate`: policies on a virtual clock, beside bounds and the best schedule found."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.cli.exits import UsageError

if TYPE_CHECKING:
    from odc.train.simulation import Case, ContextRow, Setting, SimRow

_EPILOG = """\
examples:
  odc simulate --workload W1
  odc simulate --workload W2,W2-uneven --budget 50% --r 1,2 --policy lru+none,cost_aware+popularity
  odc simulate --workload W4 --policy cost_aware+popularity --contexts
  odc simulate runs/a --budget 25%,300MB --link 2GB/s --json

workloads (each also with -uneven: layers and times of different sizes):
  W1 forward and backward through frozen layers    W1a, W1r with accumulation, with recompute
  W2 training, updated in backward                 W2s updated in the optimizer's step
  W3 forward passes only                           W4 training, evaluation, generation, a reference
  W5 all of: W5p10, W5p20, W5p30 layers dropped at 10, 20, 30 %; W5b random branches

A budget of 25% is a quarter of all parameters and moments and one gradient. r is the time to load a
page over the compute of an access to one. Measured steps begin with an empty device, behind
some of warm-up; times are of all measured steps together. window: no schedule can be faster. best:
a schedule as fast as this exists, found with the whole future known. LP: a tighter bound, for small
workloads, or with --lp for up to 400 accesses (fewer --steps), which may take minutes.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "simulate",
        usage="odc simulate (RUN | --workload NAME[,...]) [options]",
        help="run policies over a trace or a made workload on a virtual clock, beside bounds",
        description="Runs the shipped scheduler on a virtual clock over what was needed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", nargs="?", type=Path, metavar="RUN", help="run directory with a trace")
    add("--workload", metavar="NAME[,...]", help="made workloads, or all")
    add(
        "--budget", default="25%,50%", metavar="B[,...]", help="shares or sizes; default: 25%%,50%%"
    )
    add("--r", metavar="R[,...]", help="default: 0.5,1,2 for made workloads, the recorded link")
    add("--link", metavar="RATE", help="each way, e.g. 2GB/s, in place of --r")
    add("--policy", default="all", metavar="NAME[,...]", help="EVICTION+PREFETCH; default: all")
    add("--warm-up", type=int, metavar="N", help="steps that do not count; default: 4, W4 W5: 8")
    add("--steps", type=int, metavar="N", help="measured steps; default: 6, W4: 12, W5: 8")
    add("--seed", type=int, default=0, metavar="N", help="of workloads and search; default: 0")
    add("--moves", type=int, default=200, metavar="N", help="of the search; 0: none; default: 200")
    add(
        "--lp",
        action=argparse.BooleanOptionalAction,
        help="solve the linear program; default: where it is small",
    )
    add("--contexts", action="store_true", help="a line for each context under every policy")
    add("--json", action="store_true", help="print a list of rows")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints; returns the exit code."""
    from odc.train.policies import parse_policies

    _check(args)
    policies = parse_policies(args.policy)
    pairs = [(case, setting) for case in _cases(args) for setting in _settings(case, args)]
    rows = list(_rows(pairs, policies, args))
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
        return 0
    for at in range(0, len(rows), len(policies)):
        print("\n".join([*_lines(rows[at : at + len(policies)], args.contexts), ""]))
    return 0


def _rows(
    pairs: "Sequence[tuple[Case, Setting]]", policies: Sequence[str], args: argparse.Namespace
) -> "Iterator[SimRow]":
    """The rows of every case and setting, bounds first: they are the same for all policies."""
    from odc.sizes import format_bytes
    from odc.train.progress import Work
    from odc.train.simulation import MOST_ACCESSES, find_floors, run_policy

    with Work(len(pairs) * (len(policies) + 1)) as work:
        for case, setting in pairs:
            told = f"{case.name}, budget {format_bytes(setting.budget_bytes)}, r {setting.r:.3g}"
            work.begin(f"{told}: bounds")
            if args.lp and case.accesses.num_accesses > MOST_ACCESSES:
                work.say(
                    f"{case.name}: no linear program, {case.accesses.num_accesses} accesses are "
                    f"more than {MOST_ACCESSES}; name fewer --steps"
                )
            floors = find_floors(case, setting, moves=args.moves, seed=args.seed, lp=args.lp)
            for policy in policies:
                work.begin(f"{told}: {policy}")
                yield run_policy(case, setting, policy, floors)


def _lines(rows: "Sequence[SimRow]", contexts: bool) -> list[str]:
    """The table of one case and setting."""
    from odc.sizes import format_bytes
    from odc.train.simulation import by_context

    one = rows[0]
    lp = "" if one.lp_bound_s is None else f", LP {one.lp_bound_s:.3f} s"
    best = "" if one.best_found_s is None else f", best found {one.best_found_s:.3f} s"
    lines = [
        f"{one.workload}: budget {_share(one)}, "
        f"r {one.r:.3g} ({one.link_bandwidth / 1e9:.2f}GB/s), {one.steps} steps",
        f"compute {one.compute_s:.3f} s, window bound {one.window_bound_s:.3f} s{lp}{best}",
        f"{'policy':<30}{'elapsed s':>10}{'stall s':>9}{'bytes in':>10}{'bytes out':>10}"
        f"{'/compute':>9}{'/window':>8}{'/LP':>7}{'/best':>7}",
    ]
    for row in rows:
        lines.append(
            f"{row.policy:<30}{row.elapsed_s:>10.3f}{row.stall_s:>9.3f}"
            f"{format_bytes(row.bytes_in):>10}{format_bytes(row.bytes_out):>10}"
            f"{_ratio(row, row.compute_s):>9}{_ratio(row, row.window_bound_s):>8}"
            f"{_ratio(row, row.lp_bound_s):>7}{_ratio(row, row.best_found_s):>7}"
        )
        if contexts:
            lines += [_context(ctx) for ctx in by_context(row)]
    return lines


def _share(row: "SimRow") -> str:
    """The budget in bytes, and of what they are a share."""
    from odc.sizes import format_bytes

    told = format_bytes(row.budget_bytes)
    if row.budget <= 1:
        return f"{row.budget:.0%} ({told})"
    state = format_bytes(round(row.budget_bytes / row.budget))
    return f"{told} ({row.budget:.0%}, more than the state of {state})"


def _context(ctx: "ContextRow") -> str:
    first = "" if ctx.first_elapsed_s is None else f", the first {ctx.first_elapsed_s:.3f} s"
    best = "" if ctx.best_found_s is None else f", best found {ctx.best_found_s:.3f} s"
    return (
        f"  {_kind(ctx.ctx)}: {ctx.passes} passes of {ctx.elapsed_s:.3f} s{first}{best}, "
        f"compute {ctx.compute_s:.3f} s"
    )


def _kind(ctx: int) -> str:
    """What a context is: even ones train, by micro-batch; odd ones have no gradient."""
    if ctx % 2:
        return "no gradient" if ctx == 1 else f"no gradient, model {ctx // 2 + 1}"
    return "training" if ctx == 0 else f"training, micro-batch {ctx // 2 + 1}"


def _ratio(row: "SimRow", reference: float | None) -> str:
    return f"{row.elapsed_s / reference:.3f}" if reference else "-"


# -- what was asked for ----------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    if (args.run_dir is None) == (args.workload is None):
        raise UsageError("name one of RUN and --workload")
    if args.r is not None and args.link is not None:
        raise UsageError("--r and --link both choose the link; keep one")
    for option, value, least in (
        ("--warm-up", args.warm_up, 0),
        ("--steps", args.steps, 1),
        ("--moves", args.moves, 0),
        ("--seed", args.seed, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{option}: got {value}; allowed: whole numbers from {least}")


def _cases(args: argparse.Namespace) -> "list[Case]":
    from odc.memory.replay.synthetic import WORKLOADS, expand
    from odc.train.simulation import made_case, recorded_case

    if args.run_dir is not None:
        if not args.run_dir.is_dir():
            raise UsageError(f"{args.run_dir}: no such folder; give a run directory")
        return [recorded_case(args.run_dir, warm_up=args.warm_up, steps=args.steps)]
    given = WORKLOADS if args.workload == "all" else args.workload.split(",")
    names = dict.fromkeys(name for word in given for name in expand(word))
    return [
        made_case(name, seed=args.seed, warm_up=args.warm_up, steps=args.steps) for name in names
    ]


def _settings(case: "Case", args: argparse.Namespace) -> "Iterator[Setting]":
    from odc.sizes import parse_rate
    from odc.train.simulation import make_setting

    ratios: Sequence[float | None] = [None]
    if args.r is not None or (args.link is None and args.run_dir is None):
        ratios = numbers(args.r or "0.5,1,2", "--r")
    bandwidth = None if args.link is None else float(parse_rate(args.link))
    if bandwidth == 0:
        raise UsageError(f"--link: got {args.link!r}; allowed: rates above 0, as in 2GB/s")
    for budget in args.budget.split(","):
        for r in ratios:
            yield make_setting(case, budget=_budget(budget), r=r, bandwidth=bandwidth)


def _budget(word: str) -> float | int:
    """A share of `25%`, or bytes."""
    from odc.sizes import parse_size

    if not word.endswith("%"):
        return parse_size(word)
    try:
        share = float(word[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UsageError(
            f"--budget: got {word!r}; allowed: above 0% and up to 100%, or a size such as 300MB"
        )
    return share


def numbers(text: str, option: str) -> list[float]:
    """Returns the numbers of a list.

    Raises:
        UsageError: One of them is none, or not above 0.
    """
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise UsageError(f"{option}: got {text!r}; allowed: numbers above 0, as in 0.5,1,2")
    return found
