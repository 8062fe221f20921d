"""The settings that decide what fits and how fast it is, and the keys that they stand for.

A `Choice` is made from a configuration (`choice_of`), or by the search; `overrides` gives it back
as keys of `config.yaml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from odc.sizes import exact_size
from odc.train.config import Config

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a run is told; names and values are those of `config.yaml`.

    Attributes:
        micro_batch, accumulate, seq_len: Section `train`.
        dtype: Of compute; masters and moments are float32.
        where, update: Of the optimizer.
        mode, loss_chunk: Of activations.
        order: Of micro-batches and layers.
        home, host_mem: Where pages live.
        frozen_format: Of frozen parameters at home.
        rank: Of LoRA adapters; `None` trains every parameter.
        targets: Matrices that get an adapter, by the end of their names.
        total_mem, page_budget, page_size: Bytes; `None`: no limit.
    """

    seq_len: int
    micro_batch: int = 1
    accumulate: int = 1
    dtype: str = "float32"
    where: str = "device"
    update: str = "backward"
    mode: str = "keep"
    loss_chunk: int | None = None
    order: str = "micro_major"
    home: str = "host"
    host_mem: int | None = None
    frozen_format: str = "native"
    rank: int | None = None
    targets: tuple[str, ...] = LORA_TARGETS
    total_mem: int | None = None
    page_budget: int | None = None
    page_size: int = 256 << 20

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Of an optimizer step."""
        return self.tokens * self.accumulate

    @property
    def item_bytes(self) -> int:
        """Of an element that computes."""
        return ITEM_BYTES[self.dtype]

    @property
    def recomputes(self) -> bool:
        """Whether layers run again in backward."""
        return self.mode == "checkpoint" or self.order == "layer_major"

    @property
    def unlimited(self) -> bool:
        """Whether everything stays resident."""
        return self.total_mem is None and self.page_budget is None


def choice_of(config: Config) -> Choice:
    """What a configuration says.

    Places of updates are measured where `optimizer.where` is auto: they count as the device.
    """
    train, memory, optimizer = config.train, config.memory, config.optimizer
    lora = config.adapter.kind == "lora"
    return Choice(
        seq_len=train.seq_len,
        micro_batch=train.micro_batch,
        accumulate=train.accumulate,
        dtype=train.dtype,
        where="home" if optimizer.where == "home" else "device",
        update=optimizer.update or "step",
        mode=config.activations.mode,
        loss_chunk=config.activations.loss_chunk,
        order=config.accumulation.order,
        home=memory.home,
        host_mem=memory.host_mem,
        frozen_format=memory.frozen_format,
        rank=config.adapter.rank if lora else None,
        targets=tuple(config.adapter.targets) if lora else LORA_TARGETS,
        total_mem=memory.total_mem,
        page_budget=memory.page_budget if isinstance(memory.page_budget, int) else None,
        page_size=memory.page_size,
    )


def overrides(choice: Choice) -> dict[str, Any]:
    """The keys of `config.yaml` that make this choice, in sections' order."""
    found: dict[str, Any] = {
        "train.seq_len": choice.seq_len,
        "train.micro_batch": choice.micro_batch,
        "train.accumulate": choice.accumulate,
        "train.dtype": choice.dtype,
        "optimizer.where": choice.where,
        "optimizer.update": choice.update,
        "activations.mode": choice.mode,
        "activations.loss_chunk": choice.loss_chunk,
        "accumulation.order": choice.order,
        "memory.total_mem": _size(choice.total_mem),
        "memory.page_budget": None if choice.page_budget is None else _size(choice.page_budget),
        "memory.page_size": exact_size(choice.page_size),
        "memory.home": choice.home,
        "memory.frozen_format": choice.frozen_format,
    }
    if choice.home == "host+disk" and choice.host_mem is not None:
        found["memory.host_mem"] = exact_size(choice.host_mem)
    if choice.rank is not None:
        found |= {
            "adapter.kind": "lora",
            "adapter.rank": choice.rank,
            "adapter.alpha": 2.0 * choice.rank,
            "adapter.targets": list(choice.targets),
        }
    return found


def _size(num_bytes: int | None) -> int | str:
    return "unlimited" if num_bytes is None else exact_size(num_bytes)


def as_tree(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dotted keys as sections."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree
