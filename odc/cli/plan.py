"""`odc plan`: where the parameters of a model lie on m ranks, and how much padding that costs."""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.cli.exits import UsageError

if TYPE_CHECKING:
    from odc.sharding import Plan, TensorSpec
    from odc.sharding.groups import Group

_MOST_RANKS = 1 << 20
_EPILOG = """\
examples:
  odc plan --shapes model.csv.gz --ranks 8,64,1024 --granularity rows:16
  odc plan tiny-moe --ranks 2,4 --explain
  odc plan --shapes model.csv --ranks 256 --granularity rows:128 \\
           --granularity 'router|norm=element' --html plan.html

A granularity says what stays together on one rank: element, block (one row, the last dimension),
rows:N, tile:R,C (N rows that hold whole tiles) or tensor. REGEX=G holds for parameters whose name
the regex finds; the first such rule counts.

Columns: x, groups of this shape; numel, elements of one; slice, elements that each rank holds of
it; buffers, sub-buffers that it is laid out in; padding is what makes all slices equal, as a
fraction of the parameters' bytes; at least, its proven lower bound: no plan under the same rules
has less; ms, the time to plan.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "plan",
        usage="odc plan (--shapes FILE | CONFIG) --ranks N[,N...] [options]",
        help="plan shards: padding on m ranks, with a certificate",
        description="Plans where every parameter of a model lies on m ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="CONFIG, KEY=VALUE", help="a configuration, and overrides")
    add("--shapes", type=Path, metavar="FILE", help="CSV (or .csv.gz) with name,shape,dtype")
    add("--ranks", required=True, metavar="N[,N...]", help="numbers of ranks")
    add("--granularity", action="append", default=[], metavar="[REGEX=]G", help="default: block")
    add("--planner", choices=("greedy", "optimal"), default="optimal", help="default: optimal")
    add("--max-buffers", type=int, default=3, metavar="K", help="sub-buffers a group; default: 3")
    add(
        "--group",
        default="layer",
        metavar="layer|N-layers",
        help="what is gathered together; default: layer",
    )
    add(
        "--alignment",
        type=int,
        default=64,
        metavar="BYTES",
        help="of starts and slices; default: 64",
    )
    add(
        "--unit", type=int, default=128, metavar="NUMEL", help="slices are a multiple; default: 128"
    )
    add("--gather-dtype", metavar="DTYPE", help="all gathered in one dtype; else each in its own")
    add("--prove", action="store_true", help="search until the best is proven, or for minutes")
    add("--explain", action="store_true", help="say what binds and what would help")
    add("--html", type=Path, metavar="FILE", help="padding over ranks, and a picture of a plan")
    add("--json", action="store_true", help="print a list of rows, one a group and rank count")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans, checks and prints; returns the exit code."""
    from odc.sharding import GranularityRules
    from odc.sharding.groups import layer_groups

    ranks = _ranks(args.ranks)
    rules = GranularityRules.parse(args.granularity)
    tensors = _tensors(args)
    groups = layer_groups(tensors, _layers(args.group), rules)
    rows, plans = [], []
    for num_ranks in ranks:
        for group in groups:
            row, plan = _plan(group, num_ranks, rules, args)
            rows.append(row)
            plans.append((group, plan))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(format_table(rows))
        if args.explain:
            _explain(plans)
    if args.html is not None:
        _write_page(args, groups, plans)
    return 0


