"""Watches any PyTorch program: memory footprint and collectives. The one file that imports torch.

Collectives are seen where Python hands them to the backend: the methods of `ProcessGroup`, which
`torch.distributed.all_reduce` and its kin (and FSDP2, and names imported before the start) all
call. What goes from C++ to C++ is not seen: the buckets of DistributedDataParallel and functional
collectives. Nothing is ever synchronised for the sake of measuring:

* on CPU backends the duration ends when the work's future completes;
* where a work has no future (send, receive, reduce-scatter of gloo) it ends when the program has
  waited for it;
* on CUDA the device's own time is read after the fact if `TORCH_NCCL_ENABLE_TIMING=1` is set, and
  the duration is 0 (not measured) otherwise.

`stop` puts back the very objects that `start` replaced.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from profiler.schema import CommOp, Tier

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Footprint:
    """Bytes of the process on one tier.

    Attributes:
        tier: `Tier.DEVICE` (CUDA allocator) or `Tier.HOST` (resident set).
        allocated: Now.
        peak: Highest since the last sample where the system allows it (Linux), else since the
            start; on CUDA since the program last reset it.
    """

    tier: Tier
    allocated: int
    peak: int


def sample_memory() -> list[Footprint]:
    """Return the footprint on each tier; a peak of the host begins anew.

    Costs tens of microseconds and no device synchronisation.
    """
    found = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        allocated = torch.cuda.memory_allocated()
        found.append(Footprint(Tier.DEVICE, allocated, torch.cuda.max_memory_allocated()))
    try:
        lines = _STATUS.read_text().splitlines()
        sizes = {line[:5]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}
        found.append(Footprint(Tier.HOST, sizes["VmRSS"], sizes["VmHWM"]))
        _CLEAR_REFS.write_text("5")  # lowers the high-water mark to the resident set
    except (OSError, KeyError):
        # No /proc, or a container that forbids writing to it: the peak is that of the process.
        pass
    return found


def world() -> tuple[int, int] | None:
    """Return (rank, world size) of torch.distributed, None if it has not been initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def agree_on(value: str) -> str:
    """Return rank 0's value on every rank (a collective, if torch.distributed is initialised)."""
    if world() is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return str(box[0])


@dataclass
class Transfer:
    """One collective or transfer as the program issued it, in the words of the `comm` columns."""

    t_ns: int
    step: int
    seq: int
    op: CommOp
    src: int
    dst: int
    pg: int
    num_bytes: int
    dur_ns: int = 0
    wait_ns: int = 0
    done: bool = False
    work: Any = None  # held only while the device's own duration is awaited


@dataclass(frozen=True)
class _Method:
    """How to read a `ProcessGroup` method: which argument is the message, where a peer stands."""

    op: CommOp
    payload: int
    peer: int | None = None


