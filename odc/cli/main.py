"""The command `odc`: parses, calls one command, turns errors into exit codes.

Each command is a module with `add_parser` and `run`; what is heavy is imported inside `run`, so
that `odc --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from odc.cli import (
    bench,
    dashboard,
    demo,
    doctor,
    exits,
    export,
    fit,
    generate,
    plan,
    predictor,
    profile,
    report,
    simulate,
    train,
)

COMMANDS = (
    demo,
    train,
    profile,
    predictor,
    dashboard,
    report,
    simulate,
    plan,
    fit,
    bench,
    doctor,
    generate,
    export,
)

_EPILOG = """\
examples:
  odc train tiny-moe                         a mixture of experts, trained in seconds
  odc profile config.yaml --run-dir runs/a   the same with every step traced
  odc predictor train runs/a --model lstm -o predictors/a
  odc train config.yaml memory.predictor=lstm memory.predictor_path=predictors/a
  odc dashboard runs

exit codes: 0 done, 2 the input must change, 3 failed while running, 130 interrupted.
ODC_DEBUG=1 shows the traceback of an error.
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="odc",
        description="Trains models that do not fit the device, by treating its memory as a cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    from odc import __version__

    parser.add_argument("--version", action="version", version=f"odc {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: Arguments after the program's name; those of the process where not given.
    """
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse hands back those of the words that stand behind an option.
    if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words += rest
    try:
        return int(args.run(args))
    except BaseException as error:
        code = exits.exit_code(error)
        if code is None or os.environ.get("ODC_DEBUG") == "1":
            raise
        for line in exits.messages(error):
            print(f"odc: {line}", file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
