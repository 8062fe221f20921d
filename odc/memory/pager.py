"""The pager: makes pages resident when they are needed, and as few times as it can.

Hooks call it on the training thread; all decisions are made there and carried out by an engine.
One access is: note what is needed, make room, submit the loads, think ahead while they run, wait.
Correct under any hint, however wrong: a plan only decides what is loaded early and what goes
first; an access waits for its own pages whatever was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odc.errors import BudgetError
from odc.memory.events import Account, Act, Kind, Op, Phase, Sink, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import Victims, choose_loads, choose_write_backs, wanted_pages
from odc.memory.pages import PageState, PageTable
from odc.memory.plan import Plan, Prefetcher
from odc.memory.stations import OrderLibrary, Visit
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy, Lru

Need = tuple[Kind, Op]

_REST = 3  # accesses to let pass after one for which there was nothing to load or write


@dataclass(slots=True)
class Counters:
    """What happened since the last ``take``; times in ns, sizes in bytes."""

    compute_ns: int = 0
    stall_ns: int = 0
    accesses: int = 0
    misses: int = 0
    peak_page_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Knobs of the scheduler, each with the measurement behind its default in docs/log.md."""

    flight_bytes: int = 12 * 1024 * 1024  # loads in flight ahead of use, or two pages if more
    early_stores: int = 2  # early write-backs in flight
    lookahead_bytes: int = 48 * 1024 * 1024  # future victims worth cleaning
    early_write_back: bool = True
    max_items: int | None = None


