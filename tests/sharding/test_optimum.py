"""The planner against brute force on small instances."""

from __future__ import annotations

import random

import pytest

from odc.sharding.certificate import lower_bound_bytes
from odc.sharding.plan import Rules
from odc.sharding.planner import plan_blocks
from odc.sharding.tensors import TensorSpec
from tests.sharding.reference import best_slices, random_instance


def check(seed: int, count: int) -> float:
    """Plans `count` random instances; returns the share whose bound is reached."""
    rng = random.Random(seed)
    tight = 0
    for _ in range(count):
        tensors, ranks, max_buffers, alignment, unit = random_instance(rng)
        # One byte an element, so that bytes and elements are the same here.
        blocks = [
            (TensorSpec(f"t{i}", (numel,), "int8"), block)
            for i, (numel, block) in enumerate(tensors)
        ]
        rules = Rules(ranks, alignment, unit, max_buffers)
        best = best_slices(tensors, ranks, max_buffers, alignment, unit)
        said = f"{tensors} on {ranks} ranks, {rules}"
        plan, greedy = plan_blocks(blocks, rules, "optimal"), plan_blocks(blocks, rules, "greedy")
        plan.validate()
        greedy.validate()
        assert plan.slice_numel == best, said
        assert greedy.slice_numel >= best, said
        assert plan.lower_bound_bytes == lower_bound_bytes(blocks, rules) <= best, said
        tight += plan.lower_bound_bytes == best
    return tight / count


def test_the_plan_is_the_best_of_all_and_the_bound_is_never_above_it():
    assert check(seed=0, count=40) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_thousand_instances_each_are_planned_as_brute_force_does(seed):
    assert check(seed, count=1000) > 0.9
