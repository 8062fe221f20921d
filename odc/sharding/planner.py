"""The planner: parameters of a group in, a plan with its certificate out.

`greedy` keeps the order of definition, earliest fit, one buffer for each dtype: the plan of
veScale-FSDP (arXiv 2602.22437, algorithm 1) with an exact fit instead of its dynamic program.
`optimal` searches which tensors share a sub-buffer, their order and S, and is never worse.

Groups that are equal but for their names are planned once; the result depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from odc.errors import ConfigError
from odc.sharding.certificate import (
    SEARCH_BUFFERS,
    Blocks,
    kinds_of,
    lower_bound_bytes,
    share_buffers,
    space_of,
)
from odc.sharding.fit import Piece, Space, make_piece
from odc.sharding.granularity import GranularityLike, block_numels
from odc.sharding.plan import Placement, Plan, Rules, SubBuffer
from odc.sharding.search import PROVE, Buffer, Effort, Found, Search, first_slice
from odc.sharding.tensors import ITEM_BYTES, TensorSpec, dtype_name

PLANNERS = ("greedy", "optimal")
MAX_NUMEL = 1 << 56  # elements of a group: sums of slices stay in 64 bits
MAX_BYTES = (1 << 63) - 1


def plan_group(
    tensors: Sequence[TensorSpec],
    ranks: int,
    *,
    granularity: GranularityLike = "block",
    planner: str = "optimal",
    max_buffers: int = 3,
    alignment: int = 64,
    unit_numel: int = 128,
    gather_dtype: str | None = None,
    prove: bool = False,
) -> Plan:
    """Decides where every tensor of a group lies on `ranks` ranks.

    Args:
        tensors: the group's parameters in the order of definition.
        ranks: slices of every buffer.
        granularity: what stays together: `element`, `block` (one row), `rows:N`, `tile:R,C`,
            `tensor`, or a function (fqn, shape) -> one of these, such as `GranularityRules`.
        planner: `greedy` or `optimal`.
        max_buffers: sub-buffers at most (one for each dtype in any case).
        alignment: bytes that starts and slices are multiples of.
        unit_numel: elements that slices are multiples of, as collectives prefer.
        gather_dtype: the one dtype that all are gathered in; `None`: each in its own.
        prove: search until the best plan is proven, or for minutes.

    Raises:
        ConfigError: an argument is not allowed, two tensors have one name, a tile's columns do not
            divide a row, or the group has more bytes than an index holds.
    """
    rules = _rules(ranks, alignment, unit_numel, max_buffers, gather_dtype)
    blocks = list(zip(tensors, block_numels(tensors, granularity), strict=True))
    return plan_blocks(blocks, rules, planner, PROVE if prove else Effort())


def plan_blocks(blocks: Blocks, rules: Rules, planner: str, effort: Effort | None = None) -> Plan:
    """As `plan_group`, with the elements of each tensor's block given."""
    if planner not in PLANNERS:
        raise ConfigError(f"planner {planner!r} is unknown; allowed: {', '.join(PLANNERS)}")
    _check_names([tensor for tensor, _ in blocks])
    total = sum(tensor.numel for tensor, _ in blocks)
    if total >= MAX_NUMEL:
        raise ConfigError(f"the group has {total} elements; an index holds fewer than {MAX_NUMEL}")
    if planner == "greedy":
        placed = _greedy(blocks, rules)
    else:
        placed = _optimal(blocks, rules, effort or Effort())
    buffers, placements = _place(blocks, rules, placed)
    for buffer in buffers:
        if buffer.slice_bytes * rules.ranks > MAX_BYTES:
            raise ConfigError(
                f"a buffer of {rules.ranks} x {buffer.slice_bytes} bytes is more than an index "
                f"holds ({MAX_BYTES}); use fewer ranks or a finer granularity"
            )
    return Plan(rules, planner, buffers, placements, lower_bound_bytes(blocks, rules))


