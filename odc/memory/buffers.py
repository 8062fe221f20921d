"""Host memory for what is moved home and is no page: buffers of any size, used again.

Sizes recur from step to step, but not exactly (the tokens of an expert), so that a buffer serves
whoever needs a little less. What is free is kept while it all stays within what was in use at the
busiest time.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from odc.memory.frames import PROT_RW, map_anonymous, unmap

_SPARE = 1.25  # a buffer may be so much larger than what it holds


@dataclass(slots=True)
class HostBuffer:
    """A piece of host memory.

    Attributes:
        address, size: where it lies.
        touched: how much of it was ever written, and is backed by memory therefore.
    """

    address: int
    size: int
    touched: int = 0


class HostBuffers:
    """Buffers in use and free ones.

    Attributes:
        used_bytes: of the buffers in use.
        touched_bytes: host memory that all of them take.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int, HostBuffer]] = []  # by size, then address
        self._free_bytes = 0
        self._most_used = 0
        self.used_bytes = 0
        self.touched_bytes = 0

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of at least ``num_bytes``, all of which will be written."""
        at = bisect.bisect_left(self._free, (num_bytes, 0))
        if at < len(self._free) and self._free[at][0] <= _SPARE * num_bytes:
            buffer = self._free.pop(at)[2]
            self._free_bytes -= buffer.size
        else:
            size = -(-num_bytes // 4096) * 4096
            self._shrink(max(self._most_used - self.used_bytes - size, 0))
            buffer = HostBuffer(map_anonymous(size, PROT_RW), size)
        self.used_bytes += buffer.size
        self._most_used = max(self._most_used, self.used_bytes)
        self.touched_bytes += max(num_bytes - buffer.touched, 0)
        buffer.touched = max(buffer.touched, num_bytes)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Give a buffer back. Nothing may be on its way to or from it any more."""
        self.used_bytes -= buffer.size
        self._free_bytes += buffer.size
        bisect.insort(self._free, (buffer.size, buffer.address, buffer))

    def _shrink(self, num_bytes: int) -> None:
        """Let the system have free buffers until they are ``num_bytes`` together at most."""
        while self._free_bytes > num_bytes:
            buffer = self._free.pop()[2]
            self._free_bytes -= buffer.size
            self.touched_bytes -= buffer.touched
            unmap(buffer.address, buffer.size)

    def close(self) -> None:
        """Give all free buffers back to the system."""
        self._shrink(0)

    def __del__(self) -> None:
        self.close()
