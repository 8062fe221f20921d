"""The training loop: batches, losses, updates, evaluation, checkpoints, records.

    outcome = train(config, Path("runs/first"))

The loop knows a `Task`, a paged model and its optimizer, and writes a run directory. Steps count
from 0; a checkpoint named `step-000100` stands after step 99 and before step 100. All that a step
depends on is its number, the weights and the moments, so a resumed run repeats the run that was not
interrupted to the last bit.
"""

import datetime
import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odc.errors import CheckpointError, ConfigError
from odc.fsdp.group import num_elements
from odc.fsdp.layer_major import LayerMajor, layer_major
from odc.fsdp.lora_files import save_adapter
from odc.fsdp.optimizer import PagedAdamW
from odc.fsdp.runtime import Runtime
from odc.memory.events import StepRow
from odc.train import checkpoint
from odc.train.activations import activation_facts
from odc.train.adapters import identity_of
from odc.train.checkpoint import Identity
from odc.train.compose import make_memory, make_model, policy_name, prepare_process
from odc.train.config import Config, dump_config
from odc.train.divergence import diverged
from odc.train.progress import Display
from odc.train.ranks import current
from odc.train.recorder import Recorder
from odc.train.run_dir import RunDir, machine, resume_command
from odc.train.run_facts import places_of_updates, step_metrics, used_tiers
from odc.train.schedule import make_schedule
from odc.train.signals import Signals
from odc.train.tasks import Pretrain, make_task

