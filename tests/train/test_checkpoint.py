"""Claims about checkpoints: resumed runs are bit-equal, files are whole or absent."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from odc.errors import CheckpointError, ConfigError
from odc.train import checkpoint
from odc.train.run_dir import RunDir
from odc.train.tasks import make_task
from odc.train.trainer import Trainer, train
from profiler import TraceReader

INTERRUPTED_AT = 3  # the step that is running when Ctrl-C comes


class InterruptingTask:
    """Presses Ctrl-C in a step."""

    def __init__(self, config, step):
        self._inner, self._step = make_task(config), step

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def batch(self, step, micro):
        if (step, micro) == (self._step, 0):
            os.kill(os.getpid(), signal.SIGINT)
        return self._inner.batch(step, micro)


def digests(path: Path) -> dict[str, str]:
    """Checksums of all tensors' files: equal where weights, moments and step counters are."""
    return {
        n: f["sha256"]
        for n, f in json.loads((path / "checkpoint.json").read_text())["files"].items()
    }


def comparable(metrics):
    return [(line["step"], line["epoch"], line["loss"], line["tokens"]) for line in metrics]


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("dense", {}),
        ("moe", {}),
        ("moe", {"train.accumulate": 2, "optimizer.max_grad_norm": 0.5, "train.eval_every": 3}),
        ("moe", {"memory.home": "disk", "memory.page_size": "2MB"}),
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    make_config, read_metrics, tmp_path, model, overrides
):
    keys = {"checkpoint.every": 100, "memory.home_dir": tmp_path, **overrides}
    train(make_config(model, **keys), tmp_path / "whole")
    config = make_config(model, **keys)
    train(config, tmp_path / "run", task=InterruptingTask(config, INTERRUPTED_AT))
    torch.manual_seed(1234)  # whatever the process drew before
    outcome = train(make_config(model, **keys), tmp_path / "run", resume=True)
    assert outcome.summary["first_step"] == INTERRUPTED_AT + 1
    whole, resumed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    assert comparable(resumed) == comparable(whole)
    saved = [tmp_path / name / "checkpoints" / "step-000008" for name in ("whole", "run")]
    assert digests(saved[0]) == digests(saved[1])


def test_a_checkpoint_moves_between_budgets_and_homes(make_config, tmp_path):
    small = {"checkpoint.every": 4, "memory.page_size": "2MB"}
    large = {
        "checkpoint.every": 4,
        "memory.page_budget": "unlimited",
        "memory.home": "disk",
        "memory.home_dir": tmp_path,
    }
    train(make_config("dense", **small), tmp_path / "small")
    start = tmp_path / "small" / "checkpoints" / "step-000004"
    train(make_config("dense", **large), tmp_path / "large", start_from=start)
    saved = [tmp_path / name / "checkpoints" / "step-000008" for name in ("small", "large")]
    assert digests(saved[0]) == digests(saved[1])


def test_a_new_run_from_a_checkpoint_goes_on_counting(make_config, read_metrics, tmp_path):
    train(make_config(**{"train.steps": 4, "checkpoint.every": 2}), tmp_path / "first")
    outcome = train(
        make_config(**{"memory.evict_strategy": "lru", "memory.prefetch": "none"}),
        tmp_path / "second",
        start_from=tmp_path / "first",
    )
    assert [line["step"] for line in read_metrics(tmp_path / "second")] == [4, 5, 6, 7]
    assert outcome.summary["first_step"] == 4
    assert [line["step"] for line in read_metrics(tmp_path / "first")] == [0, 1, 2, 3]


def test_metrics_and_trace_hold_each_step_once_after_a_kill(make_config, read_metrics, tmp_path):
    keys = {"checkpoint.every": 3, "profiler.trace_interval": 1}
    train(make_config(**keys), tmp_path / "run")
    whole = read_metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000008")
    outcome = train(make_config(**keys), tmp_path / "run", resume=True)
    assert outcome.summary["first_step"] == 6
    assert comparable(read_metrics(tmp_path / "run")) == comparable(whole)
    reader = TraceReader(tmp_path / "run")
    assert reader.steps()["step"].tolist() == list(range(8))
    assert set(reader.steps()["session"].tolist()) == {1, 2}


def test_a_run_without_checkpoints_cannot_be_resumed(make_config, tmp_path):
    train(make_config(**{"train.steps": 1}), tmp_path / "run")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(make_config(), tmp_path / "run", resume=True)


