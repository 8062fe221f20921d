"""Training on several ranks: parameters, gradients and moments sharded, batches shared out.

Rank r takes the micro-batches m * ranks + r of a step, so that N ranks that accumulate k train as
one process that accumulates N * k. What differs from `Trainer` is what several processes have to
agree about: the loss, whether to stop, which parameters got a gradient, and who writes files (rank
0 all of the run's, every rank its trace and its part of a checkpoint).

A parameter that no rank used in a step is left alone by the optimizer, as in one process; one that
some rank used has a gradient on all of them.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odc.errors import DivergedError
from odc.fsdp.comm import GroupComm
from odc.fsdp.fully_shard import FSDPModule, state_of
from odc.fsdp.sharded_runtime import ShardedRuntime
from odc.memory.events import StepRow
from odc.train import rank_checkpoint
from odc.train.checkpoint import Identity
from odc.train.compose import check_ranks, make_sharded
from odc.train.progress import Display
from odc.train.rank_recorder import POLICY, RankRecorder
from odc.train.ranks import current, local_size, naming_peers
from odc.train.run_facts import common_metrics
from odc.train.tasks import Pretrain, make_task
from odc.train.trainer import RUNNING, Trainer


class RankTrainer(Trainer):
    """One rank of a run. Every rank makes one and calls the same methods."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        self.ranks = current()
        super().__init__(config, *args, **options)

    def _begin(self, resume: bool, start_from: Path | None) -> Path | None:
        def begin() -> Path | None:
            check_ranks(self.config)
            return super(RankTrainer, self)._begin(resume, start_from)

        return self.ranks.together(begin)[self.ranks.rank]

    def _build(self, source: Path | None, task: Pretrain | None) -> None:
        if self.config.train.threads is None:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size()))
        self.task = make_task(self.config, self.ranks) if task is None else task
        self.ranks.together(lambda: self._build_rank(source))

    def _build_rank(self, source: Path | None) -> None:
        self.model, self.optimizer = make_sharded(self.config, self.task.vocab_size)
        self.identity = Identity.of(self.model, self.config.model, self.task.corpus_hash)
        state = state_of(self.model)
        assert state is not None and isinstance(self.model, FSDPModule), "the root is sharded"
        self.shards: ShardedRuntime = state.begin(self.model)
        if self.config.model.num_experts is not None:  # ranks may use different experts
            self.model.set_reduce_scatter_unused_params(True)
        self._used = [[0.0] * len(group.places) for group in self.shards.groups]
        for group in self.shards.groups:
            for number, parameter in enumerate(group.unsharded):
                use = functools.partial(self._use, group.number, number)
                parameter.register_post_accumulate_grad_hook(use)
        rank_checkpoint.fill_moments(self.optimizer)
        if source is not None:
            with naming_peers("load of a checkpoint"):
                rank_checkpoint.load(source, self.model, self.optimizer, self.identity, self.ranks)

    def _use(self, group: int, number: int, _: torch.Tensor) -> None:
        self._used[group][number] = 1.0

    @property
    def comm(self) -> GroupComm:
        """The collectives of the shards."""
        (found,) = {id(comm): comm for comm, _ in self.shards.comms.values()}.values()
        return found

    def _open(self) -> None:
        self.ranks.on_root(self._open_run_dir)
        self._facts: dict[str, Any] = self._make_facts()
        self._recorder: Any = RankRecorder(
            self.run_dir.trace, self.config, self.shards, self.comm, self.identity, self.ranks
        )
        self.ranks.on_root(lambda: bool(self._summarize(RUNNING)))

    def _make_display(self) -> Display:
        chosen = self.config.train
        shown = self.ranks.is_root
        return Display(self.first_step, chosen.steps, chosen.log_every, shown=shown)

    def _release(self) -> None:
        """The shards go with the model."""

    # The loop.

    def _append(self, metrics: dict[str, Any]) -> None:
        if self.ranks.is_root:
            self.run_dir.append(metrics)

    def _is_to_stop(self, stopped: bool) -> bool:
        return self.ranks.total([float(stopped)])[0] > 0

    def _forget(self) -> None:
        self._recorder.take()

    def _step(self, step: int) -> dict[str, Any]:
        with naming_peers(f"step {step}"):
            return self._step_rank(step)

    def _step_rank(self, step: int) -> dict[str, Any]:
        self._recorder.begin_step(step)
        start = time.perf_counter_ns()
        loss, tokens = self._forward_backward(step)
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        end = time.perf_counter_ns()
        self._recorder.write_memory()
        moved = self._recorder.take()
        row = StepRow(
            t_ns=end,
            step=step,
            epoch=self.task.epoch(step),
            loss=loss,
            tokens=tokens,
            step_ns=end - start,
            compute_ns=end - start - moved.wait_ns,
            stall_ns=0,
            comm_ns=moved.wait_ns,
            profiler_ns=0,
            bytes_in=0,
            bytes_out=0,
            page_bytes=0,
            peak_page_bytes=0,
            transient_bytes=0,
        )
        self._recorder.end_training(row)
        return _metrics(row, moved.sent_bytes) | self._evaluate(step + 1)

    def _forward_backward(self, step: int) -> tuple[float, int]:
        """Accumulates the gradients of a step; returns the loss and the tokens of all ranks."""
        accumulate = self.config.train.accumulate
        assert isinstance(self.model, FSDPModule)
        for used in self._used:
            used[:] = [0.0] * len(used)
        total, tokens = 0.0, 0
        for micro in range(accumulate):
            batch = self.task.batch(step, micro)
            if accumulate > 1:
                self.model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = self.task.loss(self.model, batch) / accumulate
            total += loss.item()
            loss.backward()
            tokens += batch[0].numel()
        flags = [flag for used in self._used for flag in used]
        total, tokens_of_all, *flags = self.ranks.total([total, tokens, *flags])
        loss_of_all = total / self.ranks.size
        # Nothing is updated yet, and all ranks know the same loss: all of them end here.
        self._check_finite(f"step {step}: the loss is", loss_of_all)
        self._leave_unused(flags)
        return loss_of_all, int(tokens_of_all)

    def _leave_unused(self, flags: list[float]) -> None:
        parameters = [p for group in self.shards.groups for p in group.sharded]
        for parameter, flag in zip(parameters, flags, strict=True):
            if not flag:
                parameter.grad = None

    def _clip(self) -> None:
        limit = self.config.optimizer.max_grad_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def _write_checkpoint(self, done: int) -> None:
        with naming_peers("save of a checkpoint"):
            rank_checkpoint.save(
                self.run_dir.checkpoints,
                done,
                self.model,
                self.optimizer,
                self.identity,
                self.ranks,
                keep=self.config.checkpoint.keep,
            )

    # Records.

    def _make_facts(self) -> dict[str, Any]:
        return {"policy": POLICY, "ranks": self.ranks.size, **self._common_facts()}

    def _used_memory(self) -> dict[str, Any]:
        """No tiers: shards are not paged."""
        return {"activations": {"mode": self.config.activations.mode}}

    def _summarize(self, status: str, reason: str | None = None) -> dict[str, Any]:
        return super()._summarize(status, reason) if self.ranks.is_root else {"status": status}

    def _fail(self, error: BaseException) -> None:
        self._recorder.end()
        if isinstance(error, DivergedError) and not self.ranks.is_root:
            error.is_told = True  # type: ignore[attr-defined]
        super()._fail(error)


def _metrics(row: StepRow, sent_bytes: int) -> dict[str, Any]:
    return {
        **common_metrics(row),
        "stall_s": 0.0,
        "comm_s": row.comm_ns / 1e9,
        "sent_bytes": sent_bytes,
        "bytes_in": 0,
        "bytes_out": 0,
        "page_bytes": 0,
        "peak_page_bytes": 0,
        "transient_bytes": 0,
    }
