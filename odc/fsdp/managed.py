"""Which modules and parameters one call of `fully_shard` takes: all below, but for nested calls.

What is refused here says what FSDP2 says of it, and is of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from odc.errors import OdcError
from odc.fsdp.sharded import SharedPlace

TAKEN = "_odc_taken_as"  # the attribute of a parameter that a call has replaced
STATE = "_odc_fully_shard"  # the attribute of a module that holds its state


class AppliedTwiceError(OdcError, AssertionError):
    """`fully_shard` was applied to a module twice; an AssertionError, as FSDP2's is."""


class MeshNamesError(OdcError, AssertionError):
    """A mesh of replicas and shards has no names; an AssertionError, as FSDP2's is."""


class ShardDimError(OdcError, AssertionError):
    """`shard_placement_fn` named a dimension there is not; an AssertionError, as FSDP2's is."""


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses a mesh that is neither one axis nor (replicas, shards) with names.

    Raises:
        ValueError: it has another number of axes.
        MeshNamesError: it has two without names.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise MeshNamesError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: init_device_mesh("
            'device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
        )


def check_module(module: nn.Module) -> None:
    """Refuses a module that is never called, and one that was given before.

    Raises:
        ValueError: it is never called.
        AppliedTwiceError: it was given before.
    """
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    if STATE in module.__dict__:
        raise AppliedTwiceError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"fully_shard was applied to this {type(module).__name__} before."
        )


def managed_modules(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(fqn below its root, module) of all modules that no nested call has taken."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, fqn: str, root: bool) -> None:
        if id(module) in seen or (STATE in module.__dict__ and not root):
            return
        seen.add(id(module))
        found.append((fqn, module))
        for name, child in module.named_children():
            visit(child, f"{fqn}.{name}" if fqn else name, False)

    for number, root in enumerate(roots):
        visit(root, "" if len(roots) == 1 else str(number), True)
    return found


def managed_places(
    roots: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> list[SharedPlace]:
    """The parameters that a call takes, each once, in the order of the modules.

    Raises:
        ValueError: one of them is a scalar.
        NotImplementedError: one is not contiguous, or a DTensor.
    """
    skipped = {id(parameter) for parameter in ignored}
    places: dict[int, SharedPlace] = {}
    for fqn, module in managed_modules(roots):
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            if id(parameter) in places:
                places[id(parameter)].shared.append((module, name))
                continue
            full = f"{fqn}.{name}" if fqn else name
            _check_parameter(full, parameter)
            places[id(parameter)] = SharedPlace(module, name, full, parameter)
    return list(places.values())


def _check_parameter(fqn: str, parameter: nn.Parameter) -> None:
    if parameter.dim() == 0:
        raise ValueError(
            "fully_shard doesn't support scalar parameters. "
            f"Change {fqn} to a 1D tensor with numel equal to 1."
        )
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{fqn} is a DTensor on {parameter.device_mesh}: parameters that are split already "
            "(tensor or expert parallelism) cannot be sharded; give fully_shard plain parameters, "
            "or name it in ignored_params"
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {fqn} has shape "
            f"{tuple(parameter.shape)} and strides {parameter.stride()}; call .contiguous() on it"
        )


def shared_with(places: Sequence[SharedPlace]) -> list[tuple[str, str]]:
    """(own name, name there) of parameters that another call has taken before."""
    found = ((place.fqn, getattr(place.parameter, TAKEN, None)) for place in places)
    return [(own, there) for own, there in found if there is not None]


def check_shared(fqn: str, shared: Sequence[tuple[str, str]]) -> None:
    """Refuses parameters that `shared_with` found, once their module's name is known.

    Raises:
        ValueError: there is one.
    """
    for own, there in shared:
        raise ValueError(
            f"{fqn}.{own} is shared with {there}, which is already managed by another call of "
            "fully_shard: sharded apart they would no longer be one parameter; shard the modules "
            "that share it in one call (fully_shard([a, b])), or leave both to the root's"
        )


def check_placements(
    places: Sequence[SharedPlace], shard_placement_fn: Callable[[nn.Parameter], Any] | None
) -> None:
    """Asks for the dimensions of parameters, which change nothing: they lie as planned.

    Raises:
        ShardDimError: a parameter has no such dimension.
        NotImplementedError: another mesh is asked for.
    """
    for place in places if shard_placement_fn is not None else ():
        chosen = shard_placement_fn(place.parameter)  # type: ignore[misc]
        if chosen is not None and not isinstance(chosen, Shard):
            raise NotImplementedError(
                f"shard_placement_fn: got {chosen!r} for {place.fqn}; a mesh for single parameters "
                "is not supported, shard their module on that mesh"
            )
        dims = place.parameter.dim()
        if chosen is not None and not -dims <= chosen.dim < dims:
            raise ShardDimError(
                f"Shard dim {chosen.dim} is invalid for {dims}D tensor: shard_placement_fn, "
                f"{place.fqn} of shape {tuple(place.parameter.shape)}"
            )
