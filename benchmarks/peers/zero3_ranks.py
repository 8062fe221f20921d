"""What runs in a process of the comparison with DeepSpeed: a model, an optimizer, a step.

The model is odc's own dense transformer, in plain PyTorch, its weights made from the names of the
parameters; tokens are made from the number of the step. So all contenders train the same thing, and
their losses must agree.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 8192
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        layers: decoder layers of width `hidden`, SwiGLU of `mlp`.
        sequence: tokens of a sequence.
        batch: sequences of a rank and step.
    """

    layers: int = 12
    hidden: int = 512
    mlp: int = 2048
    sequence: int = 128
    batch: int = 1


@dataclass(frozen=True)
class Contender:
    """One way to train it.

    Attributes:
        name: in the table.
        kind: `deepspeed`, `paged` (odc.paged) or `sharded` (odc.fully_shard).
        dtype: `fp32`, or `bf16` with masters and moments in fp32.
        settings: `zero_optimization` and `aio` of DeepSpeed's configuration, where `NVME` stands
            for the folder; or arguments of odc.paged.
        adam: `deepspeed` (DeepSpeedCPUAdam) or `torch` (AdamW, fused).
        activations: `keep`, `checkpoint` (every layer is computed again in backward; torch's
            checkpoint for DeepSpeed), or `offload` (odc only).
        chunk: tokens whose logits are there at once (for DeepSpeed its TiledFusedLogitsLoss);
            0: all.
        env: environment of its processes.
    """

    name: str
    kind: str
    dtype: str = "fp32"
    settings: Mapping[str, Any] = field(default_factory=dict)
    adam: str = "torch"
    activations: str = "keep"
    chunk: int = 0
    env: dict[str, str] = field(default_factory=dict)


def make_step(contender: Contender, work: Work, folder: str, rank: int, ranks: int) -> Any:
    """Builds the contender; returns what takes a step and says what it took."""
    import torch

    torch.set_num_threads(1)
    make: Callable[..., Any] = {"deepspeed": _deepspeed, "paged": _paged, "sharded": _sharded}[
        contender.kind
    ]
    train, imported_bytes, moved, describe = make(contender, work, folder, rank, ranks)
    built_bytes = status("VmHWM")
    turn = 0

    def step(batch: int = work.batch) -> dict[str, Any]:
        nonlocal turn
        tokens = _tokens(work, batch, turn, rank)
        turn += 1
        if ranks > 1:
            torch.distributed.barrier()
        before, moved_before = disk_bytes(), moved()
        started, cpu = time.perf_counter(), time.process_time()
        loss = train(tokens)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        after, moved_after = disk_bytes(), moved()
        return {
            "loss": loss,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "read_bytes": after[0] - before[0],
            "written_bytes": after[1] - before[1],
            "paged_in_bytes": moved_after[0] - moved_before[0],
            "paged_out_bytes": moved_after[1] - moved_before[1],
            "imported_bytes": imported_bytes,
            "built_bytes": built_bytes,
            "peak_bytes": status("VmHWM"),
            "note": describe(),
        }

    return step


def status(name: str) -> int:
    """A size from this process's /proc entry, in bytes: `VmRSS` now, `VmHWM` at its peak."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process had read from and written to block devices."""
    with open("/proc/self/io", encoding="ascii") as lines:
        found = dict(line.split(": ") for line in lines)
    return int(found["read_bytes"]), int(found["write_bytes"])


