"""What a home is made of: its tiers, which pages live in which, and whether that fits the machine.

Planned before anything is allocated, as integers; ``make_home`` then takes what was planned.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from odc.errors import BudgetError
from odc.memory.events import Kind
from odc.memory.frames import FRAME_BYTES
from odc.memory.home import DiskHome, Home, HostHome, TieredHome, default_folder
from odc.memory.machine import Machine, gather
from odc.memory.pages import BLOCK_BYTES, PageTable
from odc.memory.placement import choose_host_pages, traffic_of
from odc.memory.preflight import Needs, host_mem_that_fits

HOMES = ("host", "disk", "host+disk")
# Of a byte from disk, in bytes from host memory. On the virtual clock (24 layers, 30 % resident,
# half of the state on a disk of a quarter of host memory's speed) a step takes 1342, 1204, 1101 ms
# at a cost of 1, 2, 4; compute alone takes 1080.
DISK_COST = 4.0


@dataclass(frozen=True, slots=True)
class HomeOptions:
    """Where pages are to live when they are not on the device.

    Attributes:
        kind: ``host``, ``disk`` or ``host+disk``.
        folder: of the file on disk; None: the system's folder for temporary files.
        host_mem: bytes of host memory for pages of ``host+disk``; None: what is free.
        prefix: what stands before the names of options in errors.

    Raises:
        BudgetError: no such home, or host memory for a home that has no limit of it.
    """

    kind: str
    folder: str | os.PathLike[str] | None = None
    host_mem: int | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.kind not in HOMES:
            raise BudgetError(
                f"{self.prefix}home must be {', '.join(HOMES[:-1])} or {HOMES[-1]}, "
                f"got {self.kind!r}"
            )
        if self.host_mem is not None and self.kind != "host+disk":
            raise BudgetError(
                f"{self.prefix}host_mem limits the host memory of {self.prefix}home host+disk; "
                f"with {self.prefix}home {self.kind} leave it out"
            )

    @property
    def block_bytes(self) -> int:
        """What the slices of a coded page are filled up to: a disk moves whole blocks."""
        return 64 if self.kind == "host" else BLOCK_BYTES

    def machine(self) -> Machine:
        """The machine, with the folder if anything goes there."""
        return gather(None if self.kind == "host" else default_folder(self.folder))


@dataclass(frozen=True, slots=True)
class HomePlan:
    """Where each page will live, and what that takes.

    Attributes:
        on_host: (num_pages,) bool.
        spare: (num_pages,) bool, pages that come home only now and then: gradients, and everything
            where the device has room for all of it.
        needs: for the preflight.
    """

    on_host: np.ndarray
    spare: np.ndarray
    needs: Needs

    def load_cost(self) -> np.ndarray:
        """(num_pages,) what loading a byte costs, relative: what lives on disk stays longer."""
        if self.on_host.all() or not self.on_host.any():
            return np.ones(len(self.on_host))
        return np.where(self.on_host, 1.0, DISK_COST)


def plan_home(
    table: PageTable,
    options: HomeOptions,
    machine: Machine,
    *,
    frame_bytes: int,
    rest_bytes: int = 0,
    gradients_come_home: bool = True,
    pages_come_home: bool = True,
) -> HomePlan:
    """Divide pages among tiers.

    Args:
        table: sealed page table.
        options: what was asked for.
        machine: tells how much host memory there is, where that was not asked for.
        frame_bytes: the pool of frames.
        rest_bytes: what else the device is to hold.
        gradients_come_home: False where each gradient is used up before its pages must go.
        pages_come_home: False where the device has room for all of them.
    """
    gradients = np.array([p.kind == Kind.GRADIENT for p in table.pages], bool)
    spare = gradients if pages_come_home else np.ones(len(table.pages), bool)
    room = np.array([p.room_bytes for p in table.pages], np.int64)
    on_host = np.full(len(table.pages), options.kind == "host")
    if options.kind == "host+disk":
        host_mem = options.host_mem
        if host_mem is None:
            host_mem = host_mem_that_fits(machine, frame_bytes, rest_bytes)
        traffic = traffic_of(table, gradients_come_home)
        on_host = choose_host_pages(room, traffic, host_mem // FRAME_BYTES * FRAME_BYTES)

    comes = gradients_come_home and pages_come_home

    def size(chosen: np.ndarray) -> int:
        return int(room[chosen].sum())

    needs = Needs(
        home=options.kind,
        frame_bytes=frame_bytes,
        host_bytes=size(on_host & ~spare),
        spare_bytes=size(on_host & spare),
        disk_bytes=size(~on_host),
        rest_bytes=rest_bytes + size(on_host & gradients & comes),
    )
    return HomePlan(on_host, spare, needs)


def make_home(table: PageTable, options: HomeOptions, plan: HomePlan) -> Home:
    """Allocate what was planned.

    Raises:
        ConfigError: the folder cannot be written.
        BudgetError: it has too little space.
    """
    option = f"{options.prefix}home_dir"
    if options.kind == "host":
        if plan.spare.all():
            return HostHome(0, table.home_bytes + table.gradient_bytes)
        return HostHome(table.home_bytes, table.gradient_bytes)
    if options.kind == "disk":
        return DiskHome(table.home_bytes + table.gradient_bytes, options.folder, option=option)
    return TieredHome(table.pages, plan.on_host, plan.spare, options.folder, option=option)
