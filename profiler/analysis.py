"""What the dashboard and the predictors compute from a trace: one import for all of it.

Every function here is pure and takes the tables of `TraceReader`.
"""

from __future__ import annotations

from profiler.merge import Table, action_steps, num_rows, select
from profiler.residency import (
    GroupSteps,
    Intervals,
    Residency,
    ResidencyMatrix,
    bytes_per_step,
    creations,
    group_steps,
    residency_intervals,
    residency_matrix,
)
from profiler.traffic import CommMatrix, comm_matrix, comm_per_step, sent_bytes, steps_table
from profiler.visits import SetUse, SetVisits, set_use, set_visits

__all__ = [
    "CommMatrix",
    "GroupSteps",
    "Intervals",
    "Residency",
    "ResidencyMatrix",
    "SetUse",
    "SetVisits",
    "Table",
    "action_steps",
    "bytes_per_step",
    "comm_matrix",
    "comm_per_step",
    "creations",
    "group_steps",
    "num_rows",
    "residency_intervals",
    "residency_matrix",
    "select",
    "sent_bytes",
    "set_use",
    "set_visits",
    "steps_table",
]
