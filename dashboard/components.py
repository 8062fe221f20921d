"""Draws a `PageContent` with Dash components: the only place that knows its HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.content import Choice, DataTable, How, Notice, PageContent, Panel, Tile
from dashboard.state import ViewState
from dashboard.theme import CONFIG

TABLE_ROWS = 50


def aria(**values: str) -> dict[str, Any]:
    """Return aria attributes, e.g. `aria(label="Views")`."""
    return {f"aria-{name}": value for name, value in values.items()}


def graph(panel: Panel, verdict: str = "") -> Component:
    """Return a figure with its title and its description; the only place that makes a graph.

    The description is not shown again where it is the page's verdict.
    """
    return html.Figure(
        [
            html.Figcaption(
                [panel.title, html.Span(panel.legend, className="panel-legend")],
                className="panel-title",
            ),
            dcc.Graph(
                id=f"graph-{panel.key}",
                figure=panel.figure,
                config=CONFIG,
                className="hatched" if panel.hatched else "",
                style={"height": f"{panel.figure.layout.height}px"},
            ),
            html.P(
                panel.summary,
                className="visually-hidden" if panel.summary == verdict else "panel-summary",
            ),
        ],
        className="card panel wide" if panel.wide else "card panel",
        **aria(label=f"{panel.title}. {panel.summary}"),
    )


def page(content: PageContent, path: str, state: ViewState, run_name: str | None) -> Component:
    """Return a whole page."""
    parts: list[Any] = [
        html.H1(content.title),
        html.P(content.question, className="question"),
        html.P(content.verdict, className="verdict", **aria(live="polite")),
    ]
    parts += [_notice(notice) for notice in content.notices]
    if content.tiles:
        parts.append(html.Dl([_tile(tile) for tile in content.tiles], className="tiles"))
    parts += [_choice(choice, path, state) for choice in content.choices]
    parts += [html.P(text, className="explanation") for text in content.explanation]
    if content.code:
        parts.append(html.Pre(html.Code(content.code), className="card code", tabIndex="0"))
    if content.panels:
        several = " several" if len(content.panels) > 1 else ""
        panels = [graph(panel, content.verdict) for panel in content.panels]
        parts.append(html.Div(panels, className=f"panels{several}"))
    if content.how:
        parts.append(_how(content.how))
    parts += [_table(table, path, state, run_name) for table in content.tables]
    return html.Div(parts, className="page")


def _notice(notice: Notice) -> Component:
    word = {"info": "Note", "warning": "Warning", "error": "Error"}[notice.severity]
    role = "alert" if notice.severity == "error" else "note"
    text: list[Any] = [html.Strong(f"{word}: "), notice.text]
    return html.Div(text, className=f"notice {notice.severity}", role=role)


def _tile(tile: Tile) -> Component:
    return html.Div(
        [
            html.Dt(tile.label),
            html.Dd(tile.value, className="value"),
            html.Dd(tile.note, className="note"),
        ],
        className="card tile",
    )


def _choice(choice: Choice, path: str, state: ViewState) -> Component:
    links = []
    for value, title in choice.options:
        chosen = value == choice.value
        link = dcc.Link(
            title,
            href=path + state.changed(**{choice.field: value}).to_query(),
            className="chosen" if chosen else "",
            id=f"choice-{choice.field}-{value}",
        )
        links.append(html.Li(link))
    return html.Nav(
        [html.Span(choice.label, className="choice-label"), html.Ul(links)],
        className="choice",
        **aria(label=choice.label),
    )


def _how(entries: Sequence[How]) -> Component:
    rows = [
        html.Tr(
            [
                html.Th(how.term, scope="row"),
                html.Td(how.formula),
                html.Td(how.unit),
                html.Td(how.source),
            ]
        )
        for how in entries
    ]
    head = html.Tr([html.Th(text, scope="col") for text in ("Number", "Formula", "Unit", "Source")])
    table = html.Table([html.Thead(head), html.Tbody(rows)])
    return html.Details(
        [html.Summary("How is this computed?"), html.Div(table, className="scroll")],
        className="card how",
    )


def _table(table: DataTable, path: str, state: ViewState, run_name: str | None) -> Component:
    align = ["number" if column.numeric else "" for column in table.columns]
    head = [
        html.Th(column.title, scope="col", className=side)
        for column, side in zip(table.columns, align, strict=True)
    ]
    body = [
        html.Tr([html.Td(text, className=side) for text, side in zip(row, align, strict=True)])
        for row in table.shown(TABLE_ROWS)
    ]
    more = f" ({TABLE_ROWS} of {len(table.rows):,} rows)" if len(table.rows) > TABLE_ROWS else ""
    address = {"view": path, "table": table.key}
    query = state.changed(run=run_name).to_query().lstrip("?")
    return html.Section(
        [
            html.Div(
                [
                    html.H2(f"{table.caption}{more}"),
                    html.A(
                        "CSV",
                        href=f"table.csv?{urlencode(address)}&{query}",
                        download=f"{table.key}.csv",
                        className="button",
                        title="Download all rows with raw values",
                    ),
                ],
                className="table-head",
            ),
            html.Div(
                html.Table([html.Thead(html.Tr(head)), html.Tbody(body)]),
                className="scroll",
                tabIndex="0",
                role="region",
                **aria(label=table.caption),
            ),
        ],
        className="card table",
    )
