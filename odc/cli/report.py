"""`odc report`: one HTML file that shows a run."""

import argparse
from pathlib import Path
from typing import Any

from odc.cli.exits import UsageError

_EPILOG = """\
examples:
  odc report runs/first
  odc report runs/first -o first.html
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "report",
        help="write a run's views to one HTML file",
        description="Writes the dashboard's views of a run to one HTML file that needs no server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.html",
        help="file to write; default: report.html in the run directory",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the report; returns the exit code."""
    from dashboard.report import write_report

    if not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir}: no such folder; give a run directory")
    output = args.output if args.output is not None else args.run_dir / "report.html"
    try:
        write_report(args.run_dir, output)
    except OSError as error:
        raise UsageError(
            f"{output}: cannot be written ({error.strerror}); name another file with -o"
        ) from error
    print(output)
    return 0
