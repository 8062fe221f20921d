"""What each rank does in `test_ranks.py`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from odc.cli.exits import exit_code
from odc.train.config import Config, load_config
from odc.train.rank_trainer import RankTrainer
from odc.train.run_dir import RunDir
from odc.train.trainer import train
from profiler.schema import CommOp


def config_of(keys: dict[str, Any]) -> Config:
    return load_config(None, keys)[0]


def counted(rank: int, keys: dict[str, Any], run_dir: Path) -> dict[str, tuple[int, int]]:
    """Trains; returns (calls, sent bytes) by operation, as the collectives counted them."""
    trainer = RankTrainer(config_of(keys), RunDir(run_dir))
    try:
        assert trainer.run().status == "finished"
        counters = trainer.comm.counters
    finally:
        trainer.close()
    return {CommOp[op.upper()].name: (c.calls, c.sent_bytes) for op, c in counters.items()}


def whole_and_resumed(
    rank: int, dense: dict[str, Any], moe: dict[str, Any], folder: Path
) -> dict[str, tuple[int, int]]:
    """Two runs, and the dense one again from its middle; returns what the first counted."""
    found = counted(rank, dense, folder / "dense")
    train(config_of(moe), folder / "moe")
    if rank == 0:
        shutil.copytree(folder / "dense", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "step-000004")
    dist.barrier()
    train(config_of(dense), folder / "resumed", resume=True)
    return found


def resumed(rank: int, keys: dict[str, Any], run_dir: Path) -> str:
    return train(config_of(keys), run_dir, resume=True).status


def signalled(rank: int, keys: dict[str, Any], run_dir: Path) -> tuple[str, int]:
    """Rank 1 alone gets a signal in step 2; returns status and steps."""
    trainer = RankTrainer(config_of(keys), RunDir(run_dir))
    step = trainer._step
    done = []

    def with_signal(number: int) -> dict[str, Any]:
        done.append(number)
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(number)

    trainer._step = with_signal  # type: ignore[method-assign]
    outcome = trainer.run()
    trainer.close()
    return outcome.status, len(done)


def failing(rank: int, keys: dict[str, Any], run_dir: Path) -> tuple[int | None, str, str]:
    """Rank 1's batches end in step 3; returns exit code, class and text of the error."""
    trainer = RankTrainer(config_of(keys), RunDir(run_dir))
    batch = trainer.task.batch

    def until_step_3(step: int, micro: int) -> Any:
        if rank == 1 and step == 3:
            raise OSError(5, "Input/output error", "tokens.npy")
        return batch(step, micro)

    trainer.task.batch = until_step_3  # type: ignore[method-assign]
    try:
        trainer.run()
    except Exception as error:
        return exit_code(error), type(error).__name__, str(error)
    raise AssertionError("it did not fail")


def refused(rank: int, keys: dict[str, Any], run_dir: Path) -> tuple[int | None, str]:
    try:
        train(config_of(keys), run_dir)
    except Exception as error:
        return exit_code(error), str(error)
    raise AssertionError("it was not refused")


def ends(
    rank: int, limited: dict[str, Any], keys: dict[str, Any], folder: Path
) -> dict[str, tuple[Any, ...]]:
    """The three ways to end early, in one world; after the last it is gone."""
    return {
        "refusal": refused(rank, limited, folder / "refusal"),
        "signal": signalled(rank, keys, folder / "signal"),
        "failure": failing(rank, keys, folder / "failure"),
    }
