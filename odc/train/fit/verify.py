"""A few real steps of a configuration, in a process of their own: what they took, and at most held.

    measured = run_steps(config_path, overrides)

The process sets the kernel's peak back once the model is built, so that it tells of the steps.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc.errors import OdcError

STEPS = 6
_LEAST, _WARM_UP_S, _MOST = 4, 4.0, 40  # steps of warm-up: as many as take some seconds


@dataclass(frozen=True)
class Measured:
    """What steps took: medians of the measured ones; bytes are the most of any.

    Attributes:
        step_s, stall_s: Of a step.
        tokens_s: Tokens a second.
        device_peak: Pages and everything else beside the process as it stood.
        page_peak: Of it, frames of pages.
        process_peak: Resident size of the process.
        process_base: Resident size before the first step, without pages and home.
    """

    step_s: float
    stall_s: float
    tokens_s: float
    device_peak: int
    page_peak: int
    process_peak: int
    process_base: int
    bytes_in: int
    bytes_out: int


def run_steps(
    config: str, overrides: Sequence[str] = (), steps: int = STEPS, step_s: float = 1.0
) -> Measured:
    """Trains some steps and measures the last, once schedules are found.

    Args:
        config: A `config.yaml`.
        overrides: `SECTION.KEY=VALUE`.
        steps: Measured ones.
        step_s: How long a step is expected to take.

    Raises:
        OdcError: The process failed; with its last words.
    """
    total = steps + min(max(_LEAST, round(_WARM_UP_S / step_s)), _MOST)
    words = [
        *overrides,
        f"train.steps={total}",
        f"train.log_every={total}",
        "train.eval_every=null",
        "checkpoint.every=null",
        f"profiler.trace_interval={10 * total}",
    ]
    command = [sys.executable, "-m", "odc.train.fit.verify", config, str(steps), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        raise OdcError(f"{config}: the steps to verify failed: {last[0]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _main(config_path: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """What the process does."""
    from odc.memory.ledger import resident_bytes
    from odc.train.config import load_config
    from odc.train.run_dir import RunDir
    from odc.train.trainer import Trainer

    config, _ = load_config(config_path, overrides)
    with tempfile.TemporaryDirectory(prefix="odc-fit-") as folder:
        run_dir = RunDir(Path(folder) / "run")
        trainer = Trainer(config, run_dir)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
            trainer.run()
            ledger, manager = trainer.manager.ledger, trainer.manager
            assert manager.pool is not None
            rest = ledger.measure(manager.pool.num_bytes, manager._home_bytes)
        finally:
            trainer.close()
        lines = (run_dir.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][-steps:]
    step_s = statistics.median(row["step_s"] for row in rows)
    page_peak = max(row["peak_page_bytes"] for row in rows)
    return {
        "step_s": step_s,
        "stall_s": statistics.median(row["stall_s"] for row in rows),
        "tokens_s": rows[0]["tokens"] / step_s,
        "device_peak": page_peak + rest,
        "page_peak": page_peak,
        "process_peak": resident_bytes()[1],
        "process_base": ledger.base_bytes,
        "bytes_in": statistics.median_low(row["bytes_in"] for row in rows),
        "bytes_out": statistics.median_low(row["bytes_out"] for row in rows),
    }


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
