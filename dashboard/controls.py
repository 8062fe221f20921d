"""The controls above a page: views, run, steps. They only write the address."""

from __future__ import annotations

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import Pages
from dashboard.registry import VIEWS, View, step_range
from dashboard.state import ViewState


def navigation(current: View, state: ViewState) -> Component:
    """Return the links to all views; mode and order belong to one view and stay behind."""
    links = []
    kept = state.changed(mode=None, order=None)
    for view in VIEWS:
        href = view.path + kept.to_query()
        link = dcc.Link(view.title, href=href, className="chosen" if view is current else "")
        links.append(html.Li(link))
    return html.Ul(links)


def control_bar(pages: Pages, view: View, state: ViewState) -> tuple[list[Component], str]:
    """Return the controls that fit an address, and a key that changes when they do."""
    names = [place.name for place in pages.catalog.runs()]
    run = pages.run(state)
    parts: list[Component] = []
    steps = step_range(run) if run is not None else None
    window = state.window(*steps, view.default_steps) if steps else None
    if names:
        parts.append(_run_control(names, run.name if run else None))
    if steps and window and steps[0] < steps[1]:
        parts.append(_step_control(steps, window))
    return parts, f"{view.path}|{names}|{run.name if run else None}|{steps}|{window}"


def _run_control(names: list[str], value: str | None) -> Component:
    dropdown = dcc.Dropdown(
        id="run-select",
        options=[{"label": name, "value": name} for name in names],
        value=value,
        clearable=False,
        searchable=len(names) > 8,
    )
    return html.Div(
        [html.Label("Run", htmlFor="run-select"), dropdown], className="control run-control"
    )


def _step_control(steps: tuple[int, int], window: tuple[int, int]) -> Component:
    slider = dcc.RangeSlider(
        id="step-window",
        min=steps[0],
        max=steps[1],
        step=1,
        value=list(window),
        marks=None,
        allow_direct_input=True,
        updatemode="mouseup",
    )
    return html.Div(
        [html.Label("Steps", htmlFor="step-window"), html.Div(slider, className="slider")],
        className="control step-control",
    )


def next_query(
    pages: Pages,
    view: View,
    query: str | None,
    run_name: str | None,
    window: list[int] | None,
) -> str | None:
    """Return the query that the controls ask for, None if the address says so already."""
    state = ViewState.from_query(query)
    run = pages.run(state)
    if run_name is not None and (run is None or run_name != run.name):
        return state.changed(run=run_name, step0=None, step1=None).to_query()
    steps = step_range(run) if run is not None else None
    if not window or steps is None or tuple(window) == state.window(*steps, view.default_steps):
        return None
    default = ViewState().window(*steps, view.default_steps)
    chosen = (None, None) if tuple(window) == default else tuple(window)
    return state.changed(step0=chosen[0], step1=chosen[1]).to_query()
