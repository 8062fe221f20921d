"""Memory that comes and goes below tensors that stay: frames on the CPU, resized storages on a GPU.

On the CPU a storage is an address range; the frames around the part that is kept are moved in from
a pool and back (see odc/memory/frames.py), which costs no page faults. On a GPU the storage is
resized to nothing and back on one stream, so no allocator has to be told of streams.
"""

from __future__ import annotations

import threading
import warnings
from typing import Protocol

import torch

from odc.memory.frames import FRAME_BYTES, AddressRange, frames_for, make_pool
from odc.sizes import format_bytes


class GatherPool:
    """Memory for what is gathered and for unreduced gradients, shared by the groups of a process.

    Frames may be taken and given by the thread of a `Comm`, too; the bytes of buffers are counted
    where a backward decides, so that all ranks count alike.

    Args:
        limit_bytes: what is kept for reuse. More is allocated where it is needed, given back to the
            system after use, and warned about once.

    Attributes:
        strict: somebody chose the limit: what could wait does, rather than go beyond it.
        taken_bytes, peak_bytes: of frames that are in use, now and at most.
        gathered_bytes, gradient_bytes: of the buffers that are in use, this rank's parts included.
            Frames are not the same on all ranks, these are: what decides about collectives asks
            them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.strict = True
        self.taken_bytes = 0
        self.peak_bytes = 0
        self.gathered_bytes = 0
        self.gradient_bytes = 0
        self._frames = make_pool(0)
        self._warned = False
        self._lock = threading.RLock()  # a collector may drop a buffer while it is held

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much may be there at once; ranks that ask about the same agree."""
        return not self.strict or num_bytes <= self.limit_bytes

    def take(self, address: int, num_frames: int, lasting: bool = False) -> None:
        """Move frames to an address; `lasting` ones do not count towards the limit."""
        with self._lock:
            missing = num_frames - self._frames.num_free
            if missing > 0:
                self._frames.grow(missing)
            self._frames.map(address, num_frames)
            if lasting:
                return
            self.taken_bytes += num_frames * FRAME_BYTES
            self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        if self.strict and self.taken_bytes > self.limit_bytes and not self._warned:
            self._warned = True
            warnings.warn(
                f"{format_bytes(self.taken_bytes)} are gathered at once, more than dbuffer_size "
                f"{format_bytes(self.limit_bytes)}: what is above it is allocated anew every time; "
                "raise dbuffer_size, or shard smaller modules",
                stacklevel=2,
            )

    def give(self, address: int, num_frames: int) -> None:
        """Move the frames at an address back."""
        with self._lock:
            self._frames.unmap(address)
            self.taken_bytes -= num_frames * FRAME_BYTES
            spare = self._frames.num_free * FRAME_BYTES + self.taken_bytes - self.limit_bytes
            if spare > 0:
                self._frames.shrink(min(self._frames.num_free, spare // FRAME_BYTES))

    def forget(self, num_frames: int) -> None:
        """Frames that were taken go with the address they are at."""
        with self._lock:
            self.taken_bytes -= num_frames * FRAME_BYTES


class Storage(Protocol):
    """Memory that a tensor looks at for ever and that is there between `take` and `give`."""

    tensor: torch.Tensor

    def take(self) -> None:
        """Make the memory available, if it is not; its content is whatever it was."""

    def give(self) -> None:
        """Give the memory up, if it is there, but for the part that is kept."""

    def forget(self) -> None:
        """It is not to be given up: it goes with the last tensor that looks at it."""


class FrameStorage:
    """CPU memory at one address.

    Args:
        numel, dtype: of the tensor.
        keep: elements [first, last) whose memory is never given up once it is held.
        pool: where the rest comes from.

    Attributes:
        kept: those elements, as a tensor of its own storage: torch.save and checkpoints that stage
            copy whole storages, and outside of these elements memory comes and goes.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, keep: tuple[int, int], pool: GatherPool
    ) -> None:
        self._pool = pool
        num_bytes = numel * dtype.itemsize
        low, high = (edge * dtype.itemsize for edge in keep)
        shift = -low % FRAME_BYTES  # what is kept begins with a frame
        total = frames_for(shift + max(num_bytes, 1))
        self._range = AddressRange(total * FRAME_BYTES)
        buffer = self._range.buffer()
        self._flat = torch.frombuffer(buffer, dtype=torch.uint8)
        self.tensor = self._flat[shift : shift + num_bytes].view(dtype)
        self.kept = torch.empty(0, dtype=dtype, device="cpu")
        first = last = 0
        if high > low:
            first, last = (shift + low) // FRAME_BYTES, frames_for(shift + high)
            self.kept = torch.frombuffer(
                buffer, dtype=torch.uint8, offset=shift + low, count=high - low
            ).view(dtype)
        self._kept_frames = slice(first, last)
        self._held = self._taken = False
        self._rest = [
            (self._range.address + start * FRAME_BYTES, end - start)
            for start, end in ((0, first), (last, total))
            if end > start
        ]

    @property
    def kept_bytes(self) -> int:
        """Of the frames that are kept."""
        return (self._kept_frames.stop - self._kept_frames.start) * FRAME_BYTES

    def hold(self) -> None:
        """Takes the memory that is kept, zeroed, if it was not."""
        if self._held or not self.kept_bytes:
            return
        self._held = True
        start = self._kept_frames.start * FRAME_BYTES
        self._pool.take(self._range.address + start, self.kept_bytes // FRAME_BYTES, lasting=True)
        self._flat[start : start + self.kept_bytes].zero_()

    def take(self) -> None:
        self.hold()
        if not self._taken:
            self._taken = True
            for address, num_frames in self._rest:
                self._pool.take(address, num_frames)

    def give(self) -> None:
        if self._taken:
            self._taken = False
            for address, num_frames in self._rest:
                self._pool.give(address, num_frames)

    def forget(self) -> None:
        if self._taken:
            self._pool.forget(sum(num_frames for _, num_frames in self._rest))


class ResizedStorage:
    """Device memory whose storage is resized to nothing and back."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._num_bytes = self.tensor.untyped_storage().nbytes()
        self.give()

    def take(self) -> None:
        self.tensor.untyped_storage().resize_(self._num_bytes)

    def give(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def forget(self) -> None:
        """The allocator knows."""
