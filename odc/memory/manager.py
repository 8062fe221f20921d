"""``MemoryManager``: real memory around the pager.

It reserves the address ranges of groups, sizes the pool of frames by the budget, opens the home and
starts the engine. What is decided, and when, stands in ``pager.py``; this file owns what has to be
allocated and given back.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from odc.errors import BudgetError, OdcError
from odc.memory.activations import describe_owners, describe_remedies
from odc.memory.coded import CodedHome, RangeCodec, page_bytes
from odc.memory.engines.threads import ThreadEngine
from odc.memory.events import Account, Kind, Tier
from odc.memory.frames import FRAME_BYTES, AddressRange, FramePool, make_pool
from odc.memory.home import Home
from odc.memory.home_plan import HomeOptions, HomePlan, make_home, plan_home
from odc.memory.home_range import HomeRange
from odc.memory.ledger import Ledger
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Counters, Pager, Tuning
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.preflight import check
from odc.memory.scores import PopularityScorer
from odc.memory.stations import Stations
from odc.memory.transfers import Transfers
from odc.memory.update_place import TrainedGroup, UpdateRates, choose_home, measure_rates
from odc.memory.victims import CostAware, EvictionPolicy
from odc.sizes import exact_size, format_bytes, parse_size

PrefetchFactory = Callable[[OrderLibrary, Limits], Prefetcher | None]
Buffers = dict[tuple[int, int], "ctypes.Array[ctypes.c_uint8]"]


def popularity(library: OrderLibrary, limits: Limits) -> Prefetcher:
    """The default prefetcher: the tape, and decayed popularity for what it cannot know."""
    return OrderPrefetcher(library, PopularityScorer(library.stations.members), limits)


class MemoryManager(Pager):
    """Pages the state of a model between device frames and its home.

    Use: ``add_group`` for every group, ``seal`` once, then what ``Pager`` offers.

    Args:
        total_mem: what the device has, as bytes or ``"40GB"``; None or ``"unlimited"`` keeps
            everything resident.
        page_budget: fixes what pages get, whatever the rest needs.
        page_size: upper limit of a page.
        home: ``"host"``, ``"disk"``, or ``"host+disk"``: where pages live when they are not on the
            device.
        home_dir: folder for the disk home.
        host_mem: host memory that pages of ``"host+disk"`` may take, as bytes or ``"8GB"``; None:
            what is free. The others live on disk.
        link_bandwidth: bytes/s each way of an emulated bus, None for none; each tier has its own.
        prefetch_window: upper limit of how many passes ahead pages are loaded.
        page_prefetch: the same in modules.
        max_items: upper limit of resident pages.
        eviction: victim order.
        prefetch: makes the prefetcher; returns None for demand paging.
        policy: policy code for the trace.
        tuning: knobs of the scheduler.
        option_prefix: what stands before the names of these arguments in errors: ``"memory."``
            where they come from a configuration file.
    """

    def __init__(
        self,
        *,
        total_mem: int | str | None = None,
        page_budget: int | str | None = None,
        page_size: int | str = "256MB",
        home: str = "host",
        home_dir: str | os.PathLike[str] | None = None,
        host_mem: int | str | None = None,
        link_bandwidth: float | None = None,
        prefetch_window: int | None = None,
        page_prefetch: int | None = None,
        max_items: int | None = None,
        eviction: EvictionPolicy | None = None,
        prefetch: PrefetchFactory = popularity,
        policy: int = 0,
        tuning: Tuning | None = None,
        option_prefix: str = "",
    ) -> None:
        self.option_prefix = option_prefix
        limited = total_mem is not None and total_mem != "unlimited"
        self.ledger = Ledger(
            parse_size(total_mem) if limited and total_mem is not None else None,
            None if page_budget is None else parse_size(page_budget),
        )
        self._home_options = HomeOptions(
            home, home_dir, None if host_mem is None else parse_size(host_mem), option_prefix
        )
        self._link_bandwidth = link_bandwidth
        self._limits = Limits(page_prefetch, prefetch_window)
        self._eviction = eviction or CostAware()
        self._prefetch = prefetch
        self._policy = policy
        self._tuning = tuning or Tuning(max_items=max_items, rehearse="aside")
        self.table = PageTable(max(parse_size(page_size) // FRAME_BYTES, 1) * FRAME_BYTES)
        self._ranges: list[AddressRange] = []  # kept as long as frames may be mapped into them
        self._codecs: dict[int, RangeCodec] = {}
        self._starts: list[int] = []  # their addresses
        self.pool: FramePool | None = None
        self.home: Home | None = None
        self._built = False

    @property
    def unlimited(self) -> bool:
        """Whether everything stays resident."""
        return self.ledger.total_bytes is None and self.ledger.fixed_page_bytes is None

    def choose_home(
        self, groups: Sequence[TrainedGroup], update_rate: Callable[[], float], frozen_bytes: int
    ) -> list[bool]:
        """For each trainable group, whether ``auto`` has it updated at home.

        Args:
            groups: all of them.
            update_rate: measures the bytes/s of parameters that are updated at home.
            frozen_bytes: frames of what is not trained.
        """
        options = self._home_options
        needed = frozen_bytes + sum(group.frame_bytes for group in groups)
        page_bytes = None if self.unlimited else self.ledger.first_page_bytes(needed, 0)

        def measure() -> UpdateRates:
            on_disk = options.kind != "host"
            return measure_rates(update_rate(), self._link_bandwidth, on_disk, options.folder)

        return choose_home(groups, page_bytes, measure, frozen_bytes)

    def add_group(self, spec: GroupSpec, codec: RangeCodec | None = None) -> tuple[int, Buffers]:
        """Reserve a group's ranges.

        Args:
            spec: the group.
            codec: of a group of parameters alone, the form in which they lie at home.

        Returns:
            Its id and a buffer for each (kind, slot), but for moments that stay at home. A compact
            group's buffers lie in one range.
        """
        buffers: Buffers = {}
        keys = [(Kind.PARAMETER, 0)]
        if spec.has_gradient:
            keys.append((Kind.GRADIENT, 0))
        if not spec.at_home:
            keys += [(Kind.MOMENT, slot) for slot in range(spec.num_moments)]
        if spec.compact:
            whole = self._reserve(max(spec.state_bytes, 1))
            self._ranges.append(whole)
            for index, key in enumerate(keys):
                piece = (ctypes.c_uint8 * spec.num_bytes).from_address(
                    whole.address + index * spec.num_bytes
                )
                piece._range = whole  # type: ignore[attr-defined]
                buffers[key] = piece
            addresses = {(int(Kind.PARAMETER), 0): whole.address}
        else:
            ranges = {key: self._reserve(spec.num_bytes) for key in keys}
            self._ranges += ranges.values()
            buffers = {key: r.buffer() for key, r in ranges.items()}
            addresses = {(int(k), slot): r.address for (k, slot), r in ranges.items()}
        stored = None
        if codec is not None:
            stored = partial(page_bytes, codec, block_bytes=self._home_options.block_bytes)
        group = self.table.add_group(spec, addresses, stored)
        if codec is not None:
            self._codecs[group] = codec
        return group, buffers

    def _reserve(self, num_bytes: int) -> AddressRange:
        try:
            return AddressRange(num_bytes)
        except OSError as error:
            raise BudgetError(
                f"{format_bytes(num_bytes)} of addresses cannot be reserved ({error.strerror}); "
                "they take no memory, so raise the limit of the process (ulimit -v unlimited)"
            ) from error

    def seal(
        self,
        sets: list[tuple[int, ...]],
        held: dict[int, list[int]],
        gradients_come_home: bool = True,
    ) -> None:
        """All groups are there: check the budget and the machine, make frames, home and engine.

        Args:
            sets: groups whose members are chosen at run time, a tuple a set.
            held: for each group, the groups that are pinned while it runs.
            gradients_come_home: False where each gradient is used up as soon as it is there.

        Raises:
            BudgetError: some group cannot be trained in the budget, or the machine has too little
                memory or disk space; says which would do.
        """
        table = self.table
        table.seal()
        all_frames = int(table.num_frames.sum())
        least, owner = table.smallest_budget(held)
        frames = (
            self.ledger.first_page_bytes(all_frames * FRAME_BYTES, least * FRAME_BYTES)
            // FRAME_BYTES
        )
        if frames < min(least, all_frames):
            self._refuse(frames, least, owner)
        stays = frames >= all_frames and not self.ledger.measures and not self._tuning.max_items
        comes = not stays or any(spec.at_home for spec in table.groups)
        plan = self._plan_home(frames * FRAME_BYTES, gradients_come_home, comes)
        # Before anything that has to be given back: a prefetcher may refuse this model.
        library = OrderLibrary(Stations(table, sets))
        table.load_weight = plan.load_cost().tolist()
        prefetcher = None if self.unlimited else self._prefetch(library, self._limits)
        home: Home = make_home(table, self._home_options, plan)
        if self._codecs:
            home = CodedHome(home, table, self._codecs, self._home_options.block_bytes)
        self.home = home
        self.pool = make_pool(frames)
        engine = ThreadEngine(self.pool, home, self._link_bandwidth)
        transfers = Transfers(table, engine, frames, home.tiers[0], self._policy)
        transfers.tier_of = home.tier_of
        super().__init__(table, library, transfers, self._eviction, prefetcher, self._tuning)
        self._least_frames, self._least_owner = least, owner
        self.hold_pinned()

    # -- what lies at home -----------------------------------------------------------------------

    @contextmanager
    def at_home(
        self, group: int, kind: Kind, slot: int = 0, write: bool = False
    ) -> Iterator[ctypes.Array[ctypes.c_uint8]]:
        """The bytes of one of a group's ranges at home, when no update runs on them any more.

        In host memory the bytes themselves, from disk a copy that is written back.

        Args:
            group: group id.
            kind, slot: which range.
            write: whether they are changed.

        Raises:
            PageIOError: the home could not be read or written, or an update of the group failed.
        """
        table, home = self.table, self.home
        assert home is not None, "the manager is sealed"
        self.transfers.finish_updates(table.of(group, Kind.PARAMETER))
        pages = [table.pages[p] for p in table.of(group, kind) if table.pages[p].slot == slot]
        with HomeRange(home, pages) as found:
            yield found.buffer
            if write:
                found.write_back()

    def _plan_home(
        self, frame_bytes: int, gradients_come_home: bool, pages_come_home: bool
    ) -> HomePlan:
        """Divide pages among the tiers of the home, and compare that with the machine."""
        options, total = self._home_options, self.ledger.total_bytes or 0
        machine = options.machine()
        plan = plan_home(
            self.table,
            options,
            machine,
            frame_bytes=frame_bytes,
            rest_bytes=max(total - frame_bytes, 0),
            gradients_come_home=gradients_come_home,
            pages_come_home=pages_come_home,
        )
        for warning in check(machine, plan.needs, self.option_prefix):
            warnings.warn(warning, stacklevel=4)
        return plan

    def _refuse(self, frames: int, least: int, owner: int) -> None:
        spec = self.table.groups[owner]
        option = "page_budget"
        gradient = " and as much of its gradient" if spec.has_gradient else ""
        need = least * FRAME_BYTES
        if self.ledger.fixed_page_bytes is None:
            option, need = "total_mem", 2 * need
        raise BudgetError(
            f"{self.option_prefix}{option}: {format_bytes(frames * FRAME_BYTES)} for pages cannot "
            f"train group {spec.name} ({format_bytes(spec.num_bytes)} of parameters{gradient}); "
            f"use at least {exact_size(need)}, or smaller pages "
            f"({self.option_prefix}page_size)"
        )

    def begin_pass(self, ctx: int, tokens: int = 0) -> None:
        """A forward of the whole model begins, in context ``ctx`` (below 0: it is being built)."""
        if ctx >= 0 and not self._built:
            assert self.pool is not None
            self._built = True
            self.ledger.start(self.pool.num_bytes, self._home_bytes)
        super().begin_pass(ctx, tokens)

    def take(self) -> Counters:
        """Counters since the last call, those of moved activations among them."""
        counters = super().take()
        moved = self.ledger.activations.take_traffic()
        counters.activation_bytes_in, counters.activation_bytes_out = moved
        return counters

    def write_memory(self) -> None:
        """Write the accounts of pages and activations to the trace."""
        super().write_memory()
        if self.sink is not None:
            account = self.ledger.activations
            self.sink.mem(
                self._engine.now_ns(),
                self.step,
                Tier.DEVICE,
                Account.ACTIVATIONS,
                account.live_bytes,
                account.peak_bytes,
            )

    @property
    def _home_bytes(self) -> int:
        """Host memory that the home and what is moved there of activations take."""
        pages = self.home.used_bytes if self.home is not None else 0
        return pages + self.ledger.activations.home_bytes

    def owns(self, address: int) -> bool:
        """Whether an address lies in the range of some group."""
        if len(self._starts) != len(self._ranges):
            self._ranges.sort(key=lambda r: r.address)
            self._starts = [r.address for r in self._ranges]
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._starts[at] + self._ranges[at].num_bytes

    def rebalance(self) -> int:
        """Measure the rest and give pages what it leaves; returns the rest's peak in bytes.

        Raises:
            BudgetError: the rest leaves less than the least that pages need.
        """
        assert self.pool is not None
        rest = self.ledger.measure(self.pool.num_bytes, self._home_bytes)
        if not self.ledger.measures:
            return rest
        all_bytes = int(self.table.num_frames.sum()) * FRAME_BYTES
        least_bytes = self._least_frames * FRAME_BYTES
        target = self.ledger.page_bytes(all_bytes, least_bytes) // FRAME_BYTES
        if target < self._least_frames:
            total = self.ledger.total_bytes or 0
            enough = math.ceil((rest + least_bytes) * 1.02 / (1 << 20)) << 20
            raise BudgetError(
                f"{self.option_prefix}total_mem: activations and the rest peak at "
                f"{format_bytes(rest)} of {format_bytes(total)} and leave "
                f"{format_bytes(target * FRAME_BYTES)} for pages, which need "
                f"{format_bytes(least_bytes)}{self._largest_group()}. {self._advice(rest)}, or "
                f"total_mem >= {exact_size(enough)}"
            )
        self._resize(target)
        return rest

    def _largest_group(self) -> str:
        """Who needs the least that pages must have."""
        if self._least_owner < 0:
            return ""
        return f" (for {self.table.groups[self._least_owner].name})"

    def _advice(self, rest: int) -> str:
        """Whose the rest's peak is, and what would make it fall."""
        account = self.ledger.activations
        owners = describe_owners(account, rest)
        remedies = describe_remedies(account, in_config=bool(self.option_prefix))
        use = ["a smaller micro-batch", *remedies] if owners else ["a smaller micro-batch"]
        peak = f"The peak was {owners}. " if owners else ""
        return f"{peak}Use {', '.join(use)}"

    def _resize(self, frames: int) -> None:
        assert self.pool is not None
        more = frames - self.pool.num_frames
        if more > 0:
            self.pool.grow(more)
            self.transfers.free += more
        elif more < 0:
            self._make_room(-more)
            while self.transfers.free < -more and self.transfers.wait_any():
                pass
            self.transfers.free += more
            self.pool.shrink(-more)
        self.transfers.num_frames = self.pool.num_frames

    def close(self) -> None:
        """Stop the engine and close the home. The model's parameters are gone with it."""
        if self.pool is not None:
            self.stop_rehearsing()
            self.transfers.engine.close()  # type: ignore[attr-defined]
            assert self.home is not None
            self.home.close()
            self.pool.close()
            # Not methods that ask at every access: only a closed manager pays for being closed.
            for name in ("access", "open_set", "begin_pass"):
                setattr(self, name, _refuse_closed)


def _refuse_closed(*args: object, **kwargs: object) -> None:
    raise OdcError("the model is closed, and its parameters are gone; build it again")
