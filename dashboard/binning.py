"""Keeps figures small: at most 512 rows x 1024 columns in a heatmap, 2,000 points in a line."""

from __future__ import annotations

import numpy as np

MAX_ROWS = 512
MAX_COLUMNS = 1024
MAX_POINTS = 2_000


def edges(count: int, most: int) -> np.ndarray:
    """Return the borders of at most `most` nearly equal bins of `count` items, i64."""
    bins = max(min(count, most), 1)
    return np.linspace(0, count, bins + 1).round().astype(np.int64)


def sum_bins(
    matrix: np.ndarray, max_rows: int = MAX_ROWS, max_columns: int = MAX_COLUMNS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum a matrix (R, C) into bins.

    Returns:
        (r, c) sums, and the borders of the bins of rows and columns.
    """
    rows, columns = edges(matrix.shape[0], max_rows), edges(matrix.shape[1], max_columns)
    if matrix.size == 0:
        return matrix, rows, columns
    summed = np.add.reduceat(np.add.reduceat(matrix, rows[:-1], axis=0), columns[:-1], axis=1)
    return summed, rows, columns


def mean_bins(values: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Return the mean of the known values of each bin, NaN where none is known."""
    if not len(values):
        return values
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0.0), borders[:-1])
    number = np.add.reduceat(known.astype(np.int64), borders[:-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = np.where(number > 0, total / number, np.nan)
    return mean


def majority_rows(codes: np.ndarray, max_rows: int = MAX_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Merge rows of category codes: a bin shows the code that most of its rows have.

    Args:
        codes: (R, C) u8, few distinct values; 0 is unknown and wins only if nothing else is there.
        max_rows: Number of rows to keep at most.

    Returns:
        (r, C) u8 codes and the borders of the bins of rows.
    """
    rows = edges(codes.shape[0], max_rows)
    if len(rows) - 1 >= codes.shape[0]:
        return codes, rows
    best = np.zeros((len(rows) - 1, codes.shape[1]), np.uint8)
    most = np.zeros(best.shape, np.int64)
    for code in np.unique(codes):
        if code == 0:
            continue
        votes = np.add.reduceat((codes == code).astype(np.int64), rows[:-1], axis=0)
        # Later codes win ties: a half resident bin counts as resident.
        wins = (votes >= most) & (votes > 0)
        best[wins], most[wins] = code, votes[wins]
    return best, rows


def robust_max(values: np.ndarray, percentile: float = 99.5) -> tuple[float, bool]:
    """Return the upper colour limit, and whether values above it exist.

    One extreme cell would otherwise make all others look alike.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 1.0, False
    limit, largest = float(np.percentile(positive, percentile)), float(positive.max())
    if largest <= 1.25 * limit:
        return largest, False
    return limit, True
