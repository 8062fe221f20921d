"""Processes that start at once: forks of a server that has loaded what they will ask for.

Python keeps one such server for all of a test run, and who starts the first process says what it
loads; so nobody else may.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",  # the first optimizer of a process loads it
        "tests.fsdp.dcp_claims",
        "tests.fsdp.hugging_face_claims",
        "odc.train.rank_trainer",
        "odc.train.demo",
        "odc.cli.main",
    ]
)


def start(
    main: Callable[[list[str]], int], arguments: Sequence[str], err: Path, **environment: str
) -> ForkServerProcess:
    """A process that runs `main(arguments)` as its program, and exits with what it returns.

    Args:
        main: of a module.
        arguments: words of the command line, without the program's name.
        err: file that its standard error goes to.
        environment: variables beside those that the server began with.
    """
    process = CONTEXT.Process(
        target=_program, args=(main, list(arguments), err, environment), daemon=True
    )
    process.start()
    return process


def finish(process: ForkServerProcess, timeout_s: float = 120) -> int | None:
    """Waits for a process and returns its exit code; None: not in time, and it is killed."""
    process.join(timeout_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def _program(
    main: Callable[[list[str]], int], arguments: list[str], err: Path, environment: dict[str, str]
) -> None:
    for path, stream in ((os.devnull, sys.stdout), (err, sys.stderr)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(environment)
    sys.exit(main(arguments))
