"""The sections of `config.yaml`: every key, its default, and what it may be.

A key that has no effect yet is declared `inactive`: it is accepted, says so in `Config.notices()`,
and is marked in the resolved file. What must hold between keys stands in each section's `problems`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from odc.train import config_checks as checks
from odc.train.config_section import Section, setting

FRAME_BYTES = 2 * 1024 * 1024


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
class TrainConfig(Section):
    """Length and shape of the run."""

    heading: ClassVar[str] = "train"

    task: str = setting(
        "pretrain", checks.choice("pretrain", later=("sft", "dpo", "grpo")), "what to train for"
    )
    steps: int = setting(1000, checks.whole(1), "optimizer steps of the whole run")
    seed: int = setting(0, checks.whole(0, (1 << 63) - 1), "of weights and batches")
    seq_len: int = setting(256, checks.whole(1), "tokens of a sequence")
    micro_batch: int = setting(8, checks.whole(1), "sequences of a forward and backward")
    accumulate: int = setting(1, checks.whole(1), "micro-batches of a step")
    eval_every: int | None = setting(
        None, checks.optional(checks.whole(1)), "steps between evaluations; null: none"
    )
    eval_batches: int = setting(8, checks.whole(1), "batches of an evaluation")
    log_every: int = setting(10, checks.whole(1), "steps between printed lines")
    threads: int | None = setting(
        None,
        checks.optional(checks.whole(1), off="auto"),
        "compute threads; auto: all cores but one",
    )
    dtype: str = setting(
        "float32",
        checks.choice("float32", "bfloat16"),
        "of weights and gradients; bfloat16: with masters and moments in float32 at home",
    )

    @property
    def num_threads(self) -> int:
        """Compute threads: `auto` leaves one core to the page transfers."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) - 1)


