"""The least bytes that must be loaded, whatever is prefetched when: Belady's rule, by bytes.

A page may be there in part here, and each byte costs the same to load, so evicting what is needed
last (L. A. Belady, 1966) loads least, up to every access at once. Loading ahead cannot lower this:
a byte that is not there must come once, early or late. Where the order within a visit is free, the
capacity counts only before and after the visit, so the figure holds for every order.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from odc.memory.replay.accesses import Accesses


class Paging:
    """Least loads of one run, from any access on.

    Args:
        accesses: what is needed, and when.
        capacity_bytes: bytes that may be resident.
    """

    def __init__(self, accesses: Accesses, capacity_bytes: float) -> None:
        self.capacity = capacity_bytes
        n = self.num_accesses = accesses.num_accesses
        self.size = accesses.page_bytes.tolist()
        self.page = accesses.page.tolist()
        self.creates = accesses.creates.tolist()
        self.dies = accesses.dies.tolist()
        self.first = accesses.first.tolist()
        self.last = accesses.last.tolist()
        self.fixed = accesses.fixed.tolist()
        following = accesses.next_hold().tolist()
        # the access that needs the content again, or never
        self.again = [n if h < 0 or self.creates[h] else self.first[h] for h in following]
        self.begins: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[list[int]] = [[] for _ in range(n)]
        for hold in range(len(self.page)):
            self.begins[self.first[hold]].append(hold)
            self.ends[self.last[hold]].append(hold)

    def least_loads(self, start: int, resident: np.ndarray | None = None) -> np.ndarray:
        """Bytes loaded from access ``start`` on, by the start of each later access.

        Args:
            start: first access.
            resident: (num_pages,) bool, what is there before it; nothing where not given.

        Returns:
            (num_accesses - start,) least bytes loaded when access ``start + k`` begins.
        """
        n = self.num_accesses
        there = [0.0] * len(self.size)
        for page in np.flatnonzero(resident).tolist() if resident is not None else ():
            there[page] = self.size[page]
        holds = enumerate(zip(self.first, self.last, strict=True))
        begun = [hold for hold, (first, last) in holds if first < start <= last]
        gap = [-1] * len(self.size)  # the hold after which a page is free to go; -1 while it is not
        heap: list[tuple[int, int]] = []  # (-access of the next need, gap)
        if resident is not None:
            self._first_needs(there, gap, heap)
        total, loaded = sum(there), 0.0
        found = np.zeros(n - start)
        for access in range(start, n):
            for hold in [*begun, *self.begins[access]]:
                page = self.page[hold]
                missing = self.size[page] - there[page]
                if not self.creates[hold] or self.first[hold] < start:
                    loaded += missing
                total += missing
                there[page] = self.size[page]
                gap[page] = -1
            begun = []
            if self.fixed[access] and total > self.capacity:
                total -= self._evict(total - self.capacity, there, gap, heap)
            found[access - start] = loaded
            for hold in self.ends[access]:
                page = self.page[hold]
                if self.dies[hold] or self.again[hold] == n:
                    total -= there[page]
                    there[page] = 0.0
                else:
                    gap[page] = hold
                    heappush(heap, (-self.again[hold], hold))
        return found

    def _first_needs(self, there: list[float], gap: list[int], heap: list[tuple[int, int]]) -> None:
        """Pages that are there at the start of the run go by their first need."""
        holds = len(self.page)
        seen: set[int] = set()
        for hold, page in enumerate(self.page):
            if page not in seen:
                seen.add(page)
                if there[page]:
                    gap[page] = holds + page
                    heappush(heap, (-self.first[hold], holds + page))
        for page in set(range(len(there))) - seen:
            there[page] = 0.0

    def _evict(
        self, excess: float, there: list[float], gap: list[int], heap: list[tuple[int, int]]
    ) -> float:
        """Take bytes of what is needed last; returns how many were there to take."""
        freed = 0.0
        holds = len(self.page)
        while heap and freed < excess:
            hold = heap[0][1]
            page = self.page[hold] if hold < holds else hold - holds
            if gap[page] != hold:
                heappop(heap)
                continue
            taken = min(there[page], excess - freed)
            there[page] -= taken
            freed += taken
            if there[page] <= 0.0:
                heappop(heap)
                gap[page] = -1
        return freed
