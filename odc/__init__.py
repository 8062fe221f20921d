"""odc: train models that do not fit the device, by treating its memory as a cache.

Names are loaded when they are first used: importing ``odc`` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "paged": "odc.fsdp.paged",
    "PagedModule": "odc.fsdp.paged_module",
    "checkpoint_layers": "odc.fsdp.activations",
    "chunked_cross_entropy": "odc.fsdp.chunked_loss",
    "layer_major": "odc.fsdp.layer_major",
    "fully_shard": "odc.fsdp.fully_shard",
    "FullyShardedDataParallel": "odc.fsdp.fully_shard",
    "FSDPModule": "odc.fsdp.fully_shard",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "UnshardHandle": "odc.fsdp.fully_shard",
    "register_fsdp_forward_method": "odc.fsdp.fully_shard",
    "share_comm_ctx": "odc.fsdp.fully_shard",
    "lora": "odc.fsdp.lora",
    "set_adapter": "odc.fsdp.lora",
    "load_adapter": "odc.fsdp.lora_files",
    "save_adapter": "odc.fsdp.lora_files",
    "load_safetensors": "odc.fsdp.interop",
    "save_safetensors": "odc.fsdp.interop",
    "from_pretrained": "odc.train.pretrained",
    "save_pretrained": "odc.train.pretrained",
    "describe_model": "odc.train.pretrained",
    "OdcError": "odc.errors",
    "AbsentParameterError": "odc.errors",
    "BudgetError": "odc.errors",
    "ConfigError": "odc.errors",
    "PagedGradientError": "odc.errors",
    "PageIOError": "odc.errors",
}

__all__ = [
    "AbsentParameterError",
    "BudgetError",
    "CPUOffloadPolicy",
    "ConfigError",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "OdcError",
    "OffloadPolicy",
    "PageIOError",
    "PagedGradientError",
    "PagedModule",
    "UnshardHandle",
    "__version__",
    "checkpoint_layers",
    "chunked_cross_entropy",
    "describe_model",
    "from_pretrained",
    "fully_shard",
    "layer_major",
    "load_adapter",
    "load_safetensors",
    "lora",
    "paged",
    "register_fsdp_forward_method",
    "save_adapter",
    "save_pretrained",
    "save_safetensors",
    "set_adapter",
    "share_comm_ctx",
]

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from odc.errors import (
        AbsentParameterError,
        BudgetError,
        ConfigError,
        OdcError,
        PagedGradientError,
        PageIOError,
    )
    from odc.fsdp.activations import checkpoint_layers
    from odc.fsdp.chunked_loss import chunked_cross_entropy
    from odc.fsdp.fully_shard import (
        FSDPModule,
        FullyShardedDataParallel,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from odc.fsdp.interop import load_safetensors, save_safetensors
    from odc.fsdp.layer_major import layer_major
    from odc.fsdp.lora import lora, set_adapter
    from odc.fsdp.lora_files import load_adapter, save_adapter
    from odc.fsdp.paged import paged
    from odc.fsdp.paged_module import PagedModule
    from odc.train.pretrained import describe_model, from_pretrained, save_pretrained


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'odc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
