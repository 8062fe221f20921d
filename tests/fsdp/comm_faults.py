"""What ranks of `test_comm.py` do where a peer is lost or does something else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odc.fsdp.comm import CommError
from tests.fsdp.comm_values import world


class FirstSends:
    """A process group that sends one message to each peer and drops all others.

    Args:
        group: what sends.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: dict[int, dist.Work] = {}

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        if peer not in self._sent:
            self._sent[peer] = self._group.send(tensors, peer, tag)
        return self._sent[peer]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def lost_peer(rank: int, op: str, how: str, timeout_s: float) -> tuple[str, int | None, float]:
    """The last rank dies before a large message or in the middle of it, or stays away."""
    size = dist.get_world_size()
    comm = world(timeout_s=timeout_s)
    buffer = torch.ones(size * 4 * 2**20)
    comm.all_gather(buffer).wait()
    dist.barrier()
    if rank == size - 1:
        if how == "absent":
            time.sleep(3600)
        if how == "middle":
            comm.group = FirstSends(comm.group)  # type: ignore[attr-defined]
            getattr(comm, op)(buffer)
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    work = getattr(comm, op)(buffer)
    try:
        work.wait()
    except CommError as error:
        try:
            work.wait()
        except CommError as again:
            assert again is error
        for later in (comm.reduce_scatter, comm.all_reduce, comm.all_gather):
            try:
                later(buffer).wait()
            except CommError as again:
                assert again.peer == error.peer
            else:
                raise AssertionError("a collective after a failure succeeded")
        return str(error), error.peer, time.monotonic() - start
    raise AssertionError("the collective of a dead peer succeeded")


def other_size(rank: int) -> str:
    comm = world(timeout_s=1.0)
    buffer = torch.ones(dist.get_world_size() * (1000 if rank else 2000))
    try:
        comm.all_gather(buffer).wait()
    except CommError as error:
        return str(error)
    raise AssertionError("ranks that disagree about the size succeeded")
