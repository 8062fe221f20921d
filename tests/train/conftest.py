"""Small runs for the tests of trainer and checkpoints: two models, one corpus, one token cache."""

import argparse
import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from odc.train.config import Config, load_config

MODELS = {
    "dense": {"model.hidden_size": 160, "model.num_layers": 4, "memory.page_budget": "16MB"},
    "moe": {
        "model.hidden_size": 64,
        "model.num_layers": 2,
        "model.num_experts": 6,
        "model.expert_size": 96,
        "memory.page_budget": "12MB",
    },
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> dict[str, Path]:
    """Keys of section `data` for a corpus of two files."""
    folder = tmp_path_factory.mktemp("corpus")
    for module in (argparse, ast):
        source = Path(module.__file__)
        (folder / source.name).write_bytes(source.read_bytes())
    return {"data.corpus": folder, "data.cache_dir": tmp_path_factory.mktemp("cache")}


@pytest.fixture(scope="session")
def make_config(corpus) -> Callable[..., Config]:
    """Returns `make(model, **{"section.key": value})`."""

    def make(model: str = "moe", **overrides) -> Config:
        keys = {
            **corpus,
            "data.vocab_size": 400,
            "data.eval_fraction": 0.2,
            "train.steps": 8,
            "train.seq_len": 24,
            "train.micro_batch": 2,
            "train.eval_batches": 2,
            "train.threads": 1,
            "optimizer.lr": 3e-3,
            "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": 2,
            **MODELS[model],
        }
        return load_config(None, {**keys, **overrides})[0]

    return make


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict]]:
    def read(run_dir: Path) -> list[dict]:
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    return read
