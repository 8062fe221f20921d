"""The simulator: the shipped pager on a virtual clock, over a recorded workload.

Nothing of the scheduler is rewritten here; a simulated number is a statement about the product as
long as the workload's compute times and the link's figures are those of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from odc.errors import BudgetError
from odc.memory.engines.base import TierSpeed
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind, Op, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Pager, Tuning
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay.drive import Drive
from odc.memory.replay.results import PassResult, SimResult
from odc.memory.replay.workload import Workload
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy

__all__ = [
    "Link",
    "PassResult",
    "PrefetchFactory",
    "SimResult",
    "Tiers",
    "simulate",
    "virtual_drive",
]
PrefetchFactory = Callable[[OrderLibrary, Limits], Prefetcher | None]


@dataclass(frozen=True, slots=True)
class Link:
    """The way between device and home.

    Attributes:
        bandwidth_in, bandwidth_out: bytes/s each way.
        latency_ns: fixed cost of a transfer.
        frame_move_ns: cost of mapping or unmapping a frame.
        update_rate: bytes/s of parameters that are updated at home.
        tiers: of a home of several tiers; None: all pages have their home in one place.
    """

    bandwidth_in: float
    bandwidth_out: float | None = None
    latency_ns: int = 100_000
    frame_move_ns: int = 15_000
    update_rate: float = math.inf
    tiers: Tiers | None = None


@dataclass(frozen=True)
class Tiers:
    """A home in host memory and on disk.

    Attributes:
        on_host: (num_pages,) bool; the other pages live on disk.
        speeds: the way to each tier, instead of the link's own figures.
        load_cost: (num_pages,) cost of loading a byte, relative.
    """

    on_host: np.ndarray
    speeds: Mapping[Tier, TierSpeed]
    load_cost: np.ndarray

    def tier_of(self, page: int) -> Tier:
        """Where a page has its home."""
        return Tier.HOST if self.on_host[page] else Tier.DISK


class Clock:
    """The body of a simulated run: computing moves the clock, and pages have no bytes."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine

    def compute(self, group: int, duration_ns: int) -> None:
        self._engine.advance(duration_ns)

    def touch(self, group: int, kind: Kind, op: Op, part: int | None) -> None: ...


def simulate(
    workload: Workload,
    *,
    budget_bytes: int,
    link: Link,
    eviction: EvictionPolicy,
    prefetch: PrefetchFactory | None = None,
    tuning: Tuning | None = None,
    limits: Limits | None = None,
    empty_before: int | None = None,
) -> SimResult:
    """Run a workload under a policy and a budget.

    Args:
        workload: what is needed, and when.
        budget_bytes: bytes for pages.
        link: the way between device and home.
        eviction: victim order.
        prefetch: makes the prefetcher, or None for demand paging.
        tuning: knobs of the scheduler.
        limits: how far ahead pages may be loaded.
        empty_before: evict every page before this step, off the clock: what is measured from
            there on starts, under every policy and in every bound, with an empty device.

    Raises:
        BudgetError: something that is needed at once does not fit.
    """
    drive = virtual_drive(
        workload,
        budget_bytes=budget_bytes,
        link=link,
        eviction=eviction,
        prefetch=prefetch,
        tuning=tuning,
        limits=limits,
    )
    if empty_before is not None:
        drive.run(empty_before)
        drive.empty()
    return drive.run()


def virtual_drive(
    workload: Workload,
    *,
    budget_bytes: int,
    link: Link,
    eviction: EvictionPolicy,
    prefetch: PrefetchFactory | None = None,
    tuning: Tuning | None = None,
    limits: Limits | None = None,
) -> Drive:
    """The same, not yet run: for those who stop on the way. Arguments as for ``simulate``."""
    table = workload.table()
    if budget_bytes < FRAME_BYTES:
        raise BudgetError(f"budget: {budget_bytes} bytes hold no frame of {FRAME_BYTES}")
    engine = _engine(link)
    frames = min(budget_bytes // FRAME_BYTES, int(table.num_frames.sum()))
    transfers = Transfers(table, engine, frames, Tier.HOST)
    if link.tiers is not None:
        transfers.tier_of = link.tiers.tier_of
        table.load_weight = link.tiers.load_cost.tolist()
    library = OrderLibrary(Stations(table, workload.sets))
    prefetcher = None
    if prefetch is not None:
        prefetcher = prefetch(library, limits or Limits())
    pager = Pager(table, library, transfers, eviction, prefetcher, tuning)
    pager.hold_pinned()
    return Drive(workload, pager, Clock(engine), engine.now_ns)


def _engine(link: Link) -> VirtualEngine:
    tiers = link.tiers
    return VirtualEngine(
        link.bandwidth_in,
        link.bandwidth_out,
        link.latency_ns,
        link.frame_move_ns,
        update_rate=link.update_rate,
        tier_of=None if tiers is None else tiers.tier_of,
        speeds=None if tiers is None else tiers.speeds,
    )
