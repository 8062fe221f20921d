"""Re-running recorded workloads through the shipped scheduler on a virtual clock, and what no
scheduler could beat."""

from odc.memory.replay.accesses import Accesses, Residency
from odc.memory.replay.best_found import BestFound, best_found
from odc.memory.replay.bounds import WindowBound, window_bound
from odc.memory.replay.lp import FluidBound, fluid_bound
from odc.memory.replay.oracle import oracle_factory
from odc.memory.replay.ratios import budget_for, link_for
from odc.memory.replay.results import PassResult, SimResult
from odc.memory.replay.simulate import Link, simulate
from odc.memory.replay.synthetic import synthetic
from odc.memory.replay.workload import Workload

__all__ = [
    "Accesses",
    "BestFound",
    "FluidBound",
    "Link",
    "PassResult",
    "Residency",
    "SimResult",
    "WindowBound",
    "Workload",
    "best_found",
    "budget_for",
    "fluid_bound",
    "link_for",
    "oracle_factory",
    "simulate",
    "synthetic",
    "window_bound",
]
