"""Experts that a model keeps fused in 3-D parameters, as modules with parameters of their own.

Transformers holds all experts of a layer in `gate_up_proj` and `down_proj`, whose first dimension
is the expert. One of them alone could neither come nor go, and `weight[expert]` makes a gradient of
the size of all experts for every expert that is used. Here each expert is a module, so that
`odc.paged` makes a group of it, and the layer asks the pager for the order to run them in.

[Note: the sums of the fused loop] Results and gradients are those of transformers' own loop over
experts (`experts_implementation="eager"`) to the last bit, in whatever order experts run. A token's
answers are added in ascending order of experts after all of them have run. Its gradients are added
in descending order, as autograd adds those of the loop: the rows of all experts are gathered at
once, those of the last expert first, so that the backward of the gather adds them in that order.
Within an expert rows stand slot by slot, as the loop has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MATRICES = ("gate_up_proj", "down_proj")
PARAMETERS = (*MATRICES, *(f"{name}_bias" for name in MATRICES))


class Expert(nn.Module):
    """One expert: a fused gate and up projection, a gate, a down projection.

    Args:
        fused: the module that holds all experts; its gate is used on.
        index: which of them.
    """

    _gate: Callable[[Tensor], Tensor]
    gate_up_proj: nn.Parameter  # (2I, H), or (H, 2I) where transposed
    down_proj: nn.Parameter  # (H, I), or (I, H)
    gate_up_proj_bias: nn.Parameter | None  # (2I,)
    down_proj_bias: nn.Parameter | None  # (H,)

    def __init__(self, fused: Any, index: int) -> None:
        super().__init__()
        self.is_transposed = bool(fused.is_transposed)
        # past nn.Module's own __setattr__: all experts share the gate, none owns it
        self.__dict__["_gate"] = fused._apply_gate
        for name in PARAMETERS:
            whole = fused._parameters.get(name)
            one = None
            if whole is not None:
                one = nn.Parameter(whole.detach()[index].clone(), requires_grad=whole.requires_grad)
            self.register_parameter(name, one)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, H) to the same shape."""
        hidden = self._gate(self._linear(x, self.gate_up_proj, self.gate_up_proj_bias))
        return self._linear(hidden, self.down_proj, self.down_proj_bias)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.is_transposed:
            return F.linear(x, weight, bias)
        return x @ weight if bias is None else x @ weight + bias


class ExpertList(nn.ModuleList):
    """All experts of a layer, in the place of the fused module.

    Attributes:
        expert_order: called with the ascending ids of the experts that received tokens and the
            routing (N, k); returns the ids in the order to run. `None` runs them ascending.
    """

    expert_order: Callable[[list[int], Tensor], list[int]] | None

    def __init__(self, fused: Any) -> None:
        super().__init__(Expert(fused, index) for index in range(len(fused.gate_up_proj)))
        self.expert_order = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See [Note: the sums of the fused loop].

        Args:
            hidden_states: (N, H).
            top_k_index: the experts of each token (N, k).
            top_k_weights: their weights (N, k).

        Returns:
            (N, H).
        """
        num_tokens = len(hidden_states)
        expert_of_row = top_k_index.t().reshape(-1)  # row = slot * N + token
        counts = torch.bincount(expert_of_row, minlength=len(self)).tolist()
        rows = (-expert_of_row).argsort(stable=True)  # the last expert's first
        tokens, slots = rows % num_tokens, rows // num_tokens
        split = [
            dict(zip(reversed(range(len(self))), whole.split(counts[::-1]), strict=True))
            for whole in (
                tokens,
                hidden_states.index_select(0, tokens),
                top_k_weights[tokens, slots, None],
            )
        ]
        tokens_of, inputs, weights = split
        used = [expert for expert, count in enumerate(counts) if count]
        order = used if self.expert_order is None else self.expert_order(used, top_k_index)
        answers = {expert: self[expert](inputs[expert]) for expert in order}
        result = torch.zeros_like(hidden_states)
        for expert in used:
            weighted = answers[expert] * weights[expert]
            result.index_add_(0, tokens_of[expert], weighted.to(result.dtype))
        return result


def unfuse_experts(model: nn.Module) -> int:
    """Replaces the fused experts in a transformers model, in place.

    Fused modules of another kind (without a gate, or with a norm behind each expert) stay as they
    are; a layer's experts are then one group.

    Args:
        model: with parameters of any device; from the meta device nothing is copied.

    Returns:
        How many modules were replaced.
    """
    found = [
        (owner, name, module)
        for owner in model.modules()
        for name, module in owner.named_children()
        if _is_fused(module)
    ]
    for owner, name, module in found:
        setattr(owner, name, ExpertList(module))
        module._parameters.clear()  # the experts keep its gate alive, and nothing else of it
    return len(found)


def _is_fused(module: Any) -> bool:
    """Whether it is one of transformers' modules for `use_experts_implementation`, with a gate."""
    return (
        all(getattr(module._parameters.get(name), "ndim", 0) == 3 for name in MATRICES)
        and set(module._parameters) <= set(PARAMETERS)
        and getattr(module, "has_gate", False)
        and not getattr(module, "has_post_expert_norm", False)
        and hasattr(module, "_apply_gate")
        and hasattr(module, "is_transposed")
    )
