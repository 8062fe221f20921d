"""Granularity: what of a parameter must stay together on one rank.

A block is a run of elements that no rank boundary cuts. A row is the last dimension; a fused
tensor `[E, a, b]` has `E * a` rows of `b`. A tile of `r` x `c` needs `r` whole rows, the shortest
contiguous run that holds whole tiles (veScale-FSDP, arXiv 2602.22437, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odc.errors import ConfigError
from odc.sharding.tensors import TensorSpec

ALLOWED = "element, block (one row), rows:N, tile:R,C or tensor"


@dataclass(frozen=True)
class Granularity:
    """A parsed granularity: `kind`, rows of a block, and the columns of a tile (0: no tile)."""

    kind: str
    rows: int = 1
    columns: int = 0

    def __str__(self) -> str:
        if self.kind == "rows":
            return f"rows:{self.rows}"
        return f"tile:{self.rows},{self.columns}" if self.kind == "tile" else self.kind

    def block_numel(self, tensor: TensorSpec) -> int:
        """Returns the elements of one block of `tensor`, at least 1.

        Raises:
            ConfigError: the columns of a tile do not divide the tensor's row.
        """
        if self.kind == "tensor":
            return max(tensor.numel, 1)
        if self.kind == "element" or len(tensor.shape) < 2:
            return 1
        if self.columns and tensor.row_numel % self.columns:
            raise ConfigError(
                f"{tensor.fqn}: rows of {tensor.row_numel} elements hold no whole tiles of "
                f"{self.columns} columns; use a tile whose columns divide {tensor.row_numel}, "
                f"or rows:{self.rows}"
            )
        return max(self.rows * tensor.row_numel, 1)


GranularityLike = str | Granularity | Callable[[str, tuple[int, ...]], "str | Granularity"]


def parse_granularity(text: str | Granularity) -> Granularity:
    """Returns the granularity that `text` names: element, block, rows:N, tile:R,C, tensor.

    Raises:
        ConfigError: it names none; the message lists what is allowed.
    """
    if isinstance(text, Granularity):
        return text
    if not isinstance(text, str):
        raise ConfigError(f"granularity {text!r} is no string; allowed: {ALLOWED}, as in 'rows:16'")
    if text in ("element", "block", "tensor"):
        return Granularity(text)
    if match := re.fullmatch(r"rows:(\d+)", text):
        rows, columns, kind = int(match[1]), 0, "rows"
    elif match := re.fullmatch(r"tile:(\d+),(\d+)", text):
        rows, columns, kind = int(match[1]), int(match[2]), "tile"
    else:
        raise ConfigError(f"granularity {text!r} is unknown; allowed: {ALLOWED}")
    if rows < 1 or (kind == "tile" and columns < 1):
        raise ConfigError(f"granularity {text!r}: rows and columns must be at least 1")
    return Granularity(kind, rows, columns)


class GranularityRules:
    """A granularity for every parameter: `(regex, granularity)` rules over a default.

    The first rule whose regex is found in the fqn holds.
    """

    def __init__(
        self, default: str | Granularity, rules: Sequence[tuple[str, str | Granularity]] = ()
    ) -> None:
        self.default = parse_granularity(default)
        try:
            self.rules = [(re.compile(regex), parse_granularity(text)) for regex, text in rules]
        except re.error as error:
            raise ConfigError(f"granularity: {error.pattern!r} is no regex: {error}") from error

    @classmethod
    def parse(cls, words: Sequence[str]) -> GranularityRules:
        """Returns the rules of command-line words, `G` or `REGEX=G`; the default is `block`.

        Raises:
            ConfigError: a word names no granularity, or there are two defaults.
        """
        defaults = [word for word in words if "=" not in word]
        if len(defaults) > 1:
            raise ConfigError(
                f"granularity: {' and '.join(defaults)} are both defaults; keep one, and write the "
                "others as REGEX=G"
            )
        pairs = [word.rpartition("=") for word in words if "=" in word]
        return cls(defaults[0] if defaults else "block", [(regex, g) for regex, _, g in pairs])

    def __call__(self, fqn: str, shape: tuple[int, ...]) -> Granularity:
        for regex, granularity in self.rules:
            if regex.search(fqn):
                return granularity
        return self.default

    def __str__(self) -> str:
        words = [f"{regex.pattern}={granularity}" for regex, granularity in self.rules]
        return " ".join([str(self.default), *words])


def block_numels(tensors: Sequence[TensorSpec], granularity: GranularityLike) -> list[int]:
    """Returns the block of every tensor, in elements."""
    if callable(granularity):
        found = [parse_granularity(granularity(t.fqn, t.shape)) for t in tensors]
    else:
        found = [parse_granularity(granularity)] * len(tensors)
    return [g.block_numel(tensor) for g, tensor in zip(found, tensors, strict=True)]
