"""Where every parameter of a group lies on m ranks: placements, planned once and proven.

`plan_group` decides; a `Plan` says where each tensor starts, which ranks hold which of its blocks,
how much padding that costs and how much less any plan could cost. Integers only, no torch.
"""

from odc.sharding.granularity import (
    Granularity,
    GranularityLike,
    GranularityRules,
    parse_granularity,
)
from odc.sharding.plan import Plan
from odc.sharding.planner import plan_group
from odc.sharding.tensors import TensorSpec

__all__ = [
    "Granularity",
    "GranularityLike",
    "GranularityRules",
    "Plan",
    "TensorSpec",
    "parse_granularity",
    "plan_group",
]
