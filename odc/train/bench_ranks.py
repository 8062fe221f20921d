"""Contenders of a benchmark: groups of ranks in processes of their own that step when asked.

Every contender builds its model and waits. The parent lets one contender take one step at a time,
in turn, so that what else the machine does hits all of them alike, and settings that are read at
start (transparent huge pages for torch's allocator) can differ.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 600
_ENV = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}

Step = Callable[..., dict[str, Any]]
MakeStep = Callable[[int, int], Step]


@contextmanager
def ranks_of(
    make_step: MakeStep, ranks: int, env: Mapping[str, str] | None = None
) -> Iterator[list[Connection]]:
    """The processes of a contender, ready for their first step.

    Args:
        make_step: called in each process with (rank, ranks); returns what takes a step. It goes
            through pickle, so it is a function of a module or a partial of one.
        ranks: number of processes.
        env: environment that they start with.

    Raises:
        RuntimeError: a rank failed; the message is its traceback's last line.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with _environment({**_ENV, "MASTER_PORT": str(port), **(env or {})}):
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(make_step, rank, ranks, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of a rank is the end of its pipe
            pipes.append(ours)
            processes.append(process)
    try:
        _answers(pipes)
        yield pipes
        for pipe in pipes:
            with suppress(OSError):  # of one that failed
                pipe.send(None)
        for process in processes:
            process.join(20)
    finally:
        for process in processes:
            process.kill()


def ask(pipes: list[Connection], *args: Any) -> list[dict[str, Any]]:
    """Lets every rank of a contender take a step with these arguments; returns their answers.

    Raises:
        RuntimeError: a rank failed; the message is its traceback's last line.
    """
    for pipe in pipes:
        pipe.send(args)
    return _answers(pipes)


def _answers(pipes: list[Connection]) -> list[dict[str, Any]]:
    found = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"rank {rank} did not answer within {TIMEOUT_S} s")
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} ended without a word") from None
        if "error" in answer:
            raise RuntimeError(f"rank {rank}: {answer['error']}")
        found.append(answer)
    return found


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def _serve(make_step: MakeStep, rank: int, ranks: int, pipe: Connection) -> None:
    """One rank: builds, then a step for every message."""
    try:
        step = make_step(rank, ranks)
        pipe.send({})
        while (args := pipe.recv()) is not None:
            pipe.send(step(*args))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})
        raise
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
