"""What ranks of `test_comm.py` count: bytes, calls, operators, scratch, threads."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from odc.fsdp.comm import CommOptions
from odc.fsdp.comm_gloo import _PROBE_TAG, GlooComm
from tests.fsdp.comm_values import CHUNK_BYTES, values, world


class CountingGroup:
    """A process group that counts what goes through it, independently of the comm."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sent, self.received = group, 0, 0
        self._lock = threading.Lock()

    def rank(self) -> int:
        return self.group.rank()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        with self._lock:
            self.sent += sum(t.numel() * t.element_size() for t in tensors)
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        with self._lock:
            if tag != _PROBE_TAG:  # a long wait asks whether the peer is there
                self.received += sum(t.numel() * t.element_size() for t in tensors)
        return self.group.recv(tensors, peer, tag)


def payload(rank: int) -> None:
    size = dist.get_world_size()
    group = CountingGroup(dist.group.WORLD)
    comm = GlooComm(group, tuple(range(size)), CommOptions(name="g", chunk_bytes=CHUNK_BYTES))
    expected = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for numel in (1, 300, 10_007):
        for dtype in (torch.float32, torch.bfloat16):
            buffer = values(size * numel, dtype, rank)
            comm.all_gather(buffer).wait()
            comm.reduce_scatter(buffer, dtype=torch.float32).wait()
            moved = buffer.nbytes * (size - 1) // size
            expected["all_gather"] += moved
            expected["reduce_scatter"] += moved
    large = values(size * 50_000, torch.float32, rank)
    comm.all_reduce(large).wait()
    expected["all_reduce"] += 2 * large.nbytes * (size - 1) // size
    for op, moved in expected.items():
        count = comm.counters[op]
        assert (count.sent_bytes, count.received_bytes) == (moved, moved), op
    assert group.sent == group.received == sum(expected.values())
    assert comm.counters["all_gather"].calls == 6


def observed(rank: int) -> list[tuple]:
    seen: list[tuple] = []
    comm = world(group_id=5, observer=lambda *call: seen.append(call))
    buffer = torch.ones(dist.get_world_size() * 1000)
    work = comm.reduce_scatter(buffer)
    assert not seen
    work.wait()
    work.wait()
    comm.all_gather(buffer).wait()
    for *_, dur_ns, wait_ns in seen:
        assert dur_ns > 0 and wait_ns > 0
    return [call[:3] for call in seen]


_BYTES_RECEIVED = 128  # its offset in the kernel's struct tcp_info


def socket_bytes() -> int:
    """What the sockets of this process have received so far, as the kernel counts it.

    Not what crossed the loopback device: other programs use that, too.
    """
    total = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, or not one of TCP
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += int.from_bytes(info[_BYTES_RECEIVED : _BYTES_RECEIVED + 8], sys.byteorder)
    return total


def crossed_since(before: int) -> int:
    """What all ranks have received since each of them counted `before`."""
    total = torch.tensor(socket_bytes() - before)
    dist.all_reduce(total)
    return int(total)


def wire(rank: int) -> tuple[list[int], list[int]]:
    """Bytes that the sockets of all ranks received in a call, and its payload."""
    comm, size = world(), dist.get_world_size()
    buffer = torch.ones(size * 2**20)
    crossed, expected = [], []
    for call in (comm.all_gather, comm.reduce_scatter, comm.all_reduce):
        dist.barrier()
        before = socket_bytes()
        call(buffer).wait()
        crossed.append(crossed_since(before))
        expected.append(buffer.nbytes * (size - 1) * (2 if call == comm.all_reduce else 1))
    return crossed, expected


class Calls(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def gather_operators(rank: int) -> list[str]:
    comm = world()
    buffer = torch.ones(dist.get_world_size() * 100_000)
    with Calls() as calls:
        comm.all_gather(buffer).wait()
    return sorted(set(calls.names))


def scratch_stays(rank: int) -> tuple[int, int]:
    comm, size = world(), dist.get_world_size()
    scratch = comm._pipeline._scratch  # type: ignore[attr-defined]
    places = set()
    for numel in (50_000, 10_000, 200_000, 50_000):
        works = [
            comm.reduce_scatter(torch.ones(size * numel, dtype=torch.bfloat16), dtype=torch.float32)
            for _ in range(3)
        ]
        for work in works:
            work.wait()
        places.add((scratch._landing.data_ptr(), scratch._wide.data_ptr()))
    assert len(places) == 1
    return scratch._landing.nbytes, scratch._wide.nbytes


def threads_end(rank: int) -> None:
    def alive() -> bool:
        return any(t.name.startswith("odc-reduce") for t in threading.enumerate())

    for dropped, op, numel in (
        (False, "reduce_scatter", 10),
        (True, "reduce_scatter", 10),
        (True, "all_reduce", 50_000),  # of a size that sends its result on
    ):
        comm = world()
        assert not alive()
        getattr(comm, op)(torch.ones(dist.get_world_size() * numel)).wait()
        assert alive()
        if dropped:
            del comm
            gc.collect()
        else:
            comm.close()
        assert not alive()
