"""Pages, frames and the scheduler that moves them. Knows byte ranges, no parameter, no module."""

from odc.memory.manager import MemoryManager

__all__ = ["MemoryManager"]
