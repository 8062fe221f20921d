"""Colours and figure templates, for a light and a dark page.

Quantities are drawn in Cividis with "much" at the end that contrasts with the page; categories in
Okabe-Ito colours. Zero has a grey of its own, and unknown is transparent: the page shows a hatched
plot background through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sequential

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif'
CONFIG: Any = {
    "displaylogo": False,
    "showSendToCloud": False,  # plotly.js 4 offers to upload the figure unless told not to
    "modeBarButtonsToRemove": ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d"],
    "responsive": True,
}
"""Configuration of every graph, in the app and in the report."""

TRANSPARENT = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class Theme:
    """Colours of one page theme.

    Attributes:
        quantity: Colorscale of quantities.
        zero: Colour of the value zero in a map of quantities.
        hatch: Plain stand-in for the hatching where the page cannot draw it.
        series: Colours of the usual categories by name.
    """

    name: str
    text: str
    muted: str
    grid: str
    surface: str
    zero: str
    hatch: str
    quantity: tuple[str, ...]
    series: dict[str, str]

    def line(self, name: str, width: float = 1.6, dash: str = "solid") -> dict[str, Any]:
        """Return a plotly line of a category's colour."""
        return {"color": self.series[name], "width": width, "dash": dash}


# Okabe-Ito; on dark pages sky blue replaces blue, whose contrast there is below 3.
LIGHT = Theme(
    name="light",
    text="#1d2733",
    muted="#566272",
    grid="#e4e8ee",
    surface="#ffffff",
    zero="#eceff3",
    hatch="#d5dae1",
    quantity=tuple(reversed(sequential.Cividis)),
    series={
        "compute": "#0072B2",
        "stall": "#D55E00",
        "other": "#9aa5b1",
        "comm": "#CC79A7",
        "device": "#0072B2",
        "home": "#f2d9a6",
        "absent": "#f0f2f5",
        "unknown": "#c3cad3",
        "parameter": "#0072B2",
        "gradient": "#E69F00",
        "moment": "#009E73",
        "budget": "#D55E00",
        "loss": "#0072B2",
        "peak": "#56B4E9",
        "transients": "#CC79A7",
        "miss": "#D55E00",
    },
)
DARK = Theme(
    name="dark",
    text="#e4e9f0",
    muted="#a3afbd",
    grid="#2c3644",
    surface="#171d26",
    zero="#2a323d",
    hatch="#3b4654",
    quantity=tuple(sequential.Cividis),
    series={
        **LIGHT.series,
        "compute": "#56B4E9",
        "stall": "#E8762B",
        "other": "#6d7988",
        "device": "#56B4E9",
        "home": "#5c4a1f",
        "absent": "#1f2630",
        "unknown": "#48535f",
        "parameter": "#56B4E9",
        "budget": "#E8762B",
        "loss": "#56B4E9",
        "peak": "#8fb8d4",
        "miss": "#E8762B",
    },
)
THEMES = {"light": LIGHT, "dark": DARK}


def figure(theme: Theme, height: int = 300) -> go.Figure:
    """Return an empty figure in the page's style; views add traces to it."""
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.grid,
        "zerolinecolor": theme.grid,
        "tickcolor": theme.grid,
        "tickfont": {"size": 12},
        "title": {"font": {"size": 12.5, "color": theme.muted}, "standoff": 8},
        "automargin": True,
    }
    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 12, "r": 16, "t": 36, "b": 12},
            "font": {"family": FONT, "size": 13, "color": theme.text},
            "paper_bgcolor": TRANSPARENT,
            "plot_bgcolor": TRANSPARENT,
            "hoverlabel": {
                "bgcolor": theme.surface,
                "bordercolor": theme.muted,
                "font": {"family": FONT, "size": 12.5, "color": theme.text},
                "align": "left",
            },
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.0,
                "yanchor": "bottom",
                "font": {"size": 12.5},
                "bgcolor": TRANSPARENT,
                "traceorder": "normal",
            },
            "modebar": {
                "bgcolor": TRANSPARENT,
                "color": theme.muted,
                "activecolor": theme.text,
                "orientation": "h",
            },
            "xaxis": axis,
            "yaxis": axis,
            "uirevision": "keep",  # a refresh of a live run keeps the zoom
        }
    )


def quantity_scale(theme: Theme, largest: float) -> list[list[Any]]:
    """Return a colorscale for counts from 0 to `largest` whose zero has its own grey."""
    colors = theme.quantity
    # Counts are integers, so everything below 1/2 is zero.
    edge = min(0.5 / largest, 0.4) if largest > 0 else 0.4
    span = 1 - edge
    steps = [[edge + span * i / (len(colors) - 1), color] for i, color in enumerate(colors)]
    steps[-1][0] = 1.0  # plotly.js ignores a scale that ends at 0.9999999
    return [[0.0, theme.zero], [edge, theme.zero], *steps]


def colorbar(largest: float, unit: str = "") -> dict[str, Any]:
    """Return a colour bar above the plot, so that it costs no width on a phone.

    The figure needs the margins of `bar_margins`.
    """
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "xpad": 0,
        # Placed in the container: placed at the plot, it pushes the margins about.
        "yref": "container",
        "y": 1.0,
        "yanchor": "top",
        "ypad": 2,
        "len": 0.6,
        "thickness": 10,
        # A few counts get a tick each: there is no half of one.
        "ticksuffix": f" {unit}" if unit else "",
        "showticksuffix": "last",
        "dtick": 1 if largest <= 6 and float(largest).is_integer() else None,
        "tickfont": {"size": 11.5},
        "outlinewidth": 0,
    }


def bar_margins(fig: go.Figure, x_title: bool = True) -> None:
    """Make room for a colour bar above the plot and ticks below it."""
    fig.update_layout(margin={"t": 40, "b": 46 if x_title else 28})
    fig.update_xaxes(automargin=False)
