"""The demo does the whole job, on a model of seconds."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from odc.cli.main import main
from odc.train.demo import run_demo
from tests import forked

SMALL = [
    "model.hidden_size=64",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_experts=16",
    "model.expert_size=96",
    "data.max_bytes=1MB",
    "data.vocab_size=512",
    "train.steps=24",
    "memory.page_budget=24MB",
]


def test_the_demo_profiles_learns_judges_trains_on_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODC_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    result = run_demo(tmp_path / "demo", SMALL, continue_steps=6, say=said.append)
    assert [row.policy for row in result.rows] == [
        "lru+none",
        "cost_aware+popularity",
        f"cost_aware+{result.chosen}",
    ]
    assert len({row.last_loss for row in result.rows}) == 1
    assert all(row.bytes_in > 0 for row in result.rows)
    evaluation = json.loads((tmp_path / "demo" / "evaluation.json").read_text())
    assert {row["policy"] for row in evaluation["rows"]} >= {"lru+none", "cost_aware+lstm"}
    assert result.report.stat().st_size > 1_000_000
    assert any("measured" in text for text in said)


def test_an_interrupted_demo_stops_at_once_with_exit_code_130(tmp_path: Path) -> None:
    words = [word.replace("train.steps=24", "train.steps=4000") for word in SMALL]
    arguments = ["demo", "--run-dir", str(tmp_path / "demo"), *words]
    cache = str(tmp_path / "cache")
    process = forked.start(main, arguments, tmp_path / "err", ODC_CACHE_DIR=cache)
    metrics = tmp_path / "demo" / "profile" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert forked.finish(process, 60) == 130
    assert not (tmp_path / "demo" / "predictors").exists()
