"""Pages of a folder of runs by address, without a browser."""

from __future__ import annotations

from pathlib import Path

from dashboard.catalog import RunCatalog, revision
from dashboard.content import PageContent
from dashboard.data import RunData, RunStore
from dashboard.registry import build_page, view_at
from dashboard.state import ViewState
from dashboard.theme import Theme
from dashboard.views.frame import no_run, unknown_run

MAX_COMPARED = 24


class Pages:
    """Computes pages of a folder of runs; holds no state of any visitor."""

    def __init__(self, root: str | Path) -> None:
        self.catalog = RunCatalog(root)
        self.store = RunStore(MAX_COMPARED + 1)

    def run(self, state: ViewState) -> RunData | None:
        """Return the run that an address names, None if there is none."""
        place = self.catalog.find(state.run)
        return None if place is None else self.store.get(place)

    def all_runs(self) -> list[RunData]:
        """Return the runs of the folder to compare."""
        return [self.store.get(place) for place in self.catalog.runs()[:MAX_COMPARED]]

    def content(self, path: str | None, query: str | None, theme: Theme) -> PageContent:
        """Return the page at an address."""
        state = ViewState.from_query(query)
        names = [place.name for place in self.catalog.runs()]
        if not names:
            return no_run(str(self.catalog.root))
        run = self.run(state)
        if run is None:
            return unknown_run(str(state.run), names)
        return build_page(view_at(path), run, state, theme, self.all_runs)

    def revision(self, query: str | None) -> str:
        """Return what changes when the page at an address may have changed."""
        places = self.catalog.runs()
        place = self.catalog.find(ViewState.from_query(query).run)
        files = revision(place.path) if place is not None else ()
        return f"{len(places)}:{files}"
