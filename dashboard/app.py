"""The Dash app over a folder of runs, and a local server for it.

The address is the whole state: path = view, query = run, steps, mode. Controls only write the
address; one callback reads it and draws the page. A timer compares the files' revision, so the
page of a live run follows it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dash
from dash import ClientsideFunction, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from flask import Flask, Response, jsonify, request
from werkzeug.serving import WSGIRequestHandler, make_server

from dashboard import components
from dashboard.components import aria
from dashboard.controls import control_bar, navigation, next_query
from dashboard.guard import check_host, guard
from dashboard.pages import Pages
from dashboard.registry import view_at
from dashboard.state import ViewState
from dashboard.theme import LIGHT, THEMES

logger = logging.getLogger("odc.dashboard")

REFRESH_MS = 3_000

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script>
document.documentElement.dataset.theme = localStorage.getItem("odc-theme")
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
</script>
{%css%}
</head>
<body>
<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>
<pattern id="odc-hatch" width="7" height="7" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="7" height="7" class="hatch-ground"/>
<rect width="2" height="7" class="hatch-line"/></pattern></defs></svg>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


def make_app(root: str | Path, *, token: str | None = None) -> dash.Dash:
    """Return the app over a run directory or a folder of runs.

    Args:
        root: A run directory, or a folder with runs in it or one level further down.
        token: If given, requests must carry it (see `dashboard.guard`).
    """
    app = dash.Dash(
        __name__,
        title="odc dashboard",
        update_title="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        pages_folder="",
        index_string=_INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        add_log_handler=False,
    )
    pages = Pages(root)
    guard(app.server, token)
    app.layout = _layout()
    _add_callbacks(app, pages)
    _add_routes(app.server, pages)
    return app


def _layout() -> Component:
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="theme"),
            dcc.Store(id="revision"),
            dcc.Store(id="controls-key"),
            dcc.Interval(id="timer", interval=REFRESH_MS),
            html.A("Skip to the page", href="#content", className="skip"),
            html.Header(
                [
                    html.Div(
                        [html.Span("odc", className="brand-name"), "dashboard"], className="brand"
                    ),
                    html.Div(id="controls", className="controls"),
                    html.Button(
                        "Theme",
                        id="theme-button",
                        className="button",
                        title="Switch between light and dark",
                        type="button",
                    ),
                ],
                className="top",
            ),
            html.Div(
                [
                    html.Nav(id="nav", className="rail", **aria(label="Views")),
                    html.Main(id="content", tabIndex="-1"),
                ],
                className="body",
            ),
        ],
        className="app",
    )


def _add_callbacks(app: dash.Dash, pages: Pages) -> None:
    app.clientside_callback(
        ClientsideFunction("odc", "theme"),
        Output("theme", "data"),
        Input("theme-button", "n_clicks"),
    )

    @app.callback(
        Output("content", "children"),
        Output("nav", "children"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("theme", "data"),
        Input("revision", "data"),
    )
    def show(path: str | None, query: str | None, theme: str | None, _: Any) -> Any:
        state = ViewState.from_query(query)
        content = pages.content(path, query, THEMES.get(theme or "light", LIGHT))
        run = pages.catalog.find(state.run)
        drawn = components.page(content, view_at(path).path, state, run.name if run else None)
        return drawn, navigation(view_at(path), state)

    @app.callback(
        Output("revision", "data"),
        Input("timer", "n_intervals"),
        State("url", "search"),
        State("revision", "data"),
    )
    def look(_: Any, query: str | None, known: str | None) -> Any:
        current = pages.revision(query)
        return no_update if current == known else current

    _add_controls(app, pages)


def _add_controls(app: dash.Dash, pages: Pages) -> None:
    @app.callback(
        Output("controls", "children"),
        Output("controls-key", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("revision", "data"),
        State("controls-key", "data"),
    )
    def controls(path: str | None, query: str | None, _: Any, known: str | None) -> Any:
        drawn, key = control_bar(pages, view_at(path), ViewState.from_query(query))
        # Drawing them again would take the focus from whoever is using them.
        return (no_update, no_update) if key == known else (drawn, key)

    @app.callback(
        Output("url", "search"),
        Input("run-select", "value"),
        Input("step-window", "value"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def navigate(
        run_name: str | None, window: list[int] | None, path: str | None, query: str | None
    ) -> Any:
        wanted = next_query(pages, view_at(path), query, run_name, window)
        return no_update if wanted is None else wanted


def _add_routes(server: Flask, pages: Pages) -> None:
    @server.route("/table.csv")
    def table_csv() -> Response:
        query = request.query_string.decode()
        content = pages.content(request.args.get("view"), query, LIGHT)
        wanted = request.args.get("table")
        table = next((table for table in content.tables if table.key == wanted), None)
        if table is None:
            return Response(f"no such table: {content.verdict}", 404, mimetype="text/plain")
        return Response(table.to_csv(), mimetype="text/csv")

    @server.route("/health")
    def health() -> Response:
        return jsonify(status="ok", runs=len(pages.catalog.runs()))


class _QuietHandler(WSGIRequestHandler):
    """Leaves out the line that werkzeug prints for every request."""

    def log_request(self, *args: Any, **kwargs: Any) -> None:
        pass


def serve(
    root: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    block: bool = True,
    token: str | None = None,
) -> str:
    """Serve the dashboard of a run or a folder of runs.

    Args:
        root: A run directory or a folder of runs.
        host: Where to listen; anything but this machine needs a token.
        port: Preferred port; a free one is taken if it is in use.
        block: Serve until interrupted; otherwise return at once and serve from a daemon thread.
        token: Secret that requests must carry.

    Returns:
        The address to open, with the token if there is one.

    Raises:
        ValueError: If the host is not this machine and there is no token.
    """
    check_host(host, token)
    listener = _listen(host.strip("[]"), port)
    app = make_app(root, token=token)
    bound = listener.getsockname()[1]
    server = make_server(
        host, bound, app.server, threaded=True, request_handler=_QuietHandler, fd=listener.fileno()
    )
    name = f"[{host.strip('[]')}]" if ":" in host else host
    url = f"http://{name}:{bound}/" + (f"?token={quote(token)}" if token else "")
    logger.info("dashboard of %s: %s", root, url)
    if not block:
        threading.Thread(
            target=_serve_until_closed, args=(server, listener), name="odc-dashboard", daemon=True
        ).start()
        return url
    print(f"odc dashboard: {url}  (Ctrl+C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        _serve_until_closed(server, listener)
    return url


def _serve_until_closed(server: Any, listener: socket.socket) -> None:
    # The listener is passed along because its socket closes when it is collected.
    with listener:
        server.serve_forever()


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on the port, on a free one if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError:
        return socket.create_server((host, 0), family=family)
