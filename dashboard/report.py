"""One HTML file with every view of a run, or of a folder of runs: no server, no request.

plotly.js stands in the file once. Figures are kept for the light page; what differs on a dark one
(colours) lies beside them, and a few lines of script draw the one that the reader's system asks
for. Figures are drawn when they come into sight, so a long report opens at once.
"""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from dashboard.binning import MAX_ROWS
from dashboard.catalog import RunCatalog
from dashboard.content import DataTable, How, PageContent, Panel
from dashboard.data import RunData
from dashboard.state import ViewState
from dashboard.theme import CONFIG, DARK, LIGHT, Theme
from dashboard.views import access, communication, memory, overview, residency
from dashboard.views.frame import failed, no_run

MAX_BYTES = 15_000_000
TABLE_ROWS = 100
_SCALES = (MAX_ROWS, 256, 128, 64)
# Whatever a trace holds, the file loads nothing from anywhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
_ASSETS = Path(__file__).parent / "assets"
# What a theme changes is small; these are the numbers, the same in both.
_NUMBERS = ("x", "y", "z", "customdata", "text", "texttemplate", "hovertemplate")


def write_report(source: str | Path, path: str | Path, *, max_bytes: int = MAX_BYTES) -> Path:
    """Write a report that needs no server.

    Args:
        source: A run directory or a folder of runs.
        path: The HTML file to write; folders are made.
        max_bytes: Heatmaps are merged further, and at last the details of all runs but one are
            left out, until the file is no larger.

    Returns:
        The file's path.

    Raises:
        ValueError: If not even the smallest report fits `max_bytes`.
    """
    catalog = RunCatalog(source)
    runs = [RunData(place) for place in catalog.runs()]
    size = 0
    for max_rows, detailed in [(rows, runs) for rows in _SCALES] + [(_SCALES[-1], runs[:1])]:
        text = _document(str(catalog.root.name), str(catalog.root), runs, detailed, max_rows)
        size = len(text.encode())
        if size <= max_bytes:
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            return target
    raise ValueError(
        f"max_bytes must be at least {size:,} for this report (plotly.js alone takes "
        f"{len(get_plotlyjs().encode()):,}), got {max_bytes:,}"
    )


def run_pages(run: RunData, theme: Theme, max_rows: int) -> list[PageContent]:
    """Return the pages of a run; an error becomes a page that names it."""
    state = ViewState()
    views = (
        (overview.TITLE, lambda: overview.build(run, state, theme)),
        (residency.TITLE, lambda: residency.build(run, state, theme, max_rows)),
        (access.TITLE, lambda: access.build(run, state, theme, max_rows)),
        ("Experts", lambda: _experts(run, theme, max_rows)),
        (memory.TITLE, lambda: memory.build(run, state, theme)),
        (communication.TITLE, lambda: communication.build(run, state, theme)),
    )
    pages = []
    for title, build in views:
        try:
            page = build()
        # As in the app: damage to one view must not cost the others.
        except Exception as error:
            page = failed(title, error)
        if page is not None:
            pages.append(page)
    return pages


def _experts(run: RunData, theme: Theme, max_rows: int) -> PageContent | None:
    if not (run.pages["set"] >= 0).any():
        return None
    return access.build(run, ViewState(mode="experts"), theme, max_rows)


def _document(
    name: str, root: str, runs: list[RunData], detailed: Sequence[RunData], max_rows: int
) -> str:
    sections, figures = [], []
    compared = [overview.comparison(runs, theme) for theme in (LIGHT, DARK)]
    if compared[0] is not None and compared[1] is not None:
        sections.append(f'<section class="page">{_page(compared[0], "c")}</section>')
        figures += _figures("c", compared[0], compared[1])
    for number, run in enumerate(detailed):
        light = run_pages(run, LIGHT, max_rows)
        dark = run_pages(run, DARK, max_rows)
        sections.append(_run_section(run, light, number, opened=len(runs) == 1))
        for index, (one, two) in enumerate(zip(light, dark, strict=True)):
            figures += _figures(f"f{number}-{index}", one, two)
    if not runs:
        sections.append(f'<section class="page">{_page(no_run(root), "n")}</section>')
    elif len(detailed) < len(runs):
        left_out = ", ".join(run.name for run in runs if run not in detailed)
        sections.append(f"<p>Left out to keep the file small: {html.escape(left_out)}.</p>")
    made = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    return _PAGE.format(
        policy=html.escape(_POLICY),
        title=html.escape(f"odc report: {name}"),
        css=(_ASSETS / "odc.css").read_text(encoding="utf-8"),
        made=html.escape(f"{root}, {made}"),
        body="\n".join(sections),
        figures="\n".join(figures),
        config=json.dumps(CONFIG),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )


def _run_section(run: RunData, pages: list[PageContent], number: int, *, opened: bool) -> str:
    body = "\n".join(
        f'<section class="page">{_page(page, f"f{number}-{index}")}</section>'
        for index, page in enumerate(pages)
    )
    policy = f" ({run.policy})" if run.policy and run.policy not in run.name else ""
    heading = html.escape(f"Run {run.name}{policy}")
    return (
        f'<details class="run"{" open" if opened else ""}><summary>{heading}</summary>'
        f"{body}</details>"
    )


