"""Where FSDP2 refuses or accepts something, so does `fully_shard`; see `drop_in_claims.py`."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from odc.fsdp.dbuffer import FrameStorage, GatherPool
from tests.fsdp.claims import cases
from tests.fsdp.drop_in_claims import CLAIMS


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)


def test_ranks_that_are_threads_share_a_pool():
    pool, failed = GatherPool(0), []

    def use():
        try:
            storage = FrameStorage(2 << 20, torch.float32, (0, 0), pool)
            for _ in range(300):
                storage.take()
                storage.give()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert not failed and pool.taken_bytes == 0
