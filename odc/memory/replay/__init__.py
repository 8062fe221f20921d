"""Re-running recorded workloads through the shipped scheduler on a virtual clock."""

from odc.memory.replay.oracle import oracle_factory
from odc.memory.replay.simulate import Link, SimResult, simulate
from odc.memory.replay.workload import Workload

__all__ = ["Link", "SimResult", "Workload", "oracle_factory", "simulate"]
