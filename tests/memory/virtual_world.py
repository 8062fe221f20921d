"""A pager on the virtual clock, with contents that are numbers, and a shadow of what is right.

Loads and stores carry the number of a page's content between device and home as the engine's own
books say that they run: a store takes what is there when it begins, a load what home has then. So a
load that was let run before the store that it needs brings an old number, which the next access
sees.
"""

from __future__ import annotations

import contextlib
import random

from odc.errors import BudgetError, PageIOError
from odc.memory.auto_eviction import Auto
from odc.memory.engines.base import CommandKind, HomeUpdate, Priority, Ticket, TierSpeed
from odc.memory.engines.virtual import VirtualEngine
from odc.memory.events import Kind, Op, Phase, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Pager, Tuning
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.memory.victims import CostAware
from tests.memory.wrong_hints import RandomPrefetcher

TIERS = (Tier.HOST, Tier.DISK)


class VirtualWorld:
    """Groups of one to nine frames, a budget of little more than the largest, wrong hints.

    Args:
        seed: of everything.
        chance: that a load or store fails.
    """

    def __init__(self, seed: int, chance: float = 0.0, num_groups: int = 6) -> None:
        rng = self.rng = random.Random(seed)
        self.chance = chance
        self.failed = 0
        self.table = PageTable(rng.choice((1, 2, 4)) * FRAME_BYTES)
        for group in range(num_groups):
            size = rng.randint(1, 9) * FRAME_BYTES
            self.table.add_group(GroupSpec(f"g{group}", size, rng.choice((1, 2)), True), {})
        self.table.seal()
        self.frames = self.table.smallest_budget()[0] + rng.randint(0, 8)
        count = len(self.table.pages)
        self.on_host = [rng.random() < 0.5 for _ in range(count)]
        self.engine = VirtualEngine(
            1.0,
            frame_move_ns=1000,
            fault=self._run_command,
            tier_of=self._tier_of,
            speeds={Tier.HOST: TierSpeed(4e9, 3e9), Tier.DISK: TierSpeed(1e9, 5e8, 40_000)},
            slice_bytes=FRAME_BYTES,
        )
        self.transfers = Transfers(self.table, self.engine, self.frames, Tier.HOST)
        self.transfers.tier_of = self._tier_of
        self.pager = Pager(
            self.table,
            OrderLibrary(Stations(self.table, [(1, 2, 3)])),
            self.transfers,
            rng.choice((CostAware(), Auto())),
            RandomPrefetcher(self.table, seed),
            Tuning(
                flight_bytes=rng.choice((8, 64)) * FRAME_BYTES, early_stores=4, gate=seed % 2 == 1
            ),
        )
        self.pager.begin_pass(0)
        self.at_home, self.on_device = [0] * count, [-1] * count
        self.right = [0] * count
        self.version = 0

    def _tier_of(self, page: int) -> Tier:
        return TIERS[not self.on_host[page]]

    def _run_command(self, ticket: Ticket) -> BaseException | None:
        page = ticket.page.page
        if ticket.kind in (CommandKind.LOAD, CommandKind.STORE) and self.rng.random() < self.chance:
            self.failed += 1
            return PageIOError("injected", page=page)
        if ticket.kind == CommandKind.LOAD:
            self.on_device[page] = self.at_home[page]
        elif ticket.kind == CommandKind.STORE:
            self.at_home[page] = self.on_device[page]
        elif ticket.kind == CommandKind.RELEASE:
            self.on_device[page] = -1
        return None

    def step(self) -> None:
        """One access or something worse; the books must balance after it."""
        rng = self.rng
        choice = rng.random()
        try:
            if choice < 0.1:
                self.transfers.cancel_one_prefetch()
            elif choice < 0.2:
                self._urge_something()
            elif choice < 0.25:
                self.pager.begin_pass(rng.randrange(2))
            elif choice < 0.3:
                self.engine.advance(rng.randrange(20_000_000))
                self.transfers.poll()
            else:
                self._access(rng.randrange(len(self.table.groups)))
        except PageIOError:
            assert self.failed
        except BudgetError:
            raise AssertionError("nothing was pinned and yet there was no room") from None
        self.transfers.check()

    def _urge_something(self) -> None:
        coming = list(self.transfers.loading.values())
        if coming:
            self.engine.urge(self.rng.choice(coming))

    def _access(self, group: int) -> None:
        rng, table = self.rng, self.table
        kind = rng.choice(list(Kind))
        op = rng.choice((Op.READ, Op.WRITE, Op.WRITE))
        part = rng.randrange(table.parts(group)) if kind != Kind.GRADIENT else None
        ids = table.of(group, kind) if part is None else table.of_part(group, kind, part)
        self.pager.access(group, [(kind, op)], rng.choice(list(Phase)), part)
        for page in ids:
            assert table.state[page] == PageState.RESIDENT
            assert self.on_device[page] == self.right[page], f"page {page} came back old"
            if op == Op.WRITE:
                self.version += 1
                self.on_device[page] = self.right[page] = self.version
        self.engine.advance(rng.choice((0, 100_000, 5_000_000)))
        self.pager.release(group, kind, part)

    def finish(self) -> None:
        """Everything comes to rest; every page is right, no frame and no command is left over."""
        self.chance = 0.0
        with contextlib.suppress(PageIOError):  # of a command that had been let run before
            self.transfers.drain()
        self.transfers.drain()
        self.transfers.check()
        assert self.engine.is_idle()
        for page in self.table.pages:
            at = self.on_device if self.table.resident[page.page] else self.at_home
            assert at[page.page] == self.right[page.page]
        assert self.transfers.in_flight_bytes == self.transfers.out_flight_bytes == 0
        held = int(self.table.num_frames[self.table.resident].sum())
        assert self.transfers.free == self.frames - held


def random_commands(seed: int, steps: int) -> tuple[VirtualEngine, list[Ticket]]:
    """An engine alone, asked at random for anything, in any order."""
    rng = random.Random(seed)
    world = VirtualWorld(seed)
    engine, pages = world.engine, world.table.pages
    tickets: list[Ticket] = []
    for _ in range(steps):
        choice = rng.random()
        if choice < 0.6:
            after = tuple(rng.sample(tickets[-20:], min(rng.choice((0, 0, 1, 3)), len(tickets))))
            kind, priority = rng.choice(list(CommandKind)), rng.choice(list(Priority))
            page, work = rng.choice(pages), None
            if kind == CommandKind.UPDATE:
                ids = (page.page, rng.randrange(len(pages)))
                work = HomeUpdate(ids, page.num_bytes, lambda: None)
            tickets.append(engine.submit(kind, page, after, priority, work))
        elif choice < 0.75:
            engine.advance(rng.randrange(3_000_000))
        elif tickets:
            asked = rng.choice(tickets[-20:])
            (engine.cancel, engine.urge, engine.poll, engine.wait)[rng.randrange(4)](asked)
    return engine, tickets