_METHODS = {
    "allgather": _Method(CommOp.ALL_GATHER, 0),
    "all_gather_single": _Method(CommOp.ALL_GATHER, 0),
    "_allgather_base": _Method(CommOp.ALL_GATHER, 0),
    "allgather_coalesced": _Method(CommOp.ALL_GATHER, 0),
    "all_gather_single_coalesced": _Method(CommOp.ALL_GATHER, 0),
    "allgather_into_tensor_coalesced": _Method(CommOp.ALL_GATHER, 0),
    "reduce_scatter": _Method(CommOp.REDUCE_SCATTER, 1),
    "reduce_scatter_single": _Method(CommOp.REDUCE_SCATTER, 1),
    "_reduce_scatter_base": _Method(CommOp.REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": _Method(CommOp.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": _Method(CommOp.REDUCE_SCATTER, 1),
    "allreduce": _Method(CommOp.ALL_REDUCE, 0),
    "allreduce_coalesced": _Method(CommOp.ALL_REDUCE, 0),
    "broadcast": _Method(CommOp.BROADCAST, 0),
    "all_to_all_single": _Method(CommOp.ALL_TO_ALL, 1),
    "alltoall_base": _Method(CommOp.ALL_TO_ALL, 1),
    "alltoall": _Method(CommOp.ALL_TO_ALL, 1),
    "send": _Method(CommOp.SEND, 0, peer=1),
    "recv": _Method(CommOp.RECV, 0, peer=1),
    "recv_anysource": _Method(CommOp.RECV, 0),
    "barrier": _Method(CommOp.BARRIER, 0),
    "reduce": _Method(CommOp.OTHER, 0),
    "gather": _Method(CommOp.OTHER, 1),
    "scatter": _Method(CommOp.OTHER, 1),
}


@dataclass
class CommCapture:
    """Records collectives while `recording` is set; counts the time spent waiting for them always.

    Attributes:
        recording: Whether new collectives are recorded; a plain flag, set between steps.
        step: Step that new collectives belong to.
        wait_ns: Host time spent in `Work.wait` so far.
        process_groups: Global ranks by the number used in the `pg` column.
    """

    recording: bool = False
    step: int = 0
    wait_ns: int = 0
    process_groups: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Transfer] = []
        self._by_work: dict[int, Transfer] = {}
        # The device's duration costs two events per collective, so the user decides (see above).
        self._device_timing = os.environ.get("TORCH_NCCL_ENABLE_TIMING", "0") in ("1", "true")
        self._seq = 0
        self._originals: list[tuple[type, str, Any, Any]] = []

    def start(self) -> None:
        """Put the wrappers in place; does nothing if they are, or without torch.distributed."""
        if self._originals or not dist.is_available():
            return
        for name, method in _METHODS.items():
            if name in dist.ProcessGroup.__dict__:
                self._replace(dist.ProcessGroup, name, self._wrap_collective(name, method))
        self._replace(dist.Work, "wait", self._wrap_wait(dist.Work.__dict__["wait"]))

    def stop(self) -> None:
        """Put the original functions back, unless someone else has wrapped them since."""
        for owner, name, original, wrapper in reversed(self._originals):
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)
        self._originals.clear()
        self.recording = False

    def drain(self, everything: bool = False) -> list[Transfer]:
        """Take the transfers that are complete, in the order of their issue.

        Args:
            everything: Also take those whose end is not known; their duration stays 0.
        """
        with self._lock:
            for transfer in self._pending:
                _ask_device(transfer)
            taken = [t for t in self._pending if t.done or everything]
            self._pending = [t for t in self._pending if not (t.done or everything)]
            open_ids = {id(t) for t in self._pending}
            self._by_work = {k: t for k, t in self._by_work.items() if id(t) in open_ids}
        return taken

    def _replace(self, owner: type, name: str, wrapper: Callable[..., Any]) -> None:
        self._originals.append((owner, name, owner.__dict__[name], wrapper))
        setattr(owner, name, wrapper)

    def _wrap_collective(self, name: str, method: _Method) -> Callable[..., Any]:
        original = dist.ProcessGroup.__dict__[name]

        def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recording:
                return original(group, *args, **kwargs)
            start = time.monotonic_ns()
            work = original(group, *args, **kwargs)
            self._record(start, group, method, [*args, *kwargs.values()], work)
            return work

        wrapper.__name__ = name
        return wrapper

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                end = time.monotonic_ns()
                self.wait_ns += end - start
                transfer = self._by_work.get(id(work))
                if transfer is not None:
                    transfer.wait_ns += end - start
                    if transfer.work is None and not transfer.done:
                        transfer.dur_ns, transfer.done = end - transfer.t_ns, True

        return wait

    def _record(self, start: int, group: Any, method: _Method, args: list[Any], work: Any) -> None:
        number, ranks = self._number(group)
        src, dst = _ends(method, args, ranks, group.rank())
        payload = args[method.payload] if method.payload < len(args) else None
        with self._lock:
            self._seq += 1
            transfer = Transfer(
                start, self.step, self._seq, method.op, src, dst, number, _num_bytes(payload)
            )
            self._pending.append(transfer)
            if work is not None:
                self._by_work[id(work)] = transfer
        if work is None:
            transfer.dur_ns, transfer.done = time.monotonic_ns() - start, True
        elif _on_device(payload):
            transfer.work = work if self._device_timing else None
            transfer.done = not self._device_timing
        else:
            _await_future(transfer, work)

    def _number(self, group: Any) -> tuple[int, list[int]]:
        number = group_number(str(group.group_name))
        ranks = self.process_groups.get(str(number))
        if ranks is None:
            ranks = list(dist.get_process_group_ranks(group))
            self.process_groups[str(number)] = ranks
        return number, ranks


def group_number(name: str) -> int:
    """Return the `pg` number of a process group, the same on every rank.

    torch counts groups alike on all ranks; groups it names by a hash get a number from that.
    """
    if name.isdigit() and int(name) < 1 << 14:
        return int(name)
    return (1 << 14) + zlib.crc32(name.encode()) % (1 << 14)


def _ends(method: _Method, args: list[Any], ranks: list[int], own: int) -> tuple[int, int]:
    """Return the global (src, dst) of a call; dst is -1 for a collective."""
    me = ranks[own]
    if method.op == CommOp.BROADCAST:
        root = getattr(args[1], "rootRank", args[1]) if len(args) > 1 else own
        return ranks[int(root)], -1
    if method.peer is not None:
        peer = ranks[int(args[method.peer])]
        return (me, peer) if method.op == CommOp.SEND else (peer, me)
    if method.op == CommOp.RECV:
        return -1, me  # from whoever comes first
    return me, -1


def _await_future(transfer: Transfer, work: Any) -> None:
    """Let the backend's thread note the end; without a future, `Work.wait` will."""

    def finish(_: Any) -> None:
        if not transfer.done:
            transfer.dur_ns, transfer.done = time.monotonic_ns() - transfer.t_ns, True

    try:
        work.get_future().add_done_callback(finish)
    except RuntimeError:
        return


def _ask_device(transfer: Transfer) -> None:
    """Read the device's own duration of a finished work, if the backend keeps it."""
    work = transfer.work
    if work is None or not work.is_completed():
        return
    try:
        transfer.dur_ns = int(work._get_duration() * 1e6)
    except RuntimeError:
        transfer.dur_ns = 0
    transfer.work, transfer.done = None, True


def _num_bytes(payload: Any) -> int:
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    if isinstance(payload, list | tuple):
        return sum(_num_bytes(item) for item in payload)
    return 0


def _on_device(payload: Any) -> bool:
    if isinstance(payload, torch.Tensor):
        return payload.is_cuda
    return isinstance(payload, list | tuple) and any(_on_device(item) for item in payload)
