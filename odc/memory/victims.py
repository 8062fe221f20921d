"""Eviction orders: which of the evictable pages go first.

A policy sorts candidates; the manager takes from the front until enough frames are free. It sees
ids and numbers only, so the limit cases (LRU, Belady, GDSF) are tests of one function.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class EvictionPolicy(Protocol):
    """Orders pages for eviction."""

    def order(
        self,
        pages: np.ndarray,
        last_use: np.ndarray,
        keep: np.ndarray | None,
        dirty: np.ndarray,
        write_back_weight: float,
    ) -> np.ndarray:
        """The candidates, first victim first.

        Args:
            pages: (n,) candidate page ids.
            last_use: (num_pages,) virtual time of the last use.
            keep: (num_pages,) keep values, or None where no source knows the future.
            dirty: (num_pages,) whether evicting the page means storing it.
            write_back_weight: 0 (the out-link is idle) to 1 (it is the bottleneck).
        """


class Lru:
    """Least recently used first."""

    def order(
        self,
        pages: np.ndarray,
        last_use: np.ndarray,
        keep: np.ndarray | None,
        dirty: np.ndarray,
        write_back_weight: float,
    ) -> np.ndarray:
        return pages[np.argsort(last_use[pages], kind="stable")]


class Belady:
    """Farthest next use first (L. A. Belady, 1966); meant for the oracle's keep values."""

    def order(
        self,
        pages: np.ndarray,
        last_use: np.ndarray,
        keep: np.ndarray | None,
        dirty: np.ndarray,
        write_back_weight: float,
    ) -> np.ndarray:
        return CostAware().order(pages, last_use, keep, dirty, 0.0)


class CostAware:
    """Least keep value first; a dirty page also costs its way out when the out-link is busy."""

    def order(
        self,
        pages: np.ndarray,
        last_use: np.ndarray,
        keep: np.ndarray | None,
        dirty: np.ndarray,
        write_back_weight: float,
    ) -> np.ndarray:
        if keep is None:
            return Lru().order(pages, last_use, keep, dirty, write_back_weight)
        value = keep[pages] * (1.0 + write_back_weight * dirty[pages])
        return pages[np.lexsort((last_use[pages], value))]
