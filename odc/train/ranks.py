"""The ranks of a run: who this process is, and how all of them come to one answer.

What a rank alone finds (a folder that is in use, a signal, a loss that is no number) all must act
on, or some would wait for ever for those who left. `together` and `total` are the two ways to know
it: the first between steps, for what may fail; the second in a step, for numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from odc.errors import OdcError

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

_CPU = torch.device("cpu")
_SOURCE_LINE = re.compile(r"^\[[^]]*:\d+\] ")  # of gloo, before its message


class PeerError(OdcError, RuntimeError):
    """Another rank failed; what it said is the message."""


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together.

    Attributes:
        rank: This process, from 0.
        size: Their number; one trains by itself.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_root(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def together(self, act: Callable[[], T]) -> list[T]:
        """Acts on every rank and returns what each returned, in order of ranks.

        Raises:
            PeerError: Another rank failed; this one did not.
            Exception: This rank's own failure. Where rank 0 says the same of itself, the error is
                marked as told (`is_told`), so that it is printed once.
        """
        if self.size == 1:
            return [act()]
        failure: Exception | None = None
        answer: T | None = None
        try:
            answer = act()
        except Exception as error:
            failure = error
        told: list[Any] = [None] * self.size
        said = None if failure is None else str(failure) or type(failure).__name__
        with naming_peers("all_gather_object"):
            dist.all_gather_object(told, (said, answer))
        if failure is not None:
            if self.rank and told[0][0] == said:
                failure.is_told = True  # type: ignore[attr-defined]
            raise failure
        for rank, (text, _) in enumerate(told):
            if text is not None:
                raise PeerError(f"rank {rank}: {text}")
        return [value for _, value in told]

    def on_root(self, act: Callable[[], T]) -> T:
        """Acts on rank 0 and returns its answer on every rank."""
        return self.together(lambda: act() if self.is_root else None)[0]  # type: ignore[return-value]

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over ranks, in float64 and in the order of ranks: the same bits on all.

        Raises:
            CommError: Another rank is gone.
        """
        if self.size == 1:
            return list(values)
        from odc.fsdp.sharded_runtime import comm_of

        assert dist.group.WORLD is not None, "ranks were joined"
        comm = comm_of(dist.group.WORLD, _CPU)
        numbers = torch.tensor(values, dtype=torch.float64)
        comm.owner = -1
        comm.all_reduce(numbers).wait()
        return numbers.tolist()


def current() -> Ranks:
    """Returns the ranks of `torch.distributed`; one where it is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())


@contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the ranks that torchrun has started, and leaves them where all went well."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield current()
        return
    dist.init_process_group("gloo")
    yield current()
    # After a failure nobody waits: some ranks are gone.
    dist.barrier()
    dist.destroy_process_group()


def local_size() -> int:
    """Returns the number of ranks on this machine, which share its cores."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", current().size)))


@contextmanager
def naming_peers(op: str) -> Iterator[None]:
    """Turns what torch's own collectives raise when a rank is gone into a `CommError`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, OdcError) or not _is_transport(text):
            raise
        from odc.fsdp.comm import CommError

        reason = _SOURCE_LINE.sub("", text.splitlines()[0]).split(". This is typically")[0]
        raise CommError(reason, op=op, group="world", num_bytes=0, peer=None) from error


def _is_transport(text: str) -> bool:
    return "gloo" in text or "onnection" in text or "imed out" in text
