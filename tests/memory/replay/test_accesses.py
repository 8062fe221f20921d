"""Accesses say what the simulator does: same computation, same pins, same steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from odc.errors import BudgetError
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Accesses, Link, Residency, Workload, simulate
from odc.memory.replay.workload import Bundle, RecordedVisit
from odc.memory.victims import Lru
from tests.memory.replay.runs import passes
from tests.memory.workloads import (
    COMPUTE_NS,
    dense,
    experts,
    page_columns,
    references,
    with_evaluation,
)

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "references": lambda: references([0, 1, 2, 0, 2, 1], 3),
    "dense": lambda: dense(4, 3),
    "experts": lambda: experts(2, 4, 2, 3),
    "evaluation": lambda: with_evaluation(dense(3, 2), 3),
}
P, G, M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT


def workload_of(columns: dict[str, np.ndarray], *bundles: Bundle) -> Workload:
    visits = [RecordedVisit(0, 0, Phase.FORWARD, 0, 1, [bundle]) for bundle in bundles]
    return Workload(columns, visits, [], lead_ns=5)


def holds(accesses: Accesses) -> list[tuple[int, ...]]:
    names = ("page", "first", "last", "through", "creates", "dirties", "dies")
    return [
        tuple(int(x) for x in row)
        for row in zip(*(getattr(accesses, name) for name in names), strict=True)
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_steps_compute_as_long_as_in_the_simulator(name: str) -> None:
    workload = WORKLOADS[name]()
    accesses = Accesses.from_workload(workload)
    result = simulate(workload, budget_bytes=1 << 40, link=Link(1e9), eviction=Lru())
    own = {step: int(accesses.compute_ns[accesses.step == step].sum()) for step in result.steps}
    assert own == dict(zip(result.steps, result.compute_ns, strict=True))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_pages_pinned_together_are_the_least_budget_of_the_simulator(name: str) -> None:
    workload = WORKLOADS[name]()
    least = int(Accesses.from_workload(workload).pinned_frames().max())
    link = Link(1e12, latency_ns=0, frame_move_ns=0)
    simulate(workload, budget_bytes=least * FRAME_BYTES, link=link, eviction=Lru())
    with pytest.raises(BudgetError, match="budget"):
        simulate(workload, budget_bytes=(least - 1) * FRAME_BYTES, link=link, eviction=Lru())


def test_a_layer_with_its_update_becomes_the_holds_of_its_bundle() -> None:
    backward = [
        (P, Op.READ, 0),
        (G, Op.CREATE, 7),
        (P, Op.WRITE, 3),
        (M, Op.WRITE, 0),
        (G, Op.DROP, 2),
    ]
    columns = page_columns([(0, P, 0, -1, -1), (0, G, 0, -1, -1), (0, M, 0, -1, -1)])
    accesses = Accesses.from_workload(workload_of(columns, Bundle(0, backward, 9)))
    # 0: before the first visit; 1: parameters; 2: gradient; 3: the walk; 4: what comes behind
    assert accesses.compute_ns.tolist() == [5, 7, 3, 2, 9]
    assert holds(accesses) == [
        (0, 1, 4, 1, 0, 1, 0),  # parameters: read, then written by the walk, held to the end
        (1, 2, 3, 1, 1, 1, 1),  # gradient: created and dead
        (2, 3, 3, 0, 0, 1, 0),  # moment: the walk lets it go at once
    ]


def test_content_that_is_created_anew_was_dead_since_its_last_use() -> None:
    columns = page_columns([(0, P, 0, -1, -1), (0, G, 0, -1, -1)])
    create = Bundle(0, [(G, Op.CREATE, 0)], 4)
    accesses = Accesses.from_workload(workload_of(columns, create, create))
    assert accesses.dies.tolist() == [True, False]
    assert accesses.next_hold().tolist() == [1, -1]


def test_a_gradient_that_is_zeroed_unpinned_dies_with_its_last_use() -> None:
    columns = page_columns([(0, P, 0, -1, -1), (0, G, 0, -1, -1)])
    accesses = Accesses.from_workload(
        workload_of(
            columns,
            Bundle(0, [(G, Op.CREATE, 0)], 4),
            Bundle(0, [(G, Op.DROP, 0)], 4),
        )
    )
    assert accesses.dies.tolist() == [True]


def test_pages_of_a_group_of_a_few_kib_are_held_to_the_end() -> None:
    columns = page_columns([(0, P, 0, -1, -1), (1, P, 0, -1, -1)])
    columns["bytes"] = np.array([4096, FRAME_BYTES * 2])
    read = [Bundle(g, [(P, Op.READ, 0)], COMPUTE_NS) for g in (0, 1, 0, 1)]
    accesses = Accesses.from_workload(workload_of(columns, *read))
    assert [h[:4] for h in holds(accesses)] == [(0, 1, 4, 1), (1, 2, 2, 1), (1, 4, 4, 1)]
    assert accesses.pinned_frames().tolist() == [0, 1, 3, 1, 3]


def test_visits_of_sets_are_free_in_order_between_moments_without_pins() -> None:
    workload = experts(2, 4, 2, 1)
    accesses = Accesses.from_workload(workload)
    moments = np.flatnonzero(accesses.fixed)
    assert len(moments) == len(workload.visits)
    assert (accesses.pinned_frames()[moments] == 0).all()
    assert Accesses.from_workload(dense(3, 1)).fixed.all()


def test_evaluations_belong_to_no_step() -> None:
    accesses = Accesses.from_workload(with_evaluation(dense(3, 2), 3))
    assert sorted(set(accesses.step.tolist())) == [-1, 0, 1]
    assert int((accesses.step == -1).sum()) == 2 * (3 + 3)  # each: 3 forwards, 3 saved groups


def test_a_part_keeps_what_is_pinned_across_its_borders() -> None:
    accesses = Accesses.from_workload(dense(3, 2))
    middle = accesses.part(4, 9)
    assert middle.compute_ns.tolist() == accesses.compute_ns[4:9].tolist()
    assert middle.pinned_frames().tolist() == accesses.pinned_frames()[4:9].tolist()
    second = accesses.steps(range(1, 2))
    assert set(second.step.tolist()) == {1}
    with pytest.raises(ValueError, match="steps 5 to 6"):
        accesses.steps(range(5, 7))


def test_a_start_leaves_out_what_is_overwritten_before_it_is_read() -> None:
    accesses = passes("palindrome", 3, 1)
    fresh = accesses.creates.copy()
    fresh[1] = True  # the first hold of page 1
    accesses = Accesses(
        **{
            name: getattr(accesses, name) if name != "creates" else fresh
            for name in Accesses.__dataclass_fields__
        }
    )
    everything = Residency(np.ones(3, bool), np.ones(3, bool))
    start = accesses.start_from(everything)
    assert start.resident.tolist() == start.dirty.tolist() == [True, False, True]
    assert not accesses.start_from(None).resident.any()
