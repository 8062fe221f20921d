"""Spans, and their ops that need no other rank: elementwise, casts, copies, views, random numbers.

`SpanTensor` is a DTensor with a 1-D span inside. Elementwise ops run on the span alone; operands
are never redistributed on the way, so that another layout is an error. `LOCAL` is this file's part
of the table in `ragged_ops.py`.

[Note: Random numbers] `normal_` and its kin draw the full tensor and keep the own span. That equals
one process bit for bit where all ranks have the same generator state, and costs one full tensor for
the time of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from odc.fsdp.ragged_shard import (
    RaggedLayoutError,
    RaggedOpError,
    RaggedShard,
    meta_of,
    overlap,
    own_part,
    own_span,
    retyped,
    shard_of,
    spec_of,
)

Args = Sequence[Any]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]

new_dtensor: Callable[..., Any] = torch.Tensor._dtensor__new__  # type: ignore[attr-defined]


class SpanTensor(DTensor):
    """A DTensor with a 1-D span inside; users meet its subclass, whose ops are the table's."""


def rewrap(like: SpanTensor, local: Tensor, spec: DTensorSpec | None = None) -> Any:
    """A span of the class of `like`, and of its layout unless another is given."""
    spec = retyped(like._spec if spec is None else spec, local.dtype)
    return new_dtensor(type(like), local, spec, requires_grad=False)


# -- operands ------------------------------------------------------------------------------------


def refuse(func: Any) -> RaggedOpError:
    return RaggedOpError(
        f"{func.name()} is not defined for a RaggedShard tensor: it would need elements that other "
        "ranks hold; use full_tensor() for the whole, to_local() for this rank's span"
    )


def match_layout(name: str, tensor: SpanTensor, spec: DTensorSpec) -> None:
    """Raises if a tensor does not lie as `spec` says."""
    other = tensor._spec
    one, two = meta_of(other), meta_of(spec)
    if one.shape != two.shape or other.placements != spec.placements or other.mesh != spec.mesh:
        raise RaggedLayoutError(
            f"{name}: expected shape {tuple(two.shape)} and {spec.placements}, got "
            f"{tuple(one.shape)} and {other.placements}; redistribute one of them"
        )
    if one.dtype == two.dtype:
        tensor._spec = spec  # the next comparison is by identity


def operand(func: Any, value: Any, spec: DTensorSpec) -> Any:
    """What an elementwise op on a span sees of an operand."""
    if isinstance(value, SpanTensor):
        if value._spec is not spec:
            match_layout(func.name(), value, spec)
        return value._local_tensor
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        if value.dim() == 0:
            replicated = all(p.is_replicate() for p in value.placements)
            return value._local_tensor if replicated else value.full_tensor()
        if value.shape == meta_of(spec).shape and all(p.is_replicate() for p in value.placements):
            return own_part(value._local_tensor, spec)
    elif value.dim() == 0:
        return value
    raise RaggedLayoutError(
        f"{func.name()}: a RaggedShard tensor of shape {tuple(meta_of(spec).shape)} with a "
        f"{type(value).__name__} of shape {tuple(value.shape)}; expected a RaggedTensor that lies "
        "alike, or a scalar (distribute_ragged makes one of a full tensor)"
    )


def operands(
    func: Any, args: Args, kwargs: Kwargs, spec: DTensorSpec
) -> tuple[list[Any], dict[str, Any]]:
    if kwargs:
        kwargs = {key: operand(func, value, spec) for key, value in kwargs.items()}
    return [operand(func, value, spec) for value in args], kwargs


def first_span(func: Any, args: Args, kwargs: Kwargs) -> SpanTensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, SpanTensor):
            return value
    raise refuse(func)


# -- handlers: one tensor ------------------------------------------------------------------------


def pointwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    lead = first_span(func, args, kwargs)
    spec, local, target = lead._spec, lead._local_tensor, kwargs.get("out")
    args, kwargs = operands(func, args, kwargs, spec)
    out = func(*args, **kwargs)
    if isinstance(target, SpanTensor):
        return target
    if not isinstance(out, Tensor) or out.shape != local.shape:
        raise refuse(func)
    if out.dtype != local.dtype:
        spec = retyped(spec, out.dtype)
    return new_dtensor(type(lead), out, spec, requires_grad=False)


def _in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target = args[0]
    if not isinstance(target, SpanTensor):
        raise refuse(func)
    args, kwargs = operands(func, args, kwargs, target._spec)
    func(*args, **kwargs)
    return target


