"""What each rank computes in `test_comm.py`."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from odc.fsdp.comm import CommOptions, NullComm, make_comm
from odc.fsdp.comm_nccl import NcclComm
from odc.fsdp.comm_pipeline import BLOCK_BYTES
from tests.fsdp.comm_values import (
    CHUNK_BYTES,
    DTYPES,
    NUMELS,
    everyone,
    in_rank_order,
    values,
    world,
)


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
