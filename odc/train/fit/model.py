"""What a model is made of, from its shapes alone: units that are paged together, and their work.

    model = model_of_config(config.model, vocab_size)        # the own Transformer
    model = model_of_folder(Path("Meta-Llama-3-8B"))         # config.json is enough
    model = model_of_shapes(Path("llama.csv.gz"), hf_config)

Units are those of `odc.fsdp.wrap`: every decoder layer, every expert inside one, the embedding, the
head, and what is left. Fused experts (one parameter of (E, a, b)) are split: an expert is a unit.
Nothing is allocated and no weight is read.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from odc.errors import ConfigError
from odc.train.config_model import ModelConfig

ALIGNMENT = 64  # of every parameter in its range, in bytes (odc/fsdp/group.py)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_FUSED = re.compile(r"\bexperts\.[a-z_]+$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed|embed_tokens|wte)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:head|lm_head)\.weight$")
# Matrices that multiply every token of a layer, or of an expert; a router is one, a norm is none.
Shape = tuple[int, ...]


class Role(StrEnum):
    """What a unit is in its model."""

    EMBEDDING = "embedding"
    LAYER = "layer"  # without its experts
    EXPERT = "expert"
    HEAD = "head"
    ROOT = "root"  # what is left: the last norm


@dataclass(frozen=True)
class Unit:
    """Parameters that come and go together.

    Attributes:
        name: Its module.
        role: What it is.
        parameters: Shape of each, by name.
        layer, expert: Its place, -1 where there is none.
        count: Experts that stand together in it (see `ModelShape.bundled`).
    """

    name: str
    role: Role
    parameters: Mapping[str, Shape]
    layer: int = -1
    expert: int = -1
    count: int = 1

    @cached_property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return self.count * sum(math.prod(shape) for shape in self.parameters.values())

    @cached_property
    def largest_numel(self) -> int:
        """Elements of its largest parameter."""
        return max((math.prod(shape) for shape in self.parameters.values()), default=0)

    def num_bytes(self, item_bytes: float) -> int:
        """Bytes of its parameters, each at a multiple of 64."""
        each = (math.prod(shape) * item_bytes for shape in self.parameters.values())
        return self.count * sum(-(-math.ceil(b) // ALIGNMENT) * ALIGNMENT for b in each)

    @property
    def matmul_numel(self) -> int:
        """Elements that multiply each token: two floating-point operations each, forward."""
        if self.role == Role.EMBEDDING:
            return 0
        return self.count * sum(
            math.prod(shape) for shape in self.parameters.values() if len(shape) > 1
        )


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in numbers.

    Attributes:
        name: For people.
        hidden, num_layers, heads, kv_heads, head_size, vocab: As usual.
        mlp_width: Inner width of a dense MLP (0: none); `gated` with three matrices, else two.
        num_experts, top_k, expert_width: Of a layer; 0 experts in a dense model.
        tied: The head is the embedding.
        units: In the order in which the runtime numbers them.
        config: Of the own Transformer; `None` for another model.
        folder: Where its weights and `config.json` are; `None` where nowhere.
    """

    name: str
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    mlp_width: int
    num_experts: int
    top_k: int
    expert_width: int
    gated: bool
    tied: bool
    units: tuple[Unit, ...] = field(repr=False, default=())
    config: ModelConfig | None = field(repr=False, default=None)
    folder: str | None = None

    @cached_property
    def numel(self) -> int:
        """All parameters."""
        return sum(unit.numel for unit in self.units)

    @cached_property
    def largest(self) -> Unit:
        """The unit with most parameters."""
        return max(self.units, key=lambda unit: unit.numel)

    def of(self, role: Role) -> list[Unit]:
        """The units of a role."""
        return [unit for unit in self.units if unit.role == role]

    @property
    def active_numel(self) -> int:
        """Parameters that work on a token: of the experts, `top_k`."""
        experts = sum(unit.numel for unit in self.of(Role.EXPERT))
        share = self.top_k / self.num_experts if self.num_experts else 0.0
        return round(self.numel - experts * (1.0 - share))

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a forward for each token."""
        matmul = sum(u.matmul_numel for u in self.units if u.role != Role.EXPERT)
        experts = sum(u.matmul_numel for u in self.of(Role.EXPERT))
        if self.num_experts:
            matmul += round(experts * self.top_k / self.num_experts)
        if self.tied:
            matmul += self.vocab * self.hidden
        return 2.0 * matmul + self.num_layers * attention_flops(self, seq_len)

    def used_experts(self, tokens: int) -> float:
        """Experts of a layer that get a token, where the router spreads tokens evenly."""
        if not self.num_experts:
            return 0.0
        miss = max(1.0 - self.top_k / self.num_experts, 0.0) ** tokens
        return self.num_experts * (1.0 - miss)

    def bundled(self, most: int) -> "ModelShape":
        """The same with at most `most` experts of a layer apart: neighbours stand together.

        A simulated step of thousands of experts takes minutes; where a pass uses nearly all of
        them, moving several at once changes little.
        """
        if self.num_experts <= most:
            return self
        together = -(-self.num_experts // most)
        made: list[Unit] = []
        for unit in self.units:
            if unit.role != Role.EXPERT:
                made.append(unit)
            elif unit.expert % together == 0:
                count = min(together, self.num_experts - unit.expert)
                made.append(replace(unit, count=count, expert=unit.expert // together))
        return replace(
            self, num_experts=-(-self.num_experts // together), top_k=self.top_k, units=tuple(made)
        )


def attention_flops(model: ModelShape, seq_len: int) -> float:
    """Of the scores and of what they weigh, per token of one layer's forward; causal: a half."""
    return 2.0 * model.heads * model.head_size * seq_len


