"""Errors become exit codes here, and nowhere else.

0 done; 2 the input must change; 3 something failed while running; 130 interrupted.
"""

import sys

BAD_INPUT, FAILURE, INTERRUPT = 2, 3, 130


class UsageError(ValueError):
    """The command line asks for something that does not exist or does not fit together."""


def exit_code(error: BaseException) -> int | None:
    """Returns the exit code for an error that is expected, `None` for a bug of ours."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPT
    if isinstance(error, _bad_input()):
        return BAD_INPUT
    from odc.errors import OdcError

    if isinstance(error, OdcError | OSError | MemoryError):
        return FAILURE
    return None


def messages(error: BaseException) -> list[str]:
    """Returns what to tell the user, a line for each problem."""
    if isinstance(error, KeyboardInterrupt):
        return ["interrupted", *map(str, error.args)]
    if getattr(error, "is_told", False):  # by another rank, see odc/train/ranks.py
        return []
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return text.splitlines()


def _bad_input() -> tuple[type[BaseException], ...]:
    from odc import errors

    found: list[type[BaseException]] = [
        UsageError,
        errors.ConfigError,
        errors.DataError,
        errors.BudgetError,
        errors.CheckpointError,
        errors.PredictorMismatchError,
    ]
    # An error can only come from a module that is loaded: asking for these costs no import.
    for module, name in (("profiler.errors", "TraceError"), ("predictor.io", "PredictorError")):
        loaded = sys.modules.get(module)
        if loaded is not None:
            found.append(getattr(loaded, name))
    return tuple(found)
