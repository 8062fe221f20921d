"""What the dashboard and the predictors compute from a trace: one import for all of it."""

from __future__ import annotations

from profiler.merge import action_steps
from profiler.visits import SetUse, SetVisits, set_use, set_visits

__all__ = ["SetUse", "SetVisits", "action_steps", "set_use", "set_visits"]
