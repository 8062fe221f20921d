"""Re-running recorded workloads through the shipped scheduler on a virtual clock, and what no
scheduler could beat."""

from odc.memory.replay.accesses import Accesses, Residency
from odc.memory.replay.best_found import BestFound, best_found
from odc.memory.replay.bounds import WindowBound, window_bound
from odc.memory.replay.lp import FluidBound, fluid_bound
from odc.memory.replay.oracle import oracle_factory
from odc.memory.replay.simulate import Link, SimResult, simulate
from odc.memory.replay.workload import Workload

__all__ = [
    "Accesses",
    "BestFound",
    "FluidBound",
    "Link",
    "Residency",
    "SimResult",
    "WindowBound",
    "Workload",
    "best_found",
    "fluid_bound",
    "oracle_factory",
    "simulate",
    "window_bound",
]
