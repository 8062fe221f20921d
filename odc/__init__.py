"""odc: train models that do not fit the device, by treating its memory as a cache.

Names are loaded when they are first used: importing ``odc`` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "paged": "odc.fsdp.paged",
    "PagedModule": "odc.fsdp.paged",
    "OdcError": "odc.errors",
    "AbsentParameterError": "odc.errors",
    "BudgetError": "odc.errors",
    "ConfigError": "odc.errors",
    "PagedGradientError": "odc.errors",
    "PageIOError": "odc.errors",
}

__all__ = [
    "AbsentParameterError",
    "BudgetError",
    "ConfigError",
    "OdcError",
    "PageIOError",
    "PagedGradientError",
    "PagedModule",
    "__version__",
    "paged",
]

if TYPE_CHECKING:
    from odc.errors import (
        AbsentParameterError,
        BudgetError,
        ConfigError,
        OdcError,
        PagedGradientError,
        PageIOError,
    )
    from odc.fsdp.paged import PagedModule, paged


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'odc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
