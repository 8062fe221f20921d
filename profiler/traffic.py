"""Who sent how much to whom: `comm` rows as a matrix of ranks, and the table of steps.

A point-to-point transfer (`dst` >= 0) is counted as recorded. A collective names no receiver; its
bytes are spread by a *named model*, and the name stays with the numbers. `ring` is the algorithm of
NCCL and gloo for large messages: N ranks in the order of their process group, each sending to the
next one only.

`bytes` of a collective is its message size as nccl-tests counts it: the gathered output of an
all-gather, the input of a reduce-scatter, the buffer of an all-reduce or a broadcast, the input of
an all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiler.merge import Table, num_rows
from profiler.schema import CommOp

MODELS = ("ring",)


@dataclass(frozen=True)
class CommMatrix:
    """Sparse bytes from rank to rank, ordered by (src, dst).

    Attributes:
        src: (E,) i64.
        dst: (E,) i64.
        bytes: (E,) i64.
        count: (E,) i64, rows of `comm` that contributed.
        world_size: Number of ranks.
        model: How collectives were spread.
        modelled: Whether any collective was, that is, whether numbers are not all measured.
    """

    src: np.ndarray
    dst: np.ndarray
    bytes: np.ndarray
    count: np.ndarray
    world_size: int
    model: str
    modelled: bool

    def dense(self) -> np.ndarray:
        """Return (world_size, world_size) i64 bytes; rows send, columns receive."""
        matrix = np.zeros((self.world_size, self.world_size), np.int64)
        matrix[self.src, self.dst] = self.bytes
        return matrix


def comm_matrix(
    comm: Table,
    world_size: int,
    *,
    process_groups: Mapping[str, Sequence[int]] | None = None,
    model: str = "ring",
) -> CommMatrix:
    """Sum `comm` rows into bytes from rank to rank.

    Args:
        comm: `TraceReader.comm()`; each rank's own rows describe what that rank sends.
        world_size: Number of ranks.
        process_groups: Ranks of each `pg` (manifest key `process_groups`); all ranks by default.
        model: How a collective is spread: `"ring"`.
    """
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    everyone = list(range(world_size))
    sent: dict[tuple[int, int], list[int]] = {}
    modelled = False
    for (rank, op, src, dst, pg, num_bytes), count in _distinct(comm):
        if dst >= 0:
            edges = {(src, dst): num_bytes} if op != CommOp.RECV else {}
        else:
            ranks = list((process_groups or {}).get(str(pg), everyone))
            edges = _ring_edges(op, rank, src, ranks, num_bytes)
            modelled |= bool(edges)
        for edge, edge_bytes in edges.items():
            total = sent.setdefault(edge, [0, 0])
            total[0] += edge_bytes * count
            total[1] += count
    ordered = sorted(sent.items())
    table = np.array([(*edge, *total) for edge, total in ordered], np.int64).reshape(-1, 4)
    src_column, dst_column, bytes_column, count_column = table.T
    return CommMatrix(
        src_column, dst_column, bytes_column, count_column, world_size, model, modelled
    )


def _distinct(comm: Table) -> list[tuple[tuple[int, int, int, int, int, int], int]]:
    """Return distinct (rank, op, src, dst, pg, bytes) with their number: steps repeat them."""
    rank = comm.get("rank", comm["src"])
    names = ("op", "src", "dst", "pg", "bytes")
    rows = np.stack([rank.astype(np.int64), *(comm[n].astype(np.int64) for n in names)], axis=1)
    unique, counts = np.unique(rows, axis=0, return_counts=True)
    return [
        (tuple(row), count) for row, count in zip(unique.tolist(), counts.tolist(), strict=True)
    ]


def _ring_edges(
    op: int, rank: int, root: int, ranks: list[int], num_bytes: int
) -> dict[tuple[int, int], int]:
    """Return what `rank` sends to whom in one collective of `ranks`."""
    size = len(ranks)
    if size < 2 or rank not in ranks:
        return {}
    following = ranks[(ranks.index(rank) + 1) % size]
    if op in (CommOp.ALL_GATHER, CommOp.REDUCE_SCATTER):
        return {(rank, following): num_bytes * (size - 1) // size}
    if op == CommOp.ALL_REDUCE:
        return {(rank, following): 2 * num_bytes * (size - 1) // size}
    if op == CommOp.BROADCAST:
        # The last rank of the chain that starts at the root sends nothing.
        return {} if following == root else {(rank, following): num_bytes}
    if op == CommOp.ALL_TO_ALL:
        return {(rank, other): num_bytes // size for other in ranks if other != rank}
    return {}


def sent_bytes(
    comm: Table, world_size: int, process_groups: Mapping[str, Sequence[int]] | None = None
) -> np.ndarray:
    """Return (world_size,) i64: bytes each rank sent, by closed formulas from its own rows.

    An independent count: the rows of `comm_matrix(...).dense()` must sum to it.
    """
    total = np.zeros(world_size, np.int64)
    groups = process_groups or {}
    for (rank, op, src, dst, pg, num_bytes), count in _distinct(comm):
        size = len(groups.get(str(pg), range(world_size)))
        if dst >= 0:
            total[src] += 0 if op == CommOp.RECV else num_bytes * count
        elif size > 1 and op in (CommOp.ALL_GATHER, CommOp.REDUCE_SCATTER):
            total[rank] += num_bytes * (size - 1) // size * count
        elif size > 1 and op == CommOp.ALL_REDUCE:
            total[rank] += 2 * num_bytes * (size - 1) // size * count
        elif size > 1 and op == CommOp.ALL_TO_ALL:
            total[rank] += num_bytes // size * (size - 1) * count
        elif op == CommOp.BROADCAST:
            ranks = list(groups.get(str(pg), range(world_size)))
            is_last = (ranks.index(rank) + 1) % size == ranks.index(src)
            total[rank] += 0 if size < 2 or is_last else num_bytes * count
    return total


def steps_table(steps: Table) -> Table:
    """Return the `step` columns with rates and shares added.

    Added: `other_ns` (step time that is neither compute, stall, communication nor profiler),
    `tokens_per_s`, `stall_share`, and `profiler_share` (f64, NaN for a step of no duration).
    """
    seconds = steps["step_ns"] / 1e9
    accounted = sum(steps[n] for n in ("compute_ns", "stall_ns", "comm_ns", "profiler_ns"))
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            **steps,
            "other_ns": np.maximum(steps["step_ns"] - accounted, 0),
            "tokens_per_s": np.where(seconds > 0, steps["tokens"] / seconds, np.nan),
            "stall_share": np.where(seconds > 0, steps["stall_ns"] / steps["step_ns"], np.nan),
            "profiler_share": np.where(
                seconds > 0, steps["profiler_ns"] / steps["step_ns"], np.nan
            ),
        }


def comm_per_step(comm: Table) -> Table:
    """Return columns `step`, `op`, `bytes`, `count`, `dur_ns`: sums over rows of a step and op."""
    key = comm["step"].astype(np.int64) * 256 + comm["op"]
    unique, inverse = np.unique(key, return_inverse=True)
    table: Table = {"step": unique // 256, "op": (unique % 256).astype(np.uint8)}
    for name in ("bytes", "dur_ns"):
        table[name] = np.zeros(len(unique), np.int64)
        np.add.at(table[name], inverse, comm[name])
    table["count"] = np.bincount(inverse, minlength=len(unique)) if num_rows(comm) else inverse
    return table
