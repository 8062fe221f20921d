"""Collectives of flat buffers: m equal slices, one a rank.

A buffer is 1-D, of m x S elements; rank r owns `[r * S, (r + 1) * S)`, and what it owns lies in its
place already. Nothing is packed, unpacked or allocated in a step: an all-gather fills the other
slices where they are used, a reduce-scatter leaves the sum in this rank's slice or in a given
output.

Every call returns a `Work` at once and the transfer goes on while the caller computes. The buffer
stays mapped, and nobody writes to it, until `Work.wait` returns. All ranks of a group issue the
same calls in the same order; one process group carries one `Comm`.

Sums are taken in ascending order of ranks and divided once, so that a result is the same to the
last bit from run to run, whatever arrives first (NCCL: see `comm_nccl.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from odc.errors import OdcError

ReduceOp = Literal["sum", "max"]
Observer = Callable[[str, int, int, int, int, int], None]
"""Called when a call was waited for: (op, group_id, bytes, owner, dur_ns, wait_ns).

`bytes` is the message as nccl-tests counts it: the gathered output, the reduced input. `owner` is
the group of parameters that it was for (`GroupComm.owner`). `dur_ns` runs from the call to the
moment its end was seen, `wait_ns` is the part the caller stood still.
"""


CHUNK_BYTES = 4 << 20  # smaller ones cost more wake-ups, larger ones more scratch


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """What does not depend on the backend.

    Attributes:
        name: of the group, in errors.
        group_id: of the group, for the observer.
        observer: told of every call that was waited for.
        timeout_s: how long a wait lasts before it names the rank that is missing (gloo; `make_comm`
            takes the group's own where that is shorter; NCCL has its group's own).
        chunk_bytes: what a reduction receives and adds at once (gloo).
    """

    name: str = ""
    group_id: int = 0
    observer: Observer | None = None
    timeout_s: float = 600.0
    chunk_bytes: int = CHUNK_BYTES


class CommError(OdcError, RuntimeError):
    """A collective failed: a peer is gone, or did not answer in time.

    The process group cannot be used any more.

    Attributes:
        op: The collective.
        group: Name of the process group.
        num_bytes: Bytes of its message.
        peer: Global rank that failed; `None` where the library does not tell.
    """

    def __init__(
        self, reason: str, *, op: str, group: str, num_bytes: int, peer: int | None
    ) -> None:
        self.op, self.group, self.num_bytes, self.peer = op, group, num_bytes, peer
        who = "" if peer is None else f"rank {peer}: "
        super().__init__(f"{op} of {num_bytes} bytes in group {group}: {who}{reason}")


@dataclass(frozen=True)
class Reduction:
    """How terms become a result.

    Attributes:
        op: `"sum"` or `"max"`.
        divide_by: what the sum is divided by, once; `None` leaves it.
        dtype: what is summed in; `None` is the buffer's own.
    """

    op: ReduceOp = "sum"
    divide_by: float | None = None
    dtype: torch.dtype | None = None


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result is there and the buffer may be used again.

        Raises:
            CommError: it failed; every further call raises it again.
        """


class Comm(Protocol):
    """What the runtime asks of the ranks that share its buffers."""

    def all_gather(self, buffer: Tensor) -> Work:
        """Fill the slices of the other ranks in place.

        Args:
            buffer: (m * S,), with this rank's slice in its place.
        """

    def reduce_scatter(
        self,
        buffer: Tensor,
        out: Tensor | None = None,
        *,
        divide_by: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """Sum this rank's slice over all ranks. The other slices are left as they are.

        Args:
            buffer: (m * S,), what this rank adds to each slice.
            out: (S,), where the sum goes; this rank's slice of `buffer` by default.
            divide_by: what the sum is divided by.
            dtype: what is summed in, at least as wide as the buffer's dtype.
        """

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = "sum", *, divide_by: float | None = None
    ) -> Work:
        """Reduce a whole tensor in place, to the same bits on every rank.

        Args:
            tensor: any contiguous tensor, of the same size on every rank.
        """

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Copy a contiguous tensor from `root`, a rank of the group, to all others."""


@dataclass
class OpCount:
    """What the calls of one kind came to; seconds count when a call was waited for."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Message:
    """A call as it is counted, made as the call begins: the message's own size, and the payload."""

    op: str
    num_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0
    started_ns: int = field(default_factory=time.perf_counter_ns)


