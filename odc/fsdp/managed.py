"""Which modules and parameters one call of `fully_shard` takes: all below, but for nested calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from odc.errors import OdcError
from odc.fsdp.sharded import SharedPlace

TAKEN = "_odc_taken_as"  # the attribute of a parameter that a call has replaced
STATE = "_odc_fully_shard"  # the attribute of a module that holds its state


class AppliedTwiceError(OdcError, AssertionError):
    """`fully_shard` was applied to a module twice; an AssertionError, as FSDP2's is."""


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
        ValueError: one of them is a scalar, or shared with one that another call has taken.
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
            taken = getattr(parameter, TAKEN, None)
            if taken is not None:
                raise ValueError(
                    f"{full} is shared with {taken}, which another call of fully_shard has taken: "
                    "sharded apart they would no longer be one parameter; shard the modules that "
                    "share it in one call (fully_shard([a, b])), or leave both to the root's"
                )
            if parameter.dim() == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {full} to a 1D tensor with numel equal to 1."
                )
            places[id(parameter)] = SharedPlace(module, name, full, parameter)
    return list(places.values())
