"""DBuffer: the flat storages of one group on one rank, laid out by a plan.

For every sub-buffer there is a *slice* (this rank's `S` elements, in the parameters' own dtype, for
as long as the group lives), a *full buffer* (`ranks * S` elements in the dtype of compute, present
while the group is gathered) and a *gradient buffer* (the same shape and dtype, present from the
group's first gradient until it is reduced). Parameters are permanent views of the
full buffer: a gather writes where they already look, and nothing is copied after it. Where the
dtypes agree the slice *is* this rank's part of the full buffer, and nothing is copied before it
either; otherwise it costs one cast of the slice. (The idea is DBuffer's of veScale-FSDP, arXiv
2602.22437, section 4.) The same way the slice of reduced gradients is this rank's part of the
gradient buffer, unless it holds a sum that new gradients are to be added to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from odc.fsdp.storage import FrameStorage, GatherPool, ResizedStorage, Storage
from odc.sharding.plan import Placement, Plan

# Frames are whole: where more than this part of a slice of gradients would be lost to its last
# one, the slice is no part of the gradient buffer.
MAX_LOST = 1 / 8


@dataclass
class Part:
    """The storages of one sub-buffer.

    Attributes:
        local: this rank's slice.
        full: what is gathered.
        gradient: unreduced gradients.
        own: this rank's part of both.
        joined: the same as `gradient`, but this rank's part is its slice of reduced gradients.
        incoming: the one of both that is in use.
        gradient_slice: reduced gradients, once there are any.
    """

    local: torch.Tensor
    full: Storage
    gradient: Storage
    own: slice
    joined: FrameStorage | None
    gradient_slice: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.incoming = self.gradient

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
            gradient = self._storage(numel, self._dtype_of_gradients(dtype))
            if dtype == own_dtype and self.device.type == "cpu":
                keep = (own.start, own.stop)
                held = FrameStorage(numel, dtype, keep, self.pool)
                held.hold()
                joined = self._joined(numel, dtype, keep)
                self.parts.append(Part(held.kept, held, gradient, own, joined))
            else:
                local = torch.zeros(buffer.slice_numel, dtype=own_dtype, device=self.device)
                full = self._storage(numel, dtype)
                self.parts.append(Part(local, full, gradient, own, None))

    def _dtype_of_gradients(self, computed: torch.dtype) -> torch.dtype:
        wide = self.reduce_dtype
        if wide is None or not computed.is_floating_point:
            return computed
        return computed if torch.promote_types(computed, wide) == wide else wide

    def _storage(self, numel: int, dtype: torch.dtype) -> Storage:
        if self.device.type == "cpu":
            return FrameStorage(numel, dtype, (0, 0), self.pool)
        return ResizedStorage(numel, dtype, self.device)

    def _joined(self, numel: int, dtype: torch.dtype, keep: tuple[int, int]) -> FrameStorage | None:
        """See `Part` and `MAX_LOST`."""
        if self.reduce_dtype not in (None, dtype):
            return None
        storage = FrameStorage(numel, dtype, keep, self.pool)
        lost = storage.kept_bytes - storage.kept.nbytes
        return storage if lost <= MAX_LOST * storage.kept.nbytes else None

    # -- views -----------------------------------------------------------------------------------

    def view(self, fqn: str) -> torch.Tensor:
        """The whole tensor in the full buffer; valid while the group is gathered."""
        place = self._places[fqn]
        return self._shaped(self.parts[place.buffer].full.tensor, place)

    def gradient_view(self, fqn: str) -> torch.Tensor:
        """The whole gradient in the gradient buffer; valid while that is there."""
        place = self._places[fqn]
        return self._shaped(self.parts[place.buffer].incoming.tensor, place)

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
        if part.gradient_slice is None and part.joined is not None:
            part.joined.hold()
            part.gradient_slice = part.joined.kept
        elif part.gradient_slice is None:
            part.gradient_slice = torch.zeros_like(part.local)
        return part.gradient_slice

    def slices_are_held(self) -> bool:
        """Whether a tensor besides our own looks at a slice of reduced gradients."""
        return any(
            part.gradient_slice is not None and _uses(part.gradient_slice) > 1
            for part in self.parts
        )

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
        fulls = self.claim_full()
        self.fill_full()
        return fulls

    def claim_full(self) -> list[torch.Tensor]:
        """Counts the full buffers as taken; `fill_full` is still to make room for them.

        Returns:
            The buffers to gather.
        """
        assert not self.gathered, "a group is gathered once"
        self.gathered = True
        self.pool.gathered_bytes += self.full_bytes
        return [part.full.tensor for part in self.parts]

    def fill_full(self) -> None:
        """The other half of `take_full`; any thread may."""
        for part in self.parts:
            part.full.take()
            if not part.in_place:
                part.full.tensor[part.own].copy_(part.local)

    def give_full(self) -> None:
        """Gives the full buffers up; the slices stay."""
        if self.gathered:
            self.gathered = False
            self.pool.gathered_bytes -= self.full_bytes
            for part in self.parts:
                part.full.give()

    def take_gradients(self, fresh: bool) -> None:
        """Makes room for the gradients of the whole group; their content is undefined.

        Args:
            fresh: nobody needs the slices of reduced gradients any more.
        """
        if not self.has_gradients:
            self.has_gradients = True
            self.pool.gradient_bytes += self.gradient_bytes
            for part in self.parts:
                joined = part.joined if fresh else None
                part.incoming = part.gradient if joined is None else joined
                part.incoming.take()

    def widen_gradients(self) -> None:
        """Gradients of several backwards are to add up before they are reduced: in its dtype."""
        for part in self.parts:
            dtype = self.reduce_dtype or part.gradient.tensor.dtype
            if dtype != part.gradient.tensor.dtype:
                assert not self.has_gradients, "gradients wait to be reduced in another dtype"
                part.gradient = self._storage(part.gradient.tensor.numel(), dtype)
                part.incoming = part.gradient

    def return_gradients(self) -> None:
        """Gives the memory of the gradient buffers up; any thread may."""
        for part in self.parts:
            part.incoming.give()

    def give_gradients(self) -> None:
        """Gives the gradient buffers up, and counts them no more."""
        if self.has_gradients:
            self.has_gradients = False
            self.pool.gradient_bytes -= self.gradient_bytes
            self.return_gradients()

    def __del__(self) -> None:
        """A model may be dropped while it is gathered."""
        if self.gathered:
            self.pool.gathered_bytes -= self.full_bytes
            for part in self.parts:
                part.full.forget()
        if self.has_gradients:
            self.pool.gradient_bytes -= self.gradient_bytes
            for part in self.parts:
                part.incoming.forget()

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


def _uses(tensor: torch.Tensor) -> int:
    """Tensors that look at the storage of one, itself included."""
    storage = tensor.untyped_storage()  # counts as one, and so does what Python knows it by
    return torch._C._storage_Use_Count(storage._cdata) - 1
