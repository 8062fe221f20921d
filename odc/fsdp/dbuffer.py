"""DBuffer: the flat storages of one group on one rank, laid out by a plan.

For every sub-buffer there is a *slice* (this rank's `S` elements, in the parameters' own dtype, for
as long as the group lives), a *full buffer* (`ranks * S` elements in the dtype of compute, present
while the group is gathered) and a *gradient buffer* (the same shape and dtype, present from the
group's first gradient until it is reduced). Parameters are permanent views of the
full buffer: a gather writes where they already look, and nothing is copied after it. Where the
dtypes agree the slice *is* this rank's part of the full buffer, and nothing is copied before it
either; otherwise it costs one cast of the slice. (The idea is DBuffer's of veScale-FSDP, arXiv
2602.22437, section 4.)

On the CPU a full buffer is an address range; the frames around this rank's part stay, the others
are moved in from a pool and back (see odc/memory/frames.py), which costs no page faults. On a GPU
the storage is resized to nothing and back on one stream, so no allocator has to be told of streams.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from odc.memory.frames import FRAME_BYTES, AddressRange, frames_for, make_pool
from odc.sharding.plan import Placement, Plan
from odc.sizes import format_bytes


class GatherPool:
    """Memory for what is gathered and for unreduced gradients, shared by the groups of a process.

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
        self._lock = threading.Lock()  # ranks may be threads of one process
        self._warned = False

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


class Storage(Protocol):
    """Memory that a tensor looks at for ever and that is there between `take` and `give`."""

    tensor: torch.Tensor

    def take(self) -> None:
        """Make the memory available; its content is whatever it was."""

    def give(self) -> None:
        """Give the memory up, but for the part that is kept."""

    def forget(self) -> None:
        """It is not to be given up: it goes with the last tensor that looks at it."""


class FrameStorage:
    """CPU memory at one address.

    Args:
        numel, dtype: of the tensor.
        keep: elements [first, last) whose memory is never given up.
        pool: where the rest comes from.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, keep: tuple[int, int], pool: GatherPool
    ) -> None:
        num_bytes = max(numel * dtype.itemsize, 1)
        self._range = AddressRange(num_bytes)
        self._pool = pool
        flat = torch.frombuffer(self._range.buffer(), dtype=torch.uint8)
        self.tensor = flat[: numel * dtype.itemsize].view(dtype)
        low, high = (edge * dtype.itemsize for edge in keep)
        first, last = low // FRAME_BYTES, frames_for(high)
        if high <= low:
            first = last = 0
        else:
            pool.take(self._range.address + first * FRAME_BYTES, last - first, lasting=True)
            flat[first * FRAME_BYTES : last * FRAME_BYTES].zero_()
        # A storage of its own over the kept elements: torch.save and checkpoints that stage copy
        # whole storages, and outside of these elements memory comes and goes.
        self.kept = torch.empty(0, dtype=dtype, device="cpu")
        if high > low:
            self.kept = torch.frombuffer(
                self._range.buffer(), dtype=torch.uint8, offset=low, count=high - low
            ).view(dtype)
        around = ((0, first), (last, frames_for(num_bytes)))
        self._rest = [
            (self._range.address + start * FRAME_BYTES, end - start)
            for start, end in around
            if end > start
        ]

    def take(self) -> None:
        for address, num_frames in self._rest:
            self._pool.take(address, num_frames)

    def give(self) -> None:
        for address, num_frames in self._rest:
            self._pool.give(address, num_frames)

    def forget(self) -> None:
        self._pool.taken_bytes -= sum(num_frames for _, num_frames in self._rest) * FRAME_BYTES


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


@dataclass
class Part:
    """The storages of one sub-buffer."""

    local: torch.Tensor  # this rank's slice
    full: Storage
    gradient: Storage
    own: slice  # this rank's part of full and gradient
    gradient_slice: torch.Tensor | None = None

    @property
    def in_place(self) -> bool:
        """Whether the slice is this rank's part of the full buffer."""
        return self.local.data_ptr() == self.full.tensor[self.own].data_ptr()


