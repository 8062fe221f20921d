"""`odc dashboard`: runs in a browser."""

import argparse
from pathlib import Path
from typing import Any

from odc.cli.exits import UsageError

_EPILOG = """\
examples:
  odc dashboard runs/first
  odc dashboard runs --port 8051
  odc dashboard runs --host 0.0.0.0 --token SECRET

Only this machine is answered, unless --host and --token say otherwise.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "dashboard",
        help="show runs in a browser",
        description="Serves interactive views of a run, or of all runs in a folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run, or a folder of runs")
    parser.add_argument("--port", type=int, default=8050, help="default: 8050")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--token", help="secret that a request must carry; needed off this machine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted; returns the exit code."""
    from dashboard.app import serve

    if not args.directory.is_dir():
        raise UsageError(f"{args.directory}: no such folder; give a run, or a folder of runs")
    try:
        serve(args.directory, host=args.host, port=args.port, token=args.token)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0
