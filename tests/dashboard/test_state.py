"""The address is the whole state."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dashboard.controls import next_query
from dashboard.pages import Pages
from dashboard.registry import view_at
from dashboard.state import ViewState

names = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
steps = st.none() | st.integers(0, 10**6)


@given(names, steps, steps, names, names)
def test_a_state_survives_the_address(run, step0, step1, mode, order) -> None:
    if step0 is not None and step1 is not None:
        step0, step1 = sorted((step0, step1))
    state = ViewState(run, step0, step1, mode, order)
    assert ViewState.from_query(state.to_query()) == state


@given(st.text(max_size=80))
def test_any_query_gives_some_state(query: str) -> None:
    state = ViewState.from_query(query)
    assert ViewState.from_query(state.to_query()) == state


def test_nonsense_is_left_out() -> None:
    assert ViewState.from_query("?step0=abc&step1=-4&run=&colour=red") == ViewState()
    assert ViewState.from_query("?step0=9&step1=3") == ViewState(step0=3, step1=9)
    assert ViewState.from_query(None) == ViewState()


@given(steps, steps, st.integers(0, 50), st.integers(0, 50), st.none() | st.integers(1, 9))
def test_a_window_lies_inside_the_steps_that_exist(step0, step1, first, more, default) -> None:
    low, high = ViewState(step0=step0, step1=step1).window(first, first + more, default)
    assert first <= low <= high <= first + more


def test_controls_write_the_address_and_nothing_when_it_says_so_already(small_path: Path) -> None:
    pages, view = Pages(small_path), view_at("/access")
    assert next_query(pages, view, "", "lru+none", [1, 6]) is None
    assert next_query(pages, view, "?mode=stall", "lru+none", [2, 4]) == (
        "?step0=2&step1=4&mode=stall"
    )
    assert next_query(pages, view, "?step0=2&step1=4", "lru+none", [1, 6]) == ""
    assert next_query(pages, view_at("/residency"), "", "lru+none", [4, 6]) is None


def test_another_run_forgets_the_steps(small_path: Path) -> None:
    pages = Pages(small_path)
    query = next_query(pages, view_at("/"), "?step0=2&step1=4&mode=stall", "other", [2, 4])
    assert query == "?run=other&mode=stall"
