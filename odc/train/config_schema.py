"""The sections of `config.yaml`: every key, its default, and what it may be.

A section is a keyword-only dataclass whose fields are validated whenever they are set, from YAML
and from Python alike, until `freeze` ends all changes. A key that has no effect yet is accepted,
says so in `Config.notices()`, and is marked in the resolved file.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from odc.errors import ConfigError
from odc.train import config_checks as checks
from odc.train.config_checks import Check

_MIB = 1024 * 1024
FRAME_BYTES = 2 * _MIB


def setting(default: Any, check: Check, *, inactive: bool | tuple[Any, ...] = False) -> Any:
    """Declares one key.

    Args:
        default: Value where the key is not given.
        check: What the key may be.
        inactive: `True` where the key has no effect yet, or the values that have none.
    """
    return dataclasses.field(default=default, metadata={"check": check, "inactive": inactive})


@dataclass(kw_only=True)
class Section:
    """Keys under one heading; setting one validates it, or raises `ConfigError`."""

    heading: ClassVar[str] = ""

    def __post_init__(self) -> None:
        named = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        object.__setattr__(self, "_explicit", named)
        object.__setattr__(self, "_frozen", False)

    def __setattr__(self, name: str, value: Any) -> None:
        path = f"{self.heading}.{name}"
        if self.__dict__.get("_frozen", False):
            raise ConfigError(f"{path}: set after the run started; set it before, or in a new run")
        object.__setattr__(self, name, self._parsed(path, name, value))
        if "_explicit" in self.__dict__:
            self.__dict__["_explicit"].add(name)

    def is_explicit(self, name: str) -> bool:
        """Returns whether the user named this key (as against its default)."""
        return name in self.__dict__["_explicit"]

    def derive(self, name: str, value: Any) -> None:
        """Sets a key that follows from others, unless the user named it."""
        if not self.is_explicit(name):
            object.__setattr__(self, name, value)

    def freeze(self) -> None:
        """Ends all changes: from here on setting a key raises `ConfigError`."""
        object.__setattr__(self, "_frozen", True)

    def _parsed(self, path: str, name: str, value: Any) -> Any:
        field = self.__dataclass_fields__.get(name)
        if field is None:
            guess = checks.nearest(name, tuple(self.__dataclass_fields__))
            hint = f"; did you mean {self.heading}.{guess}?" if guess else ""
            raise ConfigError(f"{path}: unknown key{hint}")
        check: Check = field.metadata["check"]
        try:
            return check.parse(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except ValueError as error:
            reason = "" if _is_conversion(error) else str(error)
            raise ConfigError(check.refuse(path, value, reason)) from error


def _is_conversion(error: ValueError) -> bool:
    """Python's own words about a failed `float(...)` add nothing for the reader."""
    return str(error).startswith("could not convert")


@dataclass(kw_only=True)
class ModelConfig(Section):
    """Shape of a decoder-only transformer; `num_experts: null` makes it dense."""

    heading: ClassVar[str] = "model"

    hidden_size: int = setting(256, checks.whole(2))
    num_layers: int = setting(4, checks.whole(1))
    num_heads: int = setting(4, checks.whole(1))
    num_kv_heads: int | None = setting(None, checks.optional(checks.whole(1)))
    mlp: str = setting("swiglu", checks.choice("swiglu", "gelu"))
    mlp_size: int | None = setting(None, checks.optional(checks.whole(1), off="auto"))
    num_experts: int | None = setting(None, checks.optional(checks.whole(1)))
    top_k: int = setting(2, checks.whole(1))
    expert_size: int | None = setting(None, checks.optional(checks.whole(1), off="auto"))
    normalize_gates: bool = setting(True, checks.flag())
    balance_coef: float = setting(0.01, checks.number(0))
    router_z_coef: float = setting(0.0, checks.number(0))
    tie_embeddings: bool = setting(False, checks.flag())
    norm_eps: float = setting(1e-5, checks.number(0, open_below=True))
    rope_theta: float = setting(10000.0, checks.number(1))
    init_std: float = setting(0.02, checks.number(0, open_below=True))

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads where not given."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of a dense MLP; 8/3 or 4 times the hidden size where not given."""
        return self._auto_width if self.mlp_size is None else self.mlp_size

    @property
    def expert_width(self) -> int:
        """Inner width of one expert; that of a dense MLP where not given."""
        return self.mlp_width if self.expert_size is None else self.expert_size

    @property
    def _auto_width(self) -> int:
        if self.mlp == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // 3 // 32) * 32

    def problems(self) -> list[str]:
        """Returns what does not fit together in this section."""
        found = []
        if self.hidden_size % self.num_heads or self.head_size % 2:
            found.append(
                f"model.hidden_size: got {self.hidden_size} with model.num_heads {self.num_heads}; "
                "allowed: an even multiple of the heads (rotary embeddings turn pairs)"
            )
        if self.num_heads % self.kv_heads:
            found.append(
                f"model.num_kv_heads: got {self.kv_heads}; "
                f"allowed: a divisor of model.num_heads {self.num_heads}"
            )
        if self.num_experts is not None and self.top_k > self.num_experts:
            found.append(
                f"model.top_k: got {self.top_k}; "
                f"allowed: at most model.num_experts {self.num_experts}"
            )
        return found
