"""`odc doctor`: what this machine offers to training, and what to change."""

import argparse
import sys
from pathlib import Path
from typing import Any

from odc.cli.exits import FAILURE

_EPILOG = """\
examples:
  odc doctor                        memory, huge pages, disk, cores, network; a few seconds
  odc doctor --home-dir /mnt/nvme   the same for the folder that memory.home=disk will use
  odc doctor --measure-links        copy, read and write rates as training sees them
  odc doctor --json > machine.json

Every line is OK, ADVICE (training works and would be faster or safer otherwise) or PROBLEM (it
cannot work), with the reason and the command that changes it. --measure-links takes about fifteen
seconds and is remembered: other commands take it as their default link. It writes and
removes a file of 1 GiB in the folder.

exit codes: 0 training is possible, 3 there is a PROBLEM.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine: what training needs, what would make it faster",
        description="Looks at this machine: what training needs, and what would make it faster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--home-dir",
        type=Path,
        metavar="DIR",
        help="folder of a disk home (memory.home_dir); default: the system's temporary one",
    )
    parser.add_argument(
        "--measure-links",
        action="store_true",
        help="measure how fast pages move, and remember it",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examines and prints; returns the exit code."""
    from odc.train.doctor import examine, format_report, to_json

    def say(text: str) -> None:
        print(f"odc: measuring {text}", file=sys.stderr, flush=True)

    report = examine(args.home_dir, measure=args.measure_links, say=say)
    print(to_json(report) if args.json else format_report(report))
    return FAILURE if report.has_problem else 0
