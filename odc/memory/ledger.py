"""The ledger: what the device's memory is spent on, and what pages may have of it.

Pages are counted exactly by their frames. All the rest (activations, what autograd holds,
gradients on their way into pages, the allocator's own keep) is measured, on a machine without a
device, as the process's peak resident size above where it stood before the model was made, less
what pages and a home in host memory take. Pages get what the rest leaves of ``total_mem``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from odc.memory.frames import FRAME_BYTES

_MARGIN = 0.01  # of total_mem, left free


def resident_bytes() -> tuple[int, int]:
    """(resident, peak resident) bytes of this process, as the kernel counts them."""
    resident = peak = 0
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                resident = int(line.split()[1]) * 1024
            elif line.startswith("VmHWM:"):
                peak = int(line.split()[1]) * 1024
    return resident, peak


@dataclass(slots=True)
class Ledger:
    """What is left for pages.

    Attributes:
        total_bytes: what the device has; None: no limit.
        fixed_page_bytes: what pages get whatever the rest needs; None: measure.
        home_bytes: host memory that a home takes (it is not the device's).
        rest_peak_bytes: the most that everything but pages has needed.
    """

    total_bytes: int | None
    fixed_page_bytes: int | None = None
    home_bytes: int = 0
    rest_peak_bytes: int = 0
    base_bytes: int = field(default_factory=lambda: resident_bytes()[0])
    pid: int = field(default_factory=os.getpid)

    @property
    def measures(self) -> bool:
        return self.total_bytes is not None and self.fixed_page_bytes is None

    def first_page_bytes(self, all_bytes: int, least_bytes: int) -> int:
        """Bytes for pages before anything was measured: three quarters, or the least that works."""
        if self.fixed_page_bytes is not None:
            return min(self.fixed_page_bytes, all_bytes)
        if self.total_bytes is None:
            return all_bytes
        return min(max(self.total_bytes * 3 // 4, least_bytes), self.total_bytes, all_bytes)

    def measure(self, page_bytes: int) -> int:
        """Take the rest's peak from the kernel; returns it. ``page_bytes``: size of the pool."""
        _, peak = resident_bytes()
        rest = peak - self.base_bytes - page_bytes - self.home_bytes
        self.rest_peak_bytes = max(self.rest_peak_bytes, rest)
        return self.rest_peak_bytes

    def page_bytes(self, all_bytes: int) -> int:
        """Bytes for pages now, in whole frames."""
        if self.fixed_page_bytes is not None or self.total_bytes is None:
            return self.first_page_bytes(all_bytes, 0)
        left = self.total_bytes - self.rest_peak_bytes - int(_MARGIN * self.total_bytes)
        return min(max(left, 0) // FRAME_BYTES * FRAME_BYTES, all_bytes)
