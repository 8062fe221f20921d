"""Collectives over gloo, from its point-to-point transfers.

torch's own gloo collectives allocate and copy: an all-gather goes through a second buffer, a
reduce-scatter is an all-reduce of a clone, of twice the payload. A gloo send or receive uses the
memory of its tensor, makes progress on gloo's thread, and any number may be in flight. So every
rank exchanges with every other directly: nothing waits for a rank in between, and each byte crosses
once.

[Note: The last bytes] When a connection breaks, gloo tells the transfers that wait for their turn,
but not the one whose bytes are half there: that one would sleep until its time-out. A message is
therefore sent as two, the second one short, and waited for from the end.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from odc.fsdp.comm import (
    CommError,
    CommOptions,
    GroupComm,
    Message,
    ReduceOp,
    Reduction,
    TimedWork,
    Work,
    check_reduction,
    flat,
    slices,
)
from odc.fsdp.comm_pipeline import (
    Job,
    PeerError,
    Receive,
    ReducePipeline,
    Wait,
    chunk_numel,
    chunks,
    reduce_terms,
)

SMALL_BYTES = 64 * 1024  # up to here an all-reduce sends everything to everyone
_TAIL_BYTES = 256
_PROBE_S = 1.0  # how often a waiting caller looks whether the awaited peer is still there
# Tags of 31 bits, out of the way of small ones that a program uses itself.
_TAG_BASE = 1 << 30
_PROBE_TAG = _TAG_BASE - 1
_ABORT_TAG = _TAG_BASE - 2

_SOURCE_LINE = re.compile(r"^\[[^]]*:\d+\] ")  # of gloo, before its message

_Call = Callable[[list[Tensor], int, int], dist.Work]


class _Transfer:
    """What was posted to one peer: one message, or two."""

    def __init__(self, peer: int, timeout: timedelta) -> None:
        self.peer, self._timeout = peer, timeout
        self._works: list[dist.Work] = []
        self._error: RuntimeError | None = None
        self._lock = threading.Lock()  # gloo tells one waiter only

    def post(self, call: _Call, part: Tensor, tag: int) -> None:
        """Post a message; that the peer is gone already is told by `wait`."""
        try:
            self._works.append(call([part], self.peer, tag))
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        """Wait, on any thread, for the last message first (see The last bytes).

        Raises:
            PeerError: the peer is gone, or did not answer in time.
        """
        with self._lock:
            try:
                if self._error is not None:
                    raise self._error
                for work in reversed(self._works):
                    if not work.wait(self._timeout):
                        raise RuntimeError("the transfer was given up")
            except RuntimeError as error:
                self._error = error
                raise PeerError(self.peer, self._reason(str(error))) from error
            self._works.clear()

    def _reason(self, text: str) -> str:
        if "imed out" in text or "Application timeout" in text:
            seconds = self._timeout.total_seconds()
            return (
                f"no answer within {seconds:g} s; it has stopped, or it called other collectives "
                "or sizes than this rank"
            )
        return _SOURCE_LINE.sub("", text.splitlines()[0]).split(". This is typically")[0]


class _GlooWork(TimedWork):
    """A reduction, if there is one, then transfers, then what is made of them."""

    def __init__(
        self,
        comm: GlooComm,
        message: Message,
        transfers: list[_Transfer],
        job: Job | None = None,
        fold: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(comm, message)
        self._gloo, self._transfers, self._job, self._fold = comm, transfers, job, fold

    def __del__(self) -> None:
        """Given up by whoever asked, it is under way all the same, and keeps its memory.

        Gloo would take a transfer back whose memory goes, and nothing after it would arrive.
        """
        if not getattr(self, "settled", True):
            self._gloo.given_up.append(self)

    def complete(self) -> None:
        """Wait for the reduction, then for what this rank receives and sends."""
        try:
            if self._gloo.failed is not None:
                raise self._gloo.failed
            if self._job is not None:
                self._await_job(self._job)
            self.wait_for_transfers()
        except PeerError as error:
            self._gloo.failed = self._gloo.failed or error
            raise self.comm.error(self.message, error.peer, error.reason) from error
        if self._fold is not None:
            self._fold()

    def wait_for_transfers(self) -> None:
        """Wait, on any thread, until nothing is read from this rank's buffer any more."""
        for transfer in self._transfers:
            transfer.wait()

    def _await_job(self, job: Job) -> None:
        while not job.done.wait(_PROBE_S):
            self._look_for_failure(job)
        if job.own.numel():
            self.ended_ns = job.ended_ns
        elif job.ended_ns is not None:  # it has only begun
            self.message = replace(self.message, started_ns=job.ended_ns)
        if job.error is not None:
            raise job.error

    def _look_for_failure(self, job: Job) -> None:
        """End a reduction that the thread would wait for in vain (see The last bytes)."""
        awaited = job.awaited
        if awaited is None or not self._gloo.is_closed(awaited[0]):
            return
        # A peer may have sent everything and left, and the thread that received it may not have
        # had its turn yet.
        if not job.done.wait(_PROBE_S) and job.awaited == awaited:
            job.finish(PeerError(awaited[0], "the connection is closed"))


