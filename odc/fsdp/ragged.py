"""RaggedTensor: what a sharded parameter is between its uses.

A DTensor with the global shape outside and a 1-D local span inside, which it aliases (a part of its
group's flat buffer). Where the span lies says a `RaggedShard` (`ragged_shard.py`), which ops it has
says a closed table (`ragged_ops.py`, `ragged_local.py`); here is how one is made, moved to other
spans, saved and loaded. On a mesh of several axes the RaggedShard is on the last one and the others
replicate (HSDP).

Source: RaggedShard of veScale-FSDP, arXiv 2602.22437, section 3, as a subclass of torch's DTensor
instead of a patched copy of the DTensor package. These four files are the only ones that touch
private parts of it (and `ragged_optim.py` of one optimizer). A RaggedTensor is not one to compute a
forward with: FSDP gathers it first.

[Note: Writes through the buffer] The span is memory of somebody else. Writing there does not bump
the RaggedTensor's version, and a storage resized to 0 and back leaves shape and span as they were.
Casts and moves to another device (`module.to`) make a span of its own, outside of the buffer.

What torch's utilities do with it by themselves: `torch.save` writes all of the storage that spans
share, once a file; `dcp.load` into meta tensors raises (call `to_empty` first); `p.grad = g` checks
only shape, dtype and device, and another layout is an error at the optimizer's first op.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from odc.fsdp import ragged_optim
from odc.fsdp.ragged_local import SpanTensor, match_layout, new_dtensor, rewrap
from odc.fsdp.ragged_ops import choose_path, run
from odc.fsdp.ragged_shard import (
    Box,
    RaggedLayoutError,
    RaggedOpError,
    RaggedShard,
    Span,
    axis_placements,
    boxes,
    meta_of,
    overlap,
    own_part,
    own_rank,
    own_span,
    retyped,
    spans_of,
    spec_of,
)

__all__ = [
    "RaggedLayoutError",
    "RaggedOpError",
    "RaggedShard",
    "RaggedTensor",
    "distribute_ragged",
    "install_distribute_tensor",
]

# -- moving spans --------------------------------------------------------------------------------


def _move(local: Tensor, source: list[Span], target: list[Span], mesh: DeviceMesh) -> Tensor:
    """Moves a flat tensor between spans of the last axis; only what a rank lacks travels."""
    rank, axis = own_rank(mesh), mesh.ndim - 1
    low, high = target[rank]
    held = source[rank]
    if local.is_meta:
        return local.new_empty(high - low)
    if source == target or all(span == held for span in source):
        return local[low - held[0] : high - held[0]].clone()
    if all(span == (low, high) for span in target):
        return _gather(local, source, high - low, mesh.get_group(axis), rank)
    return _exchange(local, source, target, mesh.get_group(axis), rank)


def _gather(local: Tensor, source: list[Span], numel: int, group: Any, rank: int) -> Tensor:
    """All spans, one after another. Uneven ones travel as they are: a broadcast each."""
    full = local.new_empty(numel)
    if len({high - low for low, high in source}) == 1:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(full, local.contiguous(), group=group)
        return full
    views = [full[low:high] for low, high in source]
    views[rank].copy_(local)
    started = [
        dist.broadcast(view, group=group, group_src=other, async_op=True)
        for other, view in enumerate(views)
        if view.numel()
    ]
    for work in started:
        work.wait()
    return full


def _exchange(
    local: Tensor, source: list[Span], target: list[Span], group: Any, rank: int
) -> Tensor:
    """Both sides are in the order of ranks, so what goes to a rank is contiguous in `local`."""
    sends = [overlap(source[rank], span) for span in target]
    receives = [overlap(span, target[rank]) for span in source]
    moved = local.new_empty(sum(receives))
    dist.all_to_all_single(moved, local.contiguous(), receives, sends, group=group)
    return moved


def _relayout(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """The tensor under other placements, outside of autograd; always of memory of its own."""
    spec = tensor._spec
    mesh, shape = spec.mesh, meta_of(spec).shape
    placements = axis_placements(mesh, placements)
    axis_placements(mesh, spec.placements)
    ranks = mesh.size(mesh.ndim - 1)
    source = spans_of(spec.placements[-1], shape, ranks)
    target = spans_of(placements[-1], shape, ranks)
    moved = _move(tensor._local_tensor.reshape(-1), source, target, mesh)
    made = spec_of(mesh, placements, shape, moved.dtype)
    if isinstance(placements[-1], RaggedShard):
        return new_dtensor(RaggedTensor, moved, made, requires_grad=False)
    if placements[-1].is_replicate():
        return new_dtensor(DTensor, moved.view(shape), made, requires_grad=False)
    rows = -(-shape[0] // ranks)
    held = max(0, min(rows, shape[0] - rows * own_rank(mesh)))
    return new_dtensor(DTensor, moved.view(held, *shape[1:]), made, requires_grad=False)


class _Relayout(torch.autograd.Function):
    """`_relayout`, and the way back for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.placements = tensor.placements
        return _relayout(tensor, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[DTensor, None]:
        if any(p.is_partial() for p in grad.placements):
            grad = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
        return _relayout(grad, ctx.placements), None


class _ToLocal(torch.autograd.Function):
    """The span as a plain tensor, whose gradient is a span too."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> RaggedTensor:
        spec = retyped(ctx.spec, grad.dtype)
        return new_dtensor(RaggedTensor, grad.contiguous(), spec, requires_grad=False)


# -- the tensor ----------------------------------------------------------------------------------


class RaggedTensor(SpanTensor):
    """A DTensor whose local tensor is this rank's flat span under a `RaggedShard`.

    Make one with `from_span`, `from_dtensor` or `distribute_ragged`. What holds for torch's
    `Shard(0)` parameters holds for it with these exceptions: the ops are those of a closed
    table, `p.data = q` copies into the span, and `share_memory_` raises.
    """

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        return run(func, args, kwargs)

    @classmethod
    def from_span(
        cls,
        local: Tensor,
        mesh: DeviceMesh,
        placement: RaggedShard | Sequence[Placement],
        shape: Sequence[int],
        *,
        requires_grad: bool = False,
    ) -> RaggedTensor:
        """Wraps a span; its memory is aliased, never copied.

        Args:
            local: 1-D and contiguous, as many elements as the placement gives this rank.
            mesh: the ranks.
            placement: a RaggedShard, or one placement an axis with a RaggedShard last.
            shape: of the whole tensor.
            requires_grad: of the result.

        Raises:
            RaggedLayoutError: the placement fits neither the mesh, nor the shape, nor the span.
        """
        placements = axis_placements(mesh, placement)
        _check_ranks(mesh, placements, shape)
        shard = placements[-1]
        if not isinstance(shard, RaggedShard):
            raise RaggedLayoutError(f"expected a RaggedShard on the last axis, got {placements}")
        expected = shard.span(math.prod(shape), own_rank(mesh))[1]
        if local.shape != (expected,) or not local.is_contiguous() or isinstance(local, DTensor):
            raise RaggedLayoutError(
                f"expected a plain, contiguous local tensor of shape ({expected},), got "
                f"{type(local).__name__} of shape {tuple(local.shape)}"
            )
        spec = spec_of(mesh, placements, shape, local.dtype)
        return new_dtensor(cls, local.detach(), spec, requires_grad=requires_grad)

    @staticmethod
    def from_dtensor(tensor: DTensor, placement: RaggedShard | Sequence[Placement]) -> RaggedTensor:
        """Redistributes a `Shard(0)`, replicated or ragged DTensor; differentiable."""
        placements = axis_placements(tensor.device_mesh, placement)
        _check_ranks(tensor.device_mesh, placements, tensor.shape)
        return _Relayout.apply(tensor, placements)

    @staticmethod
    def from_local(*args: Any, **kwargs: Any) -> DTensor:
        """Raises: a span does not tell the shape."""
        raise RaggedOpError("from_local cannot know the global shape; use RaggedTensor.from_span")

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's span: the aliased tensor itself where no gradient is recorded."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise RaggedOpError(f"to_local: grad_placements can only be {self.placements}")
        if torch.is_grad_enabled() and self.requires_grad:
            return _ToLocal.apply(self)
        return self._local_tensor

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Moves the tensor to other spans of the same mesh; differentiable.

        Only elements that a rank lacks travel: one all-to-all of the parts in which old and new
        spans meet, or an all-gather of the spans as they are. `async_op` is accepted and waits.

        Args:
            device_mesh: the tensor's own.
            placements: RaggedShard, `Shard(0)` or `Replicate()` on the last axis.
            async_op: has no effect.
            forward_dtype: cast to it before the move.
            backward_dtype: not supported.

        Raises:
            RaggedOpError: another mesh, or a placement that is none of the three.
        """
        if placements is None or backward_dtype is not None:
            raise RaggedOpError("redistribute needs placements, and takes no backward_dtype")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise RaggedOpError(f"redistribute to another mesh, {device_mesh}")
        wanted = axis_placements(self.device_mesh, placements)
        if isinstance(wanted[-1], Shard) and wanted[-1].dim < 0:
            wanted = (*wanted[:-1], Shard(wanted[-1].dim + self.ndim))
        _check_ranks(self.device_mesh, wanted, self.shape)
        source = self if forward_dtype is None else self.to(forward_dtype)
        if wanted == self.placements:
            same: Any = source.view(self.shape)
            return same
        return _Relayout.apply(source, wanted)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor on every rank; a collective, and differentiable."""
        full = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return full.to_local(grad_placements=grad_placements)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """An alias outside of autograd; setting it copies, since the span cannot be exchanged."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, RaggedTensor) or value.dtype != self.dtype:
            raise RaggedLayoutError(
                f"p.data = {type(value).__name__} of {value.dtype}: expected a RaggedTensor of "
                f"{self.dtype}; use p.copy_() for values, module.to() for dtypes"
            )
        match_layout("p.data = q", value, self._spec)
        self._local_tensor.copy_(value._local_tensor)

    def data_ptr(self) -> int:
        """0, as that of a DTensor; torch's is the span's offset where its storage starts earlier.

        Checkpoints that stage take another number for memory to copy.
        """
        return 0

    def share_memory_(self) -> Tensor:  # type: ignore[override]
        """Raises: the span is a part of a group's buffer."""
        raise RaggedOpError("share_memory_ is not defined for a RaggedShard tensor")

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, local_tensor={self._local_tensor}, "
            f"device_mesh={self.device_mesh}, placements={self.placements})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        # torch's copies the whole storage below the span, and the mesh.
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; call detach() first")
        made = new_dtensor(
            type(self), self._local_tensor.clone(), self._spec, requires_grad=self.requires_grad
        )
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):  # type: ignore[no-untyped-def]
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return new_dtensor(
            RaggedTensor, made._local_tensor, made._spec, requires_grad=made.requires_grad
        )

    def _stable_hash_for_caching(self) -> str:
        # DTensor's ignores the local shape, so that ranks would load one another's compiled code.
        own = f"{super()._stable_hash_for_caching()}{tuple(self._local_tensor.shape)}"
        return hashlib.blake2b(f"{own}{self.placements}".encode(), digest_size=16).hexdigest()

    # -- torch.distributed.checkpoint's protocol -------------------------------------------------

    def _boxes(self) -> list[Box]:
        numel, rank = self.numel(), own_rank(self.device_mesh)
        if numel == 0 and rank == 0:  # or the checkpoint would not know the tensor
            return [((0,) * self.ndim, tuple(self.shape))]
        return boxes(self.shape, *own_span(self._spec))

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self._boxes()
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        low, _ = own_span(self._spec)
        for offsets, sizes in self._boxes():
            if tuple(index.offset) == offsets:
                steps = zip(offsets, self.stride(), strict=True)
                start = sum(offset * stride for offset, stride in steps) - low
                return self._local_tensor[start : start + math.prod(sizes)].view(sizes)
        raise RaggedLayoutError(f"{index.fqn}: no box starts at {index.offset} on this rank")


