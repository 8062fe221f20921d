"""Sizes and rates as people write them: `256MB`, `40GB`, `1.5GB/s`, or plain integers.

A size counts memory, so its units are powers of 1024 under both spellings: `256MB` and `256MiB`
are 268,435,456 bytes, the number that `dbuffer_size=256*1024*1024` means in Python. A rate counts
what crosses a link, so `KB/s` to `TB/s` are powers of 1000, as on a data sheet; `KiB/s` to `TiB/s`
are powers of 1024. What odc writes says `MiB`, on the command line and in the dashboard.
"""

import math
import re
from fractions import Fraction

from odc.errors import ConfigError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*(/s)?\s*", re.ASCII)
_UNIT = re.compile(r"([kmgt]?)(i?)b", re.IGNORECASE)

ALLOWED_SIZES = "whole bytes, or a number with B, KB, MB, GB, TB (KiB ... TiB mean the same)"
ALLOWED_RATES = "bytes a second, or a number with B/s, KB/s, MB/s, GB/s, TB/s (KiB/s ... TiB/s)"


def parse_size(value: int | str) -> int:
    """Returns a number of bytes; `MB` and `MiB` are both 2**20.

    Raises:
        ConfigError: `value` is no size; the message lists what is allowed.
    """
    return _parse(value, rate=False)


def parse_rate(value: int | float | str) -> int:
    """Returns bytes a second; `MB/s` is 10**6 and `MiB/s` is 2**20. The `/s` may be left out.

    Raises:
        ConfigError: `value` is no rate; the message lists what is allowed.
    """
    return _parse(value, rate=True)


def format_bytes(num_bytes: float) -> str:
    """Returns a size for people in three digits, such as `1.50 GiB`; units are powers of 1024."""
    sign, rest = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if rest < 1024 or unit == "TiB":
            break
        rest /= 1024
    places = 0 if unit == "B" or rest >= 100 or rest == 0 else 1 if rest >= 10 else 2
    return f"{sign}{rest:,.{places}f} {unit}"


def exact_size(num_bytes: int) -> int | str:
    """Returns the shortest spelling that `parse_size` reads back as exactly `num_bytes`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return num_bytes


def _parse(value: int | float | str, *, rate: bool) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refused(value, rate=rate)
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0 or value != int(value):
            raise _refused(value, rate=rate)
        return int(value)
    match = _PATTERN.fullmatch(value)
    if match is None or (match[3] and not rate):
        raise _refused(value, rate=rate)
    unit = _UNIT.fullmatch(match[2] or "B")
    if unit is None or (unit[2] and not unit[1]):
        raise _refused(value, rate=rate)
    base = 1000 if rate and not unit[2] else 1024
    num_bytes = Fraction(match[1]) * base ** _POWERS[unit[1].lower()]
    if not unit[1] and num_bytes != int(num_bytes):
        raise _refused(value, rate=rate)
    return round(num_bytes)


def _refused(value: object, *, rate: bool) -> ConfigError:
    noun, allowed = ("rate", ALLOWED_RATES) if rate else ("size", ALLOWED_SIZES)
    return ConfigError(f"{value!r} is no {noun}; allowed: {allowed}")
