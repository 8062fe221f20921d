"""Collectives over NCCL, its own in-place ones.

The order in which NCCL adds is its own: fixed for a given topology and size, but not ascending in
ranks. Where another dtype is summed in, the slices are exchanged in the buffer's dtype and added
here, in ascending order: half the bytes of casting the buffer first, and no cast buffer.

A wait makes the current stream wait, not the host; times are therefore those of the calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from odc.fsdp.comm import (
    CommOptions,
    GroupComm,
    Message,
    ReduceOp,
    Reduction,
    TimedWork,
    Work,
    check_reduction,
    divide_,
    flat,
    slices,
)
from odc.fsdp.comm_pipeline import reduce_terms


class _NcclWork(TimedWork):
    """A collective of the library, and what follows it on the stream that waits."""

    def __init__(
        self,
        comm: NcclComm,
        message: Message,
        start: Callable[[], dist.Work | None],
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(comm, message)
        self._then, self._work = then, None
        try:
            self._work = start()
        except RuntimeError as error:
            self._failure: RuntimeError | None = error
        else:
            self._failure = None

    def complete(self) -> None:
        """Order the current stream after the collective."""
        try:
            if self._failure is not None:
                raise self._failure
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise self.comm.error(self.message, None, reason) from error
        if self._then is not None:
            self._then()


class NcclComm(GroupComm):
    """The collectives of an NCCL process group, for tensors on its device.

    Args:
        group: the process group.
        ranks: global rank of each of its ranks.
        options: names and observer; the time-out is the group's own.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], options: CommOptions
    ) -> None:
        super().__init__(ranks, group.rank(), options)
        self.group = group
        self._free: list[Tensor] = []  # to receive in; a reduction holds one until its end

    def all_gather(self, buffer: Tensor) -> Work:
        """In place: NCCL recognises a slice that lies in the output."""
        own = slices(buffer, self.size, "all_gather")[self.rank]
        moved = (self.size - 1) * own.nbytes
        return _NcclWork(
            self,
            Message("all_gather", buffer.nbytes, moved, moved),
            lambda: dist.all_gather_single(buffer.detach(), own, group=self.group, async_op=True),
        )

    def reduce_scatter(
        self,
        buffer: Tensor,
        out: Tensor | None = None,
        *,
        divide_by: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """In place where `out` is not given."""
        own = slices(buffer, self.size, "reduce_scatter")[self.rank]
        target = own if out is None else out.detach()
        reduction = Reduction("sum", divide_by, dtype)
        check_reduction(reduction, own, target)
        moved = (self.size - 1) * own.nbytes
        message = Message("reduce_scatter", buffer.nbytes, moved, moved)
        if dtype is not None and dtype != own.dtype:
            return self._exchange_and_add(buffer.detach(), own, target, reduction, message)
        return _NcclWork(
            self,
            message,
            lambda: dist.reduce_scatter_single(
                target, buffer.detach(), group=self.group, async_op=True
            ),
            lambda: divide_(target, divide_by),
        )

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = "sum", *, divide_by: float | None = None
    ) -> Work:
        """NCCL's own."""
        own = flat(tensor, "all_reduce")
        check_reduction(Reduction(op, divide_by), own, own)
        moved = 2 * (self.size - 1) * own.nbytes // self.size
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        return _NcclWork(
            self,
            Message("all_reduce", own.nbytes, moved, moved),
            lambda: dist.all_reduce(own, reduce_op, group=self.group, async_op=True),
            lambda: divide_(own, divide_by),
        )

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """NCCL's own; the payload is counted as the ring's."""
        whole = flat(tensor, "broadcast")
        sends = (self.rank + 1) % self.size != root
        message = Message(
            "broadcast",
            whole.nbytes,
            sent_bytes=whole.nbytes * sends,
            received_bytes=whole.nbytes * (self.rank != root),
        )
        return _NcclWork(
            self,
            message,
            lambda: dist.broadcast(whole, group=self.group, async_op=True, group_src=root),
        )

    def _exchange_and_add(
        self, buffer: Tensor, own: Tensor, out: Tensor, reduction: Reduction, message: Message
    ) -> Work:
        assert reduction.dtype is not None
        fitting = [i for i, room in enumerate(self._free) if room.nbytes >= buffer.nbytes]
        room = self._free.pop(fitting[0]) if fitting else torch.empty_like(buffer).view(torch.uint8)
        landing = room[: buffer.nbytes].view(buffer.dtype)
        terms = list(landing.view(self.size, -1).unbind())
        wide = torch.empty((2, own.numel()), dtype=reduction.dtype, device=buffer.device)

        def add() -> None:
            reduce_terms(terms, out, self.rank, reduction, wide)
            self._free.append(room)

        return _NcclWork(
            self,
            message,
            lambda: dist.all_to_all_single(landing, buffer, group=self.group, async_op=True),
            add,
        )