class Pager:
    """Pages the groups of one model.

    Args:
        table: sealed page table.
        library: recorded orders.
        transfers: books and commands.
        eviction: victim order.
        prefetcher: knowledge of the future, or None for demand paging.
        tuning: knobs.

    Attributes:
        option_prefix: what stands before the names of options in errors.
    """

    option_prefix = ""

    def __init__(
        self,
        table: PageTable,
        library: OrderLibrary,
        transfers: Transfers,
        eviction: EvictionPolicy | None = None,
        prefetcher: Prefetcher | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.table = table
        self.library = library
        self.stations = library.stations
        self.transfers = transfers
        self.eviction = eviction or Lru()
        self.prefetcher = prefetcher
        self.tuning = tuning or Tuning()
        self.sink: Sink | None = None
        self.counters = Counters()
        self.step = 0
        self.micro = 0
        self.tokens = 0
        self._seq = 0
        self._time = 0  # virtual time: accesses
        self._visit: Visit | None = None
        self._visit_start = 0
        self._remaining: list[int] = []
        self._plan: Plan | None = None
        self._engine = transfers.engine
        largest = max((p.num_bytes for p in table.pages), default=0)
        self._flight_bytes = max(self.tuning.flight_bytes, 2 * largest)
        self._mark = self._engine.now_ns()

    # -- what hooks call -------------------------------------------------------------------------

    def begin_pass(self, ctx: int, tokens: int = 0) -> None:
        """A forward of the whole model begins, in context ``ctx``."""
        self.library.begin_pass(ctx)
        self.tokens = tokens
        self._visit = None
        self._remaining = []

    def open_set(
        self, set_index: int, members: Sequence[int], phase: Phase, resident_first: bool = True
    ) -> list[int]:
        """The members of a set that a forward needs are known; returns them in the order to run.

        Resident members come first, then those on their way, then the rest: misses turn into
        overlap.
        """
        station = self.stations.of_group[self.stations.sets[set_index][members[0]]]
        self._account()
        visit = self._begin_visit(station, phase)
        assert visit.used is not None
        groups = self.stations.sets[set_index]
        order = list(members)
        if resident_first:
            order.sort(key=lambda m: self._distance(groups[m]))
        visit.used[order] = True
        visit.order = list(order)
        self._remaining = list(order)
        self.library.forward_done(set_index, visit.used, visit.order)
        if self.prefetcher is not None:
            self.prefetcher.observe(visit, self.tokens)
            self.transfers.poll()
            self._make_plan()
            self._think()
        self._mark = self._engine.now_ns()
        return order

    def access(
        self, group: int, needs: Sequence[Need], phase: Phase, part: int | None = None
    ) -> None:
        """Make what a group needs resident and pin it. Blocks until it is there.

        Args:
            group: group id.
            needs: kinds and what is done with them (read, write, create).
            phase: for the recorded order and the trace.
            part: only this part of each kind (an optimizer that walks page by page).

        Raises:
            BudgetError: pinned pages leave too little room.
            PageIOError: the home could not be read or written.
        """
        compute_ns = self._account()
        self.counters.accesses += 1
        self._time += 1
        visit = self._enter(group, phase)
        pages = self._pin(group, needs, part, visit, compute_ns)
        try:
            self._make_resident(pages)
        except Exception:
            self._unpin([page for page, _ in pages])
            raise
        for page, op in pages:
            if op != Op.READ:
                self.transfers.dirtied(page)
        self.counters.peak_page_bytes = max(
            self.counters.peak_page_bytes, self.transfers.used_bytes
        )
        self._mark = self._engine.now_ns()

    def release(self, group: int, kind: Kind, part: int | None = None) -> None:
        """Unpin pages; they may be evicted from now on."""
        table = self.table
        self._unpin(table.of(group, kind) if part is None else table.of_part(group, kind, part))

    def _unpin(self, ids: Sequence[int]) -> None:
        table = self.table
        for page in ids:
            table.pins[page] -= 1
            assert table.pins[page] >= 0, f"page {page} released more often than accessed"
            if table.pins[page] == 0 and table.state[page] == PageState.RESIDENT:
                table.evictable[page] = True
                if self._plan is not None:
                    self._plan.keep[page] = self._plan.keep_next[page]

    def drop(self, group: int, kind: Kind) -> None:
        """Unpin pages whose content is dead; a compact group's shared page lives on."""
        if self.table.groups[group].compact:
            self.release(group, kind)
            return
        if self.sink is not None:
            phase = self._visit.phase if self._visit is not None else Phase.OTHER
            self._write_need(group, kind, Op.DROP, 0, Phase(phase))
        ids = self.table.of(group, kind)
        for page in ids:
            self.table.pins[page] -= 1
        failed: Exception | None = None
        for page in ids:  # all of them, whatever happens to one
            try:
                if self.table.state[page] == PageState.LOADING:
                    self.transfers.settle(page)
            except Exception as error:
                failed = failed or error
            if self.table.state[page] == PageState.RESIDENT:
                self.transfers.drop(page)
        if failed is not None:
            raise failed

    def forget(self, group: int, kind: Kind) -> None:
        """Content of unpinned pages is dead (a gradient that was zeroed)."""
        if self.table.groups[group].compact:
            return
        for page in self.table.of(group, kind):
            self.table.pins[page] += 1
        self.drop(group, kind)

    def hold_pinned(self) -> None:
        """Groups of a few KiB stay: pin them for good."""
        for group, spec in enumerate(self.table.groups):
            if spec.pinned:
                for page in self.table.of(group, Kind.PARAMETER):
                    self.table.pins[page] += 1

    def end_update(self) -> None:
        """The optimizer step is over."""
        self.library.end_update()

    def take(self) -> Counters:
        """Counters since the last call."""
        self._account()
        counters = self.counters
        counters.bytes_in, self.transfers.bytes_in = self.transfers.bytes_in, 0
        counters.bytes_out, self.transfers.bytes_out = self.transfers.bytes_out, 0
        self.counters = Counters(peak_page_bytes=self.transfers.used_bytes)
        self._mark = self._engine.now_ns()
        return counters

    def write_memory(self) -> None:
        """Write the pages account to the trace."""
        if self.sink is not None:
            self.sink.mem(
                self._engine.now_ns(),
                self.step,
                Tier.DEVICE,
                Account.PAGES,
                self.transfers.used_bytes,
                self.counters.peak_page_bytes,
            )

    def set_sink(self, sink: Sink | None) -> None:
        """Trace to ``sink`` from now on; None stops."""
        self.sink = sink
        self.transfers.sink = sink

    # -- visits ----------------------------------------------------------------------------------

    def _account(self) -> int:
        compute_ns = self._engine.now_ns() - self._mark
        self.counters.compute_ns += compute_ns
        if self._visit is not None:
            self._visit.dur_ns += compute_ns
        return compute_ns

    def _begin_visit(self, station: int, phase: Phase) -> Visit:
        self._visit = self.library.visit(station, phase)
        self._visit_start = self._time + 1
        self._seq += 1
        if self._plan is not None:
            self._plan.visits += 1
        self._stale = self.prefetcher.advance(self._visit) if self.prefetcher is not None else False
        return self._visit

    _stale = False
    _considered: Plan | None = None  # the plan that was last acted upon
    _rest = 0  # accesses for which there is nothing to do

    def _enter(self, group: int, phase: Phase) -> Visit:
        station = self.stations.of_group[group]
        visit = self._visit
        if visit is None or visit.station != station or visit.phase != phase:
            visit = self._begin_visit(station, phase)
            self._remaining = []
            set_index = self.stations.stations[station].set_index
            if set_index >= 0 and self.library.tape[set_index] is not None:
                tape = self.library.tape_order[set_index]
                if phase == Phase.BACKWARD:
                    self._remaining = tape[::-1]
                elif phase == Phase.RECOMPUTE:
                    self._remaining = list(tape)
        return visit

    def _distance(self, group: int) -> int:
        """0 if a group's parameters are resident, 1 on their way, 2 at home."""
        worst = 0
        for page in self.table.of(group, Kind.PARAMETER):
            state = self.table.state[page]
            if state != PageState.RESIDENT:
                worst = max(worst, 1 if state == PageState.LOADING else 2)
        return worst

    def _pin(
        self,
        group: int,
        needs: Sequence[Need],
        part: int | None,
        visit: Visit,
        compute_ns: int,
    ) -> list[tuple[int, Op]]:
        table = self.table
        member = self.stations.member_of[group]
        if self._remaining and member in self._remaining:
            self._remaining.remove(member)
        pages: list[tuple[int, Op]] = []
        for kind, op in needs:
            visit.note(kind, op, member)
            if self.sink is not None and not part:
                self._write_need(group, kind, op, compute_ns, Phase(visit.phase))
                compute_ns = 0
            ids = table.of(group, kind) if part is None else table.of_part(group, kind, part)
            if op == Op.CREATE and table.groups[group].compact:
                op = Op.WRITE
            for page in ids:
                table.pins[page] += 1
                table.evictable[page] = False
                table.last_use[page] = self._time
                pages.append((page, op))
        return pages

    def _write_need(self, group: int, kind: Kind, op: Op, compute_ns: int, phase: Phase) -> None:
        assert self.sink is not None
        self.sink.need(
            self._seq,
            self._engine.now_ns(),
            self.step,
            self.micro,
            phase,
            self.library.ctx,
            group,
            kind,
            op,
            compute_ns,
            self.tokens,
        )

    # -- making pages resident -------------------------------------------------------------------

    def _make_resident(self, pages: list[tuple[int, Op]]) -> None:
        self.transfers.poll()
        waiting = self._demand(pages)
        if self.prefetcher is not None:
            if self._plan is None or self._stale:
                self._make_plan()
            self._think()
        for page in waiting:
            self._settle(page)

    def _demand(self, pages: list[tuple[int, Op]]) -> list[int]:
        """Submit what is missing; returns the pages to wait for."""
        table, transfers = self.table, self.transfers
        waiting: list[int] = []
        for page, op in pages:
            state = table.state[page]
            if state == PageState.RESIDENT or page in waiting:
                continue
            waiting.append(page)
            if state == PageState.LOADING:
                continue
            self._make_room(int(table.num_frames[page]))
            if op == Op.CREATE:
                transfers.create(page)
            else:
                self.counters.misses += 1
                transfers.load(page, self._seq)
        return waiting

    def _make_room(self, frames: int) -> None:
        transfers = self.transfers
        while transfers.available < frames:
            victims = Victims(self._ordered_victims(1.0), self.table)
            chosen = victims.take(frames - transfers.available, np.inf, None)
            if chosen is not None:
                for page in chosen:
                    transfers.evict(page)
                return
            for page in victims.rest():
                transfers.evict(page)
            if transfers.available >= frames or transfers.cancel_one_prefetch():
                continue
            on_the_way = any(not self.table.pins[page] for page in transfers.loading)
            if not (on_the_way and transfers.wait_any()):
                raise BudgetError(self._no_room(frames))

    def _no_room(self, frames: int) -> str:
        table = self.table
        names = sorted(
            {table.groups[table.pages[p].group].name for p, n in enumerate(table.pins) if n}
        )
        return (
            f"{self.option_prefix}page_budget: {frames} frames are needed and every other page is "
            f"in use by {', '.join(names[:8])}; {self.transfers.num_frames} frames of 2 MiB are "
            f"the budget, use at least {self.transfers.num_frames + frames} "
            f"({(self.transfers.num_frames + frames) * 2} MiB)"
        )

    def _settle(self, page: int) -> None:
        waited = self.transfers.settle(page) if page in self.transfers.loading else 0
        if waited:
            self.counters.stall_ns += waited
            if self.sink is not None:
                self.sink.action(
                    self._engine.now_ns() - waited,
                    self._seq,
                    page,
                    Act.STALL,
                    self.transfers.home_tier,
                    Tier.DEVICE,
                    0,
                    0,
                    waited,
                    self.transfers.policy,
                )

    # -- thinking ahead --------------------------------------------------------------------------

    def _make_plan(self) -> None:
        assert self.prefetcher is not None
        self._plan = self.prefetcher.plan(self._visit, self._remaining)
        self._stale = False

    def _ordered_victims(self, write_back_weight: float) -> np.ndarray:
        table = self.table
        keep = self._plan.keep if self._plan is not None else None
        candidates = np.flatnonzero(table.evictable)
        return self.eviction.order(candidates, table.last_use, keep, table.dirty, write_back_weight)

    def _think(self) -> None:
        """Load ahead and write back early, as far as the plan and the lines allow."""
        plan, transfers, tuning = self._plan, self.transfers, self.tuning
        if plan is None:
            return
        room = self._flight_bytes - transfers.in_flight_bytes
        stores = tuning.early_stores - len(transfers.storing)
        if not self._worth_thinking(plan, room, stores):
            return
        moved = transfers.bytes_in + transfers.bytes_out
        self._act(plan, room, stores)
        self._rest = 0 if transfers.bytes_in + transfers.bytes_out != moved else _REST

    def _worth_thinking(self, plan: Plan, room: int, stores: int) -> bool:
        """Whether enough has changed: a new plan, or lines that are about to run dry."""
        if plan is not self._considered:
            self._considered = plan
            return True
        if self._rest > 0:
            self._rest -= 1
            return False
        early = self.tuning.early_write_back and stores == self.tuning.early_stores
        return 2 * room >= self._flight_bytes or early

    def _act(self, plan: Plan, room: int, stores: int) -> None:
        transfers, tuning = self.transfers, self.tuning
        wanted = wanted_pages(self.table, plan, self._visit_start)
        if not len(wanted):
            return
        ordered = self._ordered_victims(
            min(transfers.out_flight_bytes / tuning.lookahead_bytes, 1.0)
        )
        taken = 0
        if room > 0:
            taken = self._load_ahead(plan, wanted, Victims(ordered, self.table), room)
        if tuning.early_write_back and stores > 0:
            self._clean(ordered, wanted[taken:], stores)

    def _load_ahead(self, plan: Plan, wanted: np.ndarray, victims: Victims, room: int) -> int:
        transfers = self.transfers
        items = None
        if self.tuning.max_items is not None:
            items = self.tuning.max_items - transfers.num_resident - len(transfers.loading)
        loads = choose_loads(
            self.table, wanted, plan.keep, victims, transfers.available, room, items
        )
        for load in loads:
            for victim in load.victims:
                transfers.evict(victim)
            transfers.load(load.page, -1)
        return len(loads)

    def _clean(self, ordered: np.ndarray, wanted: np.ndarray, stores: int) -> None:
        """Write back early what will have to go for the loads ahead."""
        transfers = self.transfers
        lookahead = self.tuning.lookahead_bytes // FRAME_BYTES
        frames = min(int(self.table.num_frames[wanted].sum()), lookahead) - transfers.available
        if frames <= 0:
            return
        ordered = ordered[self.table.evictable[ordered]]  # without what was just evicted
        chosen = choose_write_backs(self.table, ordered, set(transfers.storing), frames)
        for page in chosen[:stores]:
            transfers.store(page, early=True)
