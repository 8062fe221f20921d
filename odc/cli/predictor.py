"""`odc predictor train` and `odc predictor eval`."""

import argparse
import json
from pathlib import Path
from typing import Any

from odc.cli.exits import UsageError

_EPILOG = """\
examples:
  odc predictor train runs/profile --model lstm -o predictors/lstm
  odc predictor eval runs/profile --model predictors/lstm

Traces are made by odc profile. odc predictor COMMAND --help says more.
"""

_TRAIN_EPILOG = """\
examples:
  odc predictor train runs/profile --model lstm -o predictors/lstm
  odc predictor train runs/a runs/b --model sklearn -o predictors/both

The latest 30 % of each run's steps are not learned from: 15 % stop the training, 15 % judge it.
"""

_EVAL_EPILOG = """\
examples:
  odc predictor eval runs/profile --model predictors/lstm --model predictors/sklearn
  odc predictor eval runs/profile --model predictors/lstm --budget 300MB --link 2GB/s --json

The shipped scheduler runs the latest 30 % of the traced steps again on a virtual clock, once for
each policy, after warming up on the steps before them. Figures are means over those steps. The row
marked "measured" is what the run itself took over them: its distance from the simulated row of the
same policy tells how far to trust the others.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "predictor",
        help="train predictors on traces, and judge them",
        description="Trains predictors on the traces of runs, and judges them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(parts)
    _add_eval(parts)


def _add_train(parts: Any) -> None:
    parser = parts.add_parser(
        "train",
        help="learn from the traces of runs",
        description="Learns which experts will be used, from runs made by `odc profile`.",
        epilog=_TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--model", required=True, choices=("lstm", "sklearn"))
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="of the training; default: 0")
    parser.add_argument("--json", action="store_true", help="print the model card on stdout")
    parser.set_defaults(run=run_train)


def _add_eval(parts: Any) -> None:
    parser = parts.add_parser(
        "eval",
        help="compare policies on held-out steps of runs",
        description="Compares policies, learned ones among them, by re-simulation.",
        epilog=_EVAL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        type=Path,
        metavar="DIR",
        help="folder made by `odc predictor train`; may be given again",
    )
    parser.add_argument("--budget", metavar="SIZE", help="for pages; default: the run's own")
    parser.add_argument(
        "--link", metavar="RATE", help="each way, e.g. 2GB/s; default: the run's own, or measured"
    )
    parser.add_argument("--json", action="store_true", help="print all figures on stdout")
    parser.set_defaults(run=run_eval)


def run_train(args: argparse.Namespace) -> int:
    """Trains and saves a predictor; returns the exit code."""
    from predictor import quality_table, train_predictor

    try:
        card = train_predictor(args.runs, args.model, args.output, seed=args.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(card, indent=1))
        return 0
    training = card["training"]
    print(f"{card['out_dir']}: {args.model}, {card['parameters']} parameters")
    print(f"trained in {training['seconds']} s; on held-out steps:")
    print(quality_table(card["held_out"]))
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Compares policies; returns the exit code."""
    from odc.train.policy_table import compare_policies, format_table

    try:
        tables = [
            compare_policies(run, args.models, budget=args.budget, link=args.link)
            for run in args.runs
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps([table.as_json() for table in tables], indent=1))
        return 0
    print("\n\n".join(format_table(table) for table in tables))
    return 0
