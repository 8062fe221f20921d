"""What the memory manager tells the world: codes, the row of a step, and the ``Sink`` protocol.

The values are those of the trace schema; the profiler, which memory may not import, defines the
same codes for the files, and the adapter between the two checks that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Phase(IntEnum):
    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVALUATION = 4
    GENERATION = 5
    OTHER = 6


FORWARD_PHASES = (Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION)


class Kind(IntEnum):
    PARAMETER = 0
    GRADIENT = 1
    MOMENT = 2


class Op(IntEnum):
    READ = 0
    WRITE = 1  # read and changed: must be loaded, becomes dirty
    CREATE = 2  # fresh content: gets frames, is not loaded
    DROP = 3  # dead: frames are given back, nothing is stored
    UPDATE = 4  # goes home, where the update runs; the parameters on the device are old then


class Act(IntEnum):
    LOAD = 0
    PREFETCH = 1
    WRITE_BACK = 2
    EARLY_WRITE_BACK = 3
    EVICT = 4
    CANCEL = 5
    DROP = 6
    STALL = 7
    UPDATE = 8  # the optimizer ran at home


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2


class Account(IntEnum):
    PAGES = 0
    GATHERED = 1
    ACTIVATIONS = 2
    TRANSIENTS = 3


@dataclass(slots=True)
class StepRow:
    """One optimizer step, in the order of the trace's columns. Times in ns, sizes in bytes."""

    t_ns: int
    step: int
    epoch: int
    loss: float
    tokens: int
    step_ns: int
    compute_ns: int
    stall_ns: int
    comm_ns: int
    profiler_ns: int
    bytes_in: int
    bytes_out: int
    page_bytes: int
    peak_page_bytes: int
    transient_bytes: int


class Sink(Protocol):
    """Receives what happened. Called on the training thread; must be cheap and never raise."""

    def need(
        self,
        seq: int,
        t_ns: int,
        step: int,
        micro: int,
        phase: int,
        ctx: int,
        group: int,
        kind: int,
        op: int,
        compute_ns: int,
        tokens: int,
    ) -> None: ...

    def action(
        self,
        t_ns: int,
        seq: int,
        page: int,
        act: int,
        src: int,
        dst: int,
        num_bytes: int,
        dur_ns: int,
        wait_ns: int,
        policy: int,
    ) -> None: ...

    def mem(
        self, t_ns: int, step: int, tier: int, account: int, allocated: int, peak: int
    ) -> None: ...

    def step(self, row: StepRow) -> None: ...
