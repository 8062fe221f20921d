"""A heartbeat of ranks through the store: a rank that stands still is found in seconds.

A killed rank closes its connections, which its peers see at once. A stopped one (SIGSTOP, a machine
that swaps or lost its network) keeps them open, and its peers would wait until a time-out. So every
rank counts in the store of its process group, and watches the count of the next rank; who finds it
standing writes that down, and all ranks give their collectives up.

A rank that ends because another is gone closes its connections, too, and who waits for both may see
its end first. So who finds a rank gone writes that down as well, before it ends itself.

The thread counts, not the program: a rank that computes for long, or stands in a debugger, beats.
The store must live on: torchrun keeps it outside of the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

INTERVAL_S = 1.0
PATIENCE_S = 10.0
_PREFIX = "odc/heartbeat"


class Heartbeat:
    """One rank's heartbeat, and its eye on the next.

    Args:
        store: of the process group.
        rank, size: this rank and how many there are.
        on_lost: called on the heartbeat's thread with the rank that stands still, once.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        on_lost: Callable[[int], None],
        *,
        interval_s: float = INTERVAL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._on_lost = on_lost
        self._interval_s, self._patience_s = interval_s, patience_s
        self._stop = threading.Event()
        store.set(self._key(rank), "0")  # before any collective: who never counted never began
        self._thread = threading.Thread(target=self._run, name="odc-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the heartbeat; the rank says that it left on purpose."""
        if not self._stop.is_set():
            self._stop.set()
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(self._rank), "left")

    def first_lost(self, rank: int) -> int:
        """The rank that was found gone before all others; `rank` is, if nobody has told of one."""
        try:
            found = int(self._store.compare_set(f"{_PREFIX}/gone", "", str(rank)))
        except RuntimeError:  # the store is gone with the rank that held it
            return rank
        return rank if found == self._rank else found  # a peer waited for this one in vain

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/{rank}"

    def _run(self) -> None:
        watched = (self._rank + 1) % self._size
        count, last, changed = 0, "", time.monotonic()
        while not self._stop.wait(self._interval_s):
            count += 1
            try:
                self._store.set(self._key(self._rank), str(count))
                value = self._read(self._key(watched))
                lost = self._read(f"{_PREFIX}/lost")
                now = time.monotonic()
                if value != last or value in ("", "left"):
                    last, changed = value, now
                elif not lost and now - changed > self._patience_s:
                    lost = str(watched)
                    self._store.set(f"{_PREFIX}/lost", lost)
            except RuntimeError:  # the store is gone: nothing can be learned from it
                return
            if lost and not self._stop.is_set():
                self._on_lost(int(lost))
                return

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""