def _plan(group: "Group", ranks: int, rules: Any, args: argparse.Namespace) -> Any:
    from odc.sharding import plan_group

    started = time.perf_counter()
    plan = plan_group(
        group.tensors,
        ranks,
        granularity=rules,
        planner=args.planner,
        max_buffers=args.max_buffers,
        alignment=args.alignment,
        unit_numel=args.unit,
        gather_dtype=args.gather_dtype,
        prove=args.prove,
    )
    plan_s = time.perf_counter() - started
    plan.verify()
    return {
        "group": group.name,
        "count": group.count,
        "tensors": len(group.tensors),
        "ranks": ranks,
        "numel": plan.numel,
        "slice_numel": plan.slice_numel,
        "buffers": len(plan.buffers),
        "padding": plan.padding,
        "lower_bound_padding": plan.lower_bound_padding,
        "plan_s": plan_s,
    }, plan


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table, with a line for the whole model under each number of ranks."""
    width = max(12, *(len(row["group"]) for row in rows))
    lines = [
        f"{'group':{width}} {'x':>4} {'tensors':>7} {'ranks':>7} {'numel':>15} {'slice':>13} "
        f"{'buffers':>7} {'padding':>10} {'at least':>10} {'ms':>7}"
    ]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        own = [row for row in rows if row["ranks"] == ranks]
        lines += [
            f"{row['group']:{width}} {row['count']:>4} {row['tensors']:>7} {ranks:>7} "
            f"{row['numel']:>15,} {row['slice_numel']:>13,} {row['buffers']:>7} "
            f"{row['padding']:>10.4%} {row['lower_bound_padding']:>10.4%} "
            f"{row['plan_s'] * 1e3:>7.1f}"
            for row in own
        ]
        if len(own) > 1:
            numel = sum(row["numel"] * row["count"] for row in own)
            held = sum(row["slice_numel"] * row["count"] for row in own)
            padding, bound = (
                sum(row[key] * row["numel"] * row["count"] for row in own) / numel
                for key in ("padding", "lower_bound_padding")
            )
            lines.append(
                f"{'all':{width}} {sum(row['count'] for row in own):>4} "
                f"{sum(row['tensors'] * row['count'] for row in own):>7} {ranks:>7} {numel:>15,} "
                f"{held:>13,} {'':>7} {padding:>10.4%} {bound:>10.4%} "
                f"{sum(row['plan_s'] for row in own) * 1e3:>7.1f}"
            )
    return "\n".join(lines)


def _explain(plans: Sequence[tuple["Group", "Plan"]]) -> None:
    for group, plan in plans:
        print(f"\n{group.name} (x{group.count}) on {plan.ranks} ranks\n{plan.explain()}")


def _write_page(
    args: argparse.Namespace, groups: Sequence["Group"], plans: Sequence[tuple["Group", "Plan"]]
) -> None:
    from odc.cli.plan_page import write_page

    largest = max(groups, key=lambda group: group.count * sum(t.numel for t in group.tensors))
    shown = next(plan for group, plan in plans if group is largest)
    words = " ".join(args.granularity) or "block"
    try:
        write_page(args.html, largest, shown, words)
    except OSError as error:
        raise UsageError(f"{args.html}: cannot be written ({error.strerror})") from error
    if not args.json:
        print(args.html)


def _ranks(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > _MOST_RANKS:
        raise UsageError(
            f"--ranks: got {text!r}; allowed: whole numbers from 1 to {_MOST_RANKS:,}, as in "
            "8,64,1024"
        )
    return list(dict.fromkeys(found))


def _layers(text: str) -> int:
    if text == "layer":
        return 1
    match = re.fullmatch(r"(\d+)-layers?", text)
    if match is None or int(match[1]) < 1:
        raise UsageError(f"--group: got {text!r}; allowed: layer, or N-layers as in 2-layers")
    return int(match[1])


def _tensors(args: argparse.Namespace) -> list["TensorSpec"]:
    """The parameters of the shapes file, or of the configuration's model."""
    from odc.sharding import TensorSpec
    from odc.sharding.groups import read_shapes

    if args.shapes is not None:
        if args.words:
            raise UsageError(f"--shapes and {args.words[0]!r} both name a model; keep one")
        return read_shapes(args.shapes)
    names = [word for word in args.words if "=" not in word]
    if len(names) != 1:
        raise UsageError("name one model: --shapes FILE, or a configuration")
    from odc.cli.train import config_path
    from odc.train.config import load_config
    from odc.train.models import model_shapes

    overrides = [word for word in args.words if "=" in word]
    config, _ = load_config(config_path(names[0]), overrides)
    if config.model.path is not None:
        from odc.train.pretrained import describe_model

        shapes = dict(describe_model(config.model.path).shapes)
    else:
        shapes = model_shapes(config.model, config.data.vocab_size)
    return [TensorSpec(fqn, tuple(shape), "float32") for fqn, shape in shapes.items()]
