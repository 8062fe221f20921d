"""Adapters on disk, as peft has them: a folder of `adapter_config.json` and one safetensors file.

`peft.PeftModel.from_pretrained(base, folder)` reads what ``save_adapter`` writes, and
``load_adapter`` reads what peft's ``save_pretrained`` writes for plain LoRA. The adapter's name is
in neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from odc.errors import CheckpointError, ConfigError
from odc.fsdp.lora import (
    Factor,
    LoraConfig,
    adapters_of,
    add_adapter,
    factors_of,
    target_layers,
)
from odc.fsdp.parameter import PagedParameter
from odc.fsdp.safetensors_file import Entry, lay_out, read_entries, write_span

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Keys of peft's configuration that change the arithmetic or the base; each must be off.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "exclude_modules",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
)
_KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # initial values that do


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    name: str | None = None,
    *,
    base: str | None = None,
) -> None:
    """Write an adapter for peft or ``load_adapter``; files that are there are replaced.

    Args:
        model: changed by ``odc.lora``, in pages or not.
        folder: made where it is missing.
        name: of the adapter; None: the active one.
        base: name or folder of the base model, for the reader; None: what the model says of itself.

    Raises:
        ConfigError: there is no such adapter.
        CheckpointError: the folder cannot be written.
    """
    adapters = adapters_of(model)
    name = name or adapters.active
    if name not in adapters.configs:
        raise ConfigError(
            f"no adapter {name!r} to save; the model has {', '.join(map(repr, adapters.configs))}"
        )
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write_weights(model, name, target)
        text = json.dumps(_peft_config(model, adapters.configs[name], base), indent=2)
        partial = target / f".{CONFIG}.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, target / CONFIG)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the adapter cannot be written: {error.strerror}; name another folder"
        ) from error


def load_adapter(
    model: nn.Module, folder: str | os.PathLike[str], name: str = "default", *, seed: int = 0
) -> None:
    """Read an adapter's values; a model that has none of that name gets it first.

    On the meta device values are read when ``odc.paged`` fills the pages.

    Args:
        model: any that fits; once it lies in pages it must have the adapter already.
        folder: written by ``save_adapter`` or by peft.
        name: of the adapter in this model.
        seed: as for ``odc.lora``.

    Raises:
        CheckpointError: the folder is no adapter, is damaged, or does not fit the model.
        ConfigError: the adapter asks for what is not supported here, or cannot be added any more.
    """
    path = Path(folder)
    config = read_config(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path}: holds no {WEIGHTS}; save the adapter as safetensors")
    entries = read_entries([path / WEIGHTS])
    known = getattr(model, "_odc_adapters", None)
    if known is not None and name in known.configs:
        _check_same(path, name, config, known.configs[name])
        _check_shapes(path, entries, {k: f.weight.shape for k, f in factors_of(model, name)})
    else:
        shapes = {
            f"{fqn}.{kind}": shape
            for fqn, layer in target_layers(model, config)
            for kind, shape in config.shapes(layer).items()
        }
        _check_shapes(path, entries, shapes)
        add_adapter(model, name, config, seed=seed)
    factors = list(factors_of(model, name))
    for key, factor in factors:
        factor.entry = entries[f"{_PREFIX}{key}.weight"]
    for inside, resident in _by_group(model, factors, write=True):
        with resident:
            for _, factor in inside:
                if not factor.weight.is_meta:
                    factor.fill()


def read_config(folder: Path) -> LoraConfig:
    """The configuration in an adapter's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: it asks for what is not supported here.
    """
    file = folder / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        kind, targets = found.get("peft_type"), found["target_modules"]
        config = LoraConfig(
            int(found["r"]),
            found["lora_alpha"],
            float(found["lora_dropout"]),
            targets if isinstance(targets, str) else tuple(sorted(targets)),
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: is no adapter: it holds no {CONFIG}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error!r}); save the adapter again") from (
            error
        )
    wrong = [f"{k} {found[k]!r}" for k in _UNSUPPORTED if found.get(k)]
    if kind != "LORA":
        wrong.append(f"peft_type {kind!r}")
    if found.get("bias", "none") != "none":
        wrong.append(f"bias {found['bias']!r}")
    if found.get("init_lora_weights", True) not in _KEEP_THE_BASE:
        wrong.append(f"init_lora_weights {found['init_lora_weights']!r}")
    if wrong:
        raise ConfigError(
            f"{file}: {', '.join(wrong)}: only plain LoRA is supported here; put the model that "
            "peft makes of this adapter into pages instead (odc.paged(peft_model))"
        )
    return config


# -- inside ----------------------------------------------------------------------------------------


def _check_same(path: Path, name: str, found: LoraConfig, own: LoraConfig) -> None:
    if (found.rank, found.scaling) != (own.rank, own.scaling):
        raise CheckpointError(
            f"{path}: has rank {found.rank} and alpha {found.alpha:g}, adapter {name!r} has rank "
            f"{own.rank} and alpha {own.alpha:g}; make the adapter with those of the folder"
        )


def _check_shapes(
    path: Path, entries: dict[str, Entry], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    expected = {f"{_PREFIX}{key}.weight": tuple(shape) for key, shape in shapes.items()}
    missing = sorted(expected.keys() - entries.keys())
    unexpected = sorted(entries.keys() - expected.keys())
    wrong = [
        f"{key}: {entries[key].shape} in the file, {shape} in the model"
        for key, shape in expected.items()
        if key in entries and entries[key].shape != shape
    ]
    titles = (("missing", missing), ("not in the model", unexpected), ("of another shape", wrong))
    problems = [f"{title} ({len(n)}): {', '.join(n[:4])}" for title, n in titles if n]
    if problems:
        raise CheckpointError(
            "\n".join([f"{path / WEIGHTS} does not fit the model's adapter:", *problems])
        )


def _by_group(
    model: nn.Module, factors: list[tuple[str, Factor]], write: bool
) -> Iterator[tuple[list[tuple[str, Factor]], AbstractContextManager[None]]]:
    """The matrices of each group of a paged model, and what makes them resident."""
    runtime: Any = getattr(model, "_odc_runtime", None)
    if runtime is None:
        yield factors, nullcontext()
        return
    groups: dict[Any, list[tuple[str, Factor]]] = {}
    for key, factor in factors:
        assert isinstance(factor.weight, PagedParameter), "the model lies in pages"
        groups.setdefault(factor.weight._group, []).append((key, factor))
    for group, inside in groups.items():
        yield inside, runtime.resident([group], write)


def _write_weights(model: nn.Module, name: str, folder: Path) -> None:
    factors = list(factors_of(model, name))
    partial = folder / f".{WEIGHTS}.partial"
    partial.unlink(missing_ok=True)  # of a save that was interrupted
    tensors = {
        f"{_PREFIX}{key}.weight": (f.weight.dtype, tuple(f.weight.shape)) for key, f in factors
    }
    layout = lay_out(partial, tensors)
    layout.create()
    file = os.open(partial, os.O_WRONLY)
    try:
        for inside, resident in _by_group(model, factors, write=False):
            with resident:
                for key, factor in inside:
                    values: Tensor = factor.weight.detach().reshape(-1)
                    write_span(file, layout.entries[f"{_PREFIX}{key}.weight"], 0, values)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(partial, folder / WEIGHTS)


def _peft_config(model: nn.Module, config: LoraConfig, base: str | None) -> dict[str, Any]:
    of_base = getattr(getattr(model, "config", None), "_name_or_path", None)
    causal = any(kind.__name__.endswith("ForCausalLM") for kind in type(model).__mro__)
    targets = config.targets
    return {
        "base_model_name_or_path": base or of_base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "task_type": "CAUSAL_LM" if causal else None,
    }