class GroupComm(Comm):
    """What implementations share: who the ranks are, and what was moved.

    Attributes:
        ranks: global rank of each rank of the group.
        rank: this rank within the group.
        size: ranks of the group.
        name: the group's, for messages.
        counters: one entry for each kind of call that was made.
        owner: number of the group of parameters that the calls to come are for; -1: none.
        gathers_after: `all_gather_after` is there. Elsewhere the order of calls is that in which
            they are begun.
    """

    gathers_after = False

    def __init__(self, ranks: tuple[int, ...], rank: int, options: CommOptions) -> None:
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self.options, self.name = options, options.name
        self.counters: dict[str, OpCount] = {}
        self.owner = -1

    def all_gather_after(self, buffer: Tensor, ready: Callable[[], None]) -> Work:
        """An all-gather that takes its place in the order of calls now and begins later.

        Args:
            buffer: as for `all_gather`; its memory need not be there yet.
            ready: called, on any thread, when all reductions that were asked for before have their
                results and nobody reads their buffers any more; the gather begins after it.
        """
        raise NotImplementedError(f"{type(self).__name__} begins gathers in the order of calls")

    def close(self) -> None:
        """End what runs beside the main thread. Nothing may be in flight."""

    def abort(self) -> None:
        """Give up whatever is in flight, where the backend can: waits raise. Any thread may."""

    def count(self, message: Message) -> None:
        """Count a call that was issued."""
        count = self.counters.setdefault(message.op, OpCount())
        count.calls += 1
        count.sent_bytes += message.sent_bytes
        count.received_bytes += message.received_bytes

    def count_time(self, message: Message, owner: int, dur_ns: int, wait_ns: int) -> None:
        """Count the time of a call that was waited for."""
        count = self.counters[message.op]
        count.seconds += dur_ns / 1e9
        count.wait_seconds += wait_ns / 1e9
        if self.options.observer is not None:
            group_id, num_bytes = self.options.group_id, message.num_bytes
            self.options.observer(message.op, group_id, num_bytes, owner, dur_ns, wait_ns)

    def error(self, message: Message, peer: int | None, reason: str) -> CommError:
        """Return the error of a call; `peer` is a rank of the group."""
        return CommError(
            reason,
            op=message.op,
            group=self.name,
            num_bytes=message.num_bytes,
            peer=None if peer is None else self.ranks[peer],
        )


class TimedWork:
    """Counts a call, and the time until it was waited for.

    Attributes:
        ended_ns: when it ended, where that is known; else the end of the wait counts.
        settled: somebody has waited for it.
    """

    def __init__(self, comm: GroupComm, message: Message) -> None:
        self.comm, self.message, self._owner = comm, message, comm.owner
        self.ended_ns: int | None = None
        self._error: CommError | None = None
        self.settled = False
        comm.count(message)

    def wait(self) -> None:
        """Wait once; later calls return, or raise the same error, at once."""
        if not self.settled:
            begun = time.perf_counter_ns()
            try:
                self.complete()
            except CommError as error:
                self._error = error
            self.settled = True
            now = time.perf_counter_ns()
            ended = now if self.ended_ns is None else self.ended_ns
            dur_ns = ended - self.message.started_ns
            self.comm.count_time(self.message, self._owner, dur_ns, now - begun)
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Wait for the transfer."""


class _DoneWork(TimedWork):
    def complete(self) -> None:
        """Nothing is in flight."""


def slices(buffer: Tensor, size: int, call: str) -> list[Tensor]:
    """Views of a buffer's equal slices.

    Raises:
        ValueError: it is not 1-D and contiguous, or does not divide.
    """
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() % size:
        raise ValueError(
            f"{call}: expected a contiguous 1-D buffer of {size} equal slices, got shape "
            f"{tuple(buffer.shape)}, stride {buffer.stride()}"
        )
    numel = buffer.numel() // size
    buffer = buffer.detach()
    return [buffer[r * numel : (r + 1) * numel] for r in range(size)]


def flat(tensor: Tensor, call: str) -> Tensor:
    """A 1-D view.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{call}: expected a contiguous tensor, got stride {tensor.stride()}")
    return tensor.detach().view(-1)


