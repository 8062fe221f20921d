"""What one configuration value may be: parse it, refuse it, and write it back.

A `Check` knows one kind of value. `parse` turns what YAML, the command line or Python handed over
into the value that the program works with, or raises `ValueError`; `show` is its inverse and gives
what stands in the resolved `config.yaml`. "Off" is `None` inside the program, whatever word
(`unlimited`, `auto`, `null`) says so outside.
"""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odc import sizes
from odc.errors import ConfigError
from odc.sharding.granularity import ALLOWED as GRANULARITIES
from odc.sharding.granularity import parse_granularity


@dataclass(frozen=True, kw_only=True)
class Check:
    """One kind of value.

    Attributes:
        allowed: What may stand there, in words.
        parse: Returns the parsed value; raises `ValueError` where the value is not allowed.
        show: Returns what `parse` reads back as the same value.
        words: Spellings to compare a wrong value with.
        brief: `allowed` in fewer words, for a list of all keys; empty where it is short enough.
    """

    allowed: str
    parse: Callable[[Any], Any]
    show: Callable[[Any], Any] = lambda value: value
    words: tuple[str, ...] = ()
    brief: str = ""

    @property
    def kind(self) -> str:
        """What may stand there, in few words."""
        return self.brief or self.allowed

    def refuse(self, path: str, value: object, reason: str = "") -> str:
        """Returns the message for a value that `parse` did not take."""
        guess = nearest(str(value), self.words)
        hint = f"; did you mean {guess}?" if guess else ""
        because = f" ({reason})" if reason else ""
        return f"{path}: got {value!r}{because}; allowed: {self.allowed}{hint}"


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """Returns the candidate spelt most like `word`, or `None` where none is near."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def whole(minimum: int, maximum: int | None = None) -> Check:
    """An integer from `minimum` to `maximum`, both included."""
    span = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: Any) -> int:
        number = _as_float(value)
        if number != int(number) or number < minimum or (maximum is not None and number > maximum):
            raise ValueError
        return int(value) if isinstance(value, int) else int(number)

    return Check(allowed=f"a whole number, {span}", parse=parse)


def number(
    minimum: float,
    maximum: float = math.inf,
    *,
    open_below: bool = False,
    open_above: bool = False,
) -> Check:
    """A finite number from `minimum` to `maximum`; an open end does not belong to them."""
    low = f"above {minimum:g}" if open_below else f"at least {minimum:g}"
    high = "" if maximum == math.inf else f" and at most {maximum:g}"
    if open_above:
        high = f" and below {maximum:g}"

    def parse(value: Any) -> float:
        result = _as_float(value)
        if result < minimum or result > maximum:
            raise ValueError
        if (open_below and result == minimum) or (open_above and result == maximum):
            raise ValueError
        return result

    return Check(allowed=f"a number {low}{high}", parse=parse)


def flag() -> Check:
    """`true` or `false`."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Check(allowed="true, false", parse=parse, words=("true", "false"))


def text() -> Check:
    """A string that is not empty."""

    def parse(value: Any) -> str:
        result = str(value) if hasattr(value, "__fspath__") else value
        if not isinstance(result, str) or not result.strip():
            raise ValueError
        return result

    return Check(allowed="text", parse=parse)


def choice(*names: str, later: tuple[str, ...] = ()) -> Check:
    """One of `names`. Those of `later` are refused with the remark that they do not exist yet."""

    def parse(value: Any) -> str:
        # YAML reads a bare `null` as None; where `none` is a choice they mean the same.
        result = "none" if value is None and "none" in names else value
        if result in later:
            raise ValueError("not available yet")
        if not isinstance(result, str) or result not in names:
            raise ValueError
        return result

    return Check(allowed=", ".join(names), parse=parse, words=names)


