"""`odc bench fsdp`: odc's `fully_shard` beside torch's, in one run.

Every contender is a group of ranks in processes of their own (gloo on the CPU) that hold one
sharded model; they step in turn (`bench_ranks.py`).

A *grid* is a stack of blocks whose groups have a given number of bytes, each size built, measured
and freed by itself.

A contender may be *null*: its collectives move nothing, on the same layout. The difference of its
step to the real one is the communication that computing did not hide.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from odc.train.bench_ranks import ask, ranks_of

MODELS = ("dense", "moe")
DTYPES = ("fp32", "bf16")
WARM_UP = 2


@dataclass(frozen=True)
class Contender:
    """One way to shard one model.

    Attributes:
        name: in the table.
        impl: `odc` or `fsdp2`.
        model: `dense`, `moe`, or `blocks`.
        dtype: `fp32`, or `bf16` with reductions in fp32.
        group_bytes: of a group's parameters in fp32, for `blocks`.
        tokens: of a rank's step, for `dense` and `moe`.
        per_expert: every expert is a unit of its own.
        huge_pages: `THP_MEM_ALLOC_ENABLE` for torch's allocator.
        null: the collectives move nothing.
    """

    name: str
    impl: str
    model: str
    dtype: str
    group_bytes: int = 0
    tokens: int = 128
    per_expert: bool = False
    huge_pages: bool = False
    null: bool = False


@dataclass(frozen=True)
class Measured:
    """Medians over steps, with their spread.

    Attributes:
        step_s: wall time of the slowest rank; `least_s`, `most_s` are its extremes.
        cpu_s: CPU time of a rank, threads of gloo included.
        gathered_bytes: output of all-gathers a step and rank.
        reduced_bytes: input of reductions.
        peak_bytes: resident memory of the largest rank at its peak.
        steps: every measured step, for pairs.
    """

    contender: Contender
    step_s: float
    least_s: float
    most_s: float
    cpu_s: float
    gathered_bytes: int
    reduced_bytes: int
    peak_bytes: int
    steps: tuple[float, ...]


def measure(contenders: Sequence[Contender], ranks: int, repeats: int) -> list[Measured]:
    """Steps of all contenders in turn.

    Raises:
        RuntimeError: a rank failed; the message is its traceback's last line.
    """
    with ExitStack() as stack:
        running = [
            stack.enter_context(ranks_of(partial(_make_step, one), ranks, _env(one)))
            for one in contenders
        ]
        results: list[list[list[dict[str, Any]]]] = [[] for _ in contenders]
        for turn in range(WARM_UP + repeats):
            order = range(len(contenders))
            for number in order if turn % 2 else reversed(order):
                answers = ask(running[number])
                if turn >= WARM_UP:
                    results[number].append(answers)
        return [_summary(one, rows) for one, rows in zip(contenders, results, strict=True)]


def _summary(contender: Contender, rows: list[list[dict[str, Any]]]) -> Measured:
    walls = tuple(max(answer["wall_s"] for answer in row) for row in rows)
    last = rows[-1]
    return Measured(
        contender,
        statistics.median(walls),
        min(walls),
        max(walls),
        statistics.median(statistics.fmean(a["cpu_s"] for a in row) for row in rows),
        last[0]["gathered_bytes"],
        last[0]["reduced_bytes"],
        max(answer["peak_bytes"] for answer in last),
        walls,
    )


def _env(contender: Contender) -> dict[str, str]:
    return {"THP_MEM_ALLOC_ENABLE": "1"} if contender.huge_pages else {}


# -- in a rank -----------------------------------------------------------------------------------


def _make_step(contender: Contender, rank: int, ranks: int) -> Callable[[], dict[str, Any]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    make = _blocks if contender.model == "blocks" else _transformer
    # A unit per expert hangs FSDP2 where ranks route to different experts: one stream for all.
    generator = torch.Generator().manual_seed(0 if contender.model == "moe" else rank)
    model, optimizer, loss_of, counts = make(contender, generator)

    def step() -> dict[str, Any]:
        dist.barrier()
        before = counts()
        started, cpu = time.perf_counter(), time.process_time()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        after = counts()
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "gathered_bytes": after[0] - before[0],
            "reduced_bytes": after[1] - before[1],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    return step


def _transformer(contender: Contender, generator: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loss and counts of a transformer of 12 layers.

    They are of 512 with SwiGLU, vocabulary 8192; 8 experts of 1024, two of them, for `moe`.
    """
    import torch

    from odc.train.config_model import ModelConfig
    from odc.train.models import build_model

    config = ModelConfig(hidden_size=512, num_layers=12, num_heads=8, mlp_size=2048)
    if contender.model == "moe":
        config = replace(config, num_experts=8, top_k=2, expert_size=1024)
    model = build_model(config, 8192)
    counts = _shard(model, contender)

    def loss_of(model: Any) -> Any:
        tokens = torch.randint(0, 8192, (1, contender.tokens + 1), generator=generator)
        logits = model(tokens[:, :-1])
        logits = logits[0] if isinstance(logits, tuple) else logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )

    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), loss_of, counts


