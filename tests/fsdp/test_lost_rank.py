"""A rank that is killed ends the others at once, with an error that names it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from odc.errors import RankLostError
from odc.fsdp.heartbeat import Heartbeat
from tests.forked import CONTEXT


def train(rank: int, size: int, store: str, pipe) -> None:
    import torch
    import torch.distributed as dist

    import odc
    from tests.fsdp.sharded_models import Net, batch, loss_of

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    torch.manual_seed(0)
    model = odc.FullyShardedDataParallel(Net())
    step = 0
    try:
        while True:
            loss_of(model, batch(rank, step)).backward()
            model.zero_grad()
            step += 1
            if step == 3:
                pipe.send("trains")
    except RankLostError as error:
        pipe.send((error.rank, error.group, error.step, step, str(error)))
        os._exit(3)


@pytest.mark.dist
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_gone_or_stands_still_is_named_by_the_others(tmp_path, how):
    pipes, processes = [], []
    os.environ["OMP_NUM_THREADS"] = "1"
    for rank in range(3):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=train, args=(rank, 3, str(tmp_path / "store"), theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(120) and pipe.recv() == "trains"
        os.kill(processes[1].pid, how)
        killed = time.monotonic()
        for rank in (0, 2):
            assert pipes[rank].poll(60)
            lost, group, at, step, text = pipes[rank].recv()
            # Generous: seconds on an idle machine, see benchmarks; a time-out would be minutes.
            assert time.monotonic() - killed < 40
            assert lost == 1 and "rank 1" in text
            assert at in (step, step + 1) and group
        for rank in (0, 2):
            processes[rank].join(20)
            assert processes[rank].exitcode == 3
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_all_name_the_rank_that_was_found_gone_first(tmp_path, kind):
    """Who ends because of it closes its connections as well."""
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 3)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    beats = [Heartbeat(store, rank, 3, lambda rank: None) for rank in range(3)]
    assert beats[2].first_lost(1) == 1  # it is told of, before rank 2 ends
    assert beats[0].first_lost(2) == 1
    assert beats[1].first_lost(0) == 0, "it is there"
    for beat in beats:
        beat.close()