def granularity() -> Check:
    """What of a parameter stays on one rank, as `odc.sharding` reads it; kept as text."""

    def parse(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError
        try:
            return str(parse_granularity(value))
        except ConfigError:
            raise ValueError from None

    return Check(allowed=GRANULARITIES, parse=parse, words=("element", "block", "tensor"))


def size(*, minimum: int = 0, multiple_of: int = 1, power_of_two: bool = False) -> Check:
    """A number of bytes, as `odc.sizes.parse_size` reads it."""
    extra = f", at least {sizes.exact_size(minimum)}" if minimum else ""
    extra += f", a multiple of {sizes.exact_size(multiple_of)}" if multiple_of > 1 else ""
    extra += ", a power of two" if power_of_two else ""

    def parse(value: Any) -> int:
        num_bytes = sizes.parse_size(value)
        wrong = num_bytes < minimum or num_bytes % multiple_of
        if wrong or (power_of_two and num_bytes.bit_count() != 1):
            raise ValueError
        return num_bytes

    return Check(
        allowed=sizes.ALLOWED_SIZES + extra,
        parse=parse,
        show=sizes.exact_size,
        brief=f"a size such as 512MiB{extra}",
    )


def rate() -> Check:
    """Bytes a second above zero, as `odc.sizes.parse_rate` reads them."""

    def parse(value: Any) -> int:
        num_bytes = sizes.parse_rate(value)
        if num_bytes == 0:
            raise ValueError
        return num_bytes

    allowed = sizes.ALLOWED_RATES + ", above 0"
    return Check(allowed=allowed, parse=parse, brief="a rate such as 1.5GB/s")


def optional(check: Check, *, off: str = "null", also: tuple[str, ...] = ()) -> Check:
    """`check`, or `None`, which is written `off` (and read from the words `also`)."""
    words = (off, *also)

    def parse(value: Any) -> Any:
        return None if value is None or value in words else check.parse(value)

    def show(value: Any) -> Any:
        if value is None:
            return None if off == "null" else off
        return check.show(value)

    return Check(
        allowed=f"{', '.join(words)}, or {check.allowed}",
        parse=parse,
        show=show,
        brief=f"{', '.join(words)}, or {check.kind}",
        words=(*check.words, *(word for word in words if word != "null")),
    )


def list_of(item: Check, *, length: int | None = None, may_be_empty: bool = False) -> Check:
    """A list whose items all pass `item`; kept as a tuple, so that it cannot change unseen."""
    count = "a list" if length is None else f"a list of {length}"

    def parse(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or (not value and not may_be_empty):
            raise ValueError
        if length is not None and len(value) != length:
            raise ValueError
        return tuple(_parse_item(item, entry) for entry in value)

    return Check(
        allowed=f"{count}, each {item.allowed}",
        parse=parse,
        show=lambda value: [item.show(entry) for entry in value],
    )


def one_or_more(item: Check) -> Check:
    """One value that passes `item`, or a list of them; kept as a tuple."""
    many = list_of(item)
    return Check(
        allowed=f"{item.allowed}, or a list of such",
        parse=lambda value: many.parse(value if isinstance(value, list | tuple) else [value]),
        show=lambda value: item.show(value[0]) if len(value) == 1 else many.show(value),
        words=item.words,
    )


def either(first: Check, second: Check) -> Check:
    """A value that passes `first`, or else `second`."""

    def parse(value: Any) -> Any:
        try:
            return first.parse(value)
        except ValueError:
            return second.parse(value)

    def show(value: Any) -> Any:
        return second.show(value) if isinstance(value, tuple) else first.show(value)

    return Check(allowed=f"{first.allowed}; or {second.allowed}", parse=parse, show=show)


def pattern() -> Check:
    """A regular expression of Python's `re`."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value

    return Check(allowed="a regular expression", parse=parse)


def _parse_item(item: Check, entry: object) -> Any:
    try:
        return item.parse(entry)
    except ConfigError:
        raise
    except ValueError as error:
        raise ValueError(str(error) or f"{entry!r} is not allowed in it") from error


def _as_float(value: object) -> float:
    """Accepts text too: YAML 1.1 reads `3e-4` as a string."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    result = float(value)
    if not math.isfinite(result):
        raise ValueError
    return result
