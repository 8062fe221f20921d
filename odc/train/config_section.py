"""The base of a configuration section: fields that are validated whenever they are set."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from odc.errors import ConfigError
from odc.train import config_checks as checks
from odc.train.config_checks import Check


def setting(
    default: Any, check: Check, meaning: str, *, inactive: bool | tuple[Any, ...] = False
) -> Any:
    """Declares one key.

    Args:
        default: Value where the key is not given.
        check: What the key may be.
        meaning: What it is, in a few words.
        inactive: `True` where the key has no effect yet, or the values that have none.
    """
    metadata = {"check": check, "meaning": meaning, "inactive": inactive}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Section:
    """Keys under one heading; setting one validates it, or raises `ConfigError`."""

    heading: ClassVar[str] = ""

    def __post_init__(self) -> None:
        named = {name for name, f in self.fields().items() if getattr(self, name) != f.default}
        object.__setattr__(self, "_explicit", named)
        object.__setattr__(self, "_frozen", False)

    def __setattr__(self, name: str, value: Any) -> None:
        path = f"{self.heading}.{name}"
        if self.__dict__.get("_frozen", False):
            raise ConfigError(f"{path}: set after the run started; set it before, or in a new run")
        object.__setattr__(self, name, self._parsed(path, name, value))
        if "_explicit" in self.__dict__:
            self.__dict__["_explicit"].add(name)

    @classmethod
    def fields(cls) -> dict[str, dataclasses.Field[Any]]:
        """Returns the keys of this section, in the order of the file."""
        return {f.name: f for f in dataclasses.fields(cls)}

    def is_explicit(self, name: str) -> bool:
        """Returns whether the user named this key (as against its default)."""
        return name in self.__dict__["_explicit"]

    def derive(self, name: str, value: Any) -> None:
        """Sets a key that follows from others, unless the user named it."""
        if not self.is_explicit(name):
            object.__setattr__(self, name, value)

    def resolve(self) -> None:
        """Sets the keys that follow from others."""

    def problems(self) -> list[str]:
        """Returns what does not fit together in this section, one message each."""
        return []

    def freeze(self) -> None:
        """Ends all changes: from here on setting a key raises `ConfigError`."""
        object.__setattr__(self, "_frozen", True)

    @property
    def is_frozen(self) -> bool:
        """Whether the run has started."""
        return bool(self.__dict__["_frozen"])

    def is_inactive(self, name: str) -> bool:
        """Returns whether this key, with the value it has, is without effect so far."""
        inactive = self.fields()[name].metadata["inactive"]
        if isinstance(inactive, bool):
            return inactive
        return getattr(self, name) in inactive

    def shown(self) -> dict[str, Any]:
        """Returns every key with the value that the resolved file writes."""
        return {
            name: field.metadata["check"].show(getattr(self, name))
            for name, field in self.fields().items()
        }

    def _parsed(self, path: str, name: str, value: Any) -> Any:
        field = self.fields().get(name)
        if field is None:
            guess = checks.nearest(name, tuple(self.fields()))
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
