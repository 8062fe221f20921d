"""Runs a function on every rank of a gloo group, each a process of its own."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The server has torch loaded, and each rank is a fork of it: milliseconds in place of seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.fsdp.comm_ranks", "odc.train.rank_trainer"])


def _rank(function: Any, rank: int, size: int, store: str, args: tuple, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=60),
        )
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
    # No teardown: it would wait for ranks that a test has killed.
    os._exit(0)


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 60.0,
    killed: Sequence[int] = (),
) -> list[Any]:
    """Return what `function(rank, *args)` returned on each rank.

    Args:
        function: of a module under `tests`.
        killed: ranks that are expected to die without an answer.

    Raises:
        AssertionError: a rank raised, with its traceback, or gave no answer in time.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, pipes = [], []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank, args=(function, rank, size, store, args, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        deadline = time.monotonic() + timeout_s
        try:
            answers = [
                None if rank in killed else _answer(rank, pipe, deadline)
                for rank, pipe in enumerate(pipes)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return answers


def _answer(rank: int, pipe: Connection, deadline: float) -> Any:
    assert pipe.poll(max(deadline - time.monotonic(), 0)), f"rank {rank}: no answer in time"
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died without an answer") from None
    assert ok, f"rank {rank}:\n{value}"
    return value
