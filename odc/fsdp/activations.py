"""What layers save for backward: counted, and kept, recomputed in backward, or moved home.

A *layer* is a child of an outermost ``ModuleList``. Its ``forward`` is wrapped, inside its hooks:
what a unit pins is pinned around whatever happens here, and a recompute runs the layer's own code
while its unit is in backward.

[Note: counting] Storages are counted by hooks on saved tensors, in passes that are worth it: the
first of its size, and those that are traced. A storage is counted from when it is first saved until
it dies, so that the peak is that of forward and backward together, in every mode. Hooks on saved
tensors turn autograd's own check of version counters off, so they make it themselves.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from odc.errors import ConfigError
from odc.fsdp.hooks import in_backward
from odc.memory.activations import MODES, ActivationAccount, ActivationProfile, CallProfile

if TYPE_CHECKING:
    from odc.fsdp.offload import Offloader
    from odc.memory.manager import MemoryManager

Forward = Callable[..., Any]
Around = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
# Arguments by which layers are given keys and values of earlier positions, to add to them.
_CACHES = frozenset(("cache", "past_key_values", "past_key_value", "layer_past"))


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model and their names: the called children of every outermost list."""
    found: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str, listed: bool) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if listed and type(child).forward is not nn.Module.forward:
                found.setdefault(child, path)
            else:
                walk(child, path, listed or isinstance(child, nn.ModuleList))

    walk(model, "", False)
    return [(name, layer) for layer, name in found.items()]


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Have ``around(module, forward, args, kwargs)`` called in place of a module's ``forward``.

    Hooks of the module stay outside. A copy of the module is wrapped as well.
    """
    inner: Any = module.forward
    own = getattr(inner, "__self__", None) is module
    function = inner.__func__ if own else inner

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = types.MethodType(function, self) if own else function
        return around(self, bound, args, kwargs)

    module.forward = types.MethodType(forward, module)


def checkpoint_layers(model: nn.Module) -> None:
    """Have every layer of a model recomputed in backward instead of keeping what it saved.

    ``odc.paged(..., activations="checkpoint")`` does it for paged models; this is for others. The
    recompute is that of ``torch.utils.checkpoint`` (non-reentrant), random numbers included.

    Raises:
        ConfigError: the model has no layers.
    """
    for _, layer in _layers_for(model, "checkpoint"):
        wrap_forward(layer, _run_checkpointed)


def _layers_for(model: nn.Module, mode: str) -> list[tuple[str, nn.Module]]:
    layers = find_layers(model)
    if not layers:
        raise ConfigError(
            f"activations: got {mode!r} for {type(model).__name__}, which has no nn.ModuleList of "
            "layers to do it for; use 'keep'"
        )
    return layers


def _run_checkpointed(
    layer: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a layer so that its backward recomputes it."""
    args, kwargs, cached = _without_caches(layer, args, kwargs)
    if cached or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    """Names of the positional arguments of a module's ``forward``."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _without_caches(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments of a layer less its caches while it is trained, and whether a cache is left.

    A recompute would add to a cache twice, and one keeps on the device what is moved home;
    transformers makes one in every forward that is not told to leave it.
    """
    kind: Any = type(layer)
    named = dict(zip(_names(kind), args, strict=False)) | kwargs
    found = {name for name in _CACHES & named.keys() if named[name] is not None}
    if not (found and layer.training and torch.is_grad_enabled()):
        return args, kwargs, bool(found)
    given = zip(args, (*_names(kind), *[""] * len(args)), strict=False)
    kwargs = {name: None if name in found else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if name in found else value for value, name in given), kwargs, False


class Kept:
    """A saved tensor that stays, with the check that autograd makes of those without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output holds the node that holds this
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        if self.tensor._version != self.version:
            raise modified(self.tensor.shape, self.version)
        return self.tensor


def modified(shape: torch.Size, version: int) -> RuntimeError:
    """The error of a saved tensor that was changed in place, as autograd words it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} is no longer at version {version}, at which "
        "it was saved"
    )


@dataclass(slots=True)
class _Live:
    """A storage that is alive: its number in a profile, and whether it is counted as kept."""

    storage: weakref.ref[Any]
    size: int
    profile: ActivationProfile
    index: int
    kept: bool = False


