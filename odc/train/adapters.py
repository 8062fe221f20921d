"""Adapters in a run: what section `adapter` means for the model, and which base they belong to.

A run that trains an adapter saves the adapter alone. Its checkpoints name the base by a
fingerprint of its values, wherever these came from: an adapter is worth nothing on another base.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from odc.errors import CheckpointError, ConfigError
from odc.fsdp.group import ParamGroup
from odc.fsdp.lora import ALL_LINEAR, lora
from odc.fsdp.lora_files import load_adapter
from odc.fsdp.runtime import Runtime
from odc.fsdp.safetensors_file import Entry, read_entries, read_span
from odc.memory.events import Kind
from odc.train.config import Config
from odc.train.config_model import AdapterConfig
from odc.train.models import initializer

_SAMPLES = 256  # values of a parameter that its fingerprint is made of

Init = Callable[[str, nn.Module], None]


def add_adapter(model: nn.Module, config: Config, fresh: bool = True) -> None:
    """Freezes a model on the meta device and lays the adapter beside it, if there is to be one.

    Args:
        model: Not in pages yet.
        config: Section `adapter` is read, and the seed of the run.
        fresh: Whether `adapter.load` says its first values.

    Raises:
        ConfigError: No layer matches the targets.
        CheckpointError: The adapter to load does not fit.
    """
    chosen = config.adapter
    if chosen.kind == "none":
        return
    if chosen.base is not None and config.model.path is not None:
        raise ConfigError(
            f"adapter.base: got {chosen.base} with model.path {config.model.path}; allowed: one of "
            "them (both name the base's weights)"
        )
    try:
        lora(
            model,
            chosen.rank,
            chosen.alpha,
            chosen.dropout,
            _targets(chosen),
            seed=config.train.seed,
        )
    except ConfigError as error:
        raise ConfigError(*(f"adapter.{problem}" for problem in error.problems)) from error
    if fresh and chosen.load is not None:
        load_adapter(model, chosen.load)


def _targets(chosen: AdapterConfig) -> tuple[str, ...] | str:
    if len(chosen.targets) == 1:
        only = chosen.targets[0]
        if only == ALL_LINEAR or not re.fullmatch(r"[\w.]+", only):
            return only
    return tuple(chosen.targets)


def identity_of(model: nn.Module, chosen: AdapterConfig) -> dict[str, Any]:
    """Returns what an adapter's checkpoint must agree about: its keys, and its base.

    Args:
        model: In pages, and filled; each of its groups is read once.
        chosen: Section `adapter`.
    """
    if chosen.kind == "none":
        return {}
    return {
        "kind": chosen.kind,
        "rank": chosen.rank,
        "alpha": chosen.alpha,
        "targets": list(chosen.targets),
        "base": fingerprint(model),
    }


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Returns 16 hex digits of a paged model's frozen weights: names, shapes and some values."""
    runtime: Runtime = model._odc_runtime  # type: ignore[assignment]
    runtime.manager.begin_pass(-2)  # no forward: recorded orders are left alone
    digest = hashlib.sha256()
    for group in runtime.groups:
        if not (group.trainable or group.adapter):
            with runtime.resident([group]):
                for index, slot in enumerate(group.slots):
                    digest.update(f"{slot.fqn} {list(slot.shape)} {slot.dtype}\n".encode())
                    digest.update(_sample(group, index))
    return digest.hexdigest()[:16]


def _sample(group: ParamGroup, index: int) -> bytes:
    flat = group.view(Kind.PARAMETER, index).reshape(-1)
    chosen = flat[:: max(flat.numel() // _SAMPLES, 1)].contiguous()
    return chosen.view(torch.uint8).numpy().tobytes()


# The base.


def base_initializer(config: Config) -> Init:
    """Returns what fills the base's weights, as `odc.paged(..., init=...)` takes it.

    Raises:
        CheckpointError: `adapter.base` names no checkpoint of a whole model.
    """
    if config.adapter.base is None:
        return initializer(config.model, config.train.seed)
    read = _reader(Path(config.adapter.base), config)

    @torch.no_grad()
    def fill(fqn: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            read(f"{fqn}.{name}" if fqn else name, parameter.detach())

    return fill


def _reader(source: Path, config: Config) -> Callable[[str, Tensor], None]:
    from odc.train.checkpoint_folder import check_model, find, read_header

    path = find(source)
    header = read_header(path)
    if header.get("adapter"):
        raise CheckpointError(
            f"adapter.base: {path} holds an adapter and no model; name the run of its base"
        )
    check_model(path, config.model)
    if "ranks" in header:
        from odc.train.rank_checkpoint import WholeTensors

        saved = WholeTensors(path)
        return lambda fqn, target: saved.read(f"param.{fqn}", target)
    entries = read_entries(path / name for name in header["files"])

    def read(fqn: str, target: Tensor) -> None:
        entry: Entry | None = entries.get(f"param.{fqn}")
        if entry is None or entry.shape != tuple(target.shape):
            raise CheckpointError(
                f"adapter.base: {path} has {fqn} of shape {entry and entry.shape}, the model "
                f"{tuple(target.shape)}; use the model and data.vocab_size that it was saved with"
            )
        read_span(entry, 0, target.view(-1))

    return read
