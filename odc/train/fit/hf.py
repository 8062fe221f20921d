"""Models of the Hugging Face hub from their `config.json` alone: no transformers, no weights.

The parameter list of Llama, Qwen3, Qwen3-MoE, Mixtral and gpt-oss follows from the configuration;
of any other decoder a list of shapes can be given (a CSV of name, shape, dtype). `config.json` then
says what shapes do not: heads, and how many experts a token uses.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc.errors import ConfigError
from odc.sharding.groups import read_shapes
from odc.train.fit.model import ModelShape, Shape, units_of

_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss")


def model_of_folder(folder: Path) -> ModelShape:
    """A model from its folder; only `config.json` is read.

    Raises:
        ConfigError: It is missing, or no decoder whose shapes are known.
    """
    return model_of_hf(folder / "config.json", folder=folder)


def model_of_hf(
    config_json: Path, shapes: Path | None = None, folder: Path | None = None
) -> ModelShape:
    """A model from a `config.json` and, for those that are not known here, a list of shapes.

    Args:
        config_json: Configuration of a decoder-only model.
        shapes: CSV or `.csv.gz` with name, shape, dtype.
        folder: Where it lies, if its weights do.

    Raises:
        ConfigError: A file cannot be read, a key is missing, or the two disagree.
    """
    facts = _Facts.read(config_json)
    if folder is None and config_json.name == "config.json":
        folder = config_json.parent
    kind = facts.kind
    if shapes is None and kind not in _KNOWN:
        raise ConfigError(
            f"{config_json}: model_type {kind!r} is not known; allowed: {', '.join(_KNOWN)}, or "
            "any other with a list of its parameters (--shapes FILE)"
        )
    if shapes is None:
        listed = dict(_parameters(facts))
    else:
        listed = {tensor.fqn: tensor.shape for tensor in read_shapes(shapes)}
    experts = facts.number("num_experts", "num_local_experts", default=0)
    width = facts.number("intermediate_size")
    made = ModelShape(
        name=facts.name,
        hidden=facts.number("hidden_size"),
        num_layers=facts.number("num_hidden_layers"),
        heads=facts.number("num_attention_heads"),
        kv_heads=facts.kv_heads,
        head_size=facts.head_size,
        vocab=facts.number("vocab_size"),
        mlp_width=0 if experts else width,
        num_experts=experts,
        top_k=facts.number("num_experts_per_tok", "experts_per_token") if experts else 0,
        expert_width=facts.number("moe_intermediate_size", default=width) if experts else 0,
        gated=True,
        tied=facts.tied,
        units=units_of(listed),
        folder=None if folder is None else str(folder),
    )
    _check(made, shapes or config_json)
    return made


def _check(model: ModelShape, source: Path) -> None:
    layers = {unit.layer for unit in model.units if unit.layer >= 0}
    experts = {unit.expert for unit in model.units if unit.expert >= 0}
    for what, found, expected in (
        ("num_hidden_layers", len(layers), model.num_layers),
        ("experts of a layer", len(experts), model.num_experts),
    ):
        if found != expected:
            raise ConfigError(
                f"{source}: its parameters have {found} for {what}, config.json says {expected}; "
                "the two must be of one model"
            )


@dataclass(frozen=True)
class _Facts:
    """A `config.json`."""

    path: Path
    values: Mapping[str, Any]

    @staticmethod
    def read(path: Path) -> "_Facts":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); expected the config.json of a model"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected an object, got {type(values).__name__}")
        return _Facts(path, values.get("text_config", values))

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise ConfigError(f"{self.path}: {' or '.join(names)} is missing or no whole number")
        return default

    @property
    def kind(self) -> str:
        """`model_type`, or what `architectures` tells."""
        named = self.values.get("model_type")
        if isinstance(named, str):
            return named
        classes = self.values.get("architectures") or ["unknown"]
        plain = str(classes[0]).removesuffix("ForCausalLM").lower()
        return {"qwen3moe": "qwen3_moe", "gptoss": "gpt_oss"}.get(plain, plain)

    @property
    def name(self) -> str:
        given = self.values.get("_name_or_path")
        own = self.path.parent.name if self.path.name == "config.json" else self.path.stem
        return str(given or own or self.kind)

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.number("num_key_value_heads", default=self.heads)

    @property
    def head_size(self) -> int:
        return self.number("head_dim", default=self.number("hidden_size") // self.heads)

    @property
    def tied(self) -> bool:
        return bool(self.values.get("tie_word_embeddings", False))


def _parameters(facts: _Facts) -> Iterator[tuple[str, Shape]]:
    hidden, vocab = facts.number("hidden_size"), facts.number("vocab_size")
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(facts.number("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield from ((f"{prefix}.{name}", shape) for name, shape in _layer(facts, hidden))
    yield "model.norm.weight", (hidden,)
    if not facts.tied:
        yield "lm_head.weight", (vocab, hidden)


def _layer(facts: _Facts, hidden: int) -> Iterator[tuple[str, Shape]]:
    kind, size = facts.kind, facts.head_size
    rows, kv_rows = facts.heads * size, facts.kv_heads * size
    biased = kind == "gpt_oss" or bool(facts.values.get("attention_bias", False))
    if kind == "gpt_oss":
        yield "self_attn.sinks", (facts.heads,)
    for name, shape in (
        ("q_proj", (rows, hidden)),
        ("k_proj", (kv_rows, hidden)),
        ("v_proj", (kv_rows, hidden)),
        ("o_proj", (hidden, rows)),
    ):
        yield f"self_attn.{name}.weight", shape
        if biased or (kind == "qwen2" and name != "o_proj"):
            yield f"self_attn.{name}.bias", shape[:1]
    if kind in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (size,)
        yield "self_attn.k_norm.weight", (size,)
    yield from _mlp(facts, hidden)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _mlp(facts: _Facts, hidden: int) -> Iterator[tuple[str, Shape]]:
    width = facts.number("intermediate_size")
    if facts.kind == "gpt_oss":
        experts = facts.number("num_local_experts")
        yield "mlp.router.weight", (experts, hidden)
        yield "mlp.router.bias", (experts,)
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * width)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * width)
        yield "mlp.experts.down_proj", (experts, width, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)
    elif facts.kind in ("qwen3_moe", "mixtral"):
        experts = facts.number("num_experts", "num_local_experts")
        width = facts.number("moe_intermediate_size", default=width)
        yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, width)
        yield "mlp.gate.weight", (experts, hidden)
    else:
        yield "mlp.gate_proj.weight", (width, hidden)
        yield "mlp.up_proj.weight", (width, hidden)
        yield "mlp.down_proj.weight", (hidden, width)
