"""Hugging Face models in pages: streamed in from a folder, trained, streamed out again.

    model, opt = odc.from_pretrained(folder, total_mem="2GB", home="disk", lr=1e-5)
    ...
    odc.save_pretrained(model, "tuned")

The model is built on the meta device from `config.json`; then each group takes its frames and reads
its tensors straight from the files, so that the whole is never held. Saving goes the same way back.
Nothing is looked up outside the folder, and no code from it is ever run. Transformers is imported
inside the functions: it is an optional package.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from odc.errors import CheckpointError, ConfigError
from odc.fsdp.expert_list import ExpertList, unfuse_experts
from odc.fsdp.interop import Held, load_one, match, save_safetensors, tensors_of
from odc.fsdp.optimizer import PagedAdamW
from odc.fsdp.paged import paged
from odc.fsdp.safetensors_file import INDEX, SINGLE, Entry, find_files, read_entries
from odc.fsdp.tensor_names import Piece
from odc.sizes import format_bytes

CONFIG = "config.json"
GENERATION = "generation_config.json"
# What lies beside the weights and belongs to the model.
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "LICENSE*",
)
_SOURCE = "_odc_source"  # attribute of a model: the folder that it came from

Matched = list[tuple[Held, list[tuple[Piece, Entry]]]]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as it would lie in pages, known from its configuration alone.

    Attributes:
        model_type: the family, such as `llama`.
        model: on the meta device, experts as modules of their own; `odc.fsdp.wrap.find_units` says
            which groups `odc.paged` makes of it.
        shapes: of every parameter by name, tied ones once.
        num_layers, hidden_size, vocab_size: as the configuration has them.
        num_experts: of a layer with experts; 0 in a dense model.
        top_k: experts that a token uses; 0 in a dense model.
        stored_dtype: of the weights in the folder as the configuration says, `float32` where it
            does not.
    """

    model_type: str
    model: nn.Module = field(repr=False)
    shapes: Mapping[str, torch.Size] = field(repr=False)
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_experts: int
    top_k: int
    stored_dtype: torch.dtype

    @property
    def num_parameters(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())


def describe_model(
    folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> ModelDescription:
    """What a folder's `config.json` says of its model; weights are neither read nor needed.

    Args:
        folder: holds `config.json`.
        dtype: of the parameters.

    Raises:
        ConfigError: transformers or the file is missing, or it describes no language model.
    """
    config = read_config(folder)
    model = build_on_meta(config, dtype)
    layers = [len(module) for module in model.modules() if isinstance(module, ExpertList)]
    stored = getattr(config, "dtype", None)
    return ModelDescription(
        model_type=config.model_type,
        model=model,
        shapes={name: parameter.shape for name, parameter in model.named_parameters()},
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_experts=max(layers, default=0),
        top_k=getattr(config, "num_experts_per_tok", 0) if layers else 0,
        stored_dtype=stored if isinstance(stored, torch.dtype) else torch.float32,
    )


def read_config(folder: str | os.PathLike[str]) -> Any:
    """The folder's `config.json` as transformers understands it.

    Raises:
        ConfigError: as in `describe_model`.
    """
    transformers = import_transformers()
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path}: expected the folder of a Hugging Face model, found "
            f"{'no ' + CONFIG + ' in it' if path.is_dir() else 'no folder'}; name one that holds "
            f"{CONFIG} and *.safetensors, as save_pretrained writes it"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{path / CONFIG}: {str(error).splitlines()[0]}") from error
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{path / CONFIG}: the weights are quantized ({kind}), which cannot be trained; save "
            "them in bfloat16 or float32 first and name that folder"
        )
    return config


def build_on_meta(
    config: Any, dtype: torch.dtype, attn_implementation: str | None = None
) -> nn.Module:
    """The causal language model of a configuration on the meta device, each expert a module.

    Raises:
        ConfigError: transformers has none for this configuration.
    """
    transformers = import_transformers()
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False, **options
            )
    except ValueError as error:
        raise ConfigError(
            f"{config.model_type}: transformers {transformers.__version__} builds no causal "
            f"language model of it: {str(error).splitlines()[0]}"
        ) from error
    unfuse_experts(model)
    model.eval()
    return model  # type: ignore[no-any-return]


