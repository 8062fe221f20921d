"""The examples run as their first lines say, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_sharded_loop_on_two_ranks() -> None:
    out = run("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/fully_shard.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 3
    held = re.findall(r"rank \d holds (\d+) of (\d+)", out)
    assert sum(int(part) for part, _ in held) == int(held[0][1])


@pytest.mark.slow
def test_a_loop_in_pages() -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run("examples/plain_loop.py"))]
    assert losses[-1] < losses[0]