def test_only_the_newest_are_kept(make_config, tmp_path):
    keys = {"checkpoint.every": 2, "checkpoint.keep": 3}
    train(make_config(**keys), tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006", "step-000008"]


def test_checkpoints_can_lie_elsewhere(make_config, tmp_path):
    keys = {"checkpoint.every": 4, "checkpoint.dir": tmp_path / "store", "train.steps": 4}
    train(make_config(**keys), tmp_path / "run")
    assert (tmp_path / "store" / "run" / "step-000004" / "checkpoint.json").is_file()
    keys["train.steps"] = 6
    train(make_config(**keys), tmp_path / "run", resume=True)
    assert (tmp_path / "store" / "run" / "step-000006" / "checkpoint.json").is_file()


def test_unfinished_checkpoints_are_ignored_and_swept(make_config, tmp_path):
    train(make_config(**{"train.steps": 4, "checkpoint.every": 2}), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    newest = folder / "step-000004"
    left = folder / ".step-000006.123.partial"
    left.mkdir()
    (folder / "step-000009").mkdir()
    (newest / "group-0001.safetensors").write_bytes(b"cut")
    assert checkpoint.latest(folder) == folder / "step-000002"
    outcome = train(
        make_config(**{"train.steps": 4, "checkpoint.every": 2}), tmp_path / "run", resume=True
    )
    assert outcome.summary["first_step"] == 2
    assert checkpoint.latest(folder) == newest
    assert not left.exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["group-0002.safetensors", "checkpoint.json"])
def test_damage_is_told_with_the_files_name(make_config, tmp_path, name):
    train(make_config(**{"train.steps": 2, "checkpoint.every": 2}), tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    flip(path / name)
    with pytest.raises(CheckpointError, match=name):
        train(make_config(), tmp_path / "new", start_from=path)
    assert not (tmp_path / "new").exists()


def test_another_model_or_corpus_is_refused(make_config, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("There was a table set out under a tree. " * 2000)
    train(make_config(**{"train.steps": 2, "checkpoint.every": 2}), tmp_path / "run")
    for keys, told in (
        ({"model.num_heads": 2}, "model.num_heads 4, the configuration has 2"),
        ({"data.vocab_size": 300}, "other parameters"),
        ({"data.corpus": tmp_path / "text"}, "other parameters|another corpus"),
        ({"model.expert_size": 64}, "model.expert_size 96"),
    ):
        with pytest.raises(CheckpointError, match=told):
            train(make_config(**keys), tmp_path / "run", resume=True)


def test_a_finished_run_has_nothing_to_resume(make_config, tmp_path):
    train(make_config(**{"train.steps": 2, "checkpoint.every": 2}), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"finished at step 2; .* train\.steps=4"):
        train(make_config(**{"train.steps": 2}), tmp_path / "run", resume=True)


def test_any_safetensors_reader_reads_the_files(make_config, tmp_path):
    trainer = Trainer(make_config(**{"train.steps": 2}), RunDir(tmp_path / "run"))
    trainer.run()
    path = checkpoint.save(
        tmp_path / "saved", 2, trainer.model, trainer.optimizer, trainer.identity
    )
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    state = trainer.model.state_dict()
    moments = trainer.optimizer.state_dict()["state"]
    trainer.close()
    for fqn, value in state.items():
        assert torch.equal(found[f"param.{fqn}"], value)
    steps = [int(v) for k, v in found.items() if k.startswith("step.")]
    assert sorted(int(m["step"]) for m in moments.values()) == sorted(s for s in steps if s)
    assert sum(k.startswith("exp_avg.") for k in found) == len(state)


def test_saving_stays_within_the_budget(make_config, tmp_path):
    trainer = Trainer(make_config("dense", **{"train.steps": 1}), RunDir(tmp_path / "run"))
    trainer.run()
    trainer.manager.take()
    checkpoint.save(tmp_path / "saved", 1, trainer.model, trainer.optimizer, trainer.identity)
    assert trainer.manager.take().peak_page_bytes <= 16 << 20
    trainer.close()


def test_a_full_disk_leaves_the_checkpoints_before_it(
    make_config, read_metrics, tmp_path, monkeypatch
):
    write = checkpoint.write_tensors
    saves = []

    def full(path, specs, buffers):
        saves.append(path.parent)
        if len(set(saves)) == 2 and path.name == "group-0003.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, specs, buffers)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    config = make_config(**{"checkpoint.every": 3, "profiler.trace_interval": 1})
    with pytest.raises(checkpoint.CheckpointWriteError, match="step-000006.*No space left"):
        train(config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000003"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "No space left" in summary["reason"]
    monkeypatch.undo()
    train(make_config(**{"checkpoint.every": 3}), tmp_path / "run", resume=True)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(8))


def test_what_a_checkpoint_has_behind_it_is_in_the_trace(make_config, tmp_path, monkeypatch):
    """A kill right after a checkpoint: the run resumes behind a step, which must be recorded."""
    seen = []

    def save(folder, step, *rest, **keywords):
        seen.append((step, TraceReader(tmp_path / "run").steps()["step"].tolist()))

    monkeypatch.setattr(checkpoint, "save", save)
    config = make_config(**{"checkpoint.every": 3, "profiler.trace_interval": 100})
    train(config, tmp_path / "run")
    assert seen == [(step, list(range(step))) for step in (3, 6, 8)]
