"""Numbers as people read them, and the small tools of figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dashboard import units
from dashboard.binning import edges, majority_rows, mean_bins, robust_max, sum_bins
from dashboard.data import _parse_size
from odc.sizes import format_bytes
from profiler.schema import Kind


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (64 * 2**20, "64.0 MiB"), (5 * 2**30, "5.00 GiB"),
     (float("nan"), "unknown"), (None, "unknown"), (-2048, "-2.00 KiB")],
)  # fmt: skip
def test_sizes_are_binary(value, text) -> None:
    assert units.size(value) == text


@given(st.one_of(st.integers(-(2**60), 2**60), st.integers(-(10**6), 10**6)))
def test_sizes_read_as_on_the_command_line(value: int) -> None:
    assert units.size(value) == format_bytes(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (0.412, "412 ms"), (2.5e-5, "25.0 µs"), (3e-9, "3.00 ns"), (73, "1 min 13 s"),
     (float("inf"), "unknown")],
)  # fmt: skip
def test_durations(value, text) -> None:
    assert units.seconds(value) == text


def test_codes_of_newer_programs_have_a_name() -> None:
    assert units.code(Kind, 2) == "moment"
    assert units.code(Kind, 99) == "code 99"


@pytest.mark.parametrize(("text", "size"), [("64MiB", 2**26), ("64 MB", 2**26), ("12", 12),
                                            ("1.5GB", 3 * 2**29), ("unlimited", None)])  # fmt: skip
def test_sizes_of_a_configuration(text: str, size: int | None) -> None:
    assert _parse_size(text) == size


@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
                  elements=st.integers(0, 99)), st.integers(1, 20), st.integers(1, 20))  # fmt: skip
def test_bins_keep_the_sum(matrix, rows, columns) -> None:
    binned, row_edges, column_edges = sum_bins(matrix, rows, columns)
    assert binned.sum() == matrix.sum()
    assert binned.shape == (len(row_edges) - 1, len(column_edges) - 1)
    assert binned.shape[0] <= rows and binned.shape[1] <= columns


def test_means_leave_out_what_is_unknown() -> None:
    values = np.array([1.0, np.nan, 3.0, np.nan])
    np.testing.assert_array_equal(mean_bins(values, np.array([0, 2, 3, 4])), [1.0, 3.0, np.nan])


def test_a_merged_row_shows_what_most_of_its_rows_show() -> None:
    codes = np.array([[1, 0, 2], [1, 0, 2], [2, 0, 1], [0, 2, 1]], np.uint8)
    merged, borders = majority_rows(codes, 2)
    assert merged.tolist() == [[1, 0, 2], [2, 2, 1]]
    assert borders.tolist() == [0, 2, 4]


def test_one_extreme_cell_does_not_set_the_colours() -> None:
    values = np.ones(1000)
    values[0] = 1e6
    assert robust_max(values) == (pytest.approx(1, rel=0.1), True)
    assert robust_max(np.zeros(4)) == (1.0, False)


def test_edges_of_nothing_are_one_empty_bin() -> None:
    assert edges(0, 10).tolist() == [0, 0]