def check_reduction(reduction: Reduction, own: Tensor, out: Tensor) -> None:
    """Refuse what would lose digits silently.

    Raises:
        ValueError: the dtypes do not go together, or `out` has another size.
    """
    wide = reduction.dtype or own.dtype
    if torch.promote_types(own.dtype, wide) != wide:
        raise ValueError(
            f"dtype must be at least as wide as the buffer's {own.dtype}, got {wide}; cast the "
            "buffer before it is reduced"
        )
    if reduction.divide_by is not None and not wide.is_floating_point:
        raise ValueError(f"divide_by needs floating point, got {wide}; leave it out")
    if out.dtype not in (own.dtype, wide):
        raise ValueError(f"out must be {own.dtype} or {wide}, got {out.dtype}")
    if out.dim() != 1 or out.numel() != own.numel():
        raise ValueError(f"out must have shape ({own.numel()},), got {tuple(out.shape)}")


def divide_(tensor: Tensor, divisor: float | None) -> None:
    """Divide in place, rounding once; multiplying by an inverse would round twice."""
    if divisor is None:
        return
    if tensor.device.type == "cpu":
        tensor.div_(divisor)
    else:  # CUDA multiplies by the inverse of a number, but divides by a tensor
        tensor.div_(torch.full((), divisor, dtype=tensor.dtype, device=tensor.device))


class NullComm(GroupComm):
    """Moves nothing: the only rank of a group, or a rank of m whose peers are thought away.

    With m ranks it does this rank's share of the local work on the same layout, so that the
    difference in time to a real one is the communication that was not hidden.
    """

    gathers_after = True

    def __init__(self, size: int = 1, rank: int = 0, options: CommOptions | None = None) -> None:
        super().__init__(tuple(range(size)), rank, options or CommOptions(name="null"))

    def all_gather(self, buffer: Tensor) -> Work:
        """The other slices keep what they hold."""
        slices(buffer, self.size, "all_gather")
        return self._done("all_gather", buffer)

    def all_gather_after(self, buffer: Tensor, ready: Callable[[], None]) -> Work:
        """No reduction is ever under way."""
        ready()
        return self.all_gather(buffer)

    def reduce_scatter(
        self,
        buffer: Tensor,
        out: Tensor | None = None,
        *,
        divide_by: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """The sum has one term: this rank's."""
        own = slices(buffer, self.size, "reduce_scatter")[self.rank]
        target = own if out is None else out.detach()
        reduction = Reduction("sum", divide_by, dtype)
        check_reduction(reduction, own, target)
        reduce_one(own, target, reduction)
        return self._done("reduce_scatter", buffer)

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = "sum", *, divide_by: float | None = None
    ) -> Work:
        """The sum has one term: this rank's."""
        own = flat(tensor, "all_reduce")
        check_reduction(Reduction(op, divide_by), own, own)
        divide_(own, divide_by)
        return self._done("all_reduce", tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """This rank keeps what it has."""
        flat(tensor, "broadcast")
        return self._done("broadcast", tensor)

    def _done(self, op: str, tensor: Tensor) -> Work:
        return _DoneWork(self, Message(op, tensor.nbytes))


def reduce_one(own: Tensor, out: Tensor, reduction: Reduction) -> None:
    """A reduction of a single term: cast and divide."""
    wide = reduction.dtype or own.dtype
    if out.dtype != wide and reduction.divide_by is not None:
        term = own.to(wide)
        divide_(term, reduction.divide_by)
        out.copy_(term)
        return
    if out.data_ptr() != own.data_ptr():
        out.copy_(own)
    divide_(out, reduction.divide_by)


def make_comm(
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
    options: CommOptions | None = None,
) -> GroupComm:
    """Return the `Comm` of a process group: gloo's transfers, or the backend's own collectives.

    Args:
        group: an axis of a mesh (`mesh.get_group(axis)`), or any other group.
        device: where the buffers are.
        options: without a name, the group's own is taken.
    """
    options = options or CommOptions()
    if not options.name:
        options = replace(options, name=group.group_desc or group.group_name)
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return NullComm(options=options)
    if _backend(group, torch.device(device)) == "gloo":
        from odc.fsdp.comm_gloo import GlooComm

        own_s = group._get_backend(torch.device(device)).options._timeout.total_seconds()
        options = replace(options, timeout_s=min(options.timeout_s, own_s))
        return GlooComm(group, ranks, options)
    from odc.fsdp.comm_nccl import NcclComm

    return NcclComm(group, ranks, options)  # and any other backend's own collectives


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what carries a device's tensors."""
    try:
        return str(group._get_backend(device).name())
    except (AttributeError, NotImplementedError, RuntimeError):  # a group written in Python
        return str(dist.get_backend(group))
