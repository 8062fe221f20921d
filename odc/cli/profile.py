"""`odc profile`: train with every step traced."""

import argparse
from typing import Any

from odc.cli import train

_EPILOG = """\
examples:
  odc profile tiny-moe --run-dir runs/profile
  odc profile config.yaml train.steps=300 memory.prefetch=none
  odc predictor train runs/profile --model lstm -o predictors/first

`odc profile --keys` lists all keys with default and meaning.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "profile",
        usage="odc profile [CONFIG] [KEY=VALUE ...] [options]",
        help="train with every step traced",
        description="Trains like `odc train` with profiler.trace_interval 1: the trace holds "
        "every access, for predictors, comparisons and the dashboard.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    return train.train_with(args, ("profiler.trace_interval=1",))
