"""The pages in the order of the navigation, and how each is built.

A new view is one file with a `build` function, and one line here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dashboard.content import PageContent
from dashboard.data import RunData
from dashboard.state import ViewState
from dashboard.theme import Theme
from dashboard.views import access, communication, memory, overview, residency
from dashboard.views.frame import failed

logger = logging.getLogger("odc.dashboard")

AllRuns = Callable[[], list[RunData]]


@dataclass(frozen=True)
class View:
    """A page: its path in the address, its title, and what computes it."""

    path: str
    title: str
    build: Callable[[RunData, ViewState, Theme, AllRuns], PageContent]
    default_steps: int | None = None


VIEWS = (
    View(
        "/",
        "Overview",
        lambda run, state, theme, all_runs: overview.build(run, state, theme, all_runs),
    ),
    View(
        "/residency",
        "Residency",
        lambda run, state, theme, _: residency.build(run, state, theme),
        residency.DEFAULT_STEPS,
    ),
    View("/access", "Access", lambda run, state, theme, _: access.build(run, state, theme)),
    View(
        "/memory",
        "Memory",
        lambda run, state, theme, _: memory.build(run, state, theme),
        memory.DEFAULT_STEPS,
    ),
    View(
        "/communication",
        "Communication",
        lambda run, state, theme, _: communication.build(run, state, theme),
    ),
)


def view_at(path: str | None) -> View:
    """Return the view of an address, the overview for an unknown one."""
    wanted = "/" + (path or "").strip("/")
    return next((view for view in VIEWS if view.path == wanted), VIEWS[0])


def build_page(
    view: View, run: RunData, state: ViewState, theme: Theme, all_runs: AllRuns
) -> PageContent:
    """Build a page; an error becomes a page that names it, and is logged."""
    try:
        return view.build(run, state, theme, all_runs)
    # Traces come from killed and foreign programs: whatever they hold, the app stays alive.
    except Exception as error:
        logger.exception("%s: view %s failed", run.path, view.title)
        return failed(view.title, error)


def step_range(run: RunData) -> tuple[int, int] | None:
    """Return the first and last step that a run knows of, None without any."""
    ends: list[int] = []
    if len(run.metrics):
        ends += [int(run.metrics["step"].min()), int(run.metrics["step"].max())]
    steps, _ = run.step_starts
    if len(steps):
        ends += [int(steps.min()), int(steps.max())]
    return (min(ends), max(ends)) if ends else None
