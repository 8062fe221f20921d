"""A RaggedTensor behaves as FSDP2's sharded DTensor, on spans that are uneven or empty.

The claims on several ranks are in `ragged_*claims.py`.
"""

from __future__ import annotations

import copy
import pickle
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.fsdp.ragged import RaggedLayoutError, RaggedShard
from odc.fsdp.ragged_shard import boxes
from odc.sharding import TensorSpec, plan_group
from tests.fsdp import (
    ragged_claims,
    ragged_optimizer_claims,
    ragged_refusal_claims,
    ragged_saving_claims,
)
from tests.fsdp.claims import cases

CLAIMS = (
    ragged_claims.CLAIMS
    | ragged_optimizer_claims.CLAIMS
    | ragged_saving_claims.CLAIMS
    | ragged_refusal_claims.CLAIMS
)


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)


def test_placements_are_values():
    one, same, other = RaggedShard(4, (1, 0, 2)), RaggedShard(4, [1, 0, 2]), RaggedShard(4, (1, 2))
    assert one == same and hash(one) == hash(same) and one != other and one != "R"
    assert pickle.loads(pickle.dumps(one)) == one and copy.deepcopy(one) == one
    assert repr(one) == str(one) == "RaggedShard(block_numel=4, local_units=(1, 0, 2))"
    text, names = one.__fx_repr__()
    assert eval(text, names) == one
    assert not (one.is_shard() or one.is_shard(0) or one.is_replicate() or one.is_partial())


def test_the_last_block_may_be_short():
    shard = RaggedShard(4, (1, 0, 2))
    assert [shard.span(10, rank) for rank in range(3)] == [(0, 4), (4, 0), (4, 6)]
    assert shard.bounds(10) == (0, 4, 4, 10)


def test_bounds_and_placements_say_the_same():
    assert RaggedShard.from_bounds((0, 8, 8, 30), 8) == RaggedShard(8, (1, 0, 3))
    assert RaggedShard.from_bounds((0, 6, 30), 8) == RaggedShard(2, (3, 12))
    assert RaggedShard.from_bounds((0, 0, 0), 8) == RaggedShard(8, (0, 0))


@pytest.mark.parametrize("units", [(), (1, -1)])
def test_wrong_placements_are_refused(units):
    with pytest.raises(RaggedLayoutError, match="local_units >= 0"):
        RaggedShard(4, units)


def test_a_plans_spans_are_its_placements_spans():
    specs = [TensorSpec("a", (7, 5), "float32"), TensorSpec("b", (130,), "float32")]
    plan = plan_group(specs, ranks=3)
    for place in plan.placements:
        shard = RaggedShard(place.block_numel, plan.local_units(place.tensor.fqn))
        for rank in range(3):
            held = [s for s in plan.spans(rank) if s.fqn == place.tensor.fqn]
            offset, numel = shard.span(place.tensor.numel, rank)
            assert (numel, offset if numel else 0) == (
                (held[0].numel, held[0].tensor_offset) if held else (0, 0)
            )


@given(st.data())
def test_boxes_tile_a_span_in_order_and_are_few(data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    numel = prod(shape)
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    found = boxes(shape, low, high)
    index = torch.arange(numel).view(shape)
    covered = []
    for offsets, sizes in found:
        box = index[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert box.numel()
        covered += box.flatten().tolist()
    assert covered == list(range(low, high))
    assert len(found) <= max(2 * len(shape) - 1, 1)
