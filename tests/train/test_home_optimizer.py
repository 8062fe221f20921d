"""`optimizer.where` and `train.dtype` in a run: losses, checkpoints, records, simulation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from odc.cli.main import main
from odc.errors import ConfigError
from odc.memory.events import Act, Kind, Op
from odc.train.recorded import recorded_update_rate
from odc.train.simulation import find_floors, make_setting, recorded_case, run_policy
from odc.train.trainer import train
from profiler.reader import TraceReader

HOME = {"optimizer.where": "home", "train.steps": 4}
BF16 = {**HOME, "train.dtype": "bfloat16"}


def losses(metrics):
    return [line["loss"] for line in metrics]


@pytest.mark.parametrize(
    "model, overrides",
    [
        ("dense", {"train.accumulate": 2, "optimizer.max_grad_norm": 0.5}),
        pytest.param("moe", {"train.accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("dense", {"memory.home": "disk"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_updates_at_home_has_the_losses_of_one_without(
    make_config, read_metrics, tmp_path, model, overrides
):
    train(make_config(model, **overrides, **{"train.steps": 4}), tmp_path / "device")
    outcome = train(make_config(model, **overrides, **HOME), tmp_path / "home")
    assert losses(read_metrics(tmp_path / "home")) == losses(read_metrics(tmp_path / "device"))
    updates = outcome.summary["updates"]
    assert updates["where"] == "home" and updates["home"] and not updates["device"]


@pytest.mark.parametrize("keys", [HOME, pytest.param(BF16, marks=pytest.mark.slow)])
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    make_config, read_metrics, tmp_path, keys
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    saves = {"checkpoint.every": 2, "optimizer.schedule": "constant"}
    train(make_config("dense", **keys, **saves), whole)
    train(make_config("dense", **{**keys, "train.steps": 2}, **saves), parts)
    train(make_config("dense", **keys, **saves), parts, resume=True)
    assert losses(read_metrics(parts)) == losses(read_metrics(whole))
    for file in sorted((whole / "checkpoints" / "step-000004").glob("*.safetensors")):
        assert file.read_bytes() == (parts / "checkpoints" / "step-000004" / file.name).read_bytes()


def test_a_run_in_bfloat16_keeps_masters_and_can_be_read(make_config, tmp_path, capsys):
    config = make_config("dense", **{**BF16, "checkpoint.every": 4})
    found = set()
    outcome = train(config, tmp_path / "run")
    assert outcome.summary["updates"]["device"] == []
    from safetensors import safe_open

    for file in (tmp_path / "run" / "checkpoints" / "step-000004").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                kind, _, fqn = name.partition(".")
                tensor = tensors.get_tensor(name)
                found.add((kind, tensor.dtype))
                if kind == "master":
                    assert torch.equal(tensor.bfloat16(), tensors.get_tensor(f"param.{fqn}"))
    assert found == {
        ("param", torch.bfloat16),
        ("exp_avg", torch.float32),
        ("exp_avg_sq", torch.float32),
        ("master", torch.float32),
        ("step", torch.float32),
    }
    assert (
        main(["generate", str(tmp_path / "run"), "--prompt", "def", "--max-new-tokens", "3"]) == 0
    )
    capsys.readouterr()


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"train.dtype": "bfloat16"}, "allowed: optimizer.where home"),
        ({"train.dtype": "bfloat16", "optimizer.where": "auto"}, "allowed: optimizer.where home"),
        ({"optimizer.where": "home", "memory.page_budget": "unlimited"}, "or set a budget"),
    ],
)
def test_what_cannot_work_is_refused(make_config, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train(make_config("dense", **overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_trace_of_updates_at_home_runs_again_on_the_clock(make_config, tmp_path):
    run = tmp_path / "run"
    keys = {"profiler.trace_interval": 1, "optimizer.schedule": "constant"}
    train(make_config("dense", **{**HOME, "train.steps": 7}, **keys), run)
    reader = TraceReader(run)
    need, actions = reader.need(), reader.actions()
    updates = need["op"] == Op.UPDATE
    groups = len({g for g in need["group"][updates].tolist()})
    assert updates.sum() == 7 * groups and set(need["kind"][updates]) == {Kind.GRADIENT}
    assert (actions["act"] == Act.UPDATE).sum() >= 6 * groups
    assert not np.isin(Kind.MOMENT, need["kind"])
    assert 1e6 < recorded_update_rate(reader) < 1e12

    case = recorded_case(run, warm_up=3, steps=3)
    budget = json.loads((run / "summary.json").read_text())["page_budget"]
    setting = make_setting(case, budget=budget, r=2.0)
    floors = find_floors(case, setting, moves=1, seed=0, lp=False)
    row = run_policy(case, setting, "cost_aware+popularity", floors)
    assert row.elapsed_s >= floors.window_bound_s * (1 - 1e-6)
    slow = replace(setting, link=replace(setting.link, update_rate=1e6))
    assert run_policy(case, slow, "cost_aware+popularity", floors).elapsed_s > 2 * row.elapsed_s