class GlooComm(GroupComm):
    """The collectives of a gloo process group, for tensors in host memory.

    Args:
        group: the process group; nobody else makes a `GlooComm` of it.
        ranks: global rank of each of its ranks.
        options: names, time-out, size of chunks.

    Attributes:
        failed: the first failure; there is no way back from it.
        given_up: works that nobody can wait for any more; the next call does.
    """

    gathers_after = True

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], options: CommOptions
    ) -> None:
        super().__init__(ranks, group.rank(), options)
        self.group = group
        self.failed: PeerError | None = None
        self.given_up: list[Work] = []
        self._timeout = timedelta(seconds=options.timeout_s)
        self._sequence = 0
        self._reducing: list[_GlooWork] = []  # nobody has waited for them yet
        # In turn from the next rank on, so that not everyone talks to rank 0 first.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._pipeline = ReducePipeline(
            _receiver(group, self._timeout), self.rank, self.size, options.chunk_bytes, self.name
        )
        self._end = weakref.finalize(self, self._pipeline.close)

    def close(self) -> None:
        """End the thread."""
        self._end()

    def abort(self) -> None:
        """Give up whatever is in flight: all connections of the group are closed."""
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):  # a wait that times out closes them all
                waiting = self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG)
                waiting.wait(timedelta(milliseconds=1))

    def all_gather(self, buffer: Tensor) -> Work:
        """Every rank sends its slice to every other, and receives the others' in place."""
        parts = slices(buffer, self.size, "all_gather")
        moved = (self.size - 1) * parts[0].nbytes
        message = Message("all_gather", buffer.nbytes, moved, moved)
        tag = self._tag("all_gather", buffer)
        received, sent = self._receive_parts(parts, tag), self._send_own(parts, tag)
        return _GlooWork(self, message, received + sent)

    def all_gather_after(self, buffer: Tensor, ready: Callable[[], None]) -> Work:
        """The thread that reduces begins it in its turn. Messages find each other by their tags."""
        parts = slices(buffer, self.size, "all_gather")
        moved = (self.size - 1) * parts[0].nbytes
        message = Message("all_gather", buffer.nbytes, moved, moved)
        tag = self._tag("all_gather", buffer)
        before = self._reducing.copy()
        transfers: list[_Transfer] = []

        def begin() -> None:
            for work in before:
                work.wait_for_transfers()
            ready()
            transfers.extend(self._receive_parts(parts, tag))
            transfers.extend(self._send_own(parts, tag))

        nothing = buffer.new_empty(0)
        job = Job(nothing, nothing, Reduction(), tag, begin)
        self._pipeline.submit(job)
        return _GlooWork(self, message, transfers, job)

    def reduce_scatter(
        self,
        buffer: Tensor,
        out: Tensor | None = None,
        *,
        divide_by: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """Every rank sends each other rank its slice, in chunks, and adds up what it receives."""
        parts = slices(buffer, self.size, "reduce_scatter")
        own = parts[self.rank]
        reduction = Reduction("sum", divide_by, dtype)
        target = own if out is None else out.detach() if out.requires_grad else out
        check_reduction(reduction, own, target)
        job = Job(own, target, reduction, self._tag("reduce_scatter", buffer))
        moved = (self.size - 1) * own.nbytes
        message = Message("reduce_scatter", buffer.nbytes, moved, moved)
        work = _GlooWork(self, message, self._start(job, parts), job)
        self._reducing = [one for one in self._reducing if not one.settled] + [work]
        return work

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = "sum", *, divide_by: float | None = None
    ) -> Work:
        """A reduce-scatter and an all-gather of parts; for small tensors one exchange."""
        own = flat(tensor, "all_reduce")
        reduction = Reduction(op, divide_by)
        check_reduction(reduction, own, own)
        if own.nbytes <= SMALL_BYTES:
            return self._all_reduce_small(own, reduction)
        step = -(-own.numel() // self.size)
        parts = [own[r * step : (r + 1) * step] for r in range(self.size)]
        mine = parts[self.rank]
        moved = own.nbytes - mine.nbytes + (self.size - 1) * mine.nbytes
        message = Message("all_reduce", own.nbytes, moved, moved)
        reduce_tag, gather_tag = self._tag("reduce", own), self._tag("gather", own)
        # A peer's result arrives where this rank's term of it lies. It cannot come too early: the
        # peer has it only when that term is there.
        transfers = self._receive_parts(parts, gather_tag)
        job = Job(mine, mine, reduction, reduce_tag)
        job.then = lambda: transfers.extend(self._send_own(parts, gather_tag))
        transfers.extend(self._start(job, parts))
        return _GlooWork(self, message, transfers, job)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """The root sends to each of the others."""
        whole = flat(tensor, "broadcast")
        tag = self._tag(f"broadcast from {root}", whole)
        if self.rank == root:
            message = Message("broadcast", whole.nbytes, sent_bytes=len(self._peers) * whole.nbytes)
            transfers = [self._post(self.group.send, whole, peer, tag) for peer in self._peers]
        else:
            message = Message("broadcast", whole.nbytes, received_bytes=whole.nbytes)
            transfers = [self._post(self.group.recv, whole, root, tag)]
        return _GlooWork(self, message, transfers)

    def is_closed(self, peer: int) -> bool:
        """Whether the connection to a peer is known to be broken."""
        try:
            self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _PROBE_TAG)
        except RuntimeError:
            return True
        return False

    def _all_reduce_small(self, own: Tensor, reduction: Reduction) -> Work:
        tag = self._tag("all_reduce", own)
        room = own.new_empty((self.size, own.numel()))
        terms = [own if r == self.rank else room[r] for r in range(self.size)]
        moved = (self.size - 1) * own.nbytes
        message = Message("all_reduce", own.nbytes, moved, moved)
        transfers = self._receive_parts(terms, tag) + self._send_own(terms, tag)
        fold = partial(reduce_terms, terms, own, self.rank, reduction, None)
        return _GlooWork(self, message, transfers, fold=fold)

    def _start(self, job: Job, parts: list[Tensor]) -> list[_Transfer]:
        """Queue a reduction of this rank's part and send the other ranks theirs."""
        self._pipeline.submit(job)
        step = chunk_numel(self.options.chunk_bytes, self.size, job.own.dtype)
        transfers = [_Transfer(peer, self._timeout) for peer in self._peers]
        for span in chunks(parts[0].numel(), step):
            for transfer in transfers:
                chunk = parts[transfer.peer][span]
                if chunk.numel():
                    transfer.post(self.group.send, chunk, job.tag)
        return transfers

    def _receive_parts(self, parts: list[Tensor], tag: int) -> list[_Transfer]:
        backwards = reversed(self._peers)  # those who send to this rank first
        return [self._post(self.group.recv, parts[peer], peer, tag) for peer in backwards]

    def _send_own(self, parts: list[Tensor], tag: int) -> list[_Transfer]:
        own = parts[self.rank]
        return [self._post(self.group.send, own, peer, tag) for peer in self._peers]

    def _post(self, call: _Call, part: Tensor, peer: int, tag: int) -> _Transfer:
        """Post a whole part (see The last bytes)."""
        transfer = _Transfer(peer, self._timeout)
        head = part.numel() - _TAIL_BYTES // part.itemsize
        if part.nbytes > 16 * _TAIL_BYTES:
            transfer.post(call, part[:head], tag)
            transfer.post(call, part[head:], tag)
        elif part.numel():
            transfer.post(call, part, tag)
        return transfer

    def _tag(self, op: str, tensor: Tensor) -> int:
        """The next call's tag. Ranks that disagree about the call do not find each other.

        They would otherwise read a message of another size, which ends the process in gloo.
        """
        while self.given_up:
            with contextlib.suppress(CommError):  # told by the call that follows
                self.given_up.pop().wait()
        self._sequence = (self._sequence + 1) % (1 << 16)
        call = zlib.crc32(f"{op} {tensor.numel()} {tensor.dtype}".encode()) % (1 << 14)
        return _TAG_BASE | self._sequence << 14 | call


def _receiver(group: dist.ProcessGroup, timeout: timedelta) -> Receive:
    """How the pipeline receives; it does not keep the `GlooComm` alive."""

    def receive(into: Tensor, peer: int, tag: int) -> Wait:
        transfer = _Transfer(peer, timeout)
        transfer.post(group.recv, into, tag)
        return transfer.wait

    return receive
