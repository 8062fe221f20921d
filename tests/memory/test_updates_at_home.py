"""The shipped scheduler on the virtual clock with the optimizer at home: bytes, time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc.memory.events import Kind, Op
from odc.memory.replay import simulate
from odc.memory.replay.accesses import Accesses
from odc.memory.replay.bounds import window_bound
from odc.memory.replay.ratios import budget_for, link_for
from odc.memory.replay.synthetic import synthetic
from odc.train.policies import make_policy

STEPS, FIRST = 6, 3


def run(workload, link, budget):
    eviction, prefetch = make_policy("cost_aware+popularity", workload)
    result = simulate(
        workload, budget_bytes=budget, link=link, eviction=eviction, prefetch=prefetch
    ).after(FIRST)
    passes = result.passes
    return [sum(getattr(p, n) for p in passes) for n in ("elapsed_ns", "bytes_in", "bytes_out")]


@pytest.mark.parametrize("name, most", [("W2", 0.85), ("W2s", 0.6)])
def test_at_a_busy_link_a_step_is_shorter_and_moves_half_the_bytes(name, most):
    device = synthetic(name, seed=0, steps=STEPS)
    home = device.with_updates_at_home()
    budget, link = budget_for(device, 0.4), link_for(device, 2.0)
    took = run(device, link, budget)
    shorter = run(home, replace(link, update_rate=6e9), budget)
    assert shorter[0] < most * took[0]
    assert shorter[1] < 0.55 * took[1] and shorter[2] < 0.55 * took[2]


def test_a_slow_update_is_waited_for():
    home = synthetic("W2", seed=0, steps=STEPS).with_updates_at_home()
    budget, link = budget_for(home, 0.4), link_for(home, 0.5)
    parameters = sum(p.num_bytes for p in home.table().pages if p.kind == Kind.PARAMETER)
    rate = parameters / 2.0  # two seconds a step
    elapsed_ns = run(home, replace(link, update_rate=rate), budget)[0]
    # the last update of a step starts when the backward ends, the first one before
    assert elapsed_ns >= (STEPS - FIRST - 1) * 2e9


def test_updates_take_the_place_of_walks_through_moments():
    device = synthetic("W2", seed=0, steps=2)
    home = device.with_updates_at_home()
    rows = [row for v in home.visits for b in v.bundles for row in b.rows]
    walks = [
        row for v in device.visits for b in v.bundles for row in b.rows if row[0] == Kind.MOMENT
    ]
    assert not any(kind == Kind.MOMENT for kind, _, _ in rows)
    updates = [row for row in rows if row[1] == Op.UPDATE]
    assert updates and len(updates) == len(walks)
    assert all(kind == Kind.GRADIENT for kind, _, _ in updates)


def test_no_schedule_beats_the_bound_of_a_workload_with_updates_at_home():
    home = synthetic("W2", seed=0, steps=STEPS).with_updates_at_home()
    link = link_for(home, 2.0)
    budget = budget_for(home, 0.4)
    accesses = Accesses.from_workload(home)
    speed = (link.bandwidth_in, link.bandwidth_out or link.bandwidth_in)
    bound_s = window_bound(accesses, budget, *speed).elapsed_s
    eviction, prefetch = make_policy("cost_aware+popularity", home)
    result = simulate(home, budget_bytes=budget, link=link, eviction=eviction, prefetch=prefetch)
    elapsed_s = sum(p.elapsed_ns for p in result.passes) / 1e9
    assert elapsed_s >= bound_s * (1 - 1e-6)