def _blocks(contender: Contender, generator: Any) -> tuple[Any, Any, Any, Any]:
    """The same of a stack of blocks, with an optimizer that has no state and hardly computes."""
    import torch

    from odc.train.bench_blocks import TOKENS, Stack

    model: Any = Stack(contender.group_bytes)  # on meta: the whole of it is never there
    counts = _shard(model, contender)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=model.width**-0.5)

    tokens = TOKENS[contender.dtype]

    def loss_of(model: Any) -> Any:
        return model(torch.randn(tokens, model.width, generator=generator)).float().square().mean()

    return model, torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True), loss_of, counts


def _shard(model: Any, contender: Contender) -> Callable[[], tuple[int, int]]:
    """Shards the model; returns what counts (gathered, reduced) bytes so far."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy()
    if contender.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = [layer for layer in model.layers]
    if contender.per_expert:
        experts = [m for m in model.modules() if type(m).__name__ == "Expert"]
        units = [*experts, *units]
    if contender.impl == "odc":
        return _shard_odc(model, units, policy, contender.null)
    return _shard_fsdp2(model, units, policy, contender.null)


def _shard_odc(model: Any, units: list[Any], policy: Any, null: bool) -> Callable[[], Any]:
    import odc
    from odc.fsdp import sharded_runtime
    from odc.fsdp.comm import NullComm
    from odc.fsdp.fully_shard import state_of

    if null:

        def make_null(group: Any, device: Any) -> NullComm:
            return NullComm(group.size(), group.rank())

        sharded_runtime.make_comm = make_null  # type: ignore[assignment]
    for unit in units:
        odc.fully_shard(unit, mp_policy=policy)
    odc.fully_shard(model, mp_policy=policy)
    state = state_of(model)
    assert state is not None
    runtime = state.begin(model)
    comms: list[Any] = [comm for comm, _ in runtime.comms.values()]

    def counts() -> tuple[int, int]:
        """Sizes of the messages, from the payload that came in."""
        found = []
        for op in ("all_gather", "reduce_scatter"):
            calls = [(comm, comm.counters[op]) for comm in comms if op in comm.counters]
            found.append(
                sum(c.received_bytes * comm.size // max(comm.size - 1, 1) for comm, c in calls)
            )
        return found[0], found[1]

    return counts


def _shard_fsdp2(model: Any, units: list[Any], policy: Any, null: bool) -> Callable[[], Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    totals = [0, 0]

    def counted(kind: int, call: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            output, given = [*args, *kwargs.values()][:2]
            totals[kind] += (given if kind else output).nbytes
            if not null:
                return call(*args, **kwargs)
            if kind:
                output.copy_(given[: output.numel()])
            return None

        return collective

    for name, kind in (
        ("all_gather_single", 0),
        ("all_gather_into_tensor", 0),
        ("reduce_scatter_single", 1),
        ("reduce_scatter_tensor", 1),
    ):
        if hasattr(dist, name):
            setattr(dist, name, counted(kind, getattr(dist, name)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return lambda: (totals[0], totals[1])
