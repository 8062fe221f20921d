"""Runs functions on every rank of a gloo group, each a process of its own.

Starting ranks is what takes time, so a world of ranks waits for the next call. One in which a call
failed is thrown away: a rank may be left behind in a collective.
"""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import CONTEXT

_GRACE_S = 5.0  # for the other ranks, once one has failed


def _serve(rank: int, size: int, store: str, pipe: connection.Connection) -> None:
    """One rank: calls what it is sent, until nobody sends any more."""
    gc.freeze()  # what the server has loaded is not looked at again, and so not copied
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    last = False
    while not last:
        try:
            function, args, last = pipe.recv()
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            answer = (True, function(rank, *args))
        except BaseException:  # a failed pytest.raises is no Exception
            answer = (False, traceback.format_exc())
        gc.collect()  # threads and frames of the call end with it
        pipe.send(answer)
    # No teardown: it would wait for ranks that a test has killed.
    os._exit(0)


class _World:
    """Ranks that wait for calls.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        killed: Sequence[int],
        last: bool,
    ) -> list[Any]:
        """See `Worlds.run`."""
        for pipe in self._pipes:
            pipe.send((function, args, last))
        awaited = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in killed}
        answers: list[Any] = [None] * len(self._pipes)
        wrong: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while awaited:
            ready = connection.wait(list(awaited), max(deadline - time.monotonic(), 0))
            if not ready:
                wrong.update(dict.fromkeys(awaited.values(), "no answer in time"))
                break
            for pipe in ready:
                rank = awaited.pop(pipe)
                try:
                    good, answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    good, answers[rank] = False, "it died without an answer"
                if not good:
                    wrong[rank] = answers[rank]
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(wrong.items()))
        return answers

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()


class Worlds:
    """A world for every number of ranks, started when one is first called."""

    def __init__(self) -> None:
        self._worlds: dict[int, _World] = {}

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout_s: float = 60.0,
        killed: Sequence[int] = (),
        last: bool = False,
    ) -> list[Any]:
        """Return what `function(rank, *args)` returned on each rank.

        Args:
            function: of a module under `tests`.
            size: ranks.
            killed: ranks that are expected to die without an answer.
            last: every rank ends with its answer; some may only then know that one has failed.

        Raises:
            AssertionError: ranks raised, with their tracebacks, or gave no answer in time.
        """
        world = self._worlds.pop(size, None) or _World(size)
        try:
            answers = world.call(function, args, timeout_s, killed, last)
        except BaseException:
            world.close()
            raise
        if killed or last:
            world.close()
        else:
            self._worlds[size] = world
        return answers

    def close(self) -> None:
        """End all ranks of all worlds."""
        while self._worlds:
            self._worlds.popitem()[1].close()
