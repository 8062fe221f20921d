"""Plans: the constraints, what each rank holds, the certificate."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.errors import ConfigError, DBufferAlignmentError, PlanError, RaggedShardBoundaryError
from odc.sharding import Plan, TensorSpec, plan_group
from odc.sharding.plan import Placement, SubBuffer
from odc.sharding.planner import fsdp2_padding
from tests.sharding import layers

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from(["bfloat16", "float32", "int8"])
granularities = st.sampled_from(["element", "block", "rows:2", "rows:5", "tile:3,1", "tensor"])
groups = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=7).map(
    lambda found: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(found)]
)
arguments = st.fixed_dictionaries(
    {
        "granularity": granularities,
        "max_buffers": st.integers(1, 4),
        "alignment": st.sampled_from([1, 4, 16, 64, 256]),
        "unit_numel": st.sampled_from([1, 8, 128]),
        "gather_dtype": st.sampled_from([None, "bf16", "fp32"]),
    }
)


@settings(max_examples=150, deadline=None)
@given(groups, st.integers(1, 9), arguments, st.sampled_from(["greedy", "optimal"]))
def test_every_plan_keeps_every_constraint(tensors, ranks, chosen, planner):
    plan = plan_group(tensors, ranks, planner=planner, **chosen)
    plan.verify()
    assert [place.tensor for place in plan.placements] == tensors
    taken: dict[tuple[int, int], str] = {}
    for place in plan.placements:
        buffer = plan.buffers[place.buffer]
        item = {"int8": 1, "bfloat16": 2, "float32": 4}[buffer.dtype]
        assert buffer.slice_numel % chosen["unit_numel"] == 0
        assert buffer.slice_numel * item % chosen["alignment"] == 0
        assert place.offset * item % chosen["alignment"] == 0
        for boundary in range(0, ranks * buffer.slice_numel, buffer.slice_numel):
            if place.offset < boundary < place.end:
                assert (boundary - place.offset) % place.block_numel == 0
        assert place.end <= ranks * buffer.slice_numel
        for element in range(place.offset, place.end):
            assert taken.setdefault((place.buffer, element), place.tensor.fqn) == place.tensor.fqn
        assert (chosen["gather_dtype"] is not None) or buffer.dtype == place.tensor.dtype


@settings(max_examples=80, deadline=None)
@given(groups, st.integers(1, 9), arguments)
def test_the_spans_of_all_ranks_hold_every_element_once(tensors, ranks, chosen):
    plan = plan_group(tensors, ranks, **chosen)
    held: dict[str, list[tuple[int, int]]] = {tensor.fqn: [] for tensor in tensors}
    for rank in range(ranks):
        for span in plan.spans(rank):
            assert span.slice_offset + span.numel <= plan.buffers[span.buffer].slice_numel
            held[span.fqn].append((span.tensor_offset, span.numel))
    for place in plan.placements:
        free = 0
        for offset, numel in sorted(held[place.tensor.fqn]):
            assert offset == free and offset % place.block_numel == 0
            free += numel
        assert free == place.tensor.numel
        assert sum(plan.local_units(place.tensor.fqn)) == place.num_blocks


@settings(max_examples=80, deadline=None)
@given(groups, st.integers(1, 9), arguments)
def test_optimal_is_never_above_greedy_nor_below_the_bound(tensors, ranks, chosen):
    greedy = plan_group(tensors, ranks, planner="greedy", **chosen)
    optimal = plan_group(tensors, ranks, planner="optimal", **chosen)
    assert optimal.lower_bound_bytes == greedy.lower_bound_bytes
    assert optimal.lower_bound_bytes <= optimal.slice_bytes <= greedy.slice_bytes


@settings(max_examples=40, deadline=None)
@given(groups, st.integers(1, 9), arguments)
def test_a_plan_is_read_back_as_it_was_written(tensors, ranks, chosen):
    plan = plan_group(tensors, ranks, **chosen)
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


# Proven optima, in elements of padding, unaligned (rows, ranks, padding / numel).
@pytest.mark.parametrize(
    ("layer", "rows", "ranks", "percent"),
    [
        (layers.gpt_oss_20b, 1, 1024, 0.407),
        (layers.gpt_oss_20b, 16, 1024, 11.3),
        (layers.gpt_oss_20b, 32, 256, 4.39),
        (layers.gpt_oss_20b, 128, 1024, 103),
        (layers.qwen3_30b, 1, 1024, 0.083),
        (layers.qwen3_30b, 16, 1024, 7.70),
        (layers.qwen3_30b, 32, 256, 2.31),
        (layers.qwen3_30b, 128, 64, 0.630),
    ],
)
def test_layers_of_public_models_reach_their_proven_optimum(layer, rows, ranks, percent):
    plan = plan_group(layer(), ranks, granularity=f"rows:{rows}", alignment=1)
    assert 100 * plan.padding == pytest.approx(percent, rel=6e-3)
    assert plan.gap < 1e-9


def test_aligned_starts_cost_nothing_worth_naming_and_the_certificate_says_so():
    for layer in (layers.gpt_oss_20b, layers.qwen3_30b):
        for ranks in (8, 64, 256, 1000, 1024):
            plan = plan_group(layer(), ranks, granularity="rows:16", alignment=64)
            assert plan.gap < 2e-4


@pytest.mark.parametrize(
    ("ranks", "padding"), [(1024, 0.0134), pytest.param(256, 0.0006, marks=pytest.mark.slow)]
)
def test_hundreds_of_equal_tensors_are_planned_with_little_padding(ranks, padding):
    plan = plan_group(layers.deepseek_v3_experts_apart(), ranks, granularity="rows:16")
    plan.verify()
    assert plan.padding < padding


def test_the_order_of_definition_does_not_change_what_optimal_costs():
    tensors = layers.gpt_oss_20b()
    plan = plan_group(tensors, 64, granularity="rows:32")
    random.Random(0).shuffle(tensors)
    again = plan_group(tensors, 64, granularity="rows:32")
    assert again.buffers == plan.buffers


def test_one_buffer_serves_a_dtype_and_all_where_they_are_gathered_in_one():
    tensors = [TensorSpec("w", (64, 64), "bfloat16"), TensorSpec("router", (8, 64), "float32")]
    apart = plan_group(tensors, 4, max_buffers=1)
    assert [buffer.dtype for buffer in apart.buffers] == ["bfloat16", "float32"]
    together = plan_group(tensors, 4, max_buffers=1, gather_dtype="bf16")
    assert [buffer.dtype for buffer in together.buffers] == ["bfloat16"]


def test_a_tensor_without_elements_and_a_scalar_are_placed():
    tensors = [TensorSpec("none", (0, 4)), TensorSpec("scalar", ()), TensorSpec("w", (3, 4))]
    plan = plan_group(tensors, 3)
    plan.verify()
    assert plan.numel == 13
    assert plan.local_units("none") == (0, 0, 0)
    assert plan_group([], 4).padding == 0
    nothing = plan_group(tensors[:1], 3)
    nothing.verify()
    assert nothing.local_units("none") == (0, 0, 0) and nothing.numel == 0


def moved(plan: Plan, number: int, **changes: int) -> Plan:
    places = list(plan.placements)
    places[number] = replace(places[number], **changes)
    return replace(plan, placements=tuple(places))


def two_rows() -> Plan:
    """Two tensors of 4 rows of 32 on 2 ranks: [0, 128) and [128, 256), S = 128."""
    tensors = [TensorSpec("a", (4, 32), "int8"), TensorSpec("b", (4, 32), "int8")]
    return plan_group(tensors, 2, alignment=32)


def test_a_cut_block_is_named_with_rank_offset_and_nearest_start():
    tensors = [TensorSpec("a", (3, 48), "int8")]
    plan = Plan(
        plan_group(tensors, 2, alignment=16).rules,
        "greedy",
        (SubBuffer("int8", 128),),
        (Placement(tensors[0], 48, 0, 48),),
        0,
    )
    with pytest.raises(RaggedShardBoundaryError) as caught:
        plan.validate()
    error = caught.value
    assert (error.fqn, error.rank, error.offset, error.nearest) == ("a", 0, 48, 32)
    assert "128 cuts a block of 48" in str(error)
    moved(plan, 0, offset=error.nearest).validate()


def test_overlap_and_a_place_outside_the_buffer_are_named():
    plan = two_rows()
    with pytest.raises(RaggedShardBoundaryError, match="b: rank 0, offset 96: overlaps a"):
        moved(plan, 1, offset=96).validate()
    with pytest.raises(RaggedShardBoundaryError, match="lies outside its buffer"):
        moved(plan, 1, offset=160).validate()


def test_a_start_off_the_alignment_is_named_with_the_nearest():
    tensors = [TensorSpec("a", (4, 32), "int8"), TensorSpec("b", (2, 32), "int8")]
    plan = plan_group(tensors, 2, alignment=32)
    with pytest.raises(DBufferAlignmentError, match="b: rank 1, offset 136") as caught:
        moved(plan, 1, offset=136).validate()
    assert caught.value.nearest == 128
    with pytest.raises(DBufferAlignmentError, match="slice of buffer 0 has 130 elements"):
        replace(plan, buffers=(SubBuffer("int8", 130),)).validate()


def test_a_certificate_that_claims_too_much_is_refused():
    plan = plan_group(layers.qwen3_30b(), 64, granularity="rows:16")
    plan.verify()
    with pytest.raises(PlanError, match="what can be shown is"):
        replace(plan, lower_bound_bytes=plan.lower_bound_bytes + 1).verify()


def test_a_plan_that_is_none_is_refused():
    written = two_rows().as_json()
    del written["rules"]
    with pytest.raises(PlanError, match="no plan: KeyError"):
        Plan.from_json(written)
    with pytest.raises(PlanError, match="rank 2 does not exist"):
        two_rows().spans(2)


def test_what_would_help_is_named_with_the_padding_it_leaves():
    plan = plan_group(layers.qwen3_30b(), 1024, granularity="rows:16")
    said = plan.explain()
    assert "no plan under these rules can have less" in said
    assert "binds" in said
    for idea in ("a finer granularity", "several layers", "a two-level mesh: 4 replicas x 256"):
        assert idea in said


def test_not_to_shard_is_no_help():
    plan = plan_group([TensorSpec("w", (48, 64), "float32")], 4, granularity="rows:16")
    assert plan.padding > 0 and "another number of ranks: 3" in plan.explain()
    assert "ranks: 1\n" not in plan.explain() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks: got 0; allowed: whole numbers from 1"),
        ({"ranks": -3}, "ranks: got -3"),
        ({"ranks": 4, "planner": "best"}, "planner 'best' is unknown; allowed: greedy, optimal"),
        ({"ranks": 4, "granularity": "columns"}, "granularity 'columns' is unknown"),
        ({"ranks": 4, "granularity": 16}, "granularity 16 is no string; .* as in 'rows:16'"),
        ({"ranks": 4, "granularity": "tile:4,5"}, "w: rows of 64 elements hold no whole tiles"),
        ({"ranks": 4, "gather_dtype": "fp12"}, "dtype 'fp12' is unknown"),
        ({"ranks": 4, "max_buffers": 0}, "max_buffers: got 0"),
    ],
)
def test_bad_arguments_are_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan_group([TensorSpec("w", (64, 64))], **arguments)


def test_more_elements_than_an_index_holds_are_refused():
    with pytest.raises(ConfigError, match="an index holds fewer"):
        plan_group([TensorSpec("w", (1 << 30, 1 << 30))], 4)
    with pytest.raises(ConfigError, match="more than an index holds"):
        plan_group([TensorSpec("w", (1 << 25, 1 << 30))], 1 << 20, granularity="tensor")
    with pytest.raises(ConfigError, match="two tensors of the group have this name"):
        plan_group([TensorSpec("w", (2, 2)), TensorSpec("w", (2, 2))], 2)


def test_fsdp2_pads_every_tensor_to_whole_rows_a_rank():
    assert fsdp2_padding([TensorSpec("w", (5, 10))], 4) == pytest.approx(8 / 5 - 1)