class Meter:
    """Counts the storages that autograd saves.

    Args:
        account: where they are counted.
        is_page: whether an address belongs to a page.
    """

    def __init__(self, account: ActivationAccount, is_page: Callable[[int], bool]) -> None:
        self.account = account
        self.is_page = is_page
        self.active = False  # the pass that runs, or ran last, is measured
        self.profile = ActivationProfile(0)
        self.call: CallProfile | None = None  # of the layer that runs
        self.constant: set[int] = set()  # buffers and batches, which live anyway
        self._live: dict[int, _Live] = {}

    def note_constants(self, model: nn.Module, inputs: Any) -> None:
        """A pass begins; ``inputs`` are the caller's."""
        given = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.is_leaf]
        self.constant = {t.untyped_storage()._cdata for t in (*model.buffers(), *given)}

    def begin(self, tokens: int) -> None:
        """The forward of a pass that is measured begins."""
        self.account.begin()
        self.active = True
        self.call = None
        self.profile = ActivationProfile(tokens)

    def end(self) -> None:
        """The forward is over; what is saved from now on is so in a recompute."""
        largest = self.account.profile
        if largest is None or self.profile.tokens >= largest.tokens:
            self.account.profile = self.profile

    def begin_call(self, name: str, arguments: Any, kept: bool) -> CallProfile:
        """A layer is called with these; ``kept``: until its backward, whatever it saves."""
        call = self.call = CallProfile(name)
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                index = self._index(tensor, kept)
                if index is not None:
                    call.inputs.add(index)
        self.profile.calls.append(call)
        return call

    def end_call(self) -> None:
        """The layer has returned."""
        self.call = None
        self.profile.outside.append(set())

    def count(self, tensor: torch.Tensor, call: CallProfile | None = None) -> None:
        """A tensor was saved, by the layer that runs or by ``call``."""
        index = self._index(tensor, True)
        if index is not None:
            call = call or self.call
            (self.profile.outside[-1] if call is None else call.saved).add(index)

    def returned(self, tensor: torch.Tensor) -> None:
        """A storage that was moved home is on the device again: it counts until it dies."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        reference = weakref.ref(storage, functools.partial(self._died, key))
        self._live[key] = _Live(reference, size, self.profile, -1, kept=True)
        self.account.add(size)

    def _index(self, tensor: torch.Tensor, kept: bool) -> int | None:
        """A storage's number in the profile; if it is kept, it counts from now until it dies."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not size or self.is_constant(storage):
            return None
        live = self._live.get(key)
        if live is None:
            reference = weakref.ref(storage, functools.partial(self._died, key))
            live = self._live[key] = _Live(reference, size, self.profile, -1)
        if live.index < 0 or live.profile is not self.profile:
            live.profile, live.index = self.profile, len(self.profile.sizes)
            self.profile.sizes.append(size)
        if kept and not live.kept:
            live.kept = True
            self.account.add(size)
        return live.index

    def is_constant(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage lives anyway: a page, a buffer of the model, the batch."""
        return storage._cdata in self.constant or self.is_page(storage.data_ptr())

    def _died(self, key: int, _: Any) -> None:
        live = self._live.pop(key)
        if live.kept:
            self.account.live_bytes -= live.size

    def pack(self, tensor: torch.Tensor) -> Kept:
        """The hook on what is saved and stays."""
        self.count(tensor)
        return Kept(tensor)

    @staticmethod
    def unpack(kept: Kept) -> torch.Tensor:
        """The hook's other half."""
        return kept.get()

    def observe(self, forward: Forward, call: CallProfile) -> Forward:
        """A layer's forward, counted when it runs again in backward.

        The hooks of the checkpoint go on doing their work behind the count.
        """

        def observed(*args: Any, **kwargs: Any) -> Any:
            hooks = top_hooks()
            if not (self.active and in_backward() and hooks is not None):
                return forward(*args, **kwargs)
            pack, unpack = hooks

            def counted(tensor: torch.Tensor) -> Any:
                self.count(tensor, call)
                return pack(tensor)

            with saved_tensors_hooks(counted, unpack):
                return forward(*args, **kwargs)

        return observed


def top_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The hooks on saved tensors that are in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined, no-any-return]


class Activations:
    """The layers of a paged model, wrapped.

    Args:
        model: the root module.
        manager: whose ledger has the account, and whose engine moves what is offloaded.
        mode: one of ``keep``, ``checkpoint``, ``offload``.

    Raises:
        ConfigError: another mode, or one for layers and a model without any.
    """

    def __init__(self, model: nn.Module, manager: MemoryManager, mode: str) -> None:
        check_mode(mode)
        self.manager = manager
        self.account = manager.ledger.activations
        self.account.mode = mode
        self.meter = Meter(self.account, manager.owns)
        self.is_off = False  # somebody else decides what layers keep
        self.offloader: Offloader | None = None
        if mode == "offload":
            from odc.fsdp.offload import Offloader  # which builds upon this module

            self.offloader = Offloader(manager, self.meter)
        layers = find_layers(model) if mode == "keep" else _layers_for(model, mode)
        for name, layer in layers:
            wrap_forward(layer, functools.partial(self._run_layer, name))
        if model not in [layer for _, layer in layers]:
            wrap_forward(model, self._run_model)

    def _run_model(
        self, model: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if in_backward() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        measured = self._to_measure()
        if measured or self.offloader is not None:
            self.meter.note_constants(model, (args, kwargs))
        self.meter.active = measured
        if not measured:
            return forward(*args, **kwargs)
        self.meter.begin(self.manager.tokens)
        with saved_tensors_hooks(self.meter.pack, self.meter.unpack):
            output = forward(*args, **kwargs)
        self.meter.end()
        return output

    def _to_measure(self) -> bool:
        """Whether this pass tells something new, and nobody else's hooks would be hidden."""
        known, account = self.account.profile, self.account
        new = known is None or self.manager.tokens > known.tokens or account.live_bytes > 0
        return (new or self.manager.sink is not None) and top_hooks() is None

    def _run_layer(
        self,
        name: str,
        layer: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        mode, meter = self.account.mode, self.meter
        if self.is_off or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if in_backward() or not meter.active:
            return self._run(layer, forward, args, kwargs)
        call = meter.begin_call(name, (args, kwargs), kept=mode == "checkpoint")
        try:
            return self._run(layer, meter.observe(forward, call), args, kwargs)
        finally:
            meter.end_call()

    def _run(
        self, layer: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.account.mode == "checkpoint":
            return _run_checkpointed(layer, forward, args, kwargs)
        if self.offloader is not None and not in_backward():
            args, kwargs, _ = _without_caches(layer, args, kwargs)
            with self.offloader.layer():
                return forward(*args, **kwargs)
        return forward(*args, **kwargs)

    def end_backward(self) -> None:
        """A backward is over."""
        if self.offloader is not None:
            self.offloader.end_backward()


def check_mode(mode: str) -> None:
    """Refuse what is no mode.

    Raises:
        ConfigError: says which there are.
    """
    if mode not in MODES:
        raise ConfigError(f"activations must be one of {', '.join(MODES)}, got {mode!r}")
