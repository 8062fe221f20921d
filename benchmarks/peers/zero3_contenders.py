"""The contenders of `zero3.py`, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero3_ranks import Contender

# Elements of a layer, of the embedding and of the head: 4 * 512^2 + 3 * 512 * 2048, 8192 * 512.
LAYER = 4_195_328
# Small buffers, and parameters let go as soon as a layer is over: little memory.
LEAN = {
    "reduce_bucket_size": LAYER,
    "stage3_prefetch_bucket_size": LAYER,
    "stage3_max_live_parameters": 2 * LAYER,
    "stage3_max_reuse_distance": LAYER,
    "sub_group_size": LAYER,
}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "NVME", "pin_memory": True}
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


@dataclass(frozen=True)
class Set:
    """Contenders that are measured in turn; the first is what the others are compared with."""

    name: str
    title: str
    ranks: int
    contenders: tuple[Contender, ...]

    @property
    def sequence(self) -> int:
        """Tokens of a sequence: few in bf16, where the CPU has no instructions for it."""
        return 16 if self.name.endswith("bf16") else 128


def zero(
    name: str,
    dtype: str = "fp32",
    adam: str = "deepspeed",
    *,
    optimizer: Mapping[str, Any] | None = None,
    param: Mapping[str, Any] | None = None,
    lean: bool = True,
    env: dict[str, str] | None = None,
    **more: Any,
) -> Contender:
    """A contender of DeepSpeed; `more` overrides its settings of ZeRO."""
    settings: dict[str, Any] = {**(LEAN if lean else {}), **more}
    if optimizer is not None:
        settings["offload_optimizer"] = optimizer
    if param is not None:
        settings["offload_param"] = param
    both = {"zero": settings, "aio": AIO}
    return Contender(f"DeepSpeed, {name}", "deepspeed", dtype, both, adam, env or {})


def paged(name: str, dtype: str = "fp32", **settings: Any) -> Contender:
    """A contender of odc.paged."""
    return Contender(f"odc, {name}", "paged", dtype, {"update": "backward", **settings})


# Swap buffers: 4 values of a tile at once; three times as many where reads and writes overlap.
SWAP = {**NVME, "buffer_count": 4}
SWAP_PIPELINED = {**NVME, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
TILE = {"sub_group_size": LAYER // 4}
# Parameters on NVMe: no prefetch (it fails in the second step), a buffer for each parameter that
# may be there at once, each of the size of the largest.
PARAMS = {**NVME, "buffer_count": 20, "buffer_size": LAYER, "max_in_cpu": 0}
UNREAD_AHEAD = {**TILE, "stage3_prefetch_bucket_size": 0}


def _resident(ranks: int, dtype: str) -> Set:
    zeros = (
        zero("defaults, torch AdamW", dtype, "torch", lean=False),
        zero("small buffers, torch AdamW", dtype, "torch"),
        zero("small buffers, DeepSpeedCPUAdam", dtype),
    )
    if ranks > 1:
        first: tuple[Contender, ...] = (Contender("odc.fully_shard", "sharded", dtype),)
    elif dtype == "bf16":
        first = (paged("everything on the device, masters at home", dtype, home="host"),)
    else:
        first = (
            paged("unlimited"),
            paged("unlimited, update in step", update="step"),
        )
    title = f"everything resident, {ranks} rank{'s' if ranks > 1 else ''}, {dtype}"
    return Set(f"resident{ranks}-{dtype}", title, ranks, (*first, *zeros))


def _host(dtype: str, budgets: tuple[str, ...]) -> Set:
    ours = tuple(
        paged(f"home=host, pages {b}", dtype, home="host", page_budget=b, page_size="16MB")
        for b in budgets
    )
    zeros = (
        zero("optimizer on CPU", dtype, optimizer=CPU),
        zero("optimizer on CPU, default buffers", dtype, optimizer=CPU, lean=False),
        zero("parameters and optimizer on CPU", dtype, optimizer=CPU, param=CPU),
    )
    return Set(f"host-{dtype}", f"offload to host memory, {dtype}", 1, (*ours, *zeros))


def _disk(dtype: str, budgets: tuple[str, ...]) -> Set:
    ours = tuple(
        paged(f"home=disk, pages {b}", dtype, home="disk", page_budget=b, page_size="16MB")
        for b in budgets
    )
    zeros = (
        zero("optimizer on NVMe", dtype, optimizer=SWAP, **TILE),
        zero("optimizer on NVMe, pipelined", dtype, optimizer=SWAP_PIPELINED, **TILE),
        zero(
            "parameters and optimizer on NVMe", dtype, optimizer=SWAP, param=PARAMS, **UNREAD_AHEAD
        ),
        zero(
            "parameters and optimizer on NVMe, pipelined",
            dtype,
            optimizer=SWAP_PIPELINED,
            param=PARAMS,
            **UNREAD_AHEAD,
        ),
        zero(
            "parameters and optimizer on NVMe, prefetching",
            dtype,
            optimizer=SWAP,
            param=PARAMS,
            **TILE,
        ),
    )
    return Set(f"disk-{dtype}", f"offload to disk, {dtype}", 1, (*ours, *zeros))


SETS = (
    _resident(2, "fp32"),
    _resident(1, "fp32"),
    _resident(2, "bf16"),
    _resident(1, "bf16"),
    _host("fp32", ("400MB", "200MB")),
    _host("bf16", ("240MB", "128MB")),
    _disk("fp32", ("600MB", "300MB")),
    _disk("bf16", ("240MB", "128MB")),
)

# The largest micro-batch: each side with what it has against activations and logits.
CHUNK = 256
_SPARING = {"activations": "checkpoint", "chunk": CHUNK}


def _sparing(contender: Contender, **changes: Any) -> Contender:
    settings = {**_SPARING, **changes}
    words = settings["activations"] + (f", {CHUNK} logits" if settings["chunk"] else "")
    return replace(contender, name=f"{contender.name}; {words}", **settings)


def _batches() -> tuple[Contender, ...]:
    found = []
    for dtype in ("fp32", "bf16"):
        ours = paged(
            f"{dtype}, home=disk", dtype, home="disk", page_budget="128MB", page_size="8MB"
        )
        on_disk = zero(f"{dtype}, optimizer on NVMe", dtype, optimizer=SWAP, **TILE)
        found += [
            _sparing(ours, activations="checkpoint"),
            _sparing(ours, activations="offload"),
            _sparing(ours, activations="checkpoint", chunk=0),
            _sparing(on_disk, chunk=0),
            _sparing(on_disk),
        ]
    both = zero(
        "bf16, parameters and optimizer on NVMe",
        "bf16",
        optimizer=SWAP,
        param=PARAMS,
        **UNREAD_AHEAD,
    )
    return (*found, _sparing(both, chunk=0), _sparing(both))


BATCHES = _batches()
