"""Claims about examples/: they run as they are, and their configurations load."""

import runpy
from pathlib import Path

import pytest
import torch

from odc.train.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = Path(__file__).parents[2] / "odc" / "train" / "configs"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_runs(path, capsys):
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.glob("*.yaml"), *CONFIGS.glob("*.yaml")]), ids=lambda path: path.name
)
def test_configuration_loads_and_has_no_key_without_effect(path):
    config, notices = load_config(path)
    assert notices == [] and config.freeze()
