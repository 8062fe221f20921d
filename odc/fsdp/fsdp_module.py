"""`FSDPModule`: what a sharded module can do besides what its own class does.

The methods are those of PyTorch's `torch.distributed.fsdp.FSDPModule` (torch 2.13). They change the
`Behaviour` of the module's groups or ask its runtime; sharding itself is in `fully_shard.py`.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from odc.fsdp.managed import STATE

if TYPE_CHECKING:
    from odc.fsdp.fully_shard import FullyShardState

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


class FSDPModule:
    """What a sharded module can do besides what its own class does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the original class: containers make one when they are sliced."""
        return cls.__mro__[2](*args, **kwargs)

    def _states(self, recurse: bool = True) -> list[FullyShardState]:
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        found = (state_of(module) for module in modules)
        return list(dict.fromkeys(state for state in found if state is not None))

    def _own(self) -> FullyShardState:
        (state,) = self._states(recurse=False)
        return state

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters (not those of nested calls)."""
        assert isinstance(self, nn.Module)
        state = self._own()
        runtime = state.begin(self)
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

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without gradient takes part in a reduction, as zeros."""
        self._behave(recurse, fill_unused=reduce_scatter_unused_params)

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
