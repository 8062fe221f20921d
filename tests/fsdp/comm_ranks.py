"""What each rank does in `test_comm.py`."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from odc.fsdp.comm import CommError, CommOptions, GroupComm, NullComm, make_comm
from odc.fsdp.comm_gloo import _PROBE_TAG, GlooComm
from odc.fsdp.comm_nccl import NcclComm
from odc.fsdp.comm_pipeline import BLOCK_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
CHUNK_BYTES = 4096
# Nothing, one element, odd, around the short tail, a chunk less one, several chunks and a rest.
NUMELS = (0, 1, 7, 511, 1023, 4097, 10_007)


def world(**options: Any) -> GroupComm:
    return make_comm(
        dist.group.WORLD, options=CommOptions(name="shard", chunk_bytes=CHUNK_BYTES, **options)
    )


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose sum depends on the order."""
    made = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (numel,), generator=made, dtype=dtype)
    spread = (torch.randn(numel, generator=made) * 4).clamp(-6, 6)
    return (torch.randn(numel, generator=made) * spread.exp2()).to(dtype)


def everyone(numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """What each rank starts with, computed anew on each."""
    return [values(numel, dtype, seed * 100 + r) for r in range(dist.get_world_size())]


def in_rank_order(
    terms: list[Tensor], dtype: torch.dtype | None = None, divide_by: float | None = None
) -> Tensor:
    """The sum as it is promised: one addition after another, one division."""
    total = terms[0].to(dtype or terms[0].dtype)
    for term in terms[1:]:
        total = total + term.to(total.dtype)
    return total if divide_by is None else total / divide_by


def gather_values(rank: int) -> None:
    comm, size = world(), dist.get_world_size()
    for dtype in DTYPES:
        for numel in NUMELS:
            terms = everyone(numel, dtype)
            buffer = torch.full((size * numel,), 77, dtype=dtype)
            buffer[rank * numel : (rank + 1) * numel] = terms[rank]
            comm.all_gather(buffer).wait()
            assert torch.equal(buffer, torch.cat(terms)), (dtype, numel)
            if numel and dtype != torch.bfloat16:
                theirs = torch.empty_like(buffer)
                dist.all_gather_single(theirs, terms[rank])
                assert torch.equal(buffer, theirs)


def scatter_values(rank: int) -> None:
    comm, size = world(), dist.get_world_size()
    for dtype in DTYPES:
        for numel in NUMELS:
            for divide_by in (None, size) if dtype.is_floating_point else (None,):
                terms = everyone(size * numel, dtype)
                buffer = terms[rank].clone()
                comm.reduce_scatter(buffer, divide_by=divide_by).wait()
                mine = slice(rank * numel, (rank + 1) * numel)
                found = buffer[mine]
                expected = in_rank_order([t[mine] for t in terms], divide_by=divide_by)
                assert torch.equal(found, expected), (dtype, numel, divide_by)
                others = torch.ones(size * numel, dtype=torch.bool)
                others[mine] = False
                assert torch.equal(buffer[others], terms[rank][others])
                near_torch(found, terms[rank], divide_by)


def large_values(rank: int) -> None:
    """Slices of several chunks and blocks, in the default sizes."""
    comm, size = make_comm(dist.group.WORLD), dist.get_world_size()
    numel = (CommOptions().chunk_bytes + BLOCK_BYTES) // 4 + 333
    for dtype, wide in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        terms = everyone(size * numel, dtype)
        buffer, out = terms[rank].clone(), torch.empty(numel)
        mine = slice(rank * numel, (rank + 1) * numel)
        comm.reduce_scatter(buffer, out, divide_by=size, dtype=wide).wait()
        expected = in_rank_order([t[mine] for t in terms], wide)
        # numpy divides; a product with the inverse of 3 would differ.
        assert np.array_equal(out.numpy(), expected.numpy() / np.float32(size))
        comm.all_gather(buffer).wait()
        assert torch.equal(buffer, torch.cat([t.chunk(size)[r] for r, t in enumerate(terms)]))


def near_torch(found: Tensor, term: Tensor, divide_by: float | None) -> None:
    """Close to torch's own collective in fp64, as close as the dtype allows."""
    if not found.numel() or not found.is_floating_point():
        return
    exact = torch.empty(found.numel(), dtype=torch.float64)
    dist.reduce_scatter_single(exact, term.double())
    size_of_terms = term.double().abs()
    dist.all_reduce(size_of_terms)
    bound = size_of_terms.chunk(dist.get_world_size())[dist.get_rank()]
    error = (found.double() * (divide_by or 1) - exact).abs()
    assert (error <= 4 * torch.finfo(found.dtype).eps * bound + 1e-30).all()


def wider_sums(rank: int) -> None:
    comm, size = world(), dist.get_world_size()
    for dtype in (torch.bfloat16, torch.float16):
        for numel in NUMELS:
            terms = everyone(size * numel, dtype)
            mine = slice(rank * numel, (rank + 1) * numel)
            expected = in_rank_order([t[mine] for t in terms], torch.float32, size)
            for out in (torch.empty(numel), torch.empty(numel, dtype=dtype), None):
                buffer = terms[rank].clone()
                comm.reduce_scatter(buffer, out, divide_by=size, dtype=torch.float32).wait()
                found = buffer[mine] if out is None else out
                assert torch.equal(found, expected.to(found.dtype)), (dtype, numel)
                if out is not None:
                    assert torch.equal(buffer, terms[rank])


def late_ranks(rank: int) -> str:
    """Every rank is the last one once; returns a hash of all results."""
    comm, size = world(), dist.get_world_size()
    digest = hashlib.sha256()
    for turn in range(2 * size):
        order = (rank + turn) % size if turn < size else (turn - rank) % size
        time.sleep(0.01 * order)
        buffer = values(size * 5001, torch.float32, rank)
        comm.reduce_scatter(buffer, divide_by=size).wait()
        small, large = buffer[:100].clone(), values(70_001, torch.float32, rank)
        reduced = [comm.all_reduce(small), comm.all_reduce(large)]
        for work in reduced:
            work.wait()
        own = buffer[rank * 5001 : (rank + 1) * 5001]
        result = torch.cat([own, large])
        if turn == 0:
            first = result
        assert torch.equal(result, first)
        digest.update(result.numpy().tobytes())
    return digest.hexdigest()


def reduced_and_broadcast(rank: int) -> None:
    comm, size = world(), dist.get_world_size()
    for dtype in DTYPES:
        for numel in (0, 1, 5, 16_384, 16_385, 70_001):
            terms = everyone(numel, dtype)
            total, largest = terms[rank].clone(), terms[rank].clone()
            works = [comm.all_reduce(total), comm.all_reduce(largest, "max")]
            for work in works:
                work.wait()
            assert torch.equal(total, in_rank_order(terms)), (dtype, numel)
            assert torch.equal(largest, torch.stack(terms).amax(0) if numel else largest)
            copy = terms[rank].clone()
            comm.broadcast(copy, size - 1).wait()
            assert torch.equal(copy, terms[-1])
    matrix = torch.full((3, 4), float(rank))
    comm.all_reduce(matrix, divide_by=size).wait()
    assert torch.equal(matrix, torch.full((3, 4), sum(range(size)) / size))
    flag = torch.tensor(float("nan") if rank == size - 1 else 1.0)
    comm.all_reduce(flag, "max").wait()
    assert flag.isnan()


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


def many_in_flight(rank: int) -> None:
    size = dist.get_world_size()
    one = world()
    two = make_comm(dist.new_group(), options=CommOptions(name="two", chunk_bytes=CHUNK_BYTES))
    flying = []
    for i in range(6):
        for comm in (one, two):
            seed = 10 * i + (comm is two)
            numel = 3001 + i
            terms = everyone(size * numel, torch.float32, seed)
            mine = slice(rank * numel, (rank + 1) * numel)
            reduced, gathered, total = terms[rank].clone(), terms[rank].clone(), terms[rank].clone()
            works = [
                comm.reduce_scatter(reduced),
                comm.all_gather(gathered),
                comm.all_reduce(total),
            ]
            expected = (
                in_rank_order([t[mine] for t in terms]),
                torch.cat([t[r * numel : (r + 1) * numel] for r, t in enumerate(terms)]),
                in_rank_order(terms),
            )
            flying.append((works, (reduced[mine], gathered, total), expected))
    for works, found, expected in reversed(flying):
        for work in reversed(works):
            work.wait()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def ends_without_wait(rank: int) -> None:
    """The reduction ends on its own; the main thread only looks."""
    comm, size = world(), dist.get_world_size()
    buffer = torch.full((size * 100_000,), float(rank))
    work = comm.reduce_scatter(buffer)
    own = buffer[rank * 100_000 : (rank + 1) * 100_000]
    deadline = time.monotonic() + 30
    while own[-1] != sum(range(size)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    work.wait()


def gathered_after(rank: int) -> None:
    """What was reduced is overwritten by `ready`: a gather's memory is that of the reduction."""
    comm, size = world(), dist.get_world_size()
    numel = 50_000  # of many chunks
    mine = slice(rank * numel, (rank + 1) * numel)
    for turn in range(2):
        buffers = [torch.full((size * numel,), float(rank + 10 * n)) for n in range(2)]
        outs = [torch.zeros(numel) for _ in buffers]
        works = [comm.reduce_scatter(b, out) for b, out in zip(buffers, outs, strict=True)]
        seen: list[list[float]] = []

        def ready(
            buffers: list[Tensor] = buffers, outs: list[Tensor] = outs, seen: list[Any] = seen
        ) -> None:
            seen.append([out[-1].item() for out in outs])
            for buffer in buffers:
                buffer.fill_(-1.0)
            buffers[0][mine] = float(rank)

        later = comm.all_gather_after(buffers[0], ready)
        other = torch.full((size * 1000,), float(rank))
        at_once = comm.all_gather(other)  # it was asked for later, and may begin sooner
        if turn == rank:
            time.sleep(0.2)
        for work in (at_once, later, *works) if turn % 2 else (*works, later, at_once):
            work.wait()
        sums = [float(sum(r + 10 * n for r in range(size))) for n in range(2)]
        assert seen == [sums] and [out.unique().tolist() for out in outs] == [[s] for s in sums]
        assert torch.equal(buffers[0], torch.arange(float(size)).repeat_interleave(numel))
        assert torch.equal(other, torch.arange(float(size)).repeat_interleave(1000))

    def broken() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        comm.all_gather_after(buffers[0], broken).wait()
    comm.close()  # its error keeps it


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
            getattr(comm, op)(buffer)
            time.sleep(0.005)
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


def null_of_layout(rank: int) -> None:
    size = dist.get_world_size()
    real, null = world(), NullComm(size, rank)
    buffer = torch.full((size * 1000,), float(rank), dtype=torch.bfloat16)
    outs = []
    for comm in (real, null):
        out = torch.empty(1000)
        comm.all_gather(buffer).wait()
        comm.reduce_scatter(buffer, out, divide_by=size, dtype=torch.float32).wait()
        comm.all_reduce(out).wait()
        comm.broadcast(out, 0).wait()
        outs.append(out)
    assert list(real.counters) == list(null.counters)
    assert all(c.sent_bytes == c.received_bytes == 0 for c in null.counters.values())
    assert torch.equal(outs[1], buffer[rank * 1000 : (rank + 1) * 1000].float() / size)


def native_calls(rank: int) -> None:
    """`NcclComm` as far as a CPU shows it: gloo answers the same calls, with its own sums."""
    size = dist.get_world_size()
    comm = NcclComm(dist.group.WORLD, tuple(range(size)), CommOptions(name="shard"))
    numel = 1001
    mine = slice(rank * numel, (rank + 1) * numel)
    terms = everyone(size * numel, torch.float32)
    gathered, reduced, total = (terms[rank].clone() for _ in range(3))
    comm.all_gather(gathered).wait()
    assert torch.equal(gathered, torch.cat([t.chunk(size)[r] for r, t in enumerate(terms)]))
    expected = in_rank_order(terms, divide_by=size)
    works = [comm.reduce_scatter(reduced, divide_by=size), comm.all_reduce(total, divide_by=size)]
    for work in works:
        work.wait()
    torch.testing.assert_close(reduced[mine], expected[mine])
    torch.testing.assert_close(total, expected)
    comm.broadcast(total, size - 1).wait()
    # Two in flight: each has a landing of its own. This sum is ours, in rank order.
    low = [everyone(size * numel, torch.bfloat16, seed) for seed in (1, 2)]
    outs = [torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)]
    works = [
        comm.reduce_scatter(ts[rank].clone(), out, divide_by=size, dtype=torch.float32)
        for ts, out in zip(low, outs, strict=True)
    ]
    for work, ts, out in zip(works, low, outs, strict=True):
        work.wait()
        exact = in_rank_order([t[mine] for t in ts], torch.float32, size)
        assert torch.equal(out, exact.to(out.dtype))
    assert len(comm._free) == 2
