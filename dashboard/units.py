"""Numbers as people read them."""

from __future__ import annotations

import enum
import math

UNKNOWN = "unknown"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _digits(value: float) -> str:
    """Return three significant digits, no exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(num_bytes: float | None) -> str:
    """Return bytes, kept or moved, as the command line writes them, e.g. `64.0 MiB`."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    rest, unit = abs(float(num_bytes)), "B"
    for unit in _UNITS:
        if rest < 1024 or unit == _UNITS[-1]:
            break
        rest /= 1024
    digits = f"{rest:,.0f}" if unit == "B" else _digits(rest)
    return f"{'-' if num_bytes < 0 else ''}{digits} {unit}"


def seconds(value: float | None) -> str:
    """Return a duration, e.g. `412 ms`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    length = abs(value)
    if length == 0:
        return "0 s"
    if length >= 60:
        minutes, rest = divmod(round(length), 60)
        return f"{'-' if value < 0 else ''}{minutes} min {rest:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if length * scale >= 1:
            return f"{'-' if value < 0 else ''}{_digits(length * scale)} {unit}"
    return f"{'-' if value < 0 else ''}{_digits(length * 1e9)} ns"


def nanoseconds(value: float | None) -> str:
    """Return a duration given in ns."""
    return seconds(None if value is None else value / 1e9)


def share(value: float | None) -> str:
    """Return a fraction as a percentage."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    percent = 100 * value
    return f"{percent:.0f} %" if abs(percent) >= 10 or percent == 0 else f"{percent:.1f} %"


def count(value: float | None) -> str:
    """Return a count with separators."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def number(value: float | None) -> str:
    """Return a plain number with four significant digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:#.4g}"


def plural(amount: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def code(codes: type[enum.IntEnum], value: int) -> str:
    """Return the lower-case name of a trace code; a newer program may write unknown ones."""
    known = codes._value2member_map_.get(int(value))
    return known.name.lower() if isinstance(known, enum.Enum) else f"code {value}"
