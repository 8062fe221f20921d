"""Numbers that ranks exchange, and their sums as they are promised."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odc.fsdp.comm import CommOptions, GroupComm, make_comm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
CHUNK_BYTES = 4096
# Nothing, one element, odd, around the short tail, a chunk less one, several chunks and a rest.
NUMELS = (0, 1, 7, 511, 1023, 4097, 10_007)


def world(**options: Any) -> GroupComm:
    return make_comm(
        dist.group.WORLD, options=CommOptions(name="shard", chunk_bytes=CHUNK_BYTES, **options)
    )


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose sum depends on the order."""
    made = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (numel,), generator=made, dtype=dtype)
    spread = (torch.randn(numel, generator=made) * 4).clamp(-6, 6)
    return (torch.randn(numel, generator=made) * spread.exp2()).to(dtype)


def everyone(numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """What each rank starts with, computed anew on each."""
    return [values(numel, dtype, seed * 100 + r) for r in range(dist.get_world_size())]


def in_rank_order(
    terms: list[Tensor], dtype: torch.dtype | None = None, divide_by: float | None = None
) -> Tensor:
    """The sum as it is promised: one addition after another, one division."""
    total = terms[0].to(dtype or terms[0].dtype)
    for term in terms[1:]:
        total = total + term.to(total.dtype)
    return total if divide_by is None else total / divide_by
