"""``PagedParameter``: a parameter whose bytes lie in a group's range, and whose gradient does not
lie in ``.grad``.

Its data is a view of the range set through ``.data``, so that it has a version counter of its own:
a sibling's update does not look like an update of this one. Reading ``.grad`` while a gradient
waits in its page raises instead of giving ``None``: nothing is ignored silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from odc.errors import PagedGradientError

if TYPE_CHECKING:
    from odc.fsdp.group import ParamGroup

_GRAD: Any = torch.Tensor.grad  # the C attribute, which autograd fills whatever a subclass says

_ADVICE = (
    "the gradient of paged parameter {fqn} lies in a page, not in .grad: to clip by the global "
    "norm pass max_grad_norm= to odc.paged (opt.grad_norm has the norm after opt.step()); to read "
    "it call opt.gradient(parameter), which returns a copy; loss scaling (GradScaler) is not "
    "supported, use float32 or bfloat16; total_mem='unlimited' leaves .grad as in plain PyTorch"
)


class PagedParameter(nn.Parameter):
    """A parameter of a paged group."""

    _group: ParamGroup
    _index: int
    _fqn: str

    @staticmethod
    def over(view: torch.Tensor, requires_grad: bool, fqn: str) -> PagedParameter:
        """A parameter over ``view``, with its own version counter."""
        parameter = PagedParameter(torch.empty(0, dtype=view.dtype), requires_grad=requires_grad)
        parameter.data = view
        parameter._fqn = fqn
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """None while there is no gradient.

        Raises:
            PagedGradientError: there is one, and it lies in a page.
        """
        found = _GRAD.__get__(self)
        group = getattr(self, "_group", None)
        if found is None and group is not None and group.holds_gradient(self._index):
            raise PagedGradientError(_ADVICE.format(fqn=self._fqn))
        return found  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        group = getattr(self, "_group", None)
        if group is not None and not group.plain_grad:
            if value is not None:
                raise PagedGradientError(_ADVICE.format(fqn=self._fqn))
            group.forget_gradient(self._index)
            return
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"PagedParameter({self._fqn}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            f"paged parameter {self._fqn} cannot be copied: its pages have one owner; "
            "build a second model, or copy model.state_dict()"
        )


def take_autograd_grad(parameter: PagedParameter) -> torch.Tensor:
    """The gradient that autograd left, taken out of ``.grad``."""
    grad = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, None)
    return grad  # type: ignore[no-any-return]


def set_plain_grad(parameter: PagedParameter, grad: torch.Tensor) -> None:
    """Show ``grad`` as ``.grad``, for a model that stays resident."""
    _GRAD.__set__(parameter, grad)
