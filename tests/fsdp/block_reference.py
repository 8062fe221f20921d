"""Blocks of 8 and 4 bits as they are defined, by parameter: no pages, images or packing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

LEVELS = {"int8": 127, "int4": 7}
BITS = {"int8": 8, "int4": 4}
LEAST = np.float32(2.0**-119)


def steps_of(parameter: Tensor, name: str) -> np.ndarray:
    """(num_blocks,) the step of each block of 64 values."""
    wide = _blocks(parameter)
    most = torch.from_numpy(np.abs(wide).max(axis=1)).to(torch.bfloat16)
    limit = 65280.0 if parameter.dtype == torch.float16 else torch.finfo(torch.bfloat16).max
    absmax = most.to(torch.float32).numpy().clip(LEAST, np.float32(limit))
    return (absmax / np.float32(LEVELS[name])).astype(np.float32)


def rounded(parameter: Tensor, name: str) -> Tensor:
    """The values that a frozen parameter has once it was stored as ``name``."""
    if parameter.dim() < 2:
        return parameter.detach().clone()
    steps = steps_of(parameter, name)[:, None]
    integers = np.rint(_blocks(parameter) / steps).clip(-LEVELS[name], LEVELS[name])
    values = torch.from_numpy((integers.astype(np.float32) * steps).reshape(-1))
    return values[: parameter.numel()].to(parameter.dtype).view(parameter.shape)


def round_frozen(model: nn.Module, name: str) -> nn.Module:
    """Give the frozen parameters of a plain model the values of a paged one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad and name != "native":
                parameter.copy_(rounded(parameter, name))
    return model


def _blocks(parameter: Tensor) -> np.ndarray:
    flat = parameter.detach().to(torch.float32).reshape(-1).numpy()
    padded = np.zeros(-(-len(flat) // 64) * 64, np.float32)
    padded[: len(flat)] = flat
    return padded.reshape(-1, 64)
