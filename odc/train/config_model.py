"""Sections of `config.yaml` about what is trained: the model, its adapter, the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from odc.train import config_checks as checks
from odc.train.config_section import Section, setting


@dataclass(kw_only=True)
class ModelConfig(Section):
    """Shape of a decoder-only transformer; `num_experts: null` makes it dense."""

    heading: ClassVar[str] = "model"

    path: str | None = setting(
        None,
        checks.optional(checks.text()),
        "folder of a Hugging Face model, which says all else; null: a model of these keys",
    )
    hidden_size: int = setting(256, checks.whole(2), "width of the residual stream")
    num_layers: int = setting(4, checks.whole(1), "decoder layers")
    num_heads: int = setting(4, checks.whole(1), "query heads of a layer")
    num_kv_heads: int | None = setting(
        None, checks.optional(checks.whole(1)), "key and value heads; null: as many as query heads"
    )
    mlp: str = setting("swiglu", checks.choice("swiglu", "gelu"), "kind of the feed-forward part")
    mlp_size: int | None = setting(
        None,
        checks.optional(checks.whole(1), off="auto"),
        "inner width of a dense MLP; auto: 8/3 of hidden_size, 4 for gelu",
    )
    num_experts: int | None = setting(
        None, checks.optional(checks.whole(1)), "experts of a layer; null: a dense model"
    )
    top_k: int = setting(2, checks.whole(1), "experts that a token uses")
    expert_size: int | None = setting(
        None,
        checks.optional(checks.whole(1), off="auto"),
        "inner width of an expert; auto: that of a dense MLP",
    )
    normalize_gates: bool = setting(True, checks.flag(), "gates of the chosen experts sum to 1")
    balance_coef: float = setting(
        0.01, checks.number(0), "weight of the loss that spreads tokens over experts"
    )
    router_z_coef: float = setting(
        0.0, checks.number(0), "weight of the loss that keeps router logits small"
    )
    tie_embeddings: bool = setting(False, checks.flag(), "the output head is the token embedding")
    norm_eps: float = setting(1e-5, checks.number(0, open_below=True), "epsilon of RMSNorm")
    rope_theta: float = setting(10000.0, checks.number(1), "base of the rotary embeddings")
    init_std: float = setting(
        0.02, checks.number(0, open_below=True), "deviation of the initial weights"
    )

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads where not given."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of a dense MLP; 8/3 or 4 times the hidden size where not given."""
        return self._auto_width if self.mlp_size is None else self.mlp_size

    @property
    def expert_width(self) -> int:
        """Inner width of one expert; that of a dense MLP where not given."""
        return self.mlp_width if self.expert_size is None else self.expert_size

    @property
    def _auto_width(self) -> int:
        if self.mlp == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // 3 // 32) * 32

    def problems(self) -> list[str]:
        """Returns what does not fit together in this section."""
        if self.path is not None:
            return self._path_problems()
        found = []
        if self.hidden_size % self.num_heads or self.head_size % 2:
            found.append(
                f"model.hidden_size: got {self.hidden_size} with model.num_heads {self.num_heads}; "
                "allowed: an even multiple of the heads (rotary embeddings turn pairs)"
            )
        if self.num_heads % self.kv_heads:
            found.append(
                f"model.num_kv_heads: got {self.kv_heads}; "
                f"allowed: a divisor of model.num_heads {self.num_heads}"
            )
        if self.num_experts is not None and self.top_k > self.num_experts:
            found.append(
                f"model.top_k: got {self.top_k}; "
                f"allowed: at most model.num_experts {self.num_experts}"
            )
        return found

    def is_inactive(self, name: str) -> bool:
        """Returns whether a key is without effect: a folder says all that the others would."""
        return self.path is not None and name != "path"

    def _path_problems(self) -> list[str]:
        changed = [
            f"model.{name}"
            for name, field in self.fields().items()
            if name != "path" and getattr(self, name) != field.default
        ]
        if not changed:
            return []
        return [
            f"{', '.join(changed)}: set beside model.path {self.path}, whose config.json says what "
            "the model is; leave them out, or leave out model.path"
        ]


@dataclass(kw_only=True)
class DataConfig(Section):
    """Which text to train on, and how it is cut into tokens."""

    heading: ClassVar[str] = "data"

    corpus: Sequence[str] = setting(
        ("stdlib",),
        checks.one_or_more(checks.text()),
        "files and folders; stdlib: Python's own sources",
    )
    extensions: Sequence[str] = setting(
        (".txt", ".md", ".rst", ".py"),
        checks.list_of(checks.text()),
        "of the files to take from folders",
    )
    max_bytes: int | None = setting(
        None, checks.optional(checks.size(minimum=1)), "text read at most; null: all"
    )
    eval_fraction: float = setting(
        0.05, checks.number(0, 0.5, open_below=True), "share of the text held out for evaluation"
    )
    vocab_size: int = setting(4096, checks.whole(258, 1 << 20), "tokens of the vocabulary")
    cache_dir: str | None = setting(
        None, checks.optional(checks.text()), "where tokens are kept; null: the cache of the user"
    )


@dataclass(kw_only=True)
class AdapterConfig(Section):
    """Train small matrices beside the model's frozen weights instead of the weights."""

    heading: ClassVar[str] = "adapter"

    kind: str = setting("none", checks.choice("none", "lora"), "none trains the whole model")
    rank: int = setting(8, checks.whole(1), "of the two matrices beside a layer")
    alpha: float = setting(
        16.0, checks.number(0, open_below=True), "their product is scaled by alpha / rank"
    )
    dropout: float = setting(
        0.0, checks.number(0, 1, open_above=True), "share of a layer's inputs left out in training"
    )
    targets: Sequence[str] = setting(
        ("q_proj", "v_proj"),
        checks.one_or_more(checks.text()),
        "names of linear layers, or a pattern; all-linear: all in lists of layers",
    )
    load: str | None = setting(
        None, checks.optional(checks.text()), "folder of an adapter (peft's format) to begin with"
    )
    base: str | None = setting(
        None,
        checks.optional(checks.text()),
        "run or checkpoint whose weights are the base; null: as model says",
    )

    def resolve(self) -> None:
        """An adapter that is loaded says what it is, where nobody said otherwise."""
        file = Path(self.load or "") / "adapter_config.json"
        if self.kind == "none" or self.load is None or not file.is_file():
            return
        from odc.fsdp.lora_files import read_config

        found = read_config(file.parent)
        targets = (found.targets,) if isinstance(found.targets, str) else found.targets
        self.derive("rank", found.rank)
        self.derive("alpha", found.alpha)
        self.derive("dropout", found.dropout)
        self.derive("targets", targets)

    def problems(self) -> list[str]:
        """Returns what does not fit together in this section."""
        if self.kind != "none":
            return []
        return [
            f"adapter.{key}: got {getattr(self, key)!r} with adapter.kind none; set adapter.kind "
            "lora, or leave it out"
            for key in ("load", "base")
            if getattr(self, key) is not None
        ]
