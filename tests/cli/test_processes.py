"""Claims about whole processes: killed, interrupted or failing, a run can be read and resumed."""

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from odc.cli.main import main
from odc.errors import PageIOError
from odc.memory.home import DiskHome
from odc.train.checkpoint import latest
from profiler import TraceReader
from tests import forked

KEYS = [
    "data.vocab_size=400",
    "train.seq_len=24",
    "train.micro_batch=2",
    "train.eval_every=null",
    "train.threads=1",
    "model.num_layers=2",
    "model.num_experts=6",
    "memory.page_budget=12MB",
    "checkpoint.every=3",
    "profiler.trace_interval=1",
]


def main_on_a_failing_disk(arguments: list[str]) -> int:
    """`main` where the page home fails in the middle of a run, as a worn disk would."""
    real, calls = DiskHome._transfer, itertools.count()

    def transfer(self, call, verb, page, offset, address, num_bytes):
        if next(calls) >= 250:
            raise PageIOError("cannot write: No space left on device", page=page, path=self.path)
        return real(self, call, verb, page, offset, address, num_bytes)

    DiskHome._transfer = transfer
    return main(arguments)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    source = Path(argparse.__file__)
    (folder / source.name).write_bytes(source.read_bytes())
    cache = tmp_path_factory.mktemp("cache")
    return [f"data.corpus={folder}", f"data.cache_dir={cache}", *KEYS]


def wait_for_steps(alive: Callable[[], bool], run_dir: Path, count: int) -> None:
    """Returns as soon as a run has written `count` steps, or has ended."""
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while alive() and time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def check_kills(keys: list[str], tmp_path: Path, kills: int, model: str) -> None:
    """Kills a run again and again, resumes it, and compares it with one that ran through."""
    steps = 6 * (kills + 1)
    arguments = ["train", model, *keys, f"train.steps={steps}"]
    assert main([*arguments, "--run-dir", str(tmp_path / "whole")]) == 0
    draw = random.Random(kills)
    killed = tmp_path / "killed"
    for number in range(kills):
        resume = ["--resume"] if latest(killed / "checkpoints") else []
        words = [*arguments, "--run-dir", str(killed), *resume]
        process = forked.start(main, words, tmp_path / "err")
        wait_for_steps(process.is_alive, killed, 6 * number + 4)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        process.join()
        reader = TraceReader(killed)
        assert len(reader.need()["seq"]) and len(reader.steps()["step"])
    assert process.exitcode == -signal.SIGKILL
    assert main([*arguments, "--run-dir", str(killed), "--resume"]) == 0
    assert losses(killed) == losses(tmp_path / "whole")
    saved = [latest(tmp_path / name / "checkpoints") for name in ("killed", "whole")]
    files = [json.loads((path / "checkpoint.json").read_text())["files"] for path in saved]
    assert files[0] == files[1]
    assert TraceReader(killed).steps()["step"].tolist() == list(range(steps))


def test_a_killed_run_resumes_bit_equal(keys, tmp_path):
    check_kills(keys, tmp_path, kills=2, model="tiny-moe")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense"])
def test_a_run_killed_twenty_times_resumes_bit_equal(keys, tmp_path, model):
    keys = [*keys, "model.num_experts=null"] if model == "tiny-dense" else keys
    check_kills(keys, tmp_path, kills=20, model=model)


def test_ctrl_c_ends_a_process_cleanly_with_130(keys, tmp_path):
    run_dir = tmp_path / "run"
    words = ["train", "tiny-moe", *keys, "train.steps=5000", "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [sys.executable, "-m", "odc.cli.main", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(lambda: process.poll() is None, run_dir, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "interrupted" in out
    done = len(losses(run_dir))
    assert latest(run_dir / "checkpoints").name == f"step-{done:06d}"
    assert err.splitlines()[-1].endswith(f"to go on: odc train --run-dir {run_dir} --resume")
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert all(TraceReader(run_dir).clean_end.values())


def test_a_failing_disk_ends_a_process_with_3_and_spares_its_checkpoints(keys, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["train", "tiny-moe", *keys, "train.steps=60", "checkpoint.every=1"]
    disk = ["memory.home=disk", f"memory.home_dir={tmp_path / 'home'}", "--run-dir", str(run_dir)]
    process = forked.start(main_on_a_failing_disk, [*arguments, *disk], tmp_path / "err")
    code, err = forked.finish(process), (tmp_path / "err").read_text()
    assert code == 3, err
    told = [line for line in err.splitlines() if line.startswith("odc: ")]
    assert "Traceback" not in err and len(told) == 1
    assert told[0].startswith("odc: page ") and f"in {tmp_path / 'home'}" in told[0]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and "No space left" in summary["reason"]
    done = len(losses(run_dir))
    assert done and TraceReader(run_dir).steps()["step"].tolist() == list(range(done))
    assert main([*arguments, *disk, "--resume", f"train.steps={done + 1}"]) == 0
    assert [step for step, _ in losses(run_dir)] == list(range(done + 1))
