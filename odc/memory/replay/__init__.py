"""Re-running recorded workloads through the shipped scheduler on a virtual clock."""

from odc.memory.replay.oracle import oracle_factory
from odc.memory.replay.ratios import budget_for, link_for
from odc.memory.replay.results import PassResult, SimResult
from odc.memory.replay.simulate import Link, simulate
from odc.memory.replay.synthetic import synthetic
from odc.memory.replay.workload import Workload

__all__ = [
    "Link",
    "PassResult",
    "SimResult",
    "Workload",
    "budget_for",
    "link_for",
    "oracle_factory",
    "simulate",
    "synthetic",
]