def units_of(shapes: Mapping[str, Shape]) -> tuple[Unit, ...]:
    """Cuts a parameter list into units, in the runtime's order: the root last.

    Raises:
        ConfigError: There are no decoder layers in it.
    """
    found: dict[str, Unit] = {}
    parts: dict[str, dict[str, Shape]] = {}
    for name, shape in _split_fused(shapes):
        unit = _unit_of(name)
        found.setdefault(unit.name, unit)
        parts.setdefault(unit.name, {})[name] = shape
    units = [replace(unit, parameters=parts[name]) for name, unit in found.items()]
    if not any(unit.role == Role.LAYER for unit in units):
        raise ConfigError(
            "shapes: no parameter's name says 'layers.N.', so that there are no decoder layers; "
            "expected names as in model.layers.0.self_attn.q_proj.weight"
        )
    order = {Role.EMBEDDING: 0, Role.LAYER: 1, Role.EXPERT: 1, Role.HEAD: 2, Role.ROOT: 3}
    return tuple(sorted(units, key=lambda u: (order[u.role], u.layer, u.expert)))


def _split_fused(shapes: Mapping[str, Shape]) -> Iterable[tuple[str, Shape]]:
    """A fused parameter of all experts as one of each; dimension 0 is the expert."""
    for name, shape in shapes.items():
        if _FUSED.search(name) and len(shape) >= 2:
            head, _, last = name.rpartition(".")
            yield from ((f"{head}.{expert}.{last}", shape[1:]) for expert in range(shape[0]))
        else:
            yield name, shape


def _unit_of(name: str) -> Unit:
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer and expert:
        return Unit(name[: expert.end() - 1], Role.EXPERT, {}, int(layer[1]), int(expert[1]))
    if layer:
        return Unit(name[: layer.end() - 1], Role.LAYER, {}, int(layer[1]))
    if _EMBEDDING.search(name):
        return Unit(name.removesuffix(".weight"), Role.EMBEDDING, {})
    if _HEAD.search(name):
        return Unit(name.removesuffix(".weight"), Role.HEAD, {})
    return Unit("(root)", Role.ROOT, {})


def model_of_config(config: ModelConfig, vocab_size: int) -> ModelShape:
    """The own Transformer, as section `model` describes it."""
    from odc.train.models import model_shapes

    shapes = {name: tuple(shape) for name, shape in model_shapes(config, vocab_size).items()}
    experts = config.num_experts or 0
    made = ModelShape(
        name=f"Transformer {config.hidden_size} x {config.num_layers}"
        + (f", {experts} experts" if experts else ""),
        hidden=config.hidden_size,
        num_layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        vocab=vocab_size,
        mlp_width=0 if experts else config.mlp_width,
        num_experts=experts,
        top_k=config.top_k if experts else 0,
        expert_width=config.expert_width if experts else 0,
        gated=config.mlp == "swiglu",
        tied=config.tie_embeddings,
        config=config,
    )
    return replace(made, units=units_of(shapes))
