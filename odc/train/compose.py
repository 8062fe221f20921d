"""The one place where names in `config.yaml` become objects.

Everything else takes objects: the manager a policy and a factory, the trainer a task and a manager.
A name that cannot be turned into its object (a predictor for another model, an oracle without the
steps to come) is the user's input, and refused as such before anything trains.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from odc.errors import ConfigError
from odc.fsdp.activations import checkpoint_layers
from odc.fsdp.optimizer import PagedAdamW
from odc.fsdp.paged import paged
from odc.fsdp.ragged import RaggedTensor, distribute_ragged
from odc.memory.manager import MemoryManager, PrefetchFactory
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.scores_auto import auto_prefetcher
from odc.train.adapters import add_adapter, base_initializer
from odc.train.config import Config
from odc.train.config_memory import MemoryConfig
from odc.train.models import Transformer, build_model, init_parameter
from odc.train.policies import EVICTIONS, prefetch_factory
from profiler.schema import policy_code


def policy_name(memory: MemoryConfig) -> str:
    """Returns `EVICTION+PREFETCH` of a configuration, a predictor by its kind."""
    prefetch = memory.predictor if memory.prefetch == "predictor" else memory.prefetch
    return f"{memory.evict_strategy}+{prefetch}"


def make_memory(config: Config, first_step: int = 0) -> MemoryManager:
    """Returns the manager that section `memory` describes, ready for its groups.

    Args:
        config: Section `memory` is read.
        first_step: Step at which the run begins; an oracle's future starts there.

    Raises:
        ConfigError: A policy cannot be made as it is named.
        PredictorError: The predictor's folder is missing or damaged.
        TraceError: The oracle's trace is missing or damaged.
    """
    memory = config.memory
    if memory.evict_strategy == "belady" and memory.prefetch != "oracle":
        raise ConfigError(
            f"memory.evict_strategy: got 'belady' with memory.prefetch {memory.prefetch}; "
            "allowed: memory.prefetch oracle (Belady's order needs the recorded future)"
        )
    return MemoryManager(
        total_mem=memory.total_mem,
        page_budget=memory.page_budget,
        page_size=memory.page_size,
        home=memory.home,
        home_dir=memory.home_dir,
        host_mem=memory.host_mem,
        link_bandwidth=memory.link_bandwidth,
        prefetch_window=memory.prefetch_window,
        page_prefetch=memory.page_prefetch,
        max_items=memory.max_items,
        eviction=EVICTIONS[memory.evict_strategy](),
        prefetch=_prefetch_factory(memory, first_step),
        policy=policy_code(memory.evict_strategy, memory.prefetch),
        option_prefix="memory.",
    )


def make_model(
    config: Config, vocab_size: int, memory: MemoryManager, *, fresh: bool = True
) -> tuple[nn.Module, PagedAdamW]:
    """Builds the model on the meta device and fills its pages group by group.

    Args:
        config: Sections `model`, `adapter`, `train` and `optimizer` are read.
        vocab_size: Number of token ids.
        memory: The manager of its pages.
        fresh: Whether an adapter begins as `adapter.load` says; else a checkpoint follows.

    Raises:
        CheckpointError: The adapter's base, or the adapter to load, does not fit the model.
        BudgetError: A group does not fit the budget; says which would do.
        CheckpointError: The folder in `model.path` has no weights, or others.
        PredictorMismatchError: The predictor was made for another model.
    """
    chosen = config.optimizer
    check_where(config)
    reduced = config.train.dtype == "bfloat16"
    options: dict[str, Any] = {
        "param_groups": lambda paged_model: decay_groups(paged_model, chosen.weight_decay),
        "update": chosen.update or ("backward" if chosen.max_grad_norm is None else "step"),
        "accumulate": config.train.accumulate,
        "max_grad_norm": chosen.max_grad_norm,
        "where": chosen.where,
        "master_weights": reduced and config.adapter.kind == "none",  # adapters are float32
        "frozen_format": config.memory.frozen_format,
        "activations": config.activations.mode,
        "memory": memory,
        "lr": chosen.lr,
        "betas": tuple(chosen.betas),
        "eps": chosen.eps,
    }
    if config.model.path is not None:
        return _read_model(config, options, fresh)
    model = build_model(
        config.model,
        vocab_size,
        device="meta",
        loss_chunk=config.activations.loss_chunk,
    )
    if reduced:
        model.to(torch.bfloat16)
    add_adapter(model, config, fresh)
    made, optimizer = paged(model, torch.optim.AdamW, init=base_initializer(config), **options)
    assert optimizer is not None, "paged() returns an optimizer where it is given a class"
    return made, optimizer


def _read_model(
    config: Config, options: dict[str, Any], fresh: bool
) -> tuple[nn.Module, PagedAdamW]:
    """The model in `model.path`, with an adapter if there is to be one."""
    from odc.train.pretrained import from_pretrained

    assert config.model.path is not None, "the caller looked"
    dtype = getattr(torch, config.train.dtype)
    options["prepare"] = lambda model: add_adapter(model, config, fresh)
    made, optimizer = from_pretrained(config.model.path, torch.optim.AdamW, dtype=dtype, **options)
    assert optimizer is not None, "it returns an optimizer where it is given a class"
    return made, optimizer


def check_where(config: Config) -> None:
    """Refuses places of updates that do not go with the rest.

    Raises:
        ConfigError: bfloat16 without updates at home, or updates at home without a budget.
    """
    where, memory = config.optimizer.where, config.memory
    trains_reduced = config.train.dtype == "bfloat16" and config.adapter.kind == "none"
    if trains_reduced and where != "home":
        raise ConfigError(
            f"train.dtype: got bfloat16 with optimizer.where {where}; allowed: optimizer.where "
            "home (masters and moments in float32 live at home and are updated there), or "
            "train.dtype float32"
        )
    if where == "home" and memory.total_mem is None and memory.page_budget is None:
        raise ConfigError(
            "optimizer.where: got home without memory.total_mem or memory.page_budget; allowed: "
            "auto, device (everything is on the device, and nothing has to move), or set a budget"
        )


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Returns AdamW's parameter groups: matrices decay, norms and other vectors do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_sharded(config: Config, vocab_size: int) -> tuple[Transformer, torch.optim.AdamW]:
    """Builds the model on the meta device, shards it over all ranks, layer by layer, and fills it.

    Every rank draws the values of one parameter at a time, whole, and keeps its own part: they are
    those of one process with this seed.

    Raises:
        ConfigError: The granularity does not fit a parameter.
    """
    from odc.fsdp.fully_shard import fully_shard

    chosen, sharding = config.optimizer, config.sharding
    model = build_model(
        config.model,
        vocab_size,
        device="meta",
        loss_chunk=config.activations.loss_chunk,
    )
    if config.activations.mode == "checkpoint":
        checkpoint_layers(model)
    options: dict[str, Any] = {
        "granularity": sharding.shard_granularity,
        "dbuffer_size": sharding.dbuffer_size,
        "planner": sharding.planning_algorithm,
    }
    if sharding.max_buffers is not None:
        options["max_buffers"] = sharding.max_buffers
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device=next(model.parameters()).device_mesh.device_type)  # type: ignore[attr-defined]
    _fill(config, model)
    optimizer = torch.optim.AdamW(
        decay_groups(model, chosen.weight_decay),
        lr=chosen.lr,
        betas=(chosen.betas[0], chosen.betas[1]),
        eps=chosen.eps,
        fused=True,
    )
    return model, optimizer


@torch.no_grad()
def _fill(config: Config, model: Transformer) -> None:
    depth, std = config.model.num_layers, config.model.init_std
    for fqn, parameter in model.named_parameters():
        assert isinstance(parameter, RaggedTensor), f"{fqn} is sharded"
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
        init_parameter(fqn, full, seed=config.train.seed, std=std, num_layers=depth)
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.copy_(distribute_ragged(full, mesh, placements, src_data_rank=None))


def check_ranks(config: Config) -> None:
    """Refuses what is not combined with several ranks yet.

    Raises:
        ConfigError: Memory is limited, or something is asked for that pages alone have.
    """
    if config.model.path is not None:
        raise ConfigError(
            "model.path: a Hugging Face model is trained by one rank here; train with one rank, or "
            "shard it in a script of your own (odc.fully_shard and odc.load_safetensors)"
        )
    if config.adapter.kind != "none":
        raise ConfigError(
            f"adapter.kind: {config.adapter.kind} is not combined with several ranks yet; set "
            "adapter.kind none, or train with one rank"
        )
    if config.optimizer.where == "home" or config.train.dtype != "float32":
        raise ConfigError(
            f"optimizer.where {config.optimizer.where}, train.dtype {config.train.dtype}: updates "
            "at home are not combined with several ranks yet; use optimizer.where=device "
            "train.dtype=float32, or train with one rank"
        )
    if config.activations.mode == "offload":
        raise ConfigError(
            "activations.mode: got 'offload' with several ranks; allowed: keep, checkpoint (what "
            "ranks save is not moved home yet)"
        )
    if config.accumulation.order == "layer_major":
        raise ConfigError(
            "accumulation.order: got 'layer_major'; allowed with several ranks: micro_major (it "
            "saves transfers of pages, and sharded models are not paged)"
        )
    keys = ("total_mem", "page_budget")
    found = [f"memory.{key}" for key in keys if getattr(config.memory, key) is not None]
    if found:
        raise ConfigError(
            f"{' and '.join(found)}: paging is not combined with several ranks yet; leave it out "
            f"({' '.join(f'{key}=null' for key in found)}), or train with one rank"
        )
    if config.memory.frozen_format != "native":
        raise ConfigError(
            f"memory.frozen_format: got {config.memory.frozen_format!r} with several ranks, whose "
            "parameters are sharded and have no home; allowed: native (or train with one rank)"
        )


def _prefetch_factory(memory: MemoryConfig, first_step: int) -> PrefetchFactory:
    if memory.prefetch == "predictor":
        return predictor_factory(memory.predictor_path, memory.predictor)
    if memory.prefetch == "oracle":
        return _oracle_factory(memory, first_step)
    if memory.prefetch == "auto" and memory.predictor_path is not None:
        return predictor_factory(memory.predictor_path, with_rungs=True)
    return prefetch_factory(memory.prefetch)


def predictor_factory(
    path: str | Path | None, kind: str | None = None, with_rungs: bool = False
) -> PrefetchFactory:
    """Returns the factory of the tape with a learned scorer.

    The folder is read when the factory is called: only then are the model's sets known.

    Args:
        path: Folder made by `odc predictor train`.
        kind: Kind that must lie there; `None` takes any.
        with_rungs: The learned scorer must beat those that need no training, or it stays off.
    """
    assert path is not None, "the configuration refuses a predictor without a path"

    def make(library: OrderLibrary, limits: Limits) -> Prefetcher:
        from predictor import Structure, load_predictor

        table = library.stations.table
        sets = tuple(
            tuple((table.groups[g].layer, table.groups[g].expert) for g in groups)
            for groups in library.stations.sets
        )
        if not sets:
            raise ConfigError(
                "memory.predictor: this model has no expert sets, so that there is nothing to "
                "predict; set memory.prefetch replay"
            )
        loaded = load_predictor(path, Structure(sets))
        if kind is not None and loaded.kind != kind:
            raise ConfigError(
                f"memory.predictor: got {kind!r}, but {path} holds a predictor of kind "
                f"{loaded.kind!r}; name that kind or another folder"
            )
        if with_rungs:
            return auto_prefetcher(library, limits, loaded.scorer())
        return OrderPrefetcher(library, loaded.scorer(), limits)

    return make


def _oracle_factory(memory: MemoryConfig, first_step: int) -> PrefetchFactory:
    from odc.memory.replay import Workload, oracle_factory
    from profiler.reader import TraceReader

    assert memory.oracle_trace is not None, "the configuration refuses an oracle without a trace"
    reader = TraceReader(memory.oracle_trace)
    pages = reader.pages
    need = reader.need()
    steps = sorted({int(step) for step in np.unique(need["step"]) if step >= first_step})
    if not steps or steps[0] != first_step or steps != list(range(steps[0], steps[-1] + 1)):
        raise ConfigError(
            f"memory.oracle_trace: {memory.oracle_trace} does not hold every step from "
            f"{first_step} on; record the run to follow with odc profile"
        )
    future = range(first_step, steps[-1] + 1)
    make = oracle_factory(Workload.from_trace(need, pages, future))

    def checked(library: OrderLibrary, limits: Limits) -> Prefetcher | None:
        _check_pages(memory, library.stations.table, pages)
        return make(library, limits)

    return checked


def _check_pages(memory: MemoryConfig, table: PageTable, pages: dict[str, np.ndarray]) -> None:
    """An oracle speaks of pages by number: they must be the same pages."""
    own = [(p.group, int(p.kind), p.slot, p.part, p.num_bytes) for p in table.pages]
    names = ("group", "kind", "slot", "part", "bytes")
    recorded = list(zip(*(pages[name].tolist() for name in names), strict=True))
    if own != recorded:
        raise ConfigError(
            f"memory.oracle_trace: {memory.oracle_trace} has other pages ({len(recorded)}) than "
            f"this model ({len(own)}); record a run of this model with this memory.page_size"
        )


def prepare_process(config: Config) -> None:
    """Sets what holds for the whole process: compute threads and thread switching.

    A transfer that ends wakes a thread which wants the interpreter for microseconds; at Python's
    default of 5 ms between switches it would wait for it longer than the copy took.
    """
    torch.set_num_threads(config.train.num_threads)
    sys.setswitchinterval(0.0005)