def _page(page: PageContent, prefix: str) -> str:
    """Return a page as HTML, in the order of the app."""
    e = html.escape
    parts = [
        f"<h1>{e(page.title)}</h1>",
        f'<p class="question">{e(page.question)}</p>',
        f'<p class="verdict">{e(page.verdict)}</p>',
    ]
    for notice in page.notices:
        word = {"info": "Note", "warning": "Warning", "error": "Error"}[notice.severity]
        parts.append(
            f'<div class="notice {notice.severity}"><strong>{word}: </strong>{e(notice.text)}</div>'
        )
    if page.tiles:
        tiles = "".join(
            f'<div class="card tile"><dt>{e(tile.label)}</dt><dd class="value">{e(tile.value)}</dd>'
            f'<dd class="note">{e(tile.note)}</dd></div>'
            for tile in page.tiles
        )
        parts.append(f'<dl class="tiles">{tiles}</dl>')
    parts += [f'<p class="explanation">{e(text)}</p>' for text in page.explanation]
    if page.code:
        parts.append(f'<pre class="card code"><code>{e(page.code)}</code></pre>')
    if page.panels:
        several = " several" if len(page.panels) > 1 else ""
        panels = "".join(_panel(panel, f"{prefix}-{panel.key}", page) for panel in page.panels)
        parts.append(f'<div class="panels{several}">{panels}</div>')
    parts.append(_how(page.how))
    parts += [_table(table) for table in page.tables]
    return "\n".join(parts)


def _panel(panel: Panel, name: str, page: PageContent) -> str:
    hidden = "visually-hidden" if panel.summary == page.verdict else "panel-summary"
    wide = " wide" if panel.wide else ""
    hatched = " hatched" if panel.hatched else ""
    legend = f'<span class="panel-legend">{html.escape(panel.legend)}</span>'
    return (
        f'<figure class="card panel{wide}" aria-label="{html.escape(panel.title)}">'
        f'<figcaption class="panel-title">{html.escape(panel.title)}{legend}</figcaption>'
        f'<div class="plot{hatched}" data-figure="{name}" '
        f'style="height:{panel.figure.layout.height}px"></div>'
        f'<p class="{hidden}">{html.escape(panel.summary)}</p></figure>'
    )


def _how(entries: Sequence[How]) -> str:
    if not entries:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(how.term)}</th><td>{html.escape(how.formula)}</td>'
        f"<td>{html.escape(how.unit)}</td><td>{how.source}</td></tr>"
        for how in entries
    )
    head = "".join(f'<th scope="col">{t}</th>' for t in ("Number", "Formula", "Unit", "Source"))
    return (
        '<details class="card how"><summary>How is this computed?</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _table(table: DataTable) -> str:
    sides = [' class="number"' if column.numeric else "" for column in table.columns]
    head = "".join(
        f'<th scope="col"{side}>{html.escape(column.title)}</th>'
        for column, side in zip(table.columns, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{side}>{html.escape(text)}</td>" for text, side in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in table.shown(TABLE_ROWS)
    )
    more = f" ({TABLE_ROWS} of {len(table.rows):,} rows)" if len(table.rows) > TABLE_ROWS else ""
    return (
        f'<section class="card table"><div class="table-head"><h2>{html.escape(table.caption)}'
        f'{more}</h2></div><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{html.escape(table.caption)}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _figures(prefix: str, light: PageContent, dark: PageContent) -> list[str]:
    pairs = zip(light.panels, dark.panels, strict=True)
    return [_figure_script(f"{prefix}-{one.key}", one, two) for one, two in pairs]


def _figure_script(name: str, panel: Panel, dark: Panel) -> str:
    """Return a figure and what is different on a dark page, as data for the script."""
    overlay = json.loads(dark.figure.to_json())
    spec = {
        "light": json.loads(panel.figure.to_json()),
        "dark": {
            "data": [_without_numbers(trace) for trace in overlay["data"]],
            "layout": overlay["layout"],
        },
    }
    text = json.dumps(spec, separators=(",", ":")).replace("</", "<\\/")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _without_numbers(trace: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in trace.items() if key not in _NUMBERS}


_PAGE = """<!DOCTYPE html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
</style>
</head>
<body>
<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>
<pattern id="odc-hatch" width="7" height="7" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="7" height="7" class="hatch-ground"/>
<rect width="2" height="7" class="hatch-line"/></pattern></defs></svg>
<header class="top"><div class="brand"><span class="brand-name">odc</span>report</div>
<div class="controls">{made}</div>
<button type="button" class="button" id="theme-button">Theme</button></header>
<main class="report">
{body}
</main>
{figures}
<script>{plotly}</script>
<script>
"use strict";
const config = {config};
const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
function themed(name) {{
  const spec = JSON.parse(document.getElementById(name).textContent);
  if (root.dataset.theme === "light") return spec.light;
  return {{
    data: spec.light.data.map((trace, i) => Object.assign({{}}, trace, spec.dark.data[i])),
    layout: spec.dark.layout,
  }};
}}
function draw(plot) {{
  const figure = themed(plot.dataset.figure);
  Plotly.react(plot, figure.data, figure.layout, config);
  plot.dataset.drawn = root.dataset.theme;
}}
const seen = new IntersectionObserver((entries) => {{
  for (const entry of entries) {{
    const plot = entry.target;
    if (entry.isIntersecting && plot.dataset.drawn !== root.dataset.theme) draw(plot);
  }}
}}, {{ rootMargin: "600px" }});
const plots = document.querySelectorAll(".plot");
plots.forEach((plot) => seen.observe(plot));
document.getElementById("theme-button").addEventListener("click", () => {{
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  plots.forEach((plot) => {{ seen.unobserve(plot); seen.observe(plot); }});
}});
</script>
</body>
</html>
"""
