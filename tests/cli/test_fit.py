"""Claims about `odc fit` and `odc train --dry-run`: full-size models by their shapes alone."""

import json
from pathlib import Path

import pytest

from odc.cli.main import main

MODELS = Path(__file__).parent.parent / "data" / "models"
CARD = [
    *("--device", "24GB", "--host", "64GB", "--disk", "1TB"),
    *("--link", "25GB/s", "--disk-rate", "3GB/s", "--flops", "100T"),
]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b",
        pytest.param("qwen3-30b-a3b", marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", marks=pytest.mark.slow),
    ],
)
def test_the_settings_found_for_a_card_pass_a_dry_run(name, method, capsys, tmp_path, monkeypatch):
    # updates at home are those of this machine, which is not equally fast twice
    monkeypatch.setattr("odc.train.fit.rates.update_seconds", lambda threads: 4e-10)
    assert main(["fit", str(MODELS / name), *CARD, "--method", method, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    path = tmp_path / "config.yaml"
    path.write_text(found["config_yaml"])
    assert main(["train", str(path), "--dry-run", *CARD, "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["parameters"] == found["parameters"]
    assert judged["device_peak"] == found["device_peak"]
    assert judged["speed"]["tokens_s"] == pytest.approx(found["speed"]["tokens_s"], rel=0.01)
    assert judged["speed"]["bound_tokens_s"] >= judged["speed"]["tokens_s"]
    assert sum(judged["host"].values()) <= 64 << 30
    assert sum(judged["disk"].values()) <= 1 << 40


def test_a_dry_run_refuses_what_cannot_work_and_trains_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "tiny-dense", "--dry-run", *CARD]
    assert main(words) == 0
    assert "expected" in capsys.readouterr().out
    assert main([*words, "memory.page_budget=8MB"]) == 2
    assert "does not fit: device:" in capsys.readouterr().out
    assert main([*words, "memory.total_mem=much"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_a_place_of_updates_as_a_run_does(capsys):
    words = ["train", "tiny-dense", "train.dtype=bfloat16", "memory.total_mem=1GB"]
    for more in ([], ["--dry-run", *CARD]):
        assert main([*words, *more]) == 2
        assert "train.dtype: got bfloat16 with optimizer.where device" in capsys.readouterr().err


def test_a_machine_is_told_to_a_dry_run_only(capsys):
    assert main(["train", "tiny-dense", "--link", "1GB/s"]) == 2
    assert "--link: tells --dry-run about a machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fit"], "name one model"),
        (["fit", "--shapes", "x.csv"], "needs the model's config.json"),
        (["fit", "tiny-dense", "--flops", "fast"], "--flops: got 'fast'"),
        (["fit", "no-such-model"], "no such file"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, told, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err
