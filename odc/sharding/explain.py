"""What a plan's padding comes from, and what would make it less: each idea planned and measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from odc.sharding.certificate import Blocks, binding_tensor
from odc.sharding.plan import Plan, Rules
from odc.sharding.planner import plan_blocks
from odc.sharding.tensors import TensorSpec
from odc.sizes import format_bytes

_WORTH = 1e-4  # padding below which nothing is worth changing
_SMALL = 0.1  # of the group: tensors whose blocks may be finer than those of the large ones


@dataclass(frozen=True)
class Option:
    """A change and the padding that a plan with it has."""

    what: str
    padding: float


def options(plan: Plan) -> list[Option]:
    """Returns the changes that lower the padding, best first; each was planned."""
    blocks = [(place.tensor, place.block_numel) for place in plan.placements]
    ideas = [
        *_finer(blocks, plan.rules),
        *_transposed(blocks),
        *_more_layers(blocks),
    ]
    found = [Option(what, plan_blocks(b, plan.rules, "optimal").padding) for what, b in ideas]
    for what, ranks in _other_ranks(plan.ranks):
        rules = replace(plan.rules, ranks=ranks)
        found.append(Option(what, plan_blocks(blocks, rules, "optimal").padding))
    best_of_kind: dict[str, Option] = {}
    for option in found:
        kind = option.what.split(":")[0]
        if kind not in best_of_kind or option.padding < 0.95 * best_of_kind[kind].padding:
            best_of_kind[kind] = option
    helpful = [option for option in best_of_kind.values() if option.padding < plan.padding * 0.9]
    helpful.sort(key=lambda option: option.padding)
    finer = next((o.padding for o in helpful if o.what.startswith("a finer")), plan.padding)
    return [o for o in helpful if not o.what.startswith("single") or o.padding < 0.95 * finer]


def explain(plan: Plan) -> str:
    """Says in words what the padding is, which tensor binds, and what would help."""
    blocks = [(place.tensor, place.block_numel) for place in plan.placements]
    lines = [
        f"{len(plan.placements)} tensors, {plan.numel:,} elements on {plan.ranks:,} ranks: each "
        f"holds {plan.slice_numel:,} ({format_bytes(plan.slice_bytes)}) in "
        f"{len(plan.buffers)} buffer{'s' * (len(plan.buffers) != 1)}.",
        f"Padding {plan.padding:.4%}; no plan under these rules can have less than "
        f"{plan.lower_bound_padding:.4%}"
        + ("." if plan.gap > 1e-9 else ", so this one is the best there is."),
    ]
    if plan.padding < _WORTH:
        return "\n".join([*lines, "Nothing is worth changing."])
    binding, without = binding_tensor(blocks, plan.rules)
    if binding is None:
        lines.append("No single tensor binds: several together ask for this slice.")
    else:
        block = next(b for tensor, b in blocks if tensor.fqn == binding.fqn)
        total = plan.num_bytes
        bound = without * plan.ranks / total - 1
        lines.append(
            f"{binding.fqn} binds: {_shape(binding)} in blocks of {_rows(binding, block)}; with "
            f"none of its blocks to keep whole, the bound would be {bound:.4%}."
        )
    helpful = options(plan)
    if not helpful:
        return "\n".join([*lines, "None of the changes tried makes it less."])
    lines.append("What would help, and the padding it would leave:")
    lines += [f"  {option.padding:9.4%}  {option.what}" for option in helpful]
    return "\n".join(lines)


def _finer(blocks: Blocks, rules: Rules) -> Iterator[tuple[str, Blocks]]:
    """Fewer rows in a block: of the tensor that binds, and of all tensors but the largest."""
    binding, _ = binding_tensor(blocks, rules)
    total = sum(tensor.numel for tensor, _ in blocks)
    small = [tensor for tensor, _ in blocks if tensor.numel < _SMALL * total]
    targets = [(f"tensors below {_SMALL:.0%} of the group", small)]
    if binding is not None:
        targets.insert(0, (binding.fqn, [t for t, _ in blocks if t.shape == binding.shape]))
    for name, tensors in targets:
        names = {tensor.fqn for tensor in tensors}
        most = max((b // t.row_numel for t, b in blocks if t.fqn in names), default=0)
        for fewer in sorted({most // 2, most // 4, 1} - {0, most}, reverse=True):
            said = f"a finer granularity: {name} in blocks of {fewer} row{'s' * (fewer > 1)}"
            yield said, _with_rows(blocks, names, fewer)
        yield f"single elements: {name} by element", _with_rows(blocks, names, 0)


def _with_rows(blocks: Blocks, names: set[str], rows: int) -> Blocks:
    """The blocks with at most `rows` rows (0: one element) in those of the named tensors."""
    return [
        (tensor, min(block, max(1, rows * tensor.row_numel)) if tensor.fqn in names else block)
        for tensor, block in blocks
    ]


def _transposed(blocks: Blocks) -> Iterator[tuple[str, Blocks]]:
    seen = set()
    for target, _ in blocks:
        if len(target.shape) < 2 or target.shape in seen or target.shape[-1] == target.shape[-2]:
            continue
        seen.add(target.shape)
        turned = []
        for tensor, block in blocks:
            if tensor.shape == target.shape and block > 1:
                shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
                new = TensorSpec(tensor.fqn, shape, tensor.dtype)
                rows = max(1, block // tensor.row_numel)
                whole = block >= tensor.numel
                turned.append((new, new.numel if whole else rows * new.row_numel))
            else:
                turned.append((tensor, block))
        yield f"a transposed layout: {target.fqn} stored transposed", turned


def _more_layers(blocks: Blocks) -> Iterator[tuple[str, Blocks]]:
    for count in (2, 3, 4):
        several = [
            (TensorSpec(f"{copy}.{tensor.fqn}", tensor.shape, tensor.dtype), block)
            for copy in range(count)
            for tensor, block in blocks
        ]
        yield f"several layers in a group: {count} such layers", several


def _other_ranks(ranks: int) -> Iterator[tuple[str, int]]:
    for replicas in (2, 4, 8):
        if ranks % replicas == 0 and ranks > replicas:
            inner = ranks // replicas
            yield f"a two-level mesh: {replicas} replicas x {inner} shards", inner
    near = {ranks + d for d in range(-4, 5)} | {ranks * k // 16 for k in range(12, 21)}
    for other in sorted(near - {ranks}):
        if other > 1:  # one rank shards nothing
            yield f"another number of ranks: {other}", other


def _shape(tensor: TensorSpec) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def _rows(tensor: TensorSpec, block: int) -> str:
    rows, rest = divmod(block, tensor.row_numel)
    if rest:
        return f"{block} elements"
    return f"{rows} row{'s' * (rows > 1)} ({block:,} elements)"
