"""What the planner is told of a parameter: its name, shape and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

from odc.errors import ConfigError

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_name(text: str) -> str:
    """Returns the full name of a dtype; `bf16`, `fp32` and `torch.float32` are understood.

    Raises:
        ConfigError: there is no such dtype; the message lists those there are.
    """
    name = text.removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in ITEM_BYTES:
        raise ConfigError(
            f"dtype {text!r} is unknown; allowed: {', '.join([*_SHORT, *ITEM_BYTES])}"
        )
    return name


@dataclass(frozen=True)
class TensorSpec:
    """One parameter: `fqn`, global shape (all of it), dtype by name."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"{self.fqn}: shape {list(self.shape)} has a negative size")

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of a row, which is the last dimension; 1 below two dimensions."""
        return self.shape[-1] if len(self.shape) > 1 else 1
