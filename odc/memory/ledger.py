"""The ledger: what the device's memory is spent on, and what pages may have of it.

Pages are counted exactly by their frames. All the rest (activations, what autograd holds,
gradients on their way into pages, the allocator's own keep) is measured, on a machine without a
device, as the process's peak resident size above where it stood before the first step, less what
pages and a home in host memory take. Pages get what the rest leaves of ``total_mem``.

The kernel's peak never falls, so it tells something new only when it has grown; then it was reached
since the last look, with the pool of that time. (Setting it back would spoil it for everybody who
watches the process.)

So the rest's peak never falls either, and one huge batch costs pages for the rest of the run. That
is meant: ``total_mem`` is a limit, and what came once may come again after any window that a
shorter memory would look back on (an evaluation, the longest sequence of an epoch). By then pages
would have grown into its room. Between peaks the resident size alone tells too little to grow
safely: what a step took at most is not to be seen from its beginning and its end. Who knows that it
will not come again gives pages a fixed ``page_budget``, or resumes in a new process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

from odc.memory.activations import ActivationAccount
from odc.memory.frames import FRAME_BYTES

_MARGIN = 0.02  # of total_mem, left free


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


def trim_heap() -> None:
    """Have the C library return free memory to the system (glibc; elsewhere nothing happens)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(slots=True)
class Ledger:
    """What is left for pages.

    Attributes:
        total_bytes: what the device has; None: no limit.
        fixed_page_bytes: what pages get whatever the rest needs; None: measure.
        rest_peak_bytes: the most that everything but pages has needed.
        base_bytes: resident size before the first step, without pages and home.
        seen_peak_bytes: the process's peak at the last look.
        measured: whether ``rest_peak_bytes`` says anything.
        activations: the part of the rest that autograd keeps for backward.
        usage: tells (taken, most ever taken) bytes of what ``total_bytes`` limits: of the process,
            on a machine without a device; where there is one, its allocator's statistics.
    """

    total_bytes: int | None
    fixed_page_bytes: int | None = None
    rest_peak_bytes: int = 0
    base_bytes: int = field(init=False)
    seen_peak_bytes: int = field(init=False)
    measured: bool = False
    activations: ActivationAccount = field(default_factory=ActivationAccount)
    usage: Callable[[], tuple[int, int]] = resident_bytes

    def __post_init__(self) -> None:
        self.base_bytes, self.seen_peak_bytes = self.usage()

    @property
    def measures(self) -> bool:
        return self.total_bytes is not None and self.fixed_page_bytes is None

    def first_page_bytes(self, all_bytes: int, least_bytes: int) -> int:
        """Bytes for pages before anything was measured: half, or the least that works.

        The first step shows what the rest needs; if that is more than was left, it is too late.
        """
        if self.fixed_page_bytes is not None:
            return min(self.fixed_page_bytes, all_bytes)
        if self.total_bytes is None:
            return all_bytes
        return min(max(self.total_bytes // 2, least_bytes), self.total_bytes, all_bytes)

    def start(self, page_bytes: int, home_bytes: int) -> None:
        """The model is there, and nothing has run: what stands now is nobody's need.

        What building it took at its peak is not needed again; the allocator gives back what it kept
        of that.
        """
        trim_heap()
        resident, self.seen_peak_bytes = self.usage()
        self.base_bytes = resident - page_bytes - home_bytes

    def measure(self, page_bytes: int, home_bytes: int) -> int:
        """Take the rest's peak from the kernel; returns it.

        Args:
            page_bytes: size of the pool since the last look.
            home_bytes: host memory that a home takes; it is not the device's.
        """
        resident, peak = self.usage()
        taken = page_bytes + home_bytes
        self.base_bytes = min(self.base_bytes, resident - taken)
        if peak > self.seen_peak_bytes:
            self.seen_peak_bytes = peak
            self.measured = True
            self.rest_peak_bytes = max(self.rest_peak_bytes, peak - self.base_bytes - taken)
        return self.rest_peak_bytes

    def page_bytes(self, all_bytes: int, least_bytes: int) -> int:
        """Bytes for pages now, in whole frames."""
        if not self.measures or not self.measured:
            return self.first_page_bytes(all_bytes, least_bytes)
        assert self.total_bytes is not None
        left = self.total_bytes - self.rest_peak_bytes - int(_MARGIN * self.total_bytes)
        return min(max(left, 0) // FRAME_BYTES * FRAME_BYTES, all_bytes)
