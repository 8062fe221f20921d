"""Numbers as people read them: binary units for memory, decimal ones for links."""

from __future__ import annotations

import enum
import math

UNKNOWN = "unknown"

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB")


def _digits(value: float) -> str:
    """Return three significant digits, no exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _scaled(num_bytes: float | None, names: tuple[str, ...], base: int) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    value, sign = abs(float(num_bytes)), "-" if num_bytes < 0 else ""
    index = 0
    while value >= base and index < len(names) - 1:
        value /= base
        index += 1
    return f"{sign}{value:,.0f} B" if index == 0 else f"{sign}{_digits(value)} {names[index]}"


def memory(num_bytes: float | None) -> str:
    """Return bytes that are kept, e.g. `64.0 MiB`."""
    return _scaled(num_bytes, _BINARY, 1024)


def traffic(num_bytes: float | None) -> str:
    """Return bytes that were moved, e.g. `1.25 GB`."""
    return _scaled(num_bytes, _DECIMAL, 1000)


def seconds(value: float | None) -> str:
    """Return a duration, e.g. `412 ms`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if size == 0:
        return "0 s"
    if size >= 60:
        minutes, rest = divmod(round(size), 60)
        return f"{'-' if value < 0 else ''}{minutes} min {rest:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if size * scale >= 1:
            return f"{'-' if value < 0 else ''}{_digits(size * scale)} {unit}"
    return f"{'-' if value < 0 else ''}{_digits(size * 1e9)} ns"


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
