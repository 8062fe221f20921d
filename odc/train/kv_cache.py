"""Keys and values of the positions a model has already seen, kept for generation."""

import torch
from torch import Tensor

from odc.train.config_model import ModelConfig


class LayerCache:
    """Keys and values of one layer, (B, H, capacity, d), filled from the left."""

    def __init__(self, shape: tuple[int, int, int, int], like: Tensor) -> None:
        self._keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._values = torch.empty_like(self._keys)
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds (B, H, T, d) and returns everything cached so far."""
        end = self.length + keys.size(2)
        if end > self._keys.size(2):
            raise RuntimeError(
                f"the cache holds {self._keys.size(2)} positions, got {end}; "
                "make it with a larger capacity"
            )
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of all layers.

    Args:
        config: Shape of the model.
        batch_size: Number of sequences that are generated together.
        capacity: Largest number of positions, prompt included.
        like: A tensor of the dtype and device to use.
    """

    def __init__(
        self, config: ModelConfig, *, batch_size: int, capacity: int, like: Tensor
    ) -> None:
        shape = (batch_size, config.kv_heads, capacity, config.head_size)
        self.layers = [LayerCache(shape, like) for _ in range(config.num_layers)]

    @property
    def length(self) -> int:
        """Positions that every layer has seen."""
        return self.layers[-1].length