@dataclass
class DBuffer:
    """The storages of one group on one rank.

    Args:
        plan: where the tensors lie.
        rank: this rank's place in the plan.
        device: where the storages are.
        param_dtype: of compute; `None`: each sub-buffer's own.
        reduce_dtype: what gradients are summed in; `None`: that of compute. They travel in the
            narrower of the two, since a wider one would add bytes and no digits.
        pool: memory of the CPU's full buffers.
    """

    plan: Plan
    rank: int
    device: torch.device
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    pool: GatherPool
    parts: list[Part] = field(init=False)
    gathered: bool = False
    has_gradients: bool = False  # the gradient buffers are there

    def __post_init__(self) -> None:
        self._places = {place.tensor.fqn: place for place in self.plan.placements}
        self.parts = []
        for buffer in self.plan.buffers:
            own_dtype = getattr(torch, buffer.dtype)
            dtype = own_dtype
            if self.param_dtype is not None and own_dtype.is_floating_point:
                dtype = self.param_dtype
            numel = buffer.slice_numel * self.plan.ranks
            own = slice(self.rank * buffer.slice_numel, (self.rank + 1) * buffer.slice_numel)
            same = dtype == own_dtype and self.device.type == "cpu"
            full = self._storage(numel, dtype, (own.start, own.stop) if same else (0, 0))
            if isinstance(full, FrameStorage) and same:
                held = full.kept
            else:
                held = torch.zeros(buffer.slice_numel, dtype=own_dtype, device=self.device)
            gradient = self._storage(numel, self._dtype_of_gradients(dtype), (0, 0))
            self.parts.append(Part(held, full, gradient, own))

    def _dtype_of_gradients(self, computed: torch.dtype) -> torch.dtype:
        wide = self.reduce_dtype
        if wide is None or not computed.is_floating_point:
            return computed
        return computed if torch.promote_types(computed, wide) == wide else wide

    def _storage(self, numel: int, dtype: torch.dtype, keep: tuple[int, int]) -> Storage:
        if self.device.type == "cpu":
            return FrameStorage(numel, dtype, keep, self.pool)
        return ResizedStorage(numel, dtype, self.device)

    # -- views -----------------------------------------------------------------------------------

    def view(self, fqn: str) -> torch.Tensor:
        """The whole tensor in the full buffer; valid while the group is gathered."""
        place = self._places[fqn]
        return self._shaped(self.parts[place.buffer].full.tensor, place)

    def gradient_view(self, fqn: str) -> torch.Tensor:
        """The whole gradient in the gradient buffer; valid while that is there."""
        place = self._places[fqn]
        return self._shaped(self.parts[place.buffer].gradient.tensor, place)

    def shard(self, fqn: str) -> torch.Tensor:
        """This rank's elements of a tensor, 1-D, in the slice; always valid."""
        place = self._places[fqn]
        return self._own(self.parts[place.buffer].local, place)

    def gradient_shard(self, fqn: str) -> torch.Tensor:
        """This rank's elements of a reduced gradient, 1-D."""
        place = self._places[fqn]
        return self._own(self.gradient_slice(place.buffer), place)

    def gradient_slice(self, number: int) -> torch.Tensor:
        """This rank's slice of the reduced gradients, allocated when first asked for."""
        part = self.parts[number]
        if part.gradient_slice is None:
            part.gradient_slice = torch.zeros_like(part.local)
        return part.gradient_slice

    def _shaped(self, flat: torch.Tensor, place: Placement) -> torch.Tensor:
        return flat[place.offset : place.end].view(place.tensor.shape)

    def _own(self, held: torch.Tensor, place: Placement) -> torch.Tensor:
        slice_numel = self.plan.buffers[place.buffer].slice_numel
        start = min(max(place.offset - self.rank * slice_numel, 0), slice_numel)
        end = min(max(place.end - self.rank * slice_numel, start), slice_numel)
        return held[start:end]

    # -- memory ----------------------------------------------------------------------------------

    def take_full(self) -> list[torch.Tensor]:
        """Makes room for the full buffers and puts this rank's slices into their place.

        Returns:
            The buffers to gather.
        """
        assert not self.gathered, "a group is gathered once"
        for part in self.parts:
            part.full.take()
            if not part.in_place:
                part.full.tensor[part.own].copy_(part.local)
        self.gathered = True
        self.pool.gathered_bytes += self.full_bytes
        return [part.full.tensor for part in self.parts]

    def give_full(self) -> None:
        """Gives the full buffers up; the slices stay."""
        if self.gathered:
            self.gathered = False
            self.pool.gathered_bytes -= self.full_bytes
            for part in self.parts:
                part.full.give()

    def take_gradients(self) -> None:
        """Makes room for the gradients of the whole group; their content is undefined."""
        if not self.has_gradients:
            self.has_gradients = True
            self.pool.gradient_bytes += self.gradient_bytes
            for part in self.parts:
                part.gradient.take()

    def widen_gradients(self) -> None:
        """Gradients of several backwards are to add up before they are reduced: in its dtype."""
        for part in self.parts:
            dtype = self.reduce_dtype or part.gradient.tensor.dtype
            if dtype != part.gradient.tensor.dtype:
                assert not self.has_gradients, "gradients wait to be reduced in another dtype"
                part.gradient = self._storage(part.gradient.tensor.numel(), dtype, (0, 0))

    def give_gradients(self) -> None:
        """Gives the gradient buffers up."""
        if self.has_gradients:
            self.has_gradients = False
            self.pool.gradient_bytes -= self.gradient_bytes
            for part in self.parts:
                part.gradient.give()

    def __del__(self) -> None:
        """A model may be dropped while it is gathered."""
        if self.gathered:
            self.pool.gathered_bytes -= self.full_bytes
            for part in self.parts:
                part.full.forget()
        if self.has_gradients:
            self.pool.gradient_bytes -= self.gradient_bytes
            for part in self.parts:
                part.gradient.forget()

    # -- the whole group at once -----------------------------------------------------------------

    def slices(self) -> Iterator[torch.Tensor]:
        """This rank's slices, for one operation on a whole group."""
        return (part.local for part in self.parts)

    def zero_(self) -> None:
        """Sets all parameters to zero."""
        torch._foreach_zero_(list(self.slices()))

    def scale_(self, factor: float) -> None:
        """Multiplies all parameters."""
        torch._foreach_mul_(list(self.slices()), factor)

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's elements; padding counts for nothing, as it is zero."""
        norms = torch._foreach_norm(list(self.slices()))
        return torch.stack(norms).square().sum()

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffers."""
        return sum(part.full.tensor.nbytes for part in self.parts)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient buffers."""
        return sum(part.gradient.tensor.nbytes for part in self.parts)
