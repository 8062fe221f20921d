"""The page of `odc plan --html`: padding over ranks for several granularities, and one plan drawn.

One file that loads nothing from anywhere.
"""

import html
from pathlib import Path

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.offline import get_plotlyjs

from odc.sharding import Plan
from odc.sharding.groups import Group
from odc.sharding.planner import fsdp2_padding, plan_blocks, plan_group
from odc.sizes import format_bytes

_GRANULARITIES = ("element", "rows:1", "rows:16", "rows:32", "rows:128")
_SHOWN_RANKS = 32  # rows of the picture
_LEAST = 1e-6  # where the logarithmic axis begins: 0.0001 %

_PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}}pre{{white-space:pre-wrap;background:#f5f6f8;padding:1rem;
border-radius:6px}}h1{{font-size:1.4rem}}h2{{font-size:1.1rem;margin-top:2rem}}</style>
<script>{plotly}</script></head><body><h1>{title}</h1>
<h2>Padding over ranks</h2>
<p>Bytes added so that all slices are equal, as a share of the group. Every point is a plan of its
own; its lower bound is proven, and drawn as a dotted line where it lies below the plan.</p>{curve}
<h2>The plan on {ranks} ranks</h2><pre>{words}</pre>
<p>Each row is one rank's slice of one sub-buffer; what is white at its end or between tensors is
padding.{cut}</p>{picture}</body></html>
"""


def write_page(path: Path, group: Group, plan: Plan, granularity: str) -> None:
    """Writes the page of a group and one plan of it.

    Raises:
        OSError: the file cannot be written.
    """
    title = f"{group.name} (x{group.count}), granularity {granularity}, {plan.ranks} ranks"
    cut = ""
    if plan.ranks > _SHOWN_RANKS:
        cut = f" The first {_SHOWN_RANKS // 2} and the last {_SHOWN_RANKS // 2} ranks are shown."
    text = _PAGE.format(
        title=html.escape(title),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        curve=_html(padding_curve(group, plan, granularity)),
        ranks=f"{plan.ranks:,}",
        words=html.escape(plan.explain()),
        cut=cut,
        picture=_html(plan_picture(plan)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def padding_curve(group: Group, plan: Plan, granularity: str) -> go.Figure:
    """Padding over the number of ranks: the usual granularities, the plan's own, and FSDP2."""
    figure = go.Figure()
    ranks = sorted({2**power for power in range(1, 13)} | {plan.ranks})
    rules = plan.rules
    blocks = [(place.tensor, place.block_numel) for place in plan.placements]
    for name in dict.fromkeys((*_GRANULARITIES, granularity)):
        plans = []
        for count in ranks:
            changed = type(rules)(**{**vars(rules), "ranks": count})
            if name == granularity:
                plans.append(plan_blocks(blocks, changed, plan.planner))
            else:
                plans.append(
                    plan_group(
                        group.tensors,
                        count,
                        granularity=name,
                        planner=plan.planner,
                        max_buffers=rules.max_buffers,
                        alignment=rules.alignment,
                        unit_numel=rules.unit_numel,
                        gather_dtype=rules.gather_dtype,
                    )
                )
        _add_curve(figure, name, ranks, [p.padding for p in plans], width=2)
        bounds = [p.lower_bound_padding for p in plans]
        if any(p.gap > 1e-6 for p in plans):
            _add_curve(figure, f"{name}, lower bound", ranks, bounds, width=1, dash="dot")
    fsdp2 = [fsdp2_padding(group.tensors, count) for count in ranks]
    _add_curve(figure, "FSDP2, Shard(0)", ranks, fsdp2, width=2, dash="dash")
    figure.update_xaxes(title="ranks", type="log", tickvals=ranks[::2])
    figure.update_yaxes(title="padding", type="log", tickformat=".4~%")
    figure.update_layout(template="plotly_white", height=440, margin={"t": 20})
    return figure


def _add_curve(
    figure: go.Figure, name: str, ranks: list[int], values: list[float], width: int, dash: str = ""
) -> None:
    figure.add_scatter(
        x=ranks,
        y=[max(value, _LEAST) for value in values],
        customdata=values,
        name=name,
        mode="lines+markers",
        line={"width": width, "dash": dash or "solid"},
        hovertemplate=f"{name}<br>%{{x}} ranks: %{{customdata:.4%}}<extra></extra>",
    )


def plan_picture(plan: Plan) -> go.Figure:
    """What the first and the last ranks hold: a row each, a colour a tensor."""
    half = _SHOWN_RANKS // 2
    ranks = list(range(plan.ranks))
    if plan.ranks > _SHOWN_RANKS:
        ranks = [*ranks[:half], *ranks[-half:]]
    colors = qualitative.Dark24
    figure = go.Figure()
    spans = [span for rank in ranks for span in plan.spans(rank)]
    base = [0]
    for buffer in plan.buffers:
        base.append(base[-1] + buffer.slice_numel)
    for number, place in enumerate(plan.placements):
        own = [span for span in spans if span.fqn == place.tensor.fqn]
        figure.add_bar(
            orientation="h",
            name=place.tensor.fqn.split(".", 3)[-1],
            y=[f"rank {span.rank}" for span in own],
            x=[span.numel for span in own],
            base=[base[span.buffer] + span.slice_offset for span in own],
            marker={"color": colors[number % len(colors)], "line": {"width": 0}},
            customdata=[
                [span.first_block, span.first_block + span.num_blocks - 1, span.buffer]
                for span in own
            ],
            hovertemplate=(
                f"{html.escape(place.tensor.fqn)}<br>%{{y}}: blocks %{{customdata[0]}} to "
                "%{customdata[1]}<br>%{x:,} elements, buffer %{customdata[2]}<extra></extra>"
            ),
        )
    for number, buffer in enumerate(plan.buffers):
        figure.add_vline(x=base[number + 1], line={"width": 1, "color": "#444"})
        figure.add_annotation(
            x=base[number] + buffer.slice_numel / 2,
            y=1,
            yref="paper",
            yanchor="bottom",
            showarrow=False,
            text=f"buffer {number}: {format_bytes(buffer.slice_bytes)}",
        )
    figure.update_layout(
        template="plotly_white",
        barmode="overlay",
        bargap=0.15,
        margin={"t": 40},
        height=160 + 18 * len(ranks),
        legend={"traceorder": "normal"},
    )
    figure.update_yaxes(
        autorange="reversed", categoryorder="array", categoryarray=[f"rank {r}" for r in ranks]
    )
    figure.update_xaxes(title="elements of the slice", range=[0, base[-1]])
    return figure


def _html(figure: go.Figure) -> str:
    return figure.to_html(include_plotlyjs=False, full_html=False, config={"displaylogo": False})
