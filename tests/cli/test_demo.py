"""The demo does the whole job, on a model of seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odc.train.demo import run_demo

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
    environment = {**os.environ, "ODC_CACHE_DIR": str(tmp_path / "cache")}
    words = [word.replace("train.steps=24", "train.steps=4000") for word in SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "odc.cli.main", "demo", "--run-dir", str(tmp_path / "demo"), *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "demo" / "profile" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not (tmp_path / "demo" / "predictors").exists()
