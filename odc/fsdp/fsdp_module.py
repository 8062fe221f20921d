"""`FSDPModule`: what a sharded module can do besides what its own class does.

The methods are those of PyTorch's `torch.distributed.fsdp.FSDPModule` (torch 2.13). They change the
`Behaviour` of the module's groups or ask its runtime; sharding itself is in `fully_shard.py`.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from odc.fsdp.managed import STATE

if TYPE_CHECKING:
    from odc.fsdp.fully_shard import FullyShardState
    from odc.fsdp.sharded import ShardedGroup

_CLASSES: dict[type, type] = {}


def state_of(module: nn.Module) -> FullyShardState | None:
    """The state of a module that was given to `fully_shard`, else `None`."""
    return module.__dict__.get(STATE)


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, state: FullyShardState) -> None:
        self._state = state

    def wait(self) -> None:
        """Waits for the gather; the module then holds its full parameters."""
        if self._state.group is not None and self._state.runtime is not None:
            self._state.runtime.wait(self._state.group)


_INIT_NEW = [True]  # whether an instance that a sharded class makes is initialized


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Inside, a sharded class called as a class makes an instance without calling `__init__`."""
    before, _INIT_NEW[0] = _INIT_NEW[0], False
    try:
        yield
    finally:
        _INIT_NEW[0] = before