def from_pretrained(
    folder: str | os.PathLike[str],
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    **options: Any,
) -> tuple[Any, PagedAdamW | None]:
    """Reads a Hugging Face model from a folder into pages, group by group.

    Experts that transformers holds fused become modules of their own
    (`model.layers.0.mlp.experts.7`), each a group of pages; results are those of transformers'
    `experts_implementation="eager"`. `model.state_dict()` and `odc.save_pretrained` name tensors as
    the model's authors do. As in transformers the model is in evaluation mode.

    Args:
        folder: holds `config.json` and `model.safetensors`, or the index of several files.
        optimizer: as `odc.paged` takes it; None for a model that is not trained.
        dtype: of parameters and moments; files of another one are converted on the way.
        attn_implementation: as transformers takes it (`sdpa`, `eager`).
        prepare: called with the model on the meta device before it is paged, to freeze parameters
            or to lay adapters (`odc.lora`) beside layers, in place.
        **options: of `odc.paged`: `total_mem`, `page_budget`, `home`, `home_dir`, `lr`, ...

    Returns:
        The model and its optimizer (None without one).

    Raises:
        ConfigError: transformers is missing, or the folder holds no model that it can build.
        CheckpointError: weights are missing, damaged, or of another model.
        ValueError, BudgetError: as of `odc.paged`.
    """
    if "init" in options:
        raise ValueError("init: the folder gives every parameter its value; leave it out")
    path = Path(folder).expanduser().absolute()
    config = read_config(path)
    entries = read_weights(path)
    model = build_on_meta(config, dtype, attn_implementation)
    matched = _match(model, entries, path)
    _tell_dtypes(matched, dtype, path)
    if prepare is not None:
        prepare(model)
    made: Any
    made, opt = paged(model, optimizer, init=_Reader(matched), **options)
    if (path / GENERATION).is_file():
        generation = import_transformers().GenerationConfig
        made.generation_config = generation.from_pretrained(path, local_files_only=True)
    setattr(made, _SOURCE, path)
    made.save_pretrained = partial(save_pretrained, made)  # transformers' own would hold it in full
    return made, opt


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder that transformers loads, group by group: weights, configuration, tokenizer.

    Tensors have the names that the model's authors gave them. The tokenizer's files are copied from
    the folder that the model came from. The folder appears when it is complete.

    Args:
        model: from `odc.from_pretrained`, or any transformers model, paged or not.
        folder: new or empty, unless `overwrite`.
        max_shard_size: of a file.
        dtype: of the files; by default that of the pages.
        overwrite: exchange the weights of a folder that is there; its other files are kept.

    Raises:
        CheckpointError: the folder is not empty or cannot be written.
        ValueError: the model is not one of transformers'.
    """
    if getattr(getattr(model, "config", None), "model_type", None) is None:
        raise ValueError(
            f"{type(model).__name__} has no configuration of transformers; "
            "odc.save_safetensors writes the weights of any model"
        )
    source: Path | None = getattr(model, _SOURCE, None)
    found = [file for pattern in _COMPANIONS for file in (source.glob(pattern) if source else ())]
    save_safetensors(
        model,
        folder,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        dtype=dtype,
        beside=[file for file in dict.fromkeys(found) if file.is_file()],
    )


def import_transformers() -> ModuleType:
    """Transformers, told beforehand to look nothing up.

    Raises:
        ConfigError: it is not installed.
    """
    if "huggingface_hub" not in sys.modules:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "a Hugging Face model needs the package transformers, which is not installed; "
            "pip install 'odc-runtime[hf]'"
        ) from error
    return transformers  # type: ignore[no-any-return]


def read_weights(folder: Path) -> dict[str, Entry]:
    """The tensors of a folder by their names in the files.

    Raises:
        CheckpointError: there are none, or a file is damaged.
    """
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        kinds = ("*.bin", "*.gguf", "*.pt")
        others = sorted(path.name for kind in kinds for path in folder.glob(kind))
        raise CheckpointError(
            f"{folder} has a configuration but no weights: expected {SINGLE} or {INDEX}"
            + (f", found {', '.join(others[:3])}; save them as safetensors" if others else "")
        )
    return read_entries(find_files(folder))


def _match(model: nn.Module, entries: dict[str, Entry], folder: Path) -> Matched:
    """Where each parameter's elements lie; buffers get their values at once."""
    _fill_buffers(model)
    matched, _ = match(model, tensors_of(model), entries, True, str(folder))
    for one, pieces in matched:
        if not one.tensor.is_meta:
            load_one(one, pieces)
    unset = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and bool(buffer.isnan().any())
    ]
    if unset:
        raise CheckpointError(f"{folder}: nothing says what the buffers {', '.join(unset)} hold")
    return matched


def _fill_buffers(model: Any) -> None:
    """Buffers are small: they leave the meta device, and transformers computes what it can."""
    for module in model.modules():
        meta = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in meta.items():
            filler = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, filler, device="cpu")
        if meta:
            model._init_weights(module)


class _Reader:
    """Gives each module of the model that is being paged the values of its own parameters."""

    def __init__(self, matched: Matched) -> None:
        self._pieces = {name: pieces for one, pieces in matched for name in one.names}

    @torch.no_grad()
    def __call__(self, fqn: str, module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{fqn}.{name}" if fqn else name
                load_one(Held([full], parameter), self._pieces[full])


def _tell_dtypes(matched: Matched, dtype: torch.dtype, folder: Path) -> None:
    """Says so where pages hold another dtype than the files."""
    stored: Counter[torch.dtype] = Counter()
    for one, pieces in matched:
        for piece, entry in pieces:
            if one.tensor.is_meta and entry.dtype != dtype:
                stored[entry.dtype] += piece.numel
    for other, numel in stored.items():
        names = [str(d).removeprefix("torch.") for d in (other, dtype)]
        sizes = [format_bytes(numel * d.itemsize) for d in (other, dtype)]
        warnings.warn(
            f"{folder}: {sizes[0]} of {names[0]} become {sizes[1]} of {names[1]} in pages",
            stacklevel=3,
        )
