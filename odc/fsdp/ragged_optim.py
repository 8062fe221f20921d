"""What torch's optimizers need beside the table of ops (`ragged_ops.py`) to step ragged parameters.

Optimizers that look at each element by itself need nothing. Muon makes an update orthogonal, which
takes the whole matrix: every rank gathers it in bfloat16, the dtype that the iteration computes in
anyway, does what one process does, and keeps its span. The step then equals one process's to the
last bit. Others that mix elements are refused by name, before their first op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odc.fsdp.ragged_local import SpanTensor, rewrap
from odc.fsdp.ragged_shard import RaggedOpError, own_part

_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "keeps means of rows and columns",
    torch.optim.LBFGS: "takes products of all gradients laid end to end",
}


def install() -> None:
    """Teaches Muon spans, and tells of optimizers that cannot step them."""
    register_optimizer_step_pre_hook(_check)
    _teach_muon()


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before every step of every optimizer."""
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind) and _steps_spans(optimizer):
            raise RaggedOpError(
                f"torch.optim.{kind.__name__} {reason}, and a rank holds only a span of each "
                "parameter: use an optimizer that looks at each element by itself (AdamW, Adam, "
                "SGD and their kin), or torch.optim.Muon for matrices"
            )


def _steps_spans(optimizer: Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(isinstance(parameter, SpanTensor) for parameter in parameters)


def _teach_muon() -> None:
    """Muon calls its iteration by name, so the name is replaced; other tensors go to torch's."""
    try:
        from torch.optim import _muon
    except ImportError:  # before torch 2.9
        return
    plain = _muon._zeropower_via_newtonschulz

    def orthogonal(grad: Tensor, *args: Any) -> Tensor:
        if not isinstance(grad, SpanTensor):
            return plain(grad, *args)
        rounded: Any = grad.bfloat16()
        whole = plain(rounded.full_tensor(), *args)
        return rewrap(grad, own_part(whole, grad._spec))

    _muon._zeropower_via_newtonschulz = orthogonal  # type: ignore[assignment]
