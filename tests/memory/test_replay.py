"""Results by pass, and the empty device from which measured steps start."""

from __future__ import annotations

import pytest

from odc.memory.manager import popularity
from odc.memory.replay import Link, SimResult, Workload, budget_for, link_for, simulate, synthetic
from odc.memory.replay.ratios import compute_ns
from odc.memory.replay.simulate import virtual_drive
from odc.memory.victims import CostAware, Lru
from tests.memory.workloads import dense, with_evaluation


def run(workload: Workload, share: float, r: float = 1.0, **options: object) -> SimResult:
    return simulate(
        workload,
        budget_bytes=budget_for(workload, share),
        link=link_for(workload, r),
        eviction=CostAware(),
        prefetch=popularity,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ["W1a", "W2", "W2-uneven", "W3", "W4", "W5p20"])
def test_passes_are_those_of_the_workload_and_compute_what_it_does(name: str) -> None:
    workload = synthetic(name, steps=5)
    result = run(workload, 0.4)
    begun = [v for v in workload.visits if v.begins_pass]
    assert [(p.step, p.micro, p.ctx, p.tokens) for p in result.passes] == [
        (v.step, v.micro, v.ctx, v.tokens) for v in begun
    ]
    assert sum(p.compute_ns for p in result.passes) == compute_ns(workload)
    assert all(p.stall_ns >= 0 for p in result.passes)
    before = [None, *(p.ctx for p in result.passes)]
    assert [p.first for p in result.passes] == [
        p.ctx != ctx for p, ctx in zip(result.passes, before, strict=False)
    ]


def test_passes_add_up_to_the_clock_and_to_all_bytes() -> None:
    workload = synthetic("W4", steps=6)
    drive = virtual_drive(
        workload,
        budget_bytes=budget_for(workload, 0.4),
        link=link_for(workload, 2.0),
        eviction=Lru(),
    )
    passes = drive.run().passes
    engine, table = drive.pager.transfers.engine, drive.pager.table
    assert sum(p.elapsed_ns for p in passes) == engine.now_ns()
    resident = sum(p.num_bytes for p in table.pages if table.resident[p.page])
    assert sum(p.bytes_in for p in passes) > resident


def test_steps_and_passes_tell_the_same_where_a_step_is_a_pass() -> None:
    result = run(synthetic("W2", steps=6), 0.3, r=2.0)
    assert [p.step for p in result.passes] == result.steps
    assert [p.compute_ns for p in result.passes] == result.compute_ns
    for name in ("bytes_in", "bytes_out", "misses"):
        assert [getattr(p, name) for p in result.passes] == getattr(result, name)


def test_an_evaluation_is_a_pass_of_its_own_and_no_part_of_a_step() -> None:
    result = simulate(
        with_evaluation(dense(8, 3), 8),
        budget_bytes=16 * 2**21,
        link=Link(2**21 * 100.0, latency_ns=0, frame_move_ns=0),
        eviction=Lru(),
    )
    assert [p.ctx for p in result.passes] == [0, 1, 0, 1, 0, 1]
    trained = [p for p in result.passes if p.ctx == 0]
    assert [p.compute_ns for p in trained] == result.compute_ns
    assert [p.bytes_in for p in trained] == result.bytes_in


def test_measured_steps_start_with_an_empty_device_and_known_orders() -> None:
    workload = synthetic("W1", steps=6)
    warm, cold = run(workload, 1.0, r=0.5), run(workload, 1.0, r=0.5, empty_before=4)
    pages = sum(workload.pages["bytes"])
    assert warm.bytes_in == [pages, 0, 0, 0, 0, 0]
    assert cold.bytes_in == [pages, 0, 0, 0, pages, 0]
    assert cold.misses[4] < 5, "the order is known: nearly all of it was asked for ahead"
    assert cold.stall_ns[4] < warm.stall_ns[0]


def test_emptying_writes_what_is_dirty_and_costs_no_step_anything() -> None:
    workload = synthetic("W2", steps=4)
    plain, emptied = run(workload, 1.0), run(workload, 1.0, empty_before=3)
    homes = int(sum(workload.pages["bytes"][workload.pages["kind"] != 1]))
    assert sum(plain.bytes_out[1:]) == 0, "known to fit once the order is"
    assert emptied.bytes_out == plain.bytes_out, "written off the clock"
    assert emptied.bytes_in[3] == homes, "and read again"
    assert emptied.passes[3].compute_ns == plain.passes[3].compute_ns


def test_the_results_after_a_step_are_its_steps_and_passes() -> None:
    result = run(synthetic("W4", steps=6), 0.4)
    later = result.after(4)
    assert later.steps == [4, 5] and later.compute_ns == result.compute_ns[4:]
    assert later.passes == [p for p in result.passes if p.step >= 4]


def test_a_run_in_several_goes_is_the_same_run() -> None:
    workload = synthetic("W4", steps=5)
    options = {
        "budget_bytes": budget_for(workload, 0.4),
        "link": link_for(workload, 1.0),
        "eviction": CostAware(),
        "prefetch": popularity,
    }
    whole = simulate(workload, **options)  # type: ignore[arg-type]
    drive = virtual_drive(workload, **options)  # type: ignore[arg-type]
    for step in (1, 3, 3, 4):
        drive.run(step)
    assert drive.run() == whole
