"""What a page is made of. Views return these records; the app and the report draw them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import plotly.graph_objects as go

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Notice:
    """Something the reader must know before believing the numbers."""

    severity: Severity
    text: str


@dataclass(frozen=True)
class Tile:
    """One number with its name."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """A figure.

    Attributes:
        key: Identifies the figure on its page.
        summary: What the figure shows, in words, for those who cannot see it.
        legend: What the colour means, where a colour bar has no room to say so.
        hatched: Whether unknown values show through as hatching.
        wide: Whether the figure takes the whole width where others stand side by side.
    """

    key: str
    title: str
    figure: go.Figure
    summary: str
    legend: str = ""
    hatched: bool = False
    wide: bool = False


@dataclass(frozen=True)
class How:
    """How a number is computed."""

    term: str
    formula: str
    unit: str
    source: Literal["measured", "modelled", "configured"]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: Heading in the CSV file, with the unit of the raw value.
        title: Heading on the page.
        show: Turns the raw value into what the page shows.
        numeric: Whether the column is aligned to the right.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    numeric: bool = True


@dataclass(frozen=True)
class DataTable:
    """The numbers behind a figure; `rows` hold raw values."""

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def shown(self, limit: int) -> list[list[str]]:
        """Return the first `limit` rows as the page shows them."""
        pairs = [zip(self.columns, row, strict=True) for row in self.rows[:limit]]
        return [[column.show(value) for column, value in pair] for pair in pairs]

    def to_csv(self) -> str:
        """Return all rows with raw values."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        writer.writerows(self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Choice:
    """A control of a view: one of some values of a field of the view state."""

    field: str
    label: str
    options: Sequence[tuple[str, str]]
    value: str


@dataclass(frozen=True)
class PageContent:
    """A whole page, in the order in which it is read.

    Attributes:
        title: Name of the view.
        question: What the page answers.
        verdict: The answer in one sentence, with numbers.
        code: Commands to copy, for pages that explain how to get data.
    """

    title: str
    question: str
    verdict: str
    notices: Sequence[Notice] = ()
    tiles: Sequence[Tile] = ()
    choices: Sequence[Choice] = ()
    panels: Sequence[Panel] = ()
    how: Sequence[How] = ()
    tables: Sequence[DataTable] = ()
    code: str = ""
    explanation: Sequence[str] = field(default_factory=tuple)
