"""What a model's tensors are called in the files of its authors, and which elements lie where.

Transformers stores an expert's three matrices apart and holds those of all experts fused in one
tensor; with `ExpertList` each expert has a tensor of its own. In every case a file's tensor and a
model's share one contiguous run of elements, so all forms are the same reads and writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from odc.fsdp.expert_list import PARAMETERS, ExpertList

# What experts are called on disk: (gate, up, down), and what the block around them is called.
Scheme = tuple[str, str, str, str]
APART: tuple[Scheme, ...] = (
    ("gate_proj", "up_proj", "down_proj", "mlp"),
    ("w1", "w3", "w2", "block_sparse_moe"),
)
APART_OF = {  # by `config.model_type`; for others the file is as transformers' model is
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "ernie4_5_moe",
            "flex_olmo",
            "glm4_moe",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
        ),
        APART[0],
    ),
    "mixtral": APART[1],
    "minimax": APART[1],
}
_OWN_EXPERT = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(PARAMETERS)})")


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that a tensor of a file and one of the model have in common.

    Attributes:
        name, shape: of the file's tensor.
        numel: how many elements.
        low: the first one in the model's tensor, flat.
        begin: the first one in the file's.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    low: int = 0
    begin: int = 0

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], low: int = 0) -> Piece:
        """All of a file's tensor."""
        return Piece(name, shape, math.prod(shape), low)


def forms(name: str, shape: tuple[int, ...], num_experts: int) -> list[list[Piece]]:
    """The ways in which a file may hold a tensor of the model.

    Args:
        name, shape: of the model's tensor.
        num_experts: of the layer, where it belongs to one expert alone; else 0.
    """
    apart = [split_experts(name, shape, scheme, num_experts) for scheme in APART]
    return [own_form(name, shape, num_experts), *filter(None, apart), *_renamed(name, shape)]


def form_of(name: str, shape: tuple[int, ...], num_experts: int, model_type: str) -> list[Piece]:
    """The way in which the authors of a kind of model hold one of its tensors; as in `forms`."""
    scheme = APART_OF.get(model_type)
    apart = split_experts(name, shape, scheme, num_experts) if scheme else []
    if not apart and scheme and scheme[-1] != "mlp":
        apart = next(iter(_renamed(name, shape)), [])
    return apart or own_form(name, shape, num_experts)


def own_form(name: str, shape: tuple[int, ...], num_experts: int) -> list[Piece]:
    """As transformers' model holds it: one expert's tensor is a part of a fused one."""
    match = _OWN_EXPERT.fullmatch(name) if num_experts else None
    if match is None:
        return [Piece.whole(name, shape)]
    numel = math.prod(shape)
    begin = int(match[2]) * numel
    return [Piece(f"{match[1]}.{match[3]}", (num_experts, *shape), numel, 0, begin)]


def split_experts(
    name: str, shape: tuple[int, ...], scheme: Scheme, num_experts: int = 0
) -> list[Piece]:
    """The matrices of a `gate_up_proj` or `down_proj`, of one expert or of all; else nothing."""
    match = _OWN_EXPERT.fullmatch(name) if num_experts else None
    stem, _, last = name.rpartition(".")
    if match is not None:
        stem, last = match[1], match[3]
    *gate_up, down, block = scheme
    names = {"gate_up_proj": gate_up, "down_proj": [down]}.get(last, [])
    if not names or not stem.endswith(".experts") or len(shape) != (3 if match is None else 2):
        return []
    rows, rest = divmod(shape[-2], len(names))
    if rest:
        return []
    stem = re.sub(r"\.mlp\.experts$", f".{block}.experts", stem)
    numel = rows * shape[-1]
    experts = range(shape[0]) if match is None else [int(match[2])]
    return [
        Piece.whole(f"{stem}.{expert}.{part}.weight", (rows, shape[-1]), number * numel)
        for number, (expert, part) in enumerate(
            (expert, part) for expert in experts for part in names
        )
    ]


def _renamed(name: str, shape: tuple[int, ...]) -> list[list[Piece]]:
    """What lies beside the experts in a block that the authors call otherwise: its router."""
    if ".mlp." not in name or ".experts." in name:
        return []
    return [[Piece.whole(name.replace(".mlp.", f".{APART[1][-1]}."), shape)]]


# -- state dicts ---------------------------------------------------------------------------------


def num_experts_of(model: nn.Module) -> dict[int, int]:
    """By id of each parameter that belongs to one expert alone: the experts of its layer."""
    lists = [module for module in model.modules() if isinstance(module, ExpertList)]
    return {id(tensor): len(experts) for experts in lists for tensor in experts.parameters()}


def authors_pieces(model: nn.Module, state: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """What a model's authors call each tensor of its state dict, made with `keep_vars=True`.

    Nothing is called otherwise where no expert is a module of its own.
    """
    experts = num_experts_of(model)
    model_type = getattr(getattr(model, "config", None), "model_type", "") if experts else ""
    return {
        name: form_of(name, tuple(tensor.shape), experts.get(id(tensor), 0), model_type)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }


def put(state: dict[str, Any], pieces: list[Piece], tensor: Tensor) -> None:
    """Enters a tensor of the model into a state dict by its authors' names."""
    for piece in pieces:
        if piece.shape == tuple(tensor.shape):
            state[piece.name] = tensor
            continue
        part = tensor.reshape(-1)[piece.low : piece.low + piece.numel]
        if piece.numel == math.prod(piece.shape):
            state[piece.name] = part.view(piece.shape)
            continue
        if piece.name not in state:
            state[piece.name] = tensor.new_empty(piece.shape)
        state[piece.name].view(-1)[piece.begin : piece.begin + piece.numel] = part


def take(state: Mapping[str, Any], pieces: list[Piece], target: Tensor) -> None:
    """Copies a tensor of the model out of a state dict; what it lacks stays.

    Raises:
        RuntimeError: an entry has another shape.
    """
    for piece in pieces:
        value = state.get(piece.name)
        if value is None:
            continue
        if tuple(value.shape) != piece.shape:
            raise RuntimeError(
                f"state_dict: {piece.name} has shape {tuple(value.shape)}, the model's is "
                f"{piece.shape}"
            )
        if piece.shape == tuple(target.shape):
            target.copy_(value)
            continue
        span = value.reshape(-1)[piece.begin : piece.begin + piece.numel]
        target.view(-1)[piece.low : piece.low + piece.numel] = span
