"""What the address of a page says: run, steps, mode and order. A copied address shows the same."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

_MAX_TEXT = 200


@dataclass(frozen=True)
class ViewState:
    """The state of a view; None means the view's default.

    Attributes:
        run: Name of the run within the folder.
        step0: First step shown.
        step1: Last step shown.
        mode: What the view shows (each view has its own modes).
        order: Order of the rows.
    """

    run: str | None = None
    step0: int | None = None
    step1: int | None = None
    mode: str | None = None
    order: str | None = None

    @classmethod
    def from_query(cls, query: str | None) -> ViewState:
        """Read a query string; what makes no sense is left out."""
        given = dict(parse_qsl((query or "").lstrip("?")))
        step0, step1 = _integer(given.get("step0")), _integer(given.get("step1"))
        if step0 is not None and step1 is not None and step0 > step1:
            step0, step1 = step1, step0
        texts = {name: given.get(name, "")[:_MAX_TEXT] or None for name in ("run", "mode", "order")}
        return cls(step0=step0, step1=step1, **texts)

    def to_query(self) -> str:
        """Return the query string, `""` for the default state."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        query = urlencode({name: value for name, value in values.items() if value is not None})
        return f"?{query}" if query else ""

    def changed(self, **values: Any) -> ViewState:
        """Return a copy with other values."""
        return replace(self, **values)

    def window(self, first: int, last: int, default: int | None = None) -> tuple[int, int]:
        """Return the steps to show, inside those that exist.

        Args:
            first: First step that exists.
            last: Last step that exists.
            default: Number of steps at the end to show where the address gives none; all if None.
        """
        start = first if default is None else max(first, last - default + 1)
        if self.step0 is not None:
            start = min(max(self.step0, first), last)
        stop = last if self.step1 is None else min(max(self.step1, first), last)
        if self.step1 is not None and self.step0 is None:
            start = min(start, stop)
        return min(start, stop), max(start, stop)


def _integer(text: str | None) -> int | None:
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if 0 <= value < 1 << 31 else None
