"""Claims about failing storage: page and file are named, what was saved is intact."""

import errno
import json
import math

import pytest

from odc.cli.exits import FAILURE, exit_code
from odc.errors import BudgetError, DivergedError, PageIOError
from odc.memory.events import Kind, Op, Phase
from odc.memory.home import DiskHome
from odc.train import checkpoint
from odc.train.run_dir import RunDir
from odc.train.tasks import Pretrain
from odc.train.trainer import Trainer, train
from profiler import TraceReader


class FailingHome:
    """A home whose calls fail from some call on."""

    def __init__(self, inner: DiskHome, verb: str, healthy_calls: int, number: int) -> None:
        self.inner, self.path = inner, inner.path
        self.verb, self.left, self.number = verb, healthy_calls, number

    def load(self, page, offset, address, num_bytes):
        self._count("load", page)
        self.inner.load(page, offset, address, num_bytes)

    def store(self, page, offset, address, num_bytes):
        self._count("store", page)
        self.inner.store(page, offset, address, num_bytes)

    def _count(self, verb, page):
        if verb != self.verb:
            return
        self.left -= 1
        if self.left < 0:
            reason = errno.errorcode[self.number]
            raise PageIOError(f"cannot {verb}: {reason}", page=page, path=self.path)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("model", "verb", "number", "home"),
    [
        ("dense", "load", errno.EIO, "disk"),
        ("moe", "store", errno.EIO, "host+disk"),
        ("moe", "store", errno.ENOSPC, "disk"),
    ],
)
def test_a_page_that_fails_ends_the_run_and_spares_what_was_saved(
    make_config, read_metrics, tmp_path, model, verb, number, home
):
    keys = {
        "checkpoint.every": 2,
        "memory.home": home,
        "memory.host_mem": "8MB" if home == "host+disk" else "auto",
        "memory.home_dir": tmp_path,
        "profiler.trace_interval": 1,
        "train.steps": 5,
    }
    trainer = Trainer(make_config(model, **keys), RunDir(tmp_path / "run"))
    engine = trainer.manager.transfers.engine
    step = trainer._step

    def fail_in_step_3(number_of_step):
        if number_of_step == 3 and home == "disk":
            engine.home = FailingHome(engine.home, verb, 2, number)
        elif number_of_step == 3:
            engine.home.disk = FailingHome(engine.home.disk, verb, 2, number)
        return step(number_of_step)

    trainer._step = fail_in_step_3
    with pytest.raises(PageIOError, match=errno.errorcode[number]) as caught:
        trainer.run()
    trainer.close()
    assert caught.value.page >= 0 and caught.value.path.parent == tmp_path
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and f"page {caught.value.page}" in summary["reason"]
    assert TraceReader(tmp_path / "run").steps()["step"].tolist() == [0, 1, 2]
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == "step-000002"
    train(make_config(model, **keys), tmp_path / "run", resume=True)
    train(make_config(model, **{"train.steps": 5}), tmp_path / "whole")
    resumed, whole = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "whole")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(make_config, tmp_path):
    with pytest.raises(BudgetError, match=r"memory\.page_budget: 2\.00 MiB .* use at least"):
        train(make_config(**{"memory.page_budget": "2MB"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trace_that_cannot_be_written_does_not_stop_training(make_config, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("profiler.segment.SegmentWriter.append", full)
    outcome = train(make_config(**{"train.steps": 3}), tmp_path / "run")
    assert outcome.status == "finished"
    assert TraceReader(tmp_path / "run").dropped_events > 0


class Poisoned(Pretrain):
    """Pretraining whose loss is no number in a step's second micro-batch, or after a step."""

    def __init__(self, config, bad_step=None, bad_evaluation=False):
        super().__init__(config)
        self.bad_step, self.bad_evaluation = bad_step, bad_evaluation
        self.at = (0, 0)

    def batch(self, step, micro):
        self.at = (step, micro)
        return super().batch(step, micro)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * math.nan if model.training and self.at == (self.bad_step, 1) else loss

    def evaluate(self, model):
        return math.inf if self.bad_evaluation else super().evaluate(model)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_loss_that_is_no_number_ends_the_run(make_config, read_metrics, tmp_path, update):
    keys = {"checkpoint.every": 2, "train.accumulate": 2, "optimizer.update": update}
    keys["train.steps"] = 4
    config, run_dir = make_config(**keys), tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        train(config, run_dir, task=Poisoned(config, bad_step=3))
    assert exit_code(caught.value) == FAILURE
    told, lines = str(caught.value), read_metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert told.startswith("step 3: the loss is nan, expected a finite number")
    assert f"last finite loss: {lines[-1]['loss']:.4g} in step 2" in told
    assert "optimizer.lr (now 0.003)" in told and "optimizer.max_grad_norm" in told
    assert told.endswith(f"--from {run_dir / 'checkpoints' / 'step-000002'}")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["reason"] == told
    assert summary["final_loss"] == lines[-1]["loss"]
    train(config, run_dir, resume=True)
    train(config, tmp_path / "whole")
    resumed, whole = read_metrics(run_dir), read_metrics(tmp_path / "whole")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


def test_an_evaluation_that_is_infinite_ends_the_run(make_config, tmp_path):
    config = make_config(**{"train.eval_every": 2, "train.steps": 3})
    with pytest.raises(DivergedError, match=r"step 1: .*held-back.* is inf.*no checkpoint"):
        train(config, tmp_path / "run", task=Poisoned(config, bad_evaluation=True))


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.MOMENT])
def test_no_checkpoint_is_written_of_what_is_not_finite(make_config, tmp_path, kind):
    trainer = Trainer(
        make_config(**{"checkpoint.every": 2, "train.eval_every": None}), RunDir(tmp_path / "run")
    )
    step = trainer._step

    def spoil_after_step_3(number):
        metrics = step(number)
        if number == 3:
            group = trainer.runtime.groups[-1]
            trainer.manager.access(group.group, [(kind, Op.WRITE)], Phase.OTHER)
            group.view(kind, 0, 0).view(-1)[0] = math.nan
            trainer.manager.release(group.group, kind)
        return metrics

    trainer._step = spoil_after_step_3
    with pytest.raises(DivergedError, match=r"step 3: after it the .* hold NaN.*step-000002"):
        trainer.run()
    trainer.close()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
