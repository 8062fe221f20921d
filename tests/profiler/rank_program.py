"""What each rank does in `test_session.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import all_reduce  # a name that was taken before the profiler began

from odc.monitor import Profiler


def record_collectives(rank: int, run_dir: Path) -> list[list[int]]:
    """Three steps of every collective, each second one traced; returns the bytes between ranks."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    with Profiler(trace_interval=2, run_dir=run_dir) as profiler:
        for _ in range(3):
            t = torch.ones(1000)
            all_reduce(t)
            dist.all_gather_into_tensor(torch.empty(2000), t)
            dist.all_gather([torch.empty(1000), torch.empty(1000)], t)
            dist.reduce_scatter_tensor(torch.empty(500), t, async_op=True).wait()
            dist.broadcast(t, 1)
            dist.all_to_all_single(torch.empty(1000), t)
            dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
            dist.all_reduce(t, group=alone)
            dist.barrier()
            profiler.step(loss=float(t.sum()))
        dist.barrier()
        return profiler.comm_matrix.tolist()
