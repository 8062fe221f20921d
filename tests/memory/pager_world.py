"""A pager over real frames, threads and bytes, beside a shadow copy that knows what is right."""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from odc.errors import BudgetError, PageIOError
from odc.memory.auto_eviction import Auto
from odc.memory.engines.threads import ThreadEngine
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES, AddressRange, FramePool
from odc.memory.home import DiskHome, Home, HostHome, TieredHome
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Pager, Tuning
from odc.memory.pages import GroupSpec, PageState, PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Prefetcher
from odc.memory.scores import PopularityScorer
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.memory.victims import Belady, CostAware, Fifo, Gdsf, Lfu, Lru, Mru
from tests.memory.wrong_hints import RandomPrefetcher


class FlakyHome:
    """A home that is slow now and then, and fails with a given chance, half-way."""

    def __init__(self, home: Home, rng: random.Random) -> None:
        self.home, self.rng = home, rng
        self.tiers, self.tier_of, self.traffic = home.tiers, home.tier_of, home.traffic
        self.chance = 0.0
        self.raised = 0
        self.on_store: list[int] = []

    @property
    def used_bytes(self) -> int:
        return self.home.used_bytes

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self._fail(page, address, num_bytes, "read")
        self.home.load(page, offset, address, num_bytes)

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        self.on_store.append(page)
        self._fail(page, 0, 0, "write")
        self.home.store(page, offset, address, num_bytes)

    def _fail(self, page: int, address: int, num_bytes: int, verb: str) -> None:
        if self.rng.random() < 0.1:
            time.sleep(self.rng.random() * 0.002)
        if self.rng.random() < self.chance:
            self.raised += 1
            if address:
                ctypes.memset(address, 255, num_bytes // 2)
            raise PageIOError(f"cannot {verb}: injected", page=page, path="/home/pages")

    def close(self) -> None:
        self.home.close()


@dataclass
class Held:
    group: int
    kind: Kind
    part: int | None


@dataclass
class World:
    """What a seed makes: groups of all kinds and sizes, and a budget of little more than one."""

    seed: int
    home_kind: str = "host"
    folder: Path | None = None
    prefetch: str = "random"  # or "orders": the shipped one; or "none"
    num_groups: int = 8
    spare_frames: int | None = None
    held: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.table = PageTable(rng.choice((1, 2, 4)) * FRAME_BYTES)
        self.ranges: list[AddressRange] = []
        self.set_members = (1, 2, 3)
        for group in range(self.num_groups):
            self._add_group(rng, group)
        self.table.seal()
        least, _ = self.table.smallest_budget()
        spare = self.spare_frames if self.spare_frames is not None else rng.randint(0, 6)
        self.pool = FramePool(least + spare)
        home = self._make_home()
        self.home = FlakyHome(home, random.Random(self.seed + 1))
        self.engine = ThreadEngine(self.pool, self.home, timeout_s=20.0, slice_bytes=FRAME_BYTES)
        self.transfers = Transfers(self.table, self.engine, self.pool.num_frames, home.tiers[0])
        library = OrderLibrary(Stations(self.table, [self.set_members]))
        self.pager = Pager(
            self.table,
            library,
            self.transfers,
            rng.choice((Lru(), CostAware(), Belady(), Mru(), Fifo(), Lfu(), Gdsf(), Auto())),
            self._prefetcher(library),
            Tuning(
                flight_bytes=rng.choice((2, 8, 64)) * FRAME_BYTES,
                early_stores=rng.choice((1, 2, 8)),
                lookahead_bytes=rng.choice((1, 8, 64)) * FRAME_BYTES,
                max_items=rng.choice((None, None, 5)),
                gate=self.seed % 2 == 1,
            ),
        )
        self.pager.hold_pinned()
        self.version = 0
        self.right: list[int | None] = [0] * len(self.table.pages)  # a new home is zero
        self.pager.begin_pass(0)

    def _prefetcher(self, library: OrderLibrary) -> Prefetcher | None:
        if self.prefetch == "random":
            return RandomPrefetcher(self.table, self.seed)
        if self.prefetch == "orders":
            return OrderPrefetcher(library, PopularityScorer(library.stations.members))
        return None

    def _make_home(self) -> Home:
        table = self.table
        if self.home_kind == "disk":
            return DiskHome(table.home_bytes + table.gradient_bytes, self.folder)
        if self.home_kind == "host":
            return HostHome(table.home_bytes, table.gradient_bytes)
        on_host = np.random.default_rng(self.seed).random(len(table.pages)) < 0.5
        spare = np.array([p.kind == Kind.GRADIENT for p in table.pages])
        return TieredHome(table.pages, on_host, spare, self.folder)

    def _add_group(self, rng: random.Random, group: int) -> None:
        size = rng.choice((1_000, 300_000, 1_200_000, 2_000_000, 5_000_000, 9_000_000))
        frozen = rng.random() < 0.2
        spec = GroupSpec(f"g{group}", size, 0 if frozen else rng.choice((1, 2)), not frozen)
        if spec.compact:
            keys = {(int(Kind.PARAMETER), 0): spec.state_bytes}
        else:
            keys = {(int(Kind.PARAMETER), 0): size}
            if spec.has_gradient:
                keys[int(Kind.GRADIENT), 0] = size
            keys |= {(int(Kind.MOMENT), slot): size for slot in range(spec.num_moments)}
        addresses = {}
        for key, num_bytes in keys.items():
            self.ranges.append(AddressRange(num_bytes))
            addresses[key] = self.ranges[-1].address
        self.table.add_group(spec, addresses)

    # -- one page ------------------------------------------------------------------------------

    def content(self, page: int) -> np.ndarray:
        row = self.table.pages[page]
        block = (ctypes.c_uint32 * (row.num_bytes // 4)).from_address(row.address)
        return np.ctypeslib.as_array(block)

    def check_page(self, page: int) -> None:
        expected = self.right[page]
        if expected is not None:
            values = self.content(page)
            low, high = int(values.min()), int(values.max())
            assert low == high == expected, f"page {page}: {low}..{high}, not {expected}"

    def write_page(self, page: int) -> None:
        self.version += 1
        self.content(page)[:] = self.right[page] = self.version

    # -- steps ---------------------------------------------------------------------------------

    def ids(self, group: int, kind: Kind, part: int | None) -> Sequence[int]:
        table = self.table
        return table.of(group, kind) if part is None else table.of_part(group, kind, part)

    def access(self, group: int, needs: list[tuple[Kind, Op]], part: int | None = None) -> None:
        """Access, check what is read, change what is written; what was pinned stays pinned."""
        for kind, op in needs:
            if op == Op.CREATE:  # the old content is dead, whether the access works or not
                self._dead(group, self.ids(group, kind, part))
        self.pager.access(group, needs, self.rng.choice(list(Phase)), part)
        self.held += [Held(group, kind, part) for kind, _ in needs]
        for kind, op in needs:
            for page in self.ids(group, kind, part):
                assert self.table.state[page] == PageState.RESIDENT
                if op != Op.CREATE or self.table.groups[group].compact:
                    self.check_page(page)
                if op != Op.READ:
                    self.write_page(page)

    def release(self, at: int) -> None:
        held = self.held.pop(at)
        for page in self.ids(held.group, held.kind, held.part):
            self.check_page(page)
        self.pager.release(held.group, held.kind, held.part)

    def release_all(self) -> None:
        while self.held:
            self.release(self.rng.randrange(len(self.held)))

    def drop(self, at: int) -> None:
        """Drop what one pin holds, where nothing else pins it."""
        held = self.held[at]
        pages = self.table.of(held.group, held.kind)
        if held.part is not None or any(self.table.pins[p] != 1 for p in pages):
            return
        self.held.pop(at)
        self.pager.drop(held.group, held.kind)
        self._dead(held.group, pages)

    def forget(self, group: int, kind: Kind) -> None:
        pages = self.table.of(group, kind)
        if not any(self.table.pins[p] for p in pages):
            self.pager.forget(group, kind)
            self._dead(group, pages)

    def _dead(self, group: int, pages: Sequence[int]) -> None:
        if not self.table.groups[group].compact:
            for page in pages:
                self.right[page] = None

    def random_step(self) -> None:
        """One random call; tolerates what may go wrong and checks that nothing broke."""
        rng = self.rng
        choice = rng.random()
        group = rng.randrange(self.num_groups)
        try:
            if self.held and choice < 0.35:
                self.release(rng.randrange(len(self.held)))
            elif self.held and choice < 0.42:
                self.drop(rng.randrange(len(self.held)))
            elif choice < 0.46:
                self.forget(group, Kind.GRADIENT)
            elif choice < 0.50:
                self.pager.begin_pass(rng.randrange(2))
            elif choice < 0.51:
                self.pager.end_update()
            elif choice < 0.53 and self.pager.prefetcher is not None:
                self.pager.prefetcher.hint(rng.sample(range(8), 3), [rng.random(), 2.0, -1.0])
            elif choice < 0.57:
                members = rng.sample(range(3), rng.randint(1, 3))
                self.pager.open_set(0, members, Phase.FORWARD)
            else:
                self._random_access(group)
        except BudgetError:
            assert self.held, "nothing was pinned and yet there was no room"
            self.transfers.check()
            self.release_all()
        except PageIOError as error:
            assert self.home.raised and "/home/pages" in str(error)
            self.transfers.check()
        self.transfers.check()

    def _random_access(self, group: int) -> None:
        rng = self.rng
        kinds = [k for k in Kind if self.table.of(group, k)]
        chosen = rng.sample(kinds, rng.randint(1, len(kinds)))
        needs = [(k, rng.choice((Op.READ, Op.READ, Op.WRITE, Op.CREATE))) for k in chosen]
        part = rng.randrange(self.table.parts(group)) if rng.random() < 0.3 else None
        if part is not None:
            needs = [(k, op) for k, op in needs if k != Kind.GRADIENT] or [needs[0]]
        if self._frames(group, needs, part) > self.pool.num_frames:
            return  # cannot fit, however empty the device
        if any(self.right[p] is None for k in chosen for p in self.ids(group, k, part)):
            needs = [(k, Op.CREATE) for k, _ in needs]
        self.access(group, needs, part)

    def _frames(self, group: int, needs: list[tuple[Kind, Op]], part: int | None) -> int:
        pinned = [g for g, spec in enumerate(self.table.groups) if spec.pinned]
        ids = [p for g in pinned for p in self.table.of(g, Kind.PARAMETER)]
        ids += [p for kind, _ in needs for p in self.ids(group, kind, part)]
        return self.table.frames_of(ids)

    # -- the end -------------------------------------------------------------------------------

    def check_everything(self) -> None:
        """Every page has the right content, and every frame is accounted for."""
        self.home.chance = 0.0
        self.release_all()
        with contextlib.suppress(PageIOError):  # of a transfer that was still under way
            self.transfers.drain()
        for page in self.table.pages:
            if self.right[page.page] is not None:
                self.access(page.group, [(page.kind, Op.READ)], page.part)
                self.release_all()
        self.transfers.drain()
        self.transfers.check()
        resident = int(self.table.num_frames[self.table.resident].sum())
        assert self.pool.num_free == self.transfers.free == self.pool.num_frames - resident

    def close(self) -> None:
        self.engine.close()
        self.home.close()