def _tokens(work: Work, batch: int, turn: int, rank: int) -> Any:
    """(batch, sequence + 1) token ids of a step; skewed, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(1000 * turn + rank)
    shape = (batch, work.sequence + 1)
    return (torch.rand(shape, generator=generator).square() * VOCABULARY).long()


def _config(work: Work) -> Any:
    from odc.train.config_model import ModelConfig

    return ModelConfig(
        hidden_size=work.hidden,
        num_layers=work.layers,
        num_heads=work.hidden // 64,
        mlp_size=work.mlp,
    )


def _nothing() -> tuple[int, int]:
    return 0, 0


# -- odc -----------------------------------------------------------------------------------------


def _paged(contender: Contender, work: Work, folder: str, rank: int, ranks: int) -> Any:
    """One rank of odc.paged; the model is built group by group."""
    import torch

    import odc
    from odc.train.models import build_model, initializer

    assert ranks == 1 and rank == 0
    sys.setswitchinterval(0.0005)
    imported = status("VmRSS")
    more = {"loss_chunk": contender.chunk} if contender.chunk else {}
    model = build_model(_config(work), VOCABULARY, device="meta", **more)
    settings = {**contender.settings}
    if contender.dtype == "bf16":
        model.to(torch.bfloat16)
        settings.update(where="home", master_weights=True)
    if contender.activations != "keep":
        settings["activations"] = contender.activations
    if "home" in settings:
        settings.setdefault("home_dir", folder)
    paged, optimizer = odc.paged(
        model, torch.optim.AdamW, init=initializer(_config(work), 0), **HYPER, **settings
    )
    memory = paged.memory

    def train(tokens: Any) -> float:
        loss = paged(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    total = [0, 0]

    def moved() -> tuple[int, int]:
        counters = memory.take()
        total[0] += counters.bytes_in
        total[1] += counters.bytes_out
        return total[0], total[1]

    pages = int(memory.table.num_frames.sum()) * 2
    return train, imported, moved, lambda: f"pages {memory.pool.num_bytes >> 20} of {pages} MiB"


def _sharded(contender: Contender, work: Work, folder: str, rank: int, ranks: int) -> Any:
    """A rank of odc.fully_shard with torch's AdamW."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import odc
    from odc.fsdp.ragged import distribute_ragged
    from odc.train.models import build_model, init_parameter

    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    imported = status("VmRSS")
    policy = MixedPrecisionPolicy()
    if contender.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    config = _config(work)
    model = build_model(config, VOCABULARY, device="meta")
    for layer in model.layers:
        odc.fully_shard(layer, mp_policy=policy)
    odc.fully_shard(model, mp_policy=policy)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape)
            init_parameter(name, whole, std=config.init_std, num_layers=config.num_layers)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_ragged(whole, mesh, placements, src_data_rank=None))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def train(tokens: Any) -> float:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return train, imported, _nothing, lambda: ""


# -- DeepSpeed -----------------------------------------------------------------------------------


def _deepspeed(contender: Contender, work: Work, folder: str, rank: int, ranks: int) -> Any:
    """A rank of ZeRO-3; the model is partitioned as it is made (`zero.Init`)."""
    import logging
    import os

    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    if not os.environ.get("ZERO3_VERBOSE"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it prints every buffer it hands out
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", rank=rank, world_size=ranks, verbose=False)
    imported = status("VmRSS")
    config = ds_config(contender, work, f"{folder}/{rank}")
    model = _partitioned(contender, work, config)
    if contender.adam == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **HYPER)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def train(tokens: Any) -> float:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.item()

    return train, imported, _nothing, lambda: ""


def ds_config(contender: Contender, work: Work, folder: str) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    settings = _with_folder(dict(contender.settings), folder)
    found = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, **settings.get("zero", {})},
        **{key: value for key, value in settings.items() if key != "zero"},
    }
    if contender.dtype == "bf16":
        found["bf16"] = {"enabled": True}
    return found


def _with_folder(value: Any, folder: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_folder(inner, folder) for key, inner in value.items()}
    return folder if value == "NVME" else value


def _partitioned(contender: Contender, work: Work, config: dict[str, Any]) -> Any:
    """The model, of which no rank ever holds more than its part and one parameter."""
    import deepspeed
    import torch

    from odc.train.models import Transformer, init_parameter

    shape = _config(work)
    plain = contender.activations == "keep" and not contender.chunk
    # Its dtype argument makes bf16 of everything on a CPU; the configuration's type is right.
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = (Transformer if plain else _sparing(contender))(shape, VOCABULARY)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            whole = torch.empty(parameter.shape)
            init_parameter(name, whole, std=shape.init_std, num_layers=shape.num_layers)
            parameter.copy_(whole)
    return model


def _sparing(contender: Contender) -> Any:
    """The transformer with torch's checkpoint, and DeepSpeed's loss that holds few logits."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
    from torch.utils.checkpoint import checkpoint

    from odc.train.models import Transformer, rope_tables

    def loss_of(model: Any, x: Any, targets: Any) -> Any:
        logits = model.head(x).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    class Sparing(Transformer):
        def forward(self, idx: Any, targets: Any = None, cache: Any = None) -> Any:
            rope = rope_tables(0, idx.size(1), self.config, idx.device)
            x = self.embed(idx)
            for layer in self.layers:
                if contender.activations == "checkpoint":
                    x, _ = checkpoint(layer, x, rope, use_reentrant=False, preserve_rng_state=False)
                else:
                    x, _ = layer(x, rope)
            x = self.norm(x)
            tiles = -(-targets.numel() // contender.chunk) if contender.chunk else 1
            if tiles == 1:
                return loss_of(self, x, targets)
            weights = [self.head.weight]
            return TiledFusedLogitsLoss.apply(
                loss_of, self, x, targets, None, tiles, weights, "mean"
            )

    return Sparing