def _rules(
    ranks: int, alignment: int, unit_numel: int, max_buffers: int, gather_dtype: str | None
) -> Rules:
    for name, value in (
        ("ranks", ranks),
        ("alignment", alignment),
        ("unit_numel", unit_numel),
        ("max_buffers", max_buffers),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: got {value!r}; allowed: whole numbers from 1")
        if value > 1 << 40:
            raise ConfigError(f"{name}: got {value}; allowed: at most {1 << 40}")
    gathered = None if gather_dtype is None else dtype_name(gather_dtype)
    return Rules(ranks, alignment, unit_numel, max_buffers, gathered)


def _check_names(tensors: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.fqn in seen:
            raise ConfigError(f"{tensor.fqn}: two tensors of the group have this name")
        seen.add(tensor.fqn)


def _greedy(blocks: Blocks, rules: Rules) -> dict[str, list[Buffer]]:
    """One buffer for each dtype, in the order of definition."""
    orders: dict[str, list[Piece]] = {}
    for tensor, block in blocks:
        if tensor.numel:
            dtype = rules.dtype_of(tensor)
            piece = make_piece(tensor.numel, block, rules.aligned_numel(dtype))
            orders.setdefault(dtype, []).append(piece)
    return {
        dtype: _in_order(tuple(order), space_of(rules, dtype)).buffers
        for dtype, order in orders.items()
    }


@lru_cache(maxsize=1024)
def _in_order(order: tuple[Piece, ...], space: Space) -> Found:
    slice_numel, starts = first_slice(order, space, Effort().tolerance)
    return Found([Buffer(slice_numel, list(zip(order, starts, strict=True)))])


def _optimal(blocks: Blocks, rules: Rules, effort: Effort) -> dict[str, list[Buffer]]:
    """The best of all partitions, dtype by dtype; buffers go to the dtypes that gain most."""
    kinds = kinds_of(blocks, rules)
    greedy = _greedy(blocks, rules)

    def cost(dtype: str, num_parts: int) -> tuple[int, tuple[str, Found]]:
        found = _search(
            kinds[dtype], space_of(rules, dtype), min(num_parts, SEARCH_BUFFERS), effort
        )
        known = Found(greedy[dtype])
        best = known if known.slice_numel < found.slice_numel else found
        return best.slice_numel * ITEM_BYTES[dtype], (dtype, best)

    _, chosen = share_buffers(list(kinds), rules.max_buffers, cost)
    return {dtype: found.buffers for dtype, found in chosen}


@lru_cache(maxsize=4096)
def _search(
    kinds: tuple[tuple[Piece, int], ...], space: Space, num_parts: int, effort: Effort
) -> Found:
    return Search(list(kinds), space, num_parts, effort).run()


def _place(
    blocks: Blocks, rules: Rules, found: dict[str, list[Buffer]]
) -> tuple[tuple[SubBuffer, ...], tuple[Placement, ...]]:
    """Gives the tensors of each kind its starts, in the order of definition."""
    buffers: list[SubBuffer] = []
    free: dict[tuple[str, Piece], list[tuple[int, int]]] = {}
    for dtype, parts in found.items():
        for part in parts:
            for piece, start in part.layout:
                free.setdefault((dtype, piece), []).append((len(buffers), start))
            buffers.append(SubBuffer(dtype, part.slice_numel))
    for places in free.values():
        places.sort(reverse=True)
    placements = []
    for tensor, block in blocks:
        dtype = rules.dtype_of(tensor)
        number, offset = 0, 0
        if tensor.numel:
            piece = make_piece(tensor.numel, block, rules.aligned_numel(dtype))
            number, offset = free[dtype, piece].pop()
        placements.append(Placement(tensor, block, number, offset))
    if placements and not buffers:  # nothing but empty tensors: their views need a buffer to lie in
        dtype = rules.dtype_of(placements[0].tensor)
        buffers.append(SubBuffer(dtype, rules.unit(dtype)))
    return tuple(buffers), tuple(placements)


def fsdp2_padding(tensors: Sequence[TensorSpec], ranks: int) -> float:
    """The padding of per-parameter `Shard(0)`: dimension 0 of each rounded up to `ranks` rows."""
    total = sum(tensor.numel for tensor in tensors)
    padded = sum(
        -(-tensor.shape[0] // ranks) * ranks * math.prod(tensor.shape[1:]) if tensor.shape else 1
        for tensor in tensors
        if tensor.numel
    )
    return padded / total - 1 if total else 0.0


def lcm_padding(tensors: Sequence[TensorSpec], ranks: int) -> float:
    """The padding of Megatron-FSDP's rule: the buffer a multiple of the lcm of all row groups."""
    total = sum(tensor.numel for tensor in tensors)
    common = math.lcm(*(math.prod(t.shape[1:]) for t in tensors if t.numel)) * ranks
    return -(-total // common) * common / total - 1 if total else 0.0
