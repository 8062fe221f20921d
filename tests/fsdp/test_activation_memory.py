"""The process's peak falls by what the ledger predicted from one step that kept everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from odc.memory.activations import MODES

ROOT = Path(__file__).parents[2]


def measure(name: str, mode: str) -> dict:
    """In a process of its own; what is freed goes back to the system at once, so that it shows."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fsdp.activation_memory", name, mode],
        cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_resident_memory_falls_as_the_ledger_predicted(name):
    found = {mode: measure(name, mode) for mode in MODES}
    kept = found["keep"]
    for mode in ("checkpoint", "offload"):
        assert found[mode]["losses"] == kept["losses"]
        predicted = kept["counted"] - kept["predicted"][mode]
        assert predicted > 0.5 * kept["counted"]
        assert kept["counted"] - found[mode]["counted"] == pytest.approx(predicted, rel=0.1)
        assert kept["rss"] - found[mode]["rss"] == pytest.approx(predicted, rel=0.1)
