"""Runs that train an adapter: resumed bit-equal, saved without the base, tied to their base."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from odc.errors import CheckpointError, ConfigError
from odc.train import checkpoint
from odc.train.config import load_config
from odc.train.trainer import train
from tests.train.test_checkpoint import InterruptingTask, comparable, digests

LORA = {"adapter.kind": "lora", "adapter.rank": 4, "checkpoint.every": 4, "train.steps": 8}
DROPOUT = {
    "adapter.dropout": 0.3,
    "adapter.targets": "all-linear",
    "activations.mode": "checkpoint",
    "train.accumulate": 2,
    "train.eval_every": 3,
}


@pytest.fixture(scope="module")
def whole_run(make_config, tmp_path_factory):
    """A run that trained the whole dense model: the base of adapters."""
    path = tmp_path_factory.mktemp("base") / "run"
    train(make_config("dense", **{"checkpoint.every": 8}), path)
    return path


@pytest.mark.parametrize("model, more", [("dense", {}), ("moe", DROPOUT)])
def test_a_resumed_adapter_is_bit_equal_to_one_that_was_not_interrupted(
    make_config, read_metrics, tmp_path, model, more
):
    keys = LORA | more | {"checkpoint.every": 100}
    train(make_config(model, **keys), tmp_path / "whole")
    config = make_config(model, **keys)
    train(config, tmp_path / "run", task=InterruptingTask(config, 3))
    torch.manual_seed(99)  # whatever the process drew before
    outcome = train(make_config(model, **keys), tmp_path / "run", resume=True)
    assert outcome.summary["first_step"] == 4
    whole, resumed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    assert comparable(resumed) == comparable(whole)
    assert whole[-1]["loss"] != whole[0]["loss"]
    saved = [tmp_path / name / "checkpoints" / "step-000008" for name in ("whole", "run")]
    assert digests(saved[0]) == digests(saved[1])
    adapters = [
        tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "run")
    ]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_checkpoint_holds_what_is_trained_and_names_the_base(make_config, tmp_path, capsys):
    outcome = train(make_config("dense", **LORA), tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    names = {n for f in newest.glob("*.safetensors") for n in load_file(f)}
    assert names and all(".lora_" in name for name in names)
    header = json.loads((newest / "checkpoint.json").read_text())
    assert re.fullmatch("[0-9a-f]{16}", header["adapter"]["base"])
    summary = outcome.summary
    trained = 4 * 2 * 2 * 4 * 160  # layers, targets, matrices, rank, width
    assert summary["trainable_parameters"] == trained < summary["num_parameters"]
    assert f"adapter lora: {trained:,} of {summary['num_parameters']:,} parameters" in (
        capsys.readouterr().err
    )


def test_the_adapter_at_the_end_is_that_of_the_last_checkpoint(make_config, tmp_path):
    train(make_config("dense", **LORA), tmp_path / "run")
    found = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    saved = {k: v for f in newest.glob("*.safetensors") for k, v in load_file(f).items()}
    assert len(found) == 16
    for name, value in found.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(saved[f"param.{own}"], value), name


def test_an_adapter_begins_at_the_weights_of_a_run(make_config, read_metrics, whole_run, tmp_path):
    last = read_metrics(whole_run)[-1]["loss"]
    keys = LORA | {"adapter.base": str(whole_run), "optimizer.lr": 1e-6, "train.steps": 9}
    train(make_config("dense", **keys), tmp_path / "run")
    begun = read_metrics(tmp_path / "run")[8]["loss"]
    train(make_config("dense", **{"train.steps": 9}), tmp_path / "on", start_from=whole_run)
    assert begun == pytest.approx(read_metrics(tmp_path / "on")[0]["loss"], rel=1e-4)
    assert begun < last + 1


def test_an_adapter_is_not_resumed_over_another_base(make_config, whole_run, tmp_path):
    train(make_config("dense", **LORA), tmp_path / "run")
    more = {"train.steps": 10}
    for other in ({"adapter.base": str(whole_run)}, {"train.seed": 5}, {"model.init_std": 0.03}):
        with pytest.raises(CheckpointError, match="was trained on another base .fingerprint"):
            train(make_config("dense", **(LORA | more | other)), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match="saved with adapter.alpha 16.0.*has 8"):
        train(
            make_config("dense", **(LORA | more | {"adapter.alpha": 8})),
            tmp_path / "run",
            resume=True,
        )


def test_whole_models_and_adapters_are_not_taken_for_each_other(make_config, whole_run, tmp_path):
    train(make_config("dense", **(LORA | {"train.steps": 4})), tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds a model and no adapter.*adapter.base="):
        train(
            make_config("dense", **(LORA | {"train.steps": 9})),
            tmp_path / "a",
            start_from=whole_run,
        )
    with pytest.raises(CheckpointError, match="holds an adapter and not the model.*kind=lora"):
        train(make_config("dense"), tmp_path / "b", start_from=tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds an adapter and no model"):
        base = {"adapter.base": str(tmp_path / "run")}
        train(make_config("dense", **(LORA | base)), tmp_path / "c")


def test_an_adapter_is_loaded_with_what_its_folder_says(make_config, tmp_path):
    keys = LORA | {"adapter.targets": ["o_proj"], "adapter.alpha": 3}
    train(make_config("dense", **keys), tmp_path / "first")
    loaded = make_config(
        "dense",
        **{
            "adapter.kind": "lora",
            "adapter.load": str(tmp_path / "first" / "adapter"),
            "train.steps": 1,
            "optimizer.lr": 1e-12,
        },
    )
    assert (loaded.adapter.rank, loaded.adapter.alpha) == (4, 3.0)
    assert tuple(loaded.adapter.targets) == ("o_proj",)
    train(loaded, tmp_path / "second")
    first, second = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("first", "second")
    )
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-5, atol=1e-9)
    again, _ = load_config(tmp_path / "second" / "config.yaml")
    assert again.adapter.shown() == loaded.adapter.shown()


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"adapter.base": "runs/a"}, "adapter.base: got 'runs/a' with adapter.kind none"),
        ({"adapter.kind": "lora", "adapter.rank": 0}, "adapter.rank: got 0"),
        ({"adapter.kind": "lora", "adapter.dropout": 1.0}, "adapter.dropout: got 1.0"),
        ({"adapter.kind": "qlora"}, "adapter.kind: got 'qlora'; allowed: none, lora"),
    ],
)
def test_wrong_keys_are_told(make_config, keys, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        make_config("dense", **keys)


def test_targets_that_match_nothing_are_told_before_anything_is_written(make_config, tmp_path):
    keys = LORA | {"adapter.targets": ["c_attn"]}
    with pytest.raises(ConfigError, match="adapter.targets: no layer of the model is named c_attn"):
        train(make_config("dense", **keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_base_in_bfloat16_needs_no_masters(make_config, tmp_path):
    keys = LORA | {"train.dtype": "bfloat16", "train.steps": 2}
    train(make_config("dense", **keys), tmp_path / "run")
    found = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float32}
