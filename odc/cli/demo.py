"""`odc demo`: the main job, end to end, in minutes on a small machine."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from odc.cli.exits import UsageError

_EPILOG = """\
examples:
  odc demo
  odc demo --run-dir /tmp/demo --steps 100      a shorter one
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "demo",
        help="profile, learn, judge, train on with learned prefetch, report",
        description=(
            "Trains a mixture of experts that does not fit its page budget on the text of Python's "
            "own library, learns from the trace, and shows what the learned prefetch is worth."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="folder of the runs (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="steps under each policy (default %(default)s)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete what an earlier demo left there"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    from odc.train.demo import run_demo

    root: Path = args.run_dir
    if root.exists() and any(root.iterdir()):
        if not args.overwrite:
            raise UsageError(f"{root}: is not empty; name another --run-dir, or use --overwrite")
        if not (root / "profile").is_dir():
            raise UsageError(f"{root}: holds no earlier demo and is not deleted")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    result = run_demo(root, args.words, continue_steps=args.steps)
    print(f"report:    {result.report}")
    print(f"dashboard: odc dashboard {root}   (from .venv/bin where make installed it)")
    return 0
