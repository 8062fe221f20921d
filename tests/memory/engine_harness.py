"""What the conformance suite needs of an engine: pages, a clock, a line that is held, a fault.

A harness makes an engine whose lines the test can hold, so that commands pile up in the queues
and their order is decided by the engine and by nothing else. A CUDA engine joins with one class.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from odc.memory.engines.base import CommandKind, Ticket, TierSpeed
from odc.memory.engines.threads import ThreadEngine
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind, Tier
from odc.memory.frames import FRAME_BYTES, AddressRange, FramePool
from odc.memory.pages import Page

NUM_PAGES = 24
SLICE = FRAME_BYTES  # of a transfer, in these tests
Fault = Callable[[CommandKind, int], BaseException | None]


def no_fault(kind: CommandKind, page: int) -> BaseException | None:
    return None


class ThreadHarness:
    """The thread engine over a home that can be held and that can fail."""

    name = "threads"
    used_bytes = 0

    def __init__(
        self,
        bandwidth: float | None = None,
        timeout_s: float = 20.0,
        tiers: tuple[Tier, ...] = (Tier.HOST,),
        page_frames: int = 1,
    ) -> None:
        self.fault: Fault = no_fault
        self.tiers, self.traffic = tiers, {}
        self.moved: list[tuple[str, int]] = []
        self.slices: list[tuple[str, int, int]] = []  # the same, and which slice of the page
        self.always_open: set[int] = set()  # pages whose transfers no gate holds
        self.gates = {CommandKind.LOAD: threading.Event(), CommandKind.STORE: threading.Event()}
        for gate in self.gates.values():
            gate.set()
        self.pool = FramePool(NUM_PAGES * page_frames)
        self.room = AddressRange(NUM_PAGES * page_frames * FRAME_BYTES)
        self.engine = ThreadEngine(self.pool, self, bandwidth, timeout_s, SLICE)
        self.pages = pages_at(self.room.address, page_frames)

    def tier_of(self, page: int) -> Tier:
        return tier_of(self.tiers, page)

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._move(CommandKind.LOAD, page, offset, num_bytes)

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._move(CommandKind.STORE, page, offset, num_bytes)

    def _move(self, kind: CommandKind, page: int, offset: int, num_bytes: int) -> None:
        assert num_bytes <= SLICE
        if page in self.always_open:
            return
        self.gates[kind].wait(20.0)
        self.slices.append((kind.name, page, offset // SLICE))
        if offset == 0:
            self.moved.append((kind.name, page))
        error = self.fault(kind, page)
        if error is not None:
            raise error

    @contextmanager
    def held(self, kind: CommandKind) -> Iterator[Ticket]:
        """Inside, the line of ``kind`` is busy with page 0; yields that command."""
        self.gates[kind].clear()
        first = self.engine.submit(kind, self.pages[0])
        while not first.started:
            time.sleep(0.0005)
        try:
            yield first
        finally:
            self.gates[kind].set()

    def run_until_idle(self, tickets: list[Ticket]) -> None:
        for ticket in sorted(tickets, key=lambda t: t.number):
            while ticket.done_ns < 0 and not ticket.cancelled:
                time.sleep(0.0005)

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.engine.close()


class VirtualHarness:
    """The virtual engine; 10 ms a page unless told otherwise."""

    name = "virtual"

    def __init__(
        self,
        bandwidth: float | None = None,
        timeout_s: float = 20.0,
        tiers: tuple[Tier, ...] = (Tier.HOST,),
        page_frames: int = 1,
    ) -> None:
        self.fault: Fault = no_fault
        speed = bandwidth or FRAME_BYTES * 100.0
        self.engine = VirtualEngine(
            speed,
            fault=lambda t: self.fault(t.kind, t.page.page),
            tier_of=lambda page: tier_of(tiers, page),
            speeds={tier: TierSpeed(speed, speed) for tier in tiers},
            slice_bytes=SLICE,
            update_rate=speed,
        )
        self.pages = pages_at(0, page_frames)

    @contextmanager
    def held(self, kind: CommandKind) -> Iterator[Ticket]:
        first = self.engine.submit(kind, self.pages[0])
        self.engine.poll(first)  # starts, and ends 10 ms from now
        assert first.started
        yield first

    def run_until_idle(self, tickets: list[Ticket]) -> None:
        self.engine.advance(10**12)
        for ticket in tickets:
            with suppress(Exception):
                self.engine.poll(ticket)

    def close(self) -> None:
        pass


Harness = ThreadHarness | VirtualHarness


def in_order_of_end(*tickets: Ticket) -> list[int]:
    return [t.page.page for t in sorted(tickets, key=lambda t: t.done_ns)]


def resident(h: Harness, *pages: int) -> None:
    """Map pages without content."""
    for page in pages:
        h.engine.wait(h.engine.submit(CommandKind.CREATE, h.pages[page]))


def tier_of(tiers: tuple[Tier, ...], page: int) -> Tier:
    """The pages take turns."""
    return tiers[page % len(tiers)]


def pages_at(address: int, frames: int) -> list[Page]:
    size = frames * FRAME_BYTES
    return [
        Page(i, i, Kind.PARAMETER, 0, 0, size, frames, address + i * size, 0)
        for i in range(NUM_PAGES)
    ]