class FSDPModule:
    """What a sharded module can do besides what its own class does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the original class: containers make one when they are sliced."""
        original: Any = cls.__mro__[2]
        return original(*args, **kwargs) if _INIT_NEW[0] else original.__new__(original)

    def _states(self, recurse: bool = True) -> list[FullyShardState]:
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        found = (state_of(module) for module in modules)
        return list(dict.fromkeys(state for state in found if state is not None))

    def _own(self) -> FullyShardState:
        assert isinstance(self, nn.Module)
        state = state_of(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    _get_fsdp_state = _own

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters (not those of nested calls)."""
        assert isinstance(self, nn.Module)
        state = self._own()
        runtime = state.begin(self)
        runtime.check_materialized()
        if state.group is not None:
            runtime.start(state.group)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Gives this module's full parameters up."""
        state = self._own()
        if state.group is not None and state.runtime is not None:
            state.runtime.wait(state.group)
            state.group.reshard()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`.to`, `.to_empty` and the like change sharded parameters, which come back after it."""
        self.reshard()
        made = super()._apply(*args, **kwargs)  # type: ignore[misc]
        state = self._own()
        if state.group is not None:
            state.group.adopt()
        return made

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether a backward ends with a reduction; otherwise gradients add up unreduced."""
        for state in self._states(recurse) if not requires_gradient_sync else ():
            if state.group is not None:
                state.group.buffer.widen_gradients()
        self._behave(recurse, requires_sync=requires_gradient_sync)
        self._behave(recurse, requires_all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether a reduction on a mesh with replicas goes over these as well."""
        self._behave(recurse, requires_all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the full parameters are given up between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in self._states(recurse):
            state.auto_reshard = False
        self._behave(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the full parameters are given up after a backward."""
        self._behave(recurse, reshard_after_backward=reshard_after_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of gradients is divided by, in place of the number of ranks."""
        self._behave(False, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without gradient takes part in a reduction, as zeros."""
        self._behave(recurse, fill_unused=reduce_scatter_unused_params)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this module's backward needs its parameters; an embedding's does not."""
        self._behave(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Modules whose gathers start in forward as soon as this one's is there.

        In place of the one that followed in the last pass, and whatever `dbuffer_size` is. All
        ranks must choose the same.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._behave(False, ahead_forward=_groups_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same for backward."""
        self._behave(False, ahead_backward=_groups_of(modules))

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """A function of the flat reduced gradients, which it may change in place.

        It is called once for every sub-buffer of this module, after the division, and on the stream
        of the backward.

        Raises:
            NotImplementedError: a stream is given.
            ValueError: one is given on a mesh with replicas.
        """
        group = self._own().group
        if stream is not None and group is not None and group.mesh.ndim > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        if stream is not None:
            raise NotImplementedError("stream: enter `with torch.cuda.stream(...)` in the hook")
        self._behave(False, reduce_hook=hook)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises: gathers and reductions are in place in planned buffers."""
        raise NotImplementedError(
            "set_custom_all_gather: gathers write into planned buffers, so none can be allocated "
            "for them; shard over a mesh whose process group has a backend of your own"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises: gathers and reductions are in place in planned buffers."""
        raise NotImplementedError(
            "set_custom_reduce_scatter: reductions read planned buffers and add in rank order; "
            "shard over a mesh whose process group has a backend of your own, or change what was "
            "reduced with set_all_reduce_hook"
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What gathers wait for in place of the work that is queued when a forward begins.

        They wait for all of that anyway, as they run in the order of the current stream; so this
        only makes that stream wait for an event of another one. On the CPU there are no streams.
        """
        group = self._own().group
        if group is not None and group.buffer.device.type != "cpu":
            torch.accelerator.current_stream().wait_event(event)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to change: gradients are always added up and then divided."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing to change on the CPU, where collectives have no buffers beside the planned ones.

        Raises:
            NotImplementedError: on another device.
        """
        group = self._own().group
        if enable and group is not None and group.buffer.device.type != "cpu":
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm: the planned buffers are "
                "torch.cuda memory; leave it off, as there are no staging buffers to save"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raises: the planned buffers are no symmetric memory."""
        raise NotImplementedError(
            "set_symm_mem_for_comm: the planned buffers are no symmetric memory; leave it out, "
            "gathers have no staging copy that it could save"
        )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many groups' gradients may wait to be reduced: one, beside those that come.

        Raises:
            TypeError, ValueError: it is no positive integer.
            NotImplementedError: it is more than one.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        if max_input_buffers > 1:
            raise NotImplementedError(
                f"max_input_buffers={max_input_buffers}: one reduction is in flight at a time; "
                "shard larger modules to have fewer of them"
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Raises, if enabled: calls of one process group are in one order.

        Raises:
            NotImplementedError: it is to be enabled.
        """
        if enable:
            raise NotImplementedError(
                "set_separate_reduce_scatter_group: gathers and reductions share the mesh's "
                "process group; a gather that is started ahead overlaps with the backward as it is"
            )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to change: gathers are always asynchronous and allocate nothing."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for its reductions."""
        assert isinstance(self, nn.Module)
        self._own().begin(self).is_last_backward = is_last_backward

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: shard all, drop its gradients.

        Raises:
            RuntimeError: this is not the root.
        """
        runtime = self._own().runtime
        if runtime is not None and runtime.model is not self:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if runtime is not None:
            runtime.reset()

    def _behave(self, recurse: bool, **changes: Any) -> None:
        for state in self._states(recurse):
            for name, value in changes.items():
                if state.group is not None:
                    setattr(state.group.behaviour, name, value)


def _groups_of(modules: Iterable[Any]) -> list[ShardedGroup]:
    groups = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        groups.append(module._own().group)
    return [group for group in groups if group is not None]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Nothing to share: models have no streams of their own, and one pool a device.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")


def sharded_class(cls: type) -> type:
    if cls not in _CLASSES:
        body = {"__deepcopy__": _refuse_deepcopy}
        _CLASSES[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)
    return _CLASSES[cls]


def _refuse_deepcopy(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method gather and give up parameters as `forward` does; nothing where not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)
    (hooks,) = [h for h in module._own().hooks if h.unit.module is module]

    @functools.wraps(original)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks._pre_forward(self, args, kwargs)
        return hooks._post_forward(self, args, kwargs, original(*args, **kwargs))

    setattr(module, method_name, types.MethodType(wrapped, module))
