"""The ops of a span: a closed table for DTensors that lie under a RaggedShard.

Ops that need no other rank are in `ragged_local.py`. Here are norms and sums of whole tensors,
which give replicated DTensors, by one all-reduce for all tensors of a list, and ops on lists.
Whatever is not in the table raises and names the op: nothing falls into DTensor's rules, which take
an unknown placement for a replicated one without a word.

[Note: Before torch 2.12] DTensor's fast path there never calls a subclass's `__torch_dispatch__`.
The class then gets a `__torch_function__` that runs the call under a dispatch mode, which comes
before the fast path. Which of both holds is tried once, not read off a version. Ops issued by
autograd's own C++ code pass a mode by: gradients must be assigned from Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odc.fsdp.ragged_local import (
    LOCAL,
    Args,
    Handler,
    Kwargs,
    SpanTensor,
    first_span,
    new_dtensor,
    operand,
    operands,
    pointwise,
    refuse,
    rewrap,
)
from odc.fsdp.ragged_shard import RaggedLayoutError, RaggedShard, spec_of

_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN

# -- handlers: reductions ------------------------------------------------------------------------


def _all_reduce(value: Tensor, spec: DTensorSpec, op: Any) -> Tensor:
    dist.all_reduce(value, op=op, group=spec.mesh.get_group(spec.mesh.ndim - 1))
    return value


def _extreme(values: Tensor, spec: DTensorSpec, op: Any) -> Tensor:
    """All-reduces 1-D values by MAX or MIN. NaN wins, whatever a backend makes of comparing it."""
    if not values.is_floating_point():
        return _all_reduce(values, spec, op)
    lost = values.isnan()
    flags = lost.to(values.dtype) * (1 if op == _MAX else -1)
    both = _all_reduce(torch.cat([values.masked_fill(lost, 0.0), flags]), spec, op)
    values, flags = both.chunk(2)
    return values.masked_fill(flags != 0, math.nan)


def _finish(
    values: list[Tensor], tensors: Args, over: Callable[[Tensor, DTensorSpec], Tensor]
) -> list[DTensor]:
    """Results of this rank's spans -> replicated 0-d DTensors, by one all-reduce for all.

    They are not left partial: torch's `item()` of a partial DTensor is silently this rank's part.
    """
    groups: dict[Any, list[int]] = {}
    for position, (value, tensor) in enumerate(zip(values, tensors, strict=True)):
        groups.setdefault((tensor._spec.mesh, value.dtype), []).append(position)
    results: list[Any] = [None] * len(values)
    for (mesh, dtype), positions in groups.items():
        whole = over(torch.stack([values[p] for p in positions]), tensors[positions[0]]._spec)
        spec = spec_of(mesh, (Replicate(),) * mesh.ndim, (), dtype)
        for position, value in zip(positions, whole.unbind(), strict=True):
            results[position] = new_dtensor(DTensor, value, spec, requires_grad=False)
    return results


def _of_nothing(dtype: torch.dtype, largest: bool) -> Any:
    """The identity of max or min."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    if dtype == torch.bool:
        return not largest
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _check_whole(func: Any, tensor: SpanTensor, dims: Any, keepdim: bool) -> None:
    """Raises unless a reduction is over all dims and drops them."""
    dims = [dims] if isinstance(dims, int) else list(dims or range(tensor.ndim))
    if keepdim or {dim % max(tensor.ndim, 1) for dim in dims} != set(range(tensor.ndim)):
        raise refuse(func)


