"""Sections of `config.yaml` about how training runs: steps, updates, records, checkpoints."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from odc.train import config_checks as checks
from odc.train.config_section import Section, setting


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