def distribute_ragged(
    full_tensor: Tensor,
    mesh: DeviceMesh,
    placement: RaggedShard | Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> RaggedTensor:
    """Shards a full tensor, as torch's `distribute_tensor` does.

    Args:
        full_tensor: the values, or their shape and dtype on ranks that receive.
        mesh: the ranks.
        placement: a RaggedShard, or one placement an axis with a RaggedShard last.
        src_data_rank: the rank of each axis that has the values; `None`: every rank has them, and
            nothing travels.
    """
    placements = axis_placements(mesh, placement)
    _check_ranks(mesh, placements, full_tensor.shape)
    full = full_tensor.detach()
    if not full.is_meta:
        full = full.to(mesh.device_type)
    shape, spec = full.shape, spec_of(mesh, placements, full.shape, full.dtype)
    if src_data_rank is None or full.is_meta:
        local = own_part(full, spec).clone()
    else:
        ranks, flat = mesh.size(mesh.ndim - 1), full.reshape(-1)
        numel = shape.numel()
        source = [(0, numel if rank == src_data_rank else 0) for rank in range(ranks)]
        held = flat if own_rank(mesh) == src_data_rank else flat[:0]
        local = _move(held, source, spans_of(placements[-1], shape, ranks), mesh)
        for axis in range(mesh.ndim - 1):
            dist.broadcast(local, group=mesh.get_group(axis), group_src=src_data_rank)
    return RaggedTensor.from_span(
        local, mesh, placements, shape, requires_grad=full_tensor.requires_grad
    )


def _check_ranks(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
    shard, ranks = placements[-1], mesh.size(mesh.ndim - 1)
    if isinstance(shard, RaggedShard):
        blocks = -(-math.prod(shape) // shard.block_numel)
        if len(shard.local_units) != ranks or sum(shard.local_units) != blocks:
            raise RaggedLayoutError(
                f"{shard} does not fit: expected {blocks} blocks of {shard.block_numel} elements "
                f"for shape {tuple(shape)} on {ranks} ranks"
            )


def install_distribute_tensor() -> None:
    """Teaches `set_model_state_dict` and its kin (`full_state_dict=True`) this placement.

    They call torch's functions by name, so the names are replaced; other placements go to torch's
    functions as before. Calling it again changes nothing.
    """
    from torch.distributed import _state_dict_utils, tensor
    from torch.distributed.tensor import _api

    plain_distribute, plain_fill = tensor.distribute_tensor, _state_dict_utils._distribute_tensors
    if getattr(plain_distribute, "_knows_ragged", False):
        return

    def distribute_tensor(tensor, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        if device_mesh is not None and placements and isinstance(placements[-1], RaggedShard):
            return distribute_ragged(tensor, device_mesh, placements, **kwargs)
        return plain_distribute(tensor, device_mesh, placements, **kwargs)

    def _distribute_tensors(local_state_dict, keys, device, pg=None):  # type: ignore[no-untyped-def]
        for key in keys:
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and isinstance(pair[0], RaggedTensor):
                local_state_dict[key] = _fill(*pair)
        plain_fill(local_state_dict, keys, device, pg)

    distribute_tensor._knows_ragged = True  # type: ignore[attr-defined]
    for module in (tensor, _api, _state_dict_utils):
        module.distribute_tensor = distribute_tensor  # type: ignore[attr-defined]
    _state_dict_utils._distribute_tensors = _distribute_tensors


def _fill(state: RaggedTensor, full: Tensor) -> RaggedTensor:
    own = own_part(full.detach(), state._spec)
    if state.is_meta:
        return rewrap(state, own.clone())
    state._local_tensor.copy_(own)
    return state


def _register() -> None:
    """What torch looks up by class: `torch.load`, and the foreach form by default."""
    torch.serialization.add_safe_globals([RaggedShard, RaggedTensor, TensorMeta, DTensorSpec])
    for types in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if RaggedTensor not in types:
            types.append(RaggedTensor)  # type: ignore[arg-type]


choose_path(RaggedTensor)
_register()
ragged_optim.install()