FINISHED, INTERRUPTED, FAILED, RUNNING = "finished", "interrupted", "failed", "running"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: `finished` or `interrupted`.
        summary: Content of `summary.json`.
        run_dir: The run's folder.
    """

    status: str
    summary: dict[str, Any]
    run_dir: Path


def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    start_from: Path | None = None,
    task: Pretrain | None = None,
) -> Outcome:
    """Trains as the configuration says.

    Args:
        config: The configuration; no change is possible from here on.
        run_dir: Folder of the run, new or empty unless `resume`.
        resume: Go on from the newest complete checkpoint in `run_dir`.
        start_from: Begin a new run at another run's newest checkpoint, or at this checkpoint.
        task: What to train for; made from the configuration where not given.

    Returns:
        How it ended: after the last step, or after a SIGINT or SIGTERM.

    Raises:
        OdcError: Bad input before anything is written; or a failure while running, which leaves
            `summary.json` with status `failed` and everything that was saved before intact.
    """
    made: type[Trainer] = Trainer
    if current().size > 1:
        from odc.train.rank_trainer import RankTrainer  # which builds upon this module

        made = RankTrainer
    trainer = made(config, RunDir(run_dir), resume=resume, start_from=start_from, task=task)
    try:
        return trainer.run()
    finally:
        trainer.close()


class Trainer:
    """One run, from its first step to its end.

    Making one reads the corpus, builds the model and loads the checkpoint; nothing is written to
    the run directory before that has worked.

    Attributes:
        model: The paged model.
        optimizer: Its optimizer.
        first_step: Where this process begins.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        resume: bool = False,
        start_from: Path | None = None,
        task: Pretrain | None = None,
    ) -> None:
        self.config = config.freeze()
        self.run_dir = run_dir
        source = self._begin(resume, start_from)
        self._threads = torch.get_num_threads(), sys.getswitchinterval()
        prepare_process(config)
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self._build(source, task)
        self.schedule = make_schedule(
            self.optimizer, config.optimizer, config.train.steps, self.first_step
        )

    def _begin(self, resume: bool, start_from: Path | None) -> Path | None:
        """Finds the checkpoint to begin with, and the first step; refuses what cannot go on."""
        source = _source(self.run_dir, resume, start_from)
        self.first_step = 0 if source is None else checkpoint.read_step(source)
        if self.first_step >= self.config.train.steps:
            raise ConfigError(self._nothing_left(source, resume))
        return source

    def _build(self, source: Path | None, task: Pretrain | None) -> None:
        """Makes task, model and optimizer, and fills them from a checkpoint."""
        config = self.config
        self.task = make_task(config) if task is None else task
        memory = make_memory(config, self.first_step)
        try:
            fresh = source is None
            model, optimizer = make_model(config, self.task.vocab_size, memory, fresh=fresh)
            self.model, self.optimizer = model, optimizer
            adapter = identity_of(model, config.adapter)
            self.identity = Identity.of(model, config.model, self.task.corpus_hash, adapter)
            if source is not None:
                checkpoint.load(source, model, optimizer, self.identity)
            self._sweeps = self._make_sweeps()
        except BaseException:
            memory.close()
            raise
        self.manager = memory

    def _make_sweeps(self) -> LayerMajor | None:
        """What runs steps in layer-major order, where the configuration asks for it.

        Raises:
            ConfigError: The task has a loss of its own, or the model is read from a folder.
        """
        if self.config.accumulation.order != "layer_major":
            return None
        if self.config.model.path is not None:
            raise ConfigError(
                "accumulation.order: got 'layer_major' with model.path; allowed: micro_major (in a "
                "loop of your own odc.layer_major takes models of transformers)"
            )
        if getattr(self.task.loss, "__func__", None) is not Pretrain.loss:
            raise ConfigError(
                "accumulation.order: got 'layer_major', which runs the loss of the model behind "
                f"its last layer; {type(self.task).__name__} has a loss of its own: use "
                "micro_major"
            )
        return layer_major(self.model)

    @property
    def runtime(self) -> Runtime:
        """What the hooks of the model share."""
        return self.model._odc_runtime  # type: ignore[return-value]

    def run(self) -> Outcome:
        """Trains to the last step, or to a signal.

        Raises:
            OdcError: A failure while running.
        """
        self._open()
        self._display = self._make_display()
        status = FAILED
        try:
            with self._display, Signals() as signals:
                self._tell()
                status = self._loop(lambda: signals.received)
                self._save_adapter()
        except BaseException as error:
            self._fail(error)
            raise
        self._recorder.close()
        return Outcome(status, self._summarize(status), self.run_dir.path)

    def _open(self) -> None:
        """Makes the run directory and begins its records."""
        self._open_run_dir()
        assert self.manager.pool is not None, "the model is built"
        self._recorder = Recorder(self.run_dir.trace, self.config, self.runtime, self.identity)
        self._facts = self._make_facts()
        self._summarize(RUNNING)

    def _make_display(self) -> Display:
        chosen = self.config.train
        return Display(self.first_step, chosen.steps, chosen.log_every)

    def _tell(self) -> None:
        """Says what of the model is trained, where it is not all of it."""
        kind = self.config.adapter.kind
        if kind != "none":
            some, total = self._facts["trainable_parameters"], self._facts["num_parameters"]
            share = f"{some / total:.2%}"
            self._display.say(f"adapter {kind}: {some:,} of {total:,} parameters trained ({share})")

    def _save_adapter(self) -> None:
        if self.config.adapter.kind != "none":
            save_adapter(self.model, self.run_dir.adapter, base=self.config.model.path)

    def _open_run_dir(self) -> None:
        self.run_dir.open(self.first_step)
        dump_config(self.config, self.run_dir.config)
        self._link_checkpoints()

    def close(self) -> None:
        """Gives the memory back; the model cannot be used any more."""
        self.run_dir.close()
        self._release()
        torch.set_num_threads(self._threads[0])
        sys.setswitchinterval(self._threads[1])

    def _release(self) -> None:
        self.manager.close()

    def _nothing_left(self, source: Path | None, resume: bool) -> str:
        done = self.first_step
        if not resume:
            return (
                f"train.steps: got {self.config.train.steps}; allowed: more than the {done} steps "
                f"that {source} has behind it"
            )
        return (
            f"{self.run_dir.path}: finished at step {done}; to go on raise train.steps: "
            f"{resume_command(self.run_dir.path, current().size)} train.steps={2 * done}"
        )

    # The loop.

    def _loop(self, stopped: Callable[[], bool]) -> str:
        self.model.train()
        self._forget()
        steps = self.config.train.steps
        for step in range(self.first_step, steps):
            metrics = self._step(step)
            self._append(metrics)
            done = step + 1
            stop = self._is_to_stop(stopped())
            save = self._save_is_due(done, last=done == steps or stop)
            # A run that is killed from here on resumes behind this step: it must be recorded.
            self._recorder.end_step(flush=save)
            if save:
                self._save(done)
            self._display.show(metrics)
            if stop and done < steps:
                self._display.say(f"interrupted after step {done}")
                return INTERRUPTED
        return FINISHED

    def _append(self, metrics: dict[str, Any]) -> None:
        self.run_dir.append(metrics)

    def _is_to_stop(self, stopped: bool) -> bool:
        return stopped

    def _forget(self) -> None:
        """What was moved and waited for so far is not the next step's."""
        self.manager.take()

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step, and the evaluation that is due after it; returns its metrics."""
        self._recorder.begin_step(step)
        start = time.perf_counter_ns()
        loss, tokens = self._forward_backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        end = time.perf_counter_ns()
        self._recorder.write_memory()
        counters = self.manager.take()
        row = StepRow(
            t_ns=end,
            step=step,
            epoch=self.task.epoch(step),
            loss=loss,
            tokens=tokens,
            step_ns=end - start,
            compute_ns=end - start - counters.stall_ns,
            stall_ns=counters.stall_ns,
            comm_ns=0,
            profiler_ns=0,
            bytes_in=counters.bytes_in,
            bytes_out=counters.bytes_out,
            page_bytes=self.manager.transfers.used_bytes,
            peak_page_bytes=counters.peak_page_bytes,
            transient_bytes=max(self.manager.rebalance(), 0),
        )
        self._recorder.end_training(row)
        kept = self.manager.ledger.activations.peak_bytes
        return step_metrics(row, counters, kept) | self._evaluate(step + 1)

    def _forward_backward(self, step: int) -> tuple[float, int]:
        """Accumulates the gradients of a step; returns its loss and its tokens.

        Raises:
            DivergedError: The loss is not finite.
        """
        if self.config.adapter.dropout:
            torch.manual_seed(_dropout_seed(self.config.train.seed, step))
        if self._sweeps is not None:
            return self._sweep(step, self._sweeps)
        accumulate = self.config.train.accumulate
        losses: list[float] = []
        tokens = 0
        for micro in range(accumulate):
            batch = self.task.batch(step, micro)
            loss = self.task.loss(self.model, batch) / accumulate
            losses.append(loss.item())
            # Before backward, which may update weights.
            self._check_finite(f"step {step}: the loss is", losses[-1])
            loss.backward()
            tokens += batch[0].numel()
        return sum(losses), tokens

    def _sweep(self, step: int, sweeps: LayerMajor) -> tuple[float, int]:
        """The same, all micro-batches layer by layer."""
        batches = [self.task.batch(step, m) for m in range(self.config.train.accumulate)]
        losses: list[float] = []

        def check(loss: float) -> None:
            self._check_finite(f"step {step}: the loss is", loss)
            losses.append(loss)

        sweeps.step(batches, on_loss=check)
        return sum(losses), sum(batch[0].numel() for batch in batches)

    def _evaluate(self, done: int) -> dict[str, Any]:
        """Evaluates if it is due; what that moves and waits for is not the step's."""
        every = self.config.train.eval_every
        if every is None or (done % every and done != self.config.train.steps):
            return {}
        start = time.perf_counter()
        loss = self.task.evaluate(self.model)
        self._check_finite(f"step {done - 1}: the loss on held-back text after it is", loss)
        self._forget()
        return {"eval_loss": loss, "eval_s": time.perf_counter() - start}

    def _check_finite(self, what: str, loss: float) -> None:
        if not math.isfinite(loss):
            raise diverged(f"{what} {loss}", self.config, self.run_dir)

    def _save_is_due(self, done: int, last: bool) -> bool:
        every = self.config.checkpoint.every
        return every is not None and (last or done % every == 0)

    def _save(self, done: int) -> None:
        try:
            self._write_checkpoint(done)
        except checkpoint.NotFiniteError as error:
            what = f"step {done - 1}: after it {error}"
            raise diverged(what, self.config, self.run_dir) from error
        self._forget()

    def _write_checkpoint(self, done: int) -> None:
        assert isinstance(self.optimizer, PagedAdamW)
        checkpoint.save(
            self.run_dir.checkpoints,
            done,
            self.model,
            self.optimizer,
            self.identity,
            keep=self.config.checkpoint.keep,
        )

    # Records.

    def _link_checkpoints(self) -> None:
        """With `checkpoint.dir` checkpoints lie there, and the run's own folder leads to them."""
        folder = self.config.checkpoint.dir
        if folder is None or self.run_dir.checkpoints.exists():
            return
        try:
            target = Path(folder).expanduser().resolve() / self.run_dir.path.resolve().name
            target.mkdir(parents=True, exist_ok=True)
            self.run_dir.checkpoints.symlink_to(target, target_is_directory=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoint.dir: {folder} cannot be written ({error.strerror}); "
                "name a folder that can"
            ) from error

    def _make_facts(self) -> dict[str, Any]:
        memory = self.config.memory
        assert self.manager.pool is not None, "the model is built"
        return {
            "policy": policy_name(memory),
            "page_budget": self.manager.pool.num_bytes,
            "home": memory.home,
            "host_mem": memory.host_mem,
            "link_bandwidth": memory.link_bandwidth,
            "updates": {
                "where": self.config.optimizer.where,
                **places_of_updates(self.runtime.groups),
            },
            "num_parameters": num_elements(self.runtime.groups),
            "trainable_parameters": num_elements([g for g in self.runtime.groups if g.trainable]),
            **self._common_facts(),
        }

    def _common_facts(self) -> dict[str, Any]:
        return {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "first_step": self.first_step,
            "corpus_hash": self.identity.corpus_hash,
            "structure_hash": self.identity.structure_hash,
            "machine": machine(),
        }

    def _summarize(self, status: str, reason: str | None = None) -> dict[str, Any]:
        facts = self._facts | self._used_memory()
        facts = facts if reason is None else {"reason": reason, **facts}
        return self.run_dir.write_summary(status, facts)

    def _used_memory(self) -> dict[str, Any]:
        """What each tier moved; what layers kept for backward, and each mode would at its peak."""
        assert self.manager.home is not None, "the model is built"
        return {
            "tiers": used_tiers(self.manager.home),
            "activations": activation_facts(self.manager.ledger.activations),
        }

    def _fail(self, error: BaseException) -> None:
        """Leaves a readable run behind; nothing here may hide the error itself."""
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            self._recorder.close()
            reason = str(error) or type(error).__name__
            self._summarize(INTERRUPTED if interrupted else FAILED, reason)
        except Exception as second:
            print(f"odc: {self.run_dir.path}: {second}", file=sys.stderr)


def _dropout_seed(seed: int, step: int) -> int:
    """What is left out depends on the step alone, as batches do."""
    text = f"dropout {seed} {step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _source(run_dir: RunDir, resume: bool, start_from: Path | None) -> Path | None:
    """The checkpoint that a run begins with."""
    if not resume:
        run_dir.check_unused()
        return None if start_from is None else checkpoint.find(start_from)
    if start_from is not None:
        raise ConfigError("--from begins a new run and --resume goes on with one; use one of them")
    found = checkpoint.latest(run_dir.checkpoints)
    if found is None:
        raise CheckpointError(
            f"{run_dir.path}: has no complete checkpoint to resume from; start a new run "
            "(with checkpoint.every, to be able to resume it)"
        )
    return found