@dataclass(kw_only=True)
class AccumulationConfig(Section):
    """The order in which the micro-batches of a step pass the layers."""

    heading: ClassVar[str] = "accumulation"

    order: str = setting(
        "micro_major",
        checks.choice("micro_major", "layer_major"),
        "layer_major: all pass a layer while its pages are there; layers are recomputed in "
        "backward",
    )


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its schedule, and when it runs."""

    heading: ClassVar[str] = "optimizer"

    name: str = setting("adamw", checks.choice("adamw"), "which optimizer")
    lr: float = setting(3e-4, checks.number(0, open_below=True), "learning rate after the warmup")
    betas: Sequence[float] = setting(
        (0.9, 0.95),
        checks.list_of(checks.number(0, 1, open_above=True), length=2),
        "decay of the two moments",
    )
    eps: float = setting(1e-8, checks.number(0, open_below=True), "epsilon of AdamW")
    weight_decay: float = setting(0.1, checks.number(0), "of matrices; vectors do not decay")
    max_grad_norm: float | None = setting(
        None,
        checks.optional(checks.number(0, open_below=True)),
        "clip gradients to this global norm; null: no clipping",
    )
    where: str = setting(
        "device",
        checks.choice("device", "home", "auto"),
        "where groups are updated: home moves no moments over the link, auto chooses by rates",
    )
    update: str | None = setting(
        None,
        checks.optional(checks.choice("backward", "step"), off="auto"),
        "when a group is updated; auto: backward, step where gradients are clipped",
    )
    schedule: str = setting(
        "constant", checks.choice("constant", "cosine", "linear"), "of the learning rate"
    )
    warmup_steps: int = setting(0, checks.whole(0), "steps in which the rate rises from 0")
    min_lr_ratio: float = setting(
        0.1, checks.number(0, 1), "where the schedule ends, as a share of lr"
    )

    def resolve(self) -> None:
        """Updates run in backward unless the global gradient norm must be known first."""
        self.derive("update", "backward" if self.max_grad_norm is None else "step")

    def problems(self) -> list[str]:
        """Returns what does not fit together in this section."""
        if self.update == "backward" and self.max_grad_norm is not None:
            return [
                "optimizer.update: got 'backward' with optimizer.max_grad_norm "
                f"{self.max_grad_norm:g}; allowed: step (clipping needs the norm of all gradients, "
                "which is known only after backward; backward would have used them by then)"
            ]
        return []


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


@dataclass(kw_only=True)
class MemoryConfig(Section):
    """What the device may hold, where the rest lives, and who decides."""

    heading: ClassVar[str] = "memory"

    total_mem: int | None = setting(
        None,
        checks.optional(checks.size(minimum=FRAME_BYTES), off="unlimited"),
        "what pages, activations and gradients may take together",
    )
    page_budget: int | None = setting(
        None,
        checks.optional(checks.size(minimum=FRAME_BYTES), also=("unlimited",)),
        "fixes what pages get; null: what total_mem leaves",
    )
    page_size: int = setting(
        256 << 20, checks.size(minimum=FRAME_BYTES, multiple_of=FRAME_BYTES), "largest page"
    )
    home: str = setting(
        "host",
        checks.choice("host", "disk", "host+disk"),
        "where pages live when they are not on the device",
    )
    home_dir: str | None = setting(
        None, checks.optional(checks.text()), "folder of a disk home; null: a temporary one"
    )
    host_mem: int | None = setting(
        None,
        checks.optional(checks.size(minimum=FRAME_BYTES), off="auto"),
        "host memory for pages of home host+disk, the others live on disk; auto: what is free",
    )
    evict_strategy: str = setting(
        "cost_aware",
        checks.choice("lru", "mru", "fifo", "lfu", "gdsf", "cost_aware", "belady", "auto"),
        "which page goes when room is needed",
    )
    prefetch: str = setting(
        "popularity",
        checks.choice(
            "none", "next_k", "replay", "popularity", "markov", "auto", "predictor", "oracle"
        ),
        "how pages are chosen to be loaded ahead",
    )
    predictor: str = setting(
        "none", checks.choice("none", "sklearn", "lstm"), "learned model behind prefetch: predictor"
    )
    predictor_path: str | None = setting(
        None, checks.optional(checks.text()), "folder made by `odc predictor train`"
    )
    oracle_trace: str | None = setting(
        None, checks.optional(checks.text()), "run whose trace is the future for oracle and belady"
    )
    page_prefetch: int | None = setting(
        None,
        checks.optional(checks.whole(0), off="auto"),
        "modules ahead that pages may be loaded; auto: no limit",
    )
    prefetch_window: int | None = setting(
        None,
        checks.optional(checks.whole(0), off="auto"),
        "passes ahead that pages may be loaded; auto: no limit",
    )
    max_items: int | None = setting(
        None,
        checks.optional(checks.whole(1), off="auto"),
        "pages on the device at most; auto: as many as fit",
    )
    frozen_format: str = setting(
        "native",
        checks.choice("native", "int8", "int4"),
        "how matrices that are not trained lie at home",
    )
    link_bandwidth: int | None = setting(
        None, checks.optional(checks.rate()), "emulated speed of the bus each way; null: none"
    )

    def resolve(self) -> None:
        """Naming a predictor means to use it."""
        self.derive("prefetch", "popularity" if self.predictor == "none" else "predictor")

    def problems(self) -> list[str]:
        """Returns what does not fit together in this section."""
        return self._predictor_problems() + self._oracle_problems() + self._size_problems()

    def _predictor_problems(self) -> list[str]:
        if self.predictor == "none":
            found = []
            if self.prefetch == "predictor":
                found.append(
                    "memory.predictor: got 'none' with memory.prefetch predictor; "
                    "allowed: sklearn, lstm"
                )
            if self.predictor_path is not None and self.prefetch != "auto":
                found.append(
                    f"memory.predictor_path: got {self.predictor_path!r} with memory.predictor "
                    "none; name the predictor (sklearn, lstm), set memory.prefetch auto, or leave "
                    "the path out"
                )
            return found
        found = []
        if self.prefetch != "predictor":
            found.append(
                f"memory.prefetch: got {self.prefetch!r} with memory.predictor {self.predictor}; "
                "allowed: predictor (or leave memory.prefetch out)"
            )
        if self.predictor_path is None:
            found.append(
                f"memory.predictor_path: missing with memory.predictor {self.predictor}; "
                "allowed: a folder made by `odc predictor train`"
            )
        return found

    def _oracle_problems(self) -> list[str]:
        readers = [
            f"{key} {value}"
            for key, value, wanted in (
                ("memory.prefetch", self.prefetch, "oracle"),
                ("memory.evict_strategy", self.evict_strategy, "belady"),
            )
            if value == wanted
        ]
        if readers and self.oracle_trace is None:
            return [
                f"memory.oracle_trace: missing with {' and '.join(readers)}; "
                "allowed: a run directory whose trace is the future to follow"
            ]
        if self.oracle_trace is not None and not readers:
            return [
                f"memory.oracle_trace: got {self.oracle_trace!r}, which nothing reads; set "
                "memory.prefetch oracle or memory.evict_strategy belady, or leave it out"
            ]
        return []

    def _size_problems(self) -> list[str]:
        if self.host_mem is not None and self.home != "host+disk":
            return [
                f"memory.host_mem: got {self.host_mem} bytes with memory.home {self.home}; "
                "allowed: auto (only memory.home host+disk divides pages among the two)"
            ]
        if self.total_mem is None or self.page_budget is None:
            return []
        if self.page_budget <= self.total_mem:
            return []
        return [
            f"memory.page_budget: got {self.page_budget} bytes; "
            f"allowed: at most memory.total_mem, {self.total_mem} bytes"
        ]


@dataclass(kw_only=True)
class ActivationsConfig(Section):
    """What is done with what layers save for backward, and with the logits."""

    heading: ClassVar[str] = "activations"

    mode: str = setting(
        "keep",
        checks.choice("keep", "checkpoint", "offload"),
        "keep it, compute it again in backward, or move it home",
    )
    loss_chunk: int | None = setting(
        None,
        checks.optional(checks.whole(1)),
        "tokens whose logits exist at a time; null: all",
    )


@dataclass(kw_only=True)
class ShardingConfig(Section):
    """How groups are divided among ranks; read where there are several."""

    heading: ClassVar[str] = "sharding"

    shard_granularity: str = setting(
        "block", checks.granularity(), "what stays together on one rank"
    )
    dbuffer_size: int | None = setting(
        None,
        checks.optional(checks.size(minimum=FRAME_BYTES, power_of_two=True), off="auto"),
        "of full parameters and unreduced gradients; auto: what hides communication",
    )
    planning_algorithm: str = setting(
        "greedy",
        checks.choice("greedy", "optimal"),
        "how tensors are laid into buffers",
    )
    max_buffers: int | None = setting(
        None,
        checks.optional(checks.whole(1), off="auto"),
        "buffers that a group may be laid into",
    )


@dataclass(kw_only=True)
class CommunicationConfig(Section):
    """Which parameters communicate first, and how much of it may overlap compute."""

    heading: ClassVar[str] = "communication"

    priority_buckets: int | Sequence[Sequence[str]] = setting(
        3,
        checks.either(checks.whole(1), checks.list_of(checks.list_of(checks.pattern()))),
        "parameters that communicate first: a number, or name patterns",
        inactive=True,
    )
    overlap_factor: float = setting(
        0.8, checks.number(0, 1), "share of communication to hide behind compute", inactive=True
    )


@dataclass(kw_only=True)
class ProfilerConfig(Section):
    """What a run records."""

    heading: ClassVar[str] = "profiler"

    trace_interval: int = setting(
        100, checks.whole(1), "every how many steps one is traced in full"
    )
    metrics: Sequence[str] = setting(
        ("comm_vol", "mem_footprint"),
        checks.list_of(checks.choice("comm_vol", "mem_footprint"), may_be_empty=True),
        "what a trace holds beside needs and actions",
    )


@dataclass(kw_only=True)
class CheckpointConfig(Section):
    """When to save, where, and how many to keep."""

    heading: ClassVar[str] = "checkpoint"

    every: int | None = setting(
        None,
        checks.optional(checks.whole(1)),
        "steps between checkpoints, and one at the end; null: none",
    )
    dir: str | None = setting(
        None, checks.optional(checks.text()), "where checkpoints lie; null: in the run directory"
    )
    keep: int = setting(2, checks.whole(1), "newest checkpoints that are kept")