def _put(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`tensor[mask] = number`, whose mask lies alike."""
    target, indices, value = args[:3]
    mask = indices[0] if len(indices) == 1 else None
    masked = isinstance(mask, SpanTensor) and mask.dtype == torch.bool
    plain = isinstance(target, SpanTensor) and not (value.dim() or isinstance(value, DTensor))
    if not masked or not plain:
        raise refuse(func)
    local = operand(func, mask, target._spec)
    func(target._local_tensor, [local], value, *args[3:])
    return target


def _like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Clones, casts and `*_like`: a span has no memory format."""
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return rewrap(args[0], func(args[0]._local_tensor, *args[1:], **kwargs))


def _new_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`new_zeros` and its kin: the same shape is a span, another one a plain tensor."""
    local = args[0]._local_tensor
    if tuple(args[1]) != tuple(args[0].shape):
        return func(local, *args[1:], **kwargs)
    if func.name() == "aten::new_empty_strided":
        return rewrap(args[0], local.new_empty(local.shape, **kwargs))
    return rewrap(args[0], func(local, local.shape, *args[2:], **kwargs))


def _copy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, source = args[:2]
    if not isinstance(target, SpanTensor):
        raise RaggedLayoutError(
            f"{func.name()} from a RaggedTensor into a {type(target).__name__}: copy from "
            "full_tensor() for the whole, from to_local() for this rank's span"
        )
    if not isinstance(source, DTensor) and source.shape == target.shape:
        local = own_part(source, target._spec)
    else:
        local = operand(func, source, target._spec)
    func(target._local_tensor, local, *args[2:], **kwargs)
    return target


def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Any reshape of a contiguous tensor keeps its flat span."""
    tensor, shape = args[0], list(args[1])
    spec, numel = tensor._spec, tensor.numel()
    if shape.count(-1) == 1 and (rest := -math.prod(shape)):
        shape[shape.index(-1)] = numel // rest
    if -1 in shape or math.prod(shape) != numel:
        raise RaggedLayoutError(f"{func.name()}: {list(args[1])} has not {numel} elements")
    made = spec_of(spec.mesh, spec.placements, shape, meta_of(spec).dtype)
    return rewrap(tensor, tensor._local_tensor.view(-1), made)


def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, index = args
    if dim not in (0, -tensor.ndim):
        raise refuse(func)
    if not -tensor.shape[0] <= index < tensor.shape[0]:
        raise IndexError(f"{func.name()}: {index} is out of range for {tensor.shape[0]} rows")
    index %= tensor.shape[0]
    return _rows(tensor, index, index + 1, tensor.shape[1:])


def _slice(func: Any, args: Args, kwargs: Kwargs) -> Any:
    rest: Args = (0, None, None, 1)[len(args) - 1 :]
    tensor, dim, start, end, step = (*args, *rest)
    if dim not in (0, -tensor.ndim) or step != 1:
        raise refuse(func)
    low, high, _ = slice(start, end).indices(tensor.shape[0])
    return _rows(tensor, low, max(low, high), (max(low, high) - low, *tensor.shape[1:]))


def _rows(tensor: SpanTensor, first: int, last: int, shape: Sequence[int]) -> SpanTensor:
    """Rows `[first, last)` of dim 0, a view: the bounds of the ranks are clipped to them."""
    spec, row = tensor._spec, tensor.numel() // max(tensor.shape[0], 1)
    low, high = first * row, last * row
    shard = shard_of(spec)
    bounds = [min(max(b, low), high) - low for b in shard.bounds(tensor.numel())]
    placed = (*spec.placements[:-1], RaggedShard.from_bounds(bounds, shard.block_numel))
    own = own_span(spec)
    start = min(max(low, own[0]), own[1]) - own[0]
    local = tensor._local_tensor[start : start + overlap((low, high), own)]
    return rewrap(tensor, local, spec_of(spec.mesh, placed, shape, local.dtype))


def _random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """In place; [Note: Random numbers]."""
    target = args[0]
    local = target._local_tensor
    if not local.is_meta:
        full = local.new_empty(target.shape)
        local.copy_(own_part(func(full, *args[1:], **kwargs), target._spec))
    return target


def _random_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    spec = args[0]._spec
    full = args[0]._local_tensor.new_empty(args[0].shape)
    return rewrap(args[0], own_part(func(full, *args[1:], **kwargs), spec).clone())


def _same_size(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return args[0].shape == args[1].shape


def _on_local(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Questions about the memory."""
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _never(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return False


# -- their part of the table -----------------------------------------------------------------------

_POINTWISE = """
abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
clamp_min copysign cos div eq erf erfinv exp exp2 expm1 fill floor floor_divide fmod frac ge gt
hypot isfinite isinf isnan le lerp log log10 log1p log2 logical_and logical_not logical_or
logical_xor lt masked_fill maximum minimum mul nan_to_num ne neg pow reciprocal relu remainder
round rsqrt sigmoid sign signbit sin sqrt square sub tanh trunc where xlogy zero
alias detach lift_fresh _pin_memory
"""
_LIKES = "clone _to_copy empty_like full_like ones_like zeros_like"
_NEWS = "new_empty new_empty_strided new_full new_ones new_zeros"
_RANDOM = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"

LOCAL: dict[str, Handler] = {
    **dict.fromkeys(_POINTWISE.split(), pointwise),
    **dict.fromkeys((f"{name}_" for name in _POINTWISE.split()), _in_place),
    **dict.fromkeys(_LIKES.split(), _like),
    **dict.fromkeys(_NEWS.split(), _new_like),
    **dict.fromkeys(_RANDOM.split(), _random),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _random_like),
    **dict.fromkeys(("view", "_unsafe_view"), _view),
    **dict.fromkeys(("is_pinned", "record_stream"), _on_local),
    "copy_": _copy,
    "index_put_": _put,
    "select": _select,
    "slice": _slice,
    "is_same_size": _same_size,
    "_has_compatible_shallow_copy_type": _never,
}