def _reduce(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, name = args[0], func._schema.name.removeprefix("aten::")
    if name in ("max", "min") and len(args) > 1:
        if func._overloadname == "other":
            return pointwise(func, args, kwargs)
        raise refuse(func)
    _check_whole(func, tensor, *(*args[1:], *(None, False)[len(args) - 1 :]))
    local, spec = tensor._local_tensor, tensor._spec
    if name in ("sum", "mean"):
        value = local.sum(**kwargs)
        if name == "mean":
            value = value / tensor.numel() if value.is_floating_point() else local.mean(**kwargs)
        return _finish([value], [tensor], lambda v, spec: _all_reduce(v, spec, _SUM))[0]
    if name in ("any", "all"):
        flag = (local.any() if name == "any" else local.all()).to(torch.uint8)
        return _all_reduce(flag, spec, _MAX if name == "any" else _MIN).to(torch.bool)
    largest = name.endswith("max")
    if local.numel():
        value = local.amax() if largest else local.amin()
    else:
        value = local.new_full((), _of_nothing(local.dtype, largest))
    op = _MAX if largest else _MIN
    return _finish([value], [tensor], lambda v, spec: _extreme(v, spec, op))[0]


def _equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    one, two = operands(func, args, {}, first_span(func, args, {})._spec)[0]
    same = torch.tensor(int(torch.equal(one, two)), device=one.device)
    return bool(_all_reduce(same, first_span(func, args, {})._spec, _MIN).item())


def _item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if args[0].numel() != 1:
        raise refuse(func)
    return args[0].full_tensor().item()


def _norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    rest: Args = (2, None, False)[len(args) - 1 :]
    tensor, order, dims, keepdim = (*args, *rest)
    _check_whole(func, tensor, dims, keepdim)
    local, dtype = tensor._local_tensor, kwargs.get("dtype")
    value = func(local, order, **kwargs) if local.numel() else _norm_of_nothing(local, order, dtype)
    return _finish([value], [tensor], _over_ranks(order))[0]


def _norm_of_nothing(local: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    return local.new_full((), math.inf if order < 0 else 0.0, dtype=dtype)


def _over_ranks(order: float) -> Callable[[Tensor, DTensorSpec], Tensor]:
    """How norms of spans become the norm of the whole."""

    def reduce(norms: Tensor, spec: DTensorSpec) -> Tensor:
        if math.isinf(order):
            return _extreme(norms, spec, _MAX if order > 0 else _MIN)
        if order == 0:
            return _all_reduce(norms, spec, _SUM)
        wide = norms.float() if norms.element_size() < 4 else norms
        return (_all_reduce(wide**order, spec, _SUM) ** (1 / order)).to(norms.dtype)

    return reduce


# -- handlers: lists -----------------------------------------------------------------------------

_Rest = dict[type, list[int]]


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _lead(func: Any, args: Sequence[Any]) -> Sequence[Tensor]:
    for value in args:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return value
    raise refuse(func)


def _kinds(lead: Sequence[Tensor]) -> _Rest:
    """Positions by what is there: ragged, other DTensors, plain tensors."""
    found: _Rest = {}
    for position, tensor in enumerate(lead):
        kind = next(t for t in (SpanTensor, DTensor, Tensor) if isinstance(tensor, t))
        found.setdefault(kind, []).append(position)
    return found


def _pick(args: Sequence[Any], count: int, positions: list[int]) -> list[Any]:
    return [[a[i] for i in positions] if _is_list(a, count) else a for a in args]


def _by_kind(func: Any, args: Args, kwargs: Kwargs, handler: Callable[..., Any]) -> Any:
    """Runs a list op on each kind of tensor by itself: position by position nothing mixes."""
    lead = _lead(func, args)
    kinds = _kinds(lead)
    if len(kinds) == 1 and SpanTensor in kinds:
        return handler(func, lead, args, kwargs)
    results: list[Any] = [None] * len(lead)
    for kind, positions in kinds.items():
        picked = _pick(args, len(lead), positions)
        if kind is SpanTensor:
            out = handler(func, [lead[i] for i in positions], picked, kwargs)
        elif any(isinstance(leaf, SpanTensor) for leaf in tree_leaves(picked)):
            raise RaggedLayoutError(f"{func.name()}: {kind.__name__} with a RaggedTensor beside it")
        else:
            out = func(*picked, **kwargs)
        for position, result in zip(positions, out or [], strict=False):
            results[position] = result
    return results if func._schema.returns else None


def _each(func: Any, lead: Any, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise, position by position: `_foreach_*` and the fused optimizers."""
    specs = [tensor._spec for tensor in lead]
    local_args = []
    for value in args:
        if _is_list(value, len(specs)):
            pairs = zip(value, specs, strict=True)
            local_args.append([operand(func, item, spec) for item, spec in pairs])
        else:
            local_args.append(operand(func, value, specs[0]))
    kwargs = {key: operand(func, value, specs[0]) for key, value in kwargs.items()}
    out = func(*local_args, **kwargs)
    if not out:
        return None
    for result, tensor in zip(out, lead, strict=True):
        if result.shape != tensor._local_tensor.shape:
            raise refuse(func)
    return [rewrap(tensor, result) for result, tensor in zip(out, lead, strict=True)]


def _each_norm(func: Any, lead: Any, args: Args, kwargs: Kwargs) -> Any:
    order = args[1] if len(args) > 1 else 2
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    locals_ = [tensor._local_tensor for tensor in lead]
    filled = [local for local in locals_ if local.numel()]
    found = iter(func(filled, *args[1:], **kwargs) if filled else ())
    norms = [
        next(found) if local.numel() else _norm_of_nothing(local, order, dtype) for local in locals_
    ]
    return _finish(norms, lead, _over_ranks(order))


def _unscale(func: Any, lead: Any, args: Args, kwargs: Kwargs) -> None:
    """GradScaler's check: an inf on one rank is an inf on all."""
    found_inf = args[1]
    _each(func, lead, args, kwargs)
    for mesh, tensor in {tensor._spec.mesh: tensor for tensor in lead}.items():
        assert mesh is not None
        _all_reduce(operand(func, found_inf, tensor._spec), tensor._spec, _MAX)


# -- the table -----------------------------------------------------------------------------------

_REDUCTIONS = "all amax amin any max mean min sum"
_FUSED = "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_"
_REFUSED = {("view", "dtype"), ("bernoulli_", "Tensor")}

_TABLE: dict[str, Handler] = {
    **LOCAL,
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    "equal": _equal,
    "linalg_vector_norm": _norm,
    "_local_scalar_dense": _item,
}
_LISTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_FUSED.split(), _each),
    "_foreach_norm": _each_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
_FOUND: dict[Any, Handler] = {}


def _find(func: Any) -> Handler:
    """The handler of an overload, by the op's name; kept for the next time."""
    name = func._schema.name.removeprefix("aten::")
    has_out = any(a.is_out for a in func._schema.arguments) and _TABLE.get(name) is not pointwise
    if has_out or (name, func._overloadname) in _REFUSED:
        raise refuse(func)
    each = _LISTS.get(name) or (_each if name.startswith("_foreach_") else None)
    if each is not None:
        _FOUND[func] = lambda func, args, kwargs: _by_kind(func, args, kwargs, each)
    elif name in _TABLE:
        _FOUND[func] = _TABLE[name]
    else:
        raise refuse(func)
    return _FOUND[func]


def run(func: Any, args: Args, kwargs: Kwargs | None) -> Any:
    """Runs an op by the table."""
    return (_FOUND.get(func) or _find(func))(func, args, kwargs or {})


# -- torch ---------------------------------------------------------------------------------------


class _Table(TorchDispatchMode):
    """[Note: Before torch 2.12]"""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if any(isinstance(leaf, SpanTensor) for leaf in tree_leaves((args, kwargs))):
            return run(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _torch_function(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
    with torch._C.DisableTorchFunctionSubclass(), _Table():
        return func(*args, **(kwargs or {}))


def _reaches_table(cls: type[SpanTensor]) -> bool:
    """Whether an op runs on the span; tried on one rank without a mesh."""
    spec = spec_of(None, (RaggedShard(1, [1]),), (1,), torch.float32)  # type: ignore[arg-type]
    probe = new_dtensor(cls, torch.ones(1), spec, requires_grad=False)
    try:
        probe.zero_()
    except Exception:  # whatever DTensor's own rules make of an unknown placement
        return False
    return probe._local_tensor.item() == 0


def choose_path(cls: type[SpanTensor]) -> None:
    """Makes ops on the class reach the table, by `__torch_function__` if nothing else does."""
    if not _reaches_table(cls):
        cls.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
        assert _reaches_table(cls), f"torch {torch.__version__} runs no op of a {cls.__name__}"
