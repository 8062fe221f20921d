"""Sections of `config.yaml` about where things live: pages, activations, shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from odc.train import config_checks as checks
from odc.train.config_section import Section, setting

FRAME_BYTES = 2 * 1024 * 1024


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
