"""Claims about examples/: they run as they are, and their configurations load."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from odc.train.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_RANKS = EXAMPLES / "fully_shard.py"
CONFIGS = Path(__file__).parents[2] / "odc" / "train" / "configs"


@pytest.mark.parametrize(
    "path", sorted({*EXAMPLES.glob("*.py")} - {ON_RANKS}), ids=lambda path: path.name
)
def test_example_runs(path, capsys):
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert "loss" in capsys.readouterr().out


@pytest.mark.slow
def test_the_sharded_example_runs_on_two_ranks_and_learns():
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(ON_RANKS)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 3
    held = re.findall(r"rank \d holds (\d+) of (\d+)", done.stdout)
    assert sum(int(part) for part, _ in held) == int(held[0][1])


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.glob("*.yaml"), *CONFIGS.glob("*.yaml")]), ids=lambda path: path.name
)
def test_configuration_loads_and_has_no_key_without_effect(path):
    config, notices = load_config(path)
    assert notices == [] and config.freeze()
