"""Collectives of flat buffers over gloo, on processes of their own (`comm_*.py`)."""

import pytest
import torch

from odc.fsdp.comm import NullComm
from odc.fsdp.comm_pipeline import BLOCK_BYTES, DEPTH, SCRATCH_BYTES, chunk_numel
from tests.fsdp import comm_faults, comm_ranks, comm_traffic
from tests.fsdp.comm_values import CHUNK_BYTES

pytestmark = pytest.mark.dist
WORLDS = [2, pytest.param(3, marks=pytest.mark.slow)]  # more ranks: more of the same


@pytest.mark.parametrize("size", [*WORLDS, pytest.param(4, marks=pytest.mark.slow)])
def test_all_gather_fills_the_other_slices(run_ranks, size):
    run_ranks(comm_ranks.gather_values, size)


@pytest.mark.parametrize("size", [*WORLDS, pytest.param(4, marks=pytest.mark.slow)])
def test_reduce_scatter_sums_in_rank_order_and_divides_once(run_ranks, size):
    run_ranks(comm_ranks.scatter_values, size)


def test_slices_of_many_chunks_are_summed_and_divided_alike(run_ranks):
    run_ranks(comm_ranks.large_values, 3)


@pytest.mark.parametrize("size", WORLDS)
def test_low_precision_is_summed_in_another_dtype(run_ranks, size):
    run_ranks(comm_ranks.wider_sums, size)


@pytest.mark.parametrize("size", WORLDS)
def test_all_reduce_and_broadcast_give_every_rank_the_same(run_ranks, size):
    run_ranks(comm_ranks.reduced_and_broadcast, size)


def test_results_do_not_depend_on_who_is_late_nor_on_the_run(run_ranks):
    first, second = (run_ranks(comm_ranks.late_ranks, 3) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("size", WORLDS)
def test_payload_is_exact_and_counted(run_ranks, size):
    run_ranks(comm_traffic.payload, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_sockets_carry_the_payload_and_little_else(run_ranks, size):
    crossed, expected = run_ranks(comm_traffic.wire, size)[0]
    for ours, payload in zip(crossed, expected, strict=True):
        assert payload <= ours < 1.1 * payload


def test_all_gather_copies_and_allocates_nothing(run_ranks):
    for names in run_ranks(comm_traffic.gather_operators, 2):
        assert names == [
            "aten.detach.default",
            "aten.slice.Tensor",
            "c10d.recv_.default",
            "c10d.send.default",
        ]


def test_calls_overlap_on_one_group_and_on_two(run_ranks):
    run_ranks(comm_ranks.many_in_flight, 3)


def test_a_reduction_ends_while_the_caller_does_something_else(run_ranks):
    run_ranks(comm_ranks.ends_without_wait, 2)


@pytest.mark.parametrize("size", WORLDS)
def test_a_gather_that_begins_later_keeps_its_place_and_waits_for_reductions(run_ranks, size):
    run_ranks(comm_ranks.gathered_after, size)


def test_the_observer_is_told_once_of_every_call(run_ranks):
    seen = run_ranks(comm_traffic.observed, 2)
    assert seen == [[("reduce_scatter", 5, 8000), ("all_gather", 5, 8000)]] * 2


def test_the_scratch_is_allocated_once(run_ranks):
    for landing, wide in run_ranks(comm_traffic.scratch_stays, 3):
        assert landing == DEPTH * 2 * CHUNK_BYTES
        assert wide == 2 * BLOCK_BYTES


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_the_scratch_is_bounded_for_any_number_of_ranks(size, dtype):
    numel = chunk_numel(2**20, size, dtype)
    assert 0 < numel * dtype.itemsize * DEPTH * (size - 1) <= SCRATCH_BYTES


def test_the_thread_ends_with_its_comm(run_ranks):
    run_ranks(comm_traffic.threads_end, 2)


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("all_gather", "before"),
        *(
            pytest.param(op, how, marks=pytest.mark.slow)
            for op in ("all_gather", "reduce_scatter", "all_reduce")
            for how in ("before", "middle")
            if (op, how) != ("all_gather", "before")
        ),
    ],
)
def test_a_killed_peer_is_named_well_before_the_time_out(run_ranks, op, how):
    answers = run_ranks(comm_faults.lost_peer, 3, op, how, 50.0, killed=[2])
    for message, peer, seconds in answers[:2]:
        assert peer == 2
        assert f"{op} of 50331648 bytes in group shard: rank 2: " in message
        assert seconds < 25


@pytest.mark.parametrize(
    "op", ["reduce_scatter", pytest.param("all_gather", marks=pytest.mark.slow)]
)
def test_a_peer_that_stays_away_is_named_after_the_time_out(run_ranks, op):
    answers = run_ranks(comm_faults.lost_peer, 3, op, "absent", 1.0, killed=[2])
    for message, peer, _ in answers[:2]:
        assert peer == 2 and "no answer within 1 s" in message


def test_ranks_that_disagree_about_a_size_say_so(run_ranks):
    # The first to give up closes the connection, and the other may see that before its own end.
    messages = run_ranks(comm_faults.other_size, 2, last=True)
    assert any("called other collectives or sizes" in message for message in messages)


@pytest.mark.parametrize("size", WORLDS)
def test_the_native_calls_fill_the_same_places(run_ranks, size):
    run_ranks(comm_ranks.native_calls, size)


def test_the_null_of_a_layout_does_the_local_work_only(run_ranks):
    run_ranks(comm_ranks.null_of_layout, 2)


def test_a_single_rank_needs_no_transfer():
    comm = NullComm()
    buffer = torch.arange(6.0)
    comm.all_gather(buffer).wait()
    comm.reduce_scatter(buffer, divide_by=1).wait()
    comm.all_reduce(buffer, "max").wait()
    assert torch.equal(buffer, torch.arange(6.0))
    out = torch.empty(6)
    comm.reduce_scatter(buffer.bfloat16(), out, divide_by=3, dtype=torch.float32).wait()
    assert torch.equal(out, torch.arange(6.0) / 3)
    halves = torch.empty(6, dtype=torch.bfloat16)
    comm.reduce_scatter(buffer.bfloat16(), halves, divide_by=3, dtype=torch.float32).wait()
    assert torch.equal(halves, (torch.arange(6.0) / 3).bfloat16())


def test_what_would_be_wrong_is_refused():
    comm = NullComm(2, 0)
    with pytest.raises(ValueError, match="2 equal slices, got shape"):
        comm.all_gather(torch.ones(5))
    with pytest.raises(ValueError, match="contiguous 1-D buffer"):
        comm.all_gather(torch.ones(8)[::2])
    with pytest.raises(ValueError, match="at least as wide"):
        comm.reduce_scatter(torch.ones(4), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="floating point"):
        comm.reduce_scatter(torch.ones(4, dtype=torch.int64), divide_by=2)
    with pytest.raises(ValueError, match="out must be"):
        comm.reduce_scatter(torch.ones(4), torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="out must have shape"):
        comm.reduce_scatter(torch.ones(4), torch.ones(3))
