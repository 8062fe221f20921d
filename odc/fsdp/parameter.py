"""``PagedParameter``: a parameter whose bytes lie in a group's range, and whose gradient does not
lie in ``.grad``.

Its data is a view of the range set through ``.data``, so that it has a version counter of its own:
a sibling's update does not look like an update of this one. Reading ``.grad`` while a gradient
waits in its page raises instead of giving ``None``: nothing is ignored silently.

While its group is not pinned a parameter is an ``AbsentParameter``: the same object with another
class, which lets questions about shape and kind pass and stops everything that would touch bytes.
Changing the class costs less than 0.1 us; operations on pinned parameters pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from odc.errors import AbsentParameterError, PagedGradientError

if TYPE_CHECKING:
    from odc.fsdp.group import ParamGroup

# the C attributes, which autograd fills and reads whatever a subclass says
_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

_ADVICE = (
    "the gradient of paged parameter {fqn} lies in a page, not in .grad: to clip by the global "
    "norm pass max_grad_norm= to odc.paged (opt.grad_norm has the norm after opt.step()); to read "
    "it call opt.gradient(parameter), which returns a copy; loss scaling (GradScaler) is not "
    "supported, use float32 or bfloat16; total_mem='unlimited' with update='step' leaves .grad as "
    "in plain PyTorch"
)
_USED = (
    "the gradient of paged parameter {fqn} was used by the update and is gone: read it before "
    "opt.step() with opt.gradient(parameter), and with update='step'; total_mem='unlimited' with "
    "update='step' leaves .grad as in plain PyTorch"
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
            PagedGradientError: there is one, and it lies in a page; or it was used already.
        """
        found = _GRAD.__get__(self)
        group = getattr(self, "_group", None)
        if found is None and group is not None:
            if group.has_gradient[self._index] and not group.plain_grad:
                raise PagedGradientError(_ADVICE.format(fqn=self._fqn))
            if self._index in group.used:
                raise PagedGradientError(_USED.format(fqn=self._fqn))
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

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return _REQUIRES_GRAD.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> PagedParameter:  # type: ignore[override]
        """Freeze or thaw.

        Raises:
            RuntimeError: it was frozen when the model was paged, and has no pages for a gradient.
        """
        group = getattr(self, "_group", None)
        if requires_grad and group is not None and group.frozen and not self.requires_grad:
            raise RuntimeError(
                f"{self._fqn} was frozen when the model was paged and has no pages for a gradient; "
                "call requires_grad_(True) before odc.paged (it may be frozen again afterwards)"
            )
        _REQUIRES_GRAD.__set__(self, requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"PagedParameter({self._fqn}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse_copy(f"paged parameter {self._fqn}")


class AbsentParameter(PagedParameter):
    """A parameter whose group is not pinned: its bytes may be gone.

    In a forward the operation that reads it pins its group with the module that runs; elsewhere
    it raises.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_metadata(func):
            for parameter in _absent((args, kwargs)):
                _demand(parameter, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _demand(parameter: AbsentParameter, func: Callable[..., Any]) -> None:
    """Pin what an operation reads, or say what to do."""
    runtime = parameter._group.runtime
    if runtime is not None and runtime.adopt(parameter._group):
        return
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f".{getattr(getattr(func, '__self__', None), '__name__', '')}"
    raise AbsentParameterError(
        f"{name} reads paged parameter {parameter._fqn}, which is not on the device: read it in a "
        f"`with model.resident({parameter._fqn!r}):` (write=True to change it), or from "
        "model.state_dict()"
    )


def _absent(values: Any) -> Iterator[AbsentParameter]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, AbsentParameter):
            yield leaf


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What can be asked of a parameter without its bytes; everything else reads or writes them.
_PROPERTIES = _names(
    "shape dtype device layout ndim requires_grad grad grad_fn is_leaf is_meta is_cpu is_cuda "
    "is_mps is_mkldnn is_mtia is_sparse is_sparse_csr is_nested is_quantized is_vulkan is_xla "
    "is_xpu is_ipu is_maia itemsize nbytes names name output_nr retains_grad _version "
    "_backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = _names(
    "size numel nelement dim ndimension stride element_size storage_offset data_ptr is_contiguous "
    "is_floating_point is_complex is_signed is_inference is_shared is_pinned is_same_size "
    "is_tensor get_device register_hook register_post_accumulate_grad_hook requires_grad_ "
    "grad backward retain_grad __len__ __hash__ dim_order has_names zeros_like ones_like "
    "empty_like full_like rand_like randn_like new_empty new_zeros new_ones new_full "
    "new_empty_strided"
)


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute in _PROPERTIES
    return name in _METHODS


def _refuse_copy(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what} cannot be copied or pickled: its pages have one owner; build a second model, or "
        "use model.state_dict()"
    )


def has_autograd_grad(parameter: PagedParameter) -> bool:
    """Whether autograd left a gradient in ``.grad``; it may have been given none."""
    return _GRAD.__get__(parameter) is not None


def take_autograd_grad(parameter: PagedParameter) -> torch.Tensor:
    """The gradient that autograd left, taken out of ``.grad``."""
    grad = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, None)
    return grad  # type: ignore[no-any-return]


def set_plain_grad(parameter: PagedParameter, grad: torch.Tensor) -> None:
    """Show ``grad`` as ``.grad``, for a model that stays resident."""
    _GRAD.__set__(parameter, grad)
