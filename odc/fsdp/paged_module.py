"""What a paged model can do that a plain one cannot, and what must load pages first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from odc.fsdp.parameter import PagedParameter, _refuse_copy
from odc.fsdp.runtime import Runtime
from odc.fsdp.tensor_names import authors_pieces, put, take
from odc.memory.events import Kind
from odc.memory.manager import MemoryManager


class PagedModule(nn.Module):
    """Mixed into the class of a paged model's root: what must load pages before it reads values."""

    _odc_runtime: Runtime

    @property
    def memory(self) -> MemoryManager:
        """The model's memory manager."""
        return self._odc_runtime.manager

    def resident(self, prefix: str = "", write: bool = False) -> AbstractContextManager[None]:
        """Pin the parameters whose names begin with ``prefix``, to read or change them.

        All that is named must fit the page budget together. With a ``frozen_format``, values that
        are written to frozen matrices are rounded to it when the block ends: they are read back as
        a load from home gives them.

        Raises:
            ValueError: no parameter has such a name.
            TypeError: ``prefix`` is no text.
        """
        if not isinstance(prefix, str):
            raise TypeError(
                "resident takes the beginning of parameters' names, as in "
                f"model.resident('layers.0'); got a {type(prefix).__name__}"
            )
        groups = list(
            dict.fromkeys(
                p._group
                for name, p in self.named_parameters(remove_duplicate=False)
                if name.startswith(prefix) and isinstance(p, PagedParameter)
            )
        )
        if not groups:
            raise ValueError(f"no parameter's name begins with {prefix!r}")
        return self._odc_runtime.resident(groups, write)

    def hint(self, modules: Sequence[str | nn.Module], scores: Sequence[float]) -> None:
        """Tell the pager what it cannot know: which modules the next forward will use.

        A layer that will be dropped gets 0, one that will certainly run 1: told when the mask is
        drawn, it is neither loaded for nothing nor missing. In a forward the rest of that forward
        is meant. Wrong scores cost time, never a result.

        Args:
            modules: modules of this model, or their names. Each stands for all parameters in it.
            scores: for each, the probability that it runs, 0 to 1.

        Raises:
            ValueError: a module is unknown or has no pages of its own, a score is no probability,
                or there are not as many scores as modules.
        """
        if len(modules) != len(scores):
            raise ValueError(f"scores must be {len(modules)}, one a module, got {len(scores)}")
        names = {id(module): name for name, module in self.named_modules()}
        groups: dict[int, float] = {}
        for module, score in zip(modules, scores, strict=True):
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"scores must be probabilities from 0 to 1, got {score}")
            for group in self._groups_in(module, names):
                groups[group] = float(score)
        self._odc_runtime.hint(list(groups), list(groups.values()))

    def _groups_in(self, module: str | nn.Module, names: dict[int, str]) -> list[int]:
        """The groups all of whose parameters are in a module."""
        if isinstance(module, str):
            if module not in names.values():
                raise ValueError(f"modules: the model has no module {module!r}")
            module = self.get_submodule(module)
        elif id(module) not in names:
            raise ValueError(f"modules: this {type(module).__name__} is no module of the model")
        inside = {id(p) for p in module.parameters()}
        found = [g for g in self._odc_runtime.groups if inside.issuperset(map(id, g.parameters))]
        if not found:
            raise ValueError(
                f"modules: {names[id(module)]!r} has no pages of its own; name the layer around it"
            )
        return [g.group for g in found]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False) is not supported; use set_to_none=True")
        self._odc_runtime.forget_gradients()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Copies of all parameters and buffers, as large as the model is.

        Experts that ``odc.from_pretrained`` took apart are named as the model's authors did.
        """
        state = super().state_dict(*args, **{**kwargs, "keep_vars": True})
        pieces = authors_pieces(self, state)
        copies: dict[int, torch.Tensor] = {}
        for group in self._odc_runtime.groups:
            values = self._odc_runtime.copy_out(group, Kind.PARAMETER)
            copies.update(zip(map(id, group.parameters), values, strict=True))
        for name in list(state):
            value = state.pop(name)
            if isinstance(value, torch.Tensor):
                copy = copies.get(id(value))
                put(state, pieces[name], value.detach() if copy is None else copy)
            else:
                state[name] = value
        return state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``.to()`` and its like: allowed where they change nothing, as ``.to("cpu")`` on a CPU."""
        for parameter in self.parameters():
            probe = torch.empty(0, dtype=parameter.dtype)
            made = fn(probe)
            if made.dtype != probe.dtype or made.device != probe.device:
                raise RuntimeError(
                    f"a paged model stays where it is: cannot make {parameter._fqn} "  # type: ignore[attr-defined]
                    f"{made.dtype} on {made.device}; convert the model before odc.paged"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse_copy("a paged model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_copy("a paged model")

    @property
    def _names(self) -> dict[int, list[str]]:
        """Every name of every parameter: a tied one has several."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return names

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy values into the pages, group by group.

        With a ``frozen_format`` frozen matrices are rounded to it; ``state_dict`` then gives the
        rounded values, which load again without a change.
        """
        if assign:
            raise ValueError("assign=True would leave the pages; use assign=False")
        pieces = authors_pieces(self, super().state_dict(keep_vars=True))
        own = {piece.name for parts in pieces.values() for piece in parts}
        missing, unexpected = sorted(own - set(state_dict)), sorted(set(state_dict) - own)
        if strict and (missing or unexpected):
            raise RuntimeError(f"state_dict: missing {missing}, unexpected {unexpected}")
        runtime, names = self._odc_runtime, self._names
        with torch.no_grad():
            for group in runtime.groups:
                with runtime.resident([group], write=True):
                    for parameter in group.parameters:
                        for name in names[id(parameter)]:
                            take(state_dict, pieces[name], parameter)
            for name, buffer in self.named_buffers():
                take(state_dict, pieces.get(name, []), buffer)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def close(self) -> None:
        """Stop the transfers and give the memory back. The model cannot be used any more."""
        self._odc_runtime.manager.close()
        for unit in self._odc_runtime.units:
            unit.unhook_parameters()
