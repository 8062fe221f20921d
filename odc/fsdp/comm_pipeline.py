"""Reductions over point-to-point transfers: receive a chunk of every peer, add, while more come.

A rank's terms of the other parts go out straight from its buffer. What comes in lands in a scratch
of a fixed size, is added to this rank's own part while it is in the cache, and makes room for the
next chunk. One thread a process group does this, one reduction after another; it sleeps or is
inside torch most of the time, and both let the main thread run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from odc.fsdp.comm import Reduction, divide_

DEPTH = 3  # chunks of each peer that are under way at once
SCRATCH_BYTES = 32 * 2**20  # at most, whatever the number of ranks
BLOCK_BYTES = 2**20  # summed at once: term, sum and division stay in the second-level cache
_ALIGNMENT = 64

Wait = Callable[[], None]
Receive = Callable[[Tensor, int, int], Wait]
"""(into, peer, tag) -> what waits for it, and raises `PeerError`."""


class PeerError(Exception):
    """A transfer to or from a peer failed.

    Attributes:
        peer: Its rank in the group.
    """

    def __init__(self, peer: int, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(reason)


def chunk_numel(chunk_bytes: int, size: int, dtype: torch.dtype) -> int:
    """Elements of a chunk: the same on every rank, and few enough for the scratch."""
    fits = SCRATCH_BYTES // (DEPTH * max(size - 1, 1))
    return max(min(chunk_bytes, fits) // _ALIGNMENT, 1) * _ALIGNMENT // dtype.itemsize


def chunks(numel: int, step: int) -> Iterator[slice]:
    """The chunks that a part of `numel` elements is sent in."""
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def reduce_terms(
    terms: list[Tensor], out: Tensor, rank: int, reduction: Reduction, wide: Tensor | None
) -> None:
    """Reduce terms in ascending order of ranks into `out`, in one pass a term.

    Args:
        terms: one a rank. All but this rank's are scratch and may be overwritten.
        out: the result; may be the memory of this rank's own term.
        wide: (2, n) scratch of the dtype that is summed in, where that is not the terms' own.
    """
    combine = torch.maximum if reduction.op == "max" else torch.add
    if wide is None:
        # A sum in `out` could overwrite this rank's own term before it was added.
        total = terms[0]
        for i, term in enumerate(terms[1:], 1):
            total = combine(total, term, out=out if i >= rank else terms[0])
    else:
        total = out if out.dtype == wide.dtype else wide[0]
        total.copy_(terms[0])
        for term in terms[1:]:
            combine(total, wide[1].copy_(term), out=total)
    divide_(total, reduction.divide_by)
    if total.dtype != out.dtype:
        out.copy_(total)


@dataclass
class Job:
    """One reduction: this rank's own term, where the result goes, and what tells its end.

    One of nothing ends when all before it have; so something else gets its turn among them.

    Attributes:
        then: runs on the pipeline's thread when the result is there.
        awaited: peer whose chunk is waited for, and how many waits there were before.
        error: why there is no result: a `PeerError`, or a mistake of ours.
    """

    own: Tensor
    out: Tensor
    reduction: Reduction
    tag: int
    then: Callable[[], None] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    awaited: tuple[int, int] | None = None
    ended_ns: int | None = None
    error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        """Tell whoever waits, once. What was to follow keeps the `Comm` alive no longer."""
        self.then = None
        if not self.done.is_set():
            self.error, self.ended_ns = error, time.perf_counter_ns()
            self.done.set()


class Scratch:
    """Where chunks land, allocated once; every chunk in flight has its place in it."""

    def __init__(self, num_peers: int) -> None:
        self._num_peers = num_peers
        self._landing: Tensor | None = None
        self._wide: Tensor | None = None

    def landing(self, slot: int, step: int, dtype: torch.dtype) -> Tensor:
        """(peers, step) of a slot, for the next chunk of each peer."""
        num_bytes = DEPTH * self._num_peers * step * dtype.itemsize
        if self._landing is None or self._landing.numel() < num_bytes:
            self._landing = torch.empty(num_bytes, dtype=torch.uint8)
        flat = self._landing[:num_bytes].view(dtype)
        return flat.view(DEPTH, self._num_peers, step)[slot]

    def wide(self, dtype: torch.dtype) -> Tensor:
        """(2, numel of a block) to sum in."""
        if self._wide is None:
            self._wide = torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8)
        return self._wide.view(dtype).view(2, -1)


@dataclass
class _Chunk:
    job: Job
    span: slice
    terms: list[Tensor]
    waits: list[tuple[int, Wait]]


class ReducePipeline:
    """The thread of one process group that receives and adds.

    Args:
        receive: posts a receive.
        rank: this rank.
        size: ranks of the group.
        chunk_bytes: bytes of a chunk, at most.
        name: of the thread.
    """

    def __init__(self, receive: Receive, rank: int, size: int, chunk_bytes: int, name: str) -> None:
        self.receive, self.rank, self.size, self.chunk_bytes = receive, rank, size, chunk_bytes
        self.name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._scratch = Scratch(size - 1)
        self._coming: Iterator[tuple[Job, slice]] = iter(())
        self._failed: Exception | None = None
        self._num_posted = 0
        self._num_waits = 0

    def submit(self, job: Job) -> None:
        """Queue a reduction; every rank queues the same ones in the same order."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"odc-reduce-{self.name}", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that waits for a dead peer is left to its time-out."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout_s)

    @torch.no_grad()
    def _run(self) -> None:
        posted: deque[_Chunk] = deque()
        while True:
            while len(posted) < DEPTH:
                coming = self._next(sleep=not posted)
                if coming is None:
                    break
                chunk = self._post(*coming)
                if chunk is not None:
                    posted.append(chunk)
            if not posted:
                return
            self._reduce(posted.popleft())

    def _next(self, sleep: bool) -> tuple[Job, slice] | None:
        """The next chunk of all; `None` when there is none yet, or, after sleep, none ever."""
        while True:
            for coming in self._coming:
                return coming
            try:
                job = self._jobs.get(block=sleep)
            except queue.Empty:
                return None
            if job is None:
                self._jobs.put(None)  # what is posted ends first
                return None
            if self._failed is not None:
                job.finish(self._failed)
            elif not job.own.numel():
                self._coming = iter([(job, slice(0, 0))])
            else:
                step = chunk_numel(self.chunk_bytes, self.size, job.own.dtype)
                spans = chunks(job.own.numel(), step)
                self._coming = ((job, span) for span in spans)

    def _post(self, job: Job, span: slice) -> _Chunk | None:
        """Post the receives of a chunk; nothing for a reduction that has failed."""
        if job.done.is_set():
            return None
        if not job.own.numel():
            return _Chunk(job, span, [], [])
        try:
            own = job.own[span]
            step = chunk_numel(self.chunk_bytes, self.size, own.dtype)
            landing = self._scratch.landing(self._num_posted % DEPTH, step, own.dtype)
            peers = [peer for peer in range(self.size) if peer != self.rank]
            terms = list(landing[:, : own.numel()].unbind())
            waits = [
                (peer, self.receive(term, peer, job.tag))
                for peer, term in zip(peers, terms, strict=True)
            ]
            terms.insert(self.rank, own)
        except Exception as error:
            self._fail(job, error)
            return None
        self._num_posted += 1
        return _Chunk(job, span, terms, waits)

    def _reduce(self, chunk: _Chunk) -> None:
        job = chunk.job
        if job.done.is_set():
            return
        try:
            for peer, wait in chunk.waits:
                self._num_waits += 1
                job.awaited = (peer, self._num_waits)
                wait()
            job.awaited = None
            if job.done.is_set():  # given up meanwhile; the memory may be gone
                return
            if chunk.terms:
                self._add(chunk.terms, job.out[chunk.span], job.reduction)
        except Exception as error:
            self._fail(job, error)
            return
        if chunk.span.stop == job.own.numel():
            self._end(job)

    def _add(self, terms: list[Tensor], out: Tensor, reduction: Reduction) -> None:
        dtype = reduction.dtype or out.dtype
        wide = None if dtype == terms[0].dtype else self._scratch.wide(dtype)
        for block in chunks(out.numel(), BLOCK_BYTES // dtype.itemsize):
            parts = [term[block] for term in terms]
            room = None if wide is None else wide[:, : parts[0].numel()]
            reduce_terms(parts, out[block], self.rank, reduction, room)

    def _end(self, job: Job) -> None:
        try:
            if job.then is not None:
                job.then()
        except Exception as error:
            self._fail(job, error)
        job.finish(None)

    def _fail(self, job: Job, error: Exception) -> None:
        self._failed = error
        job.finish(error)
