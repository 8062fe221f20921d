"""The pager: makes pages resident when they are needed, and as few times as it can.

Hooks call it on the training thread; all decisions are made there and carried out by an engine.
One access is: note what is needed, make room, submit the loads, think ahead while they run, wait.
Correct under any hint, however wrong: a plan only decides what is loaded early and what goes
first; an access waits for its own pages whatever was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from odc.errors import BudgetError
from odc.memory.events import Account, Act, Kind, Op, Phase, Sink, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.issue import Room, choose_load, choose_write_backs, take_victims
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageState, PageTable
from odc.memory.plan import LEAVES_NS, UNKNOWN_NS, OrderPrefetcher, Prefetcher
from odc.memory.rehearsal import Rehearsal
from odc.memory.stations import Visit
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy, Lru, VictimQueue

Need = tuple[Kind, Op]

_SET_MARGIN = 1.05  # guesses that are equal would swap for ever


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
    rehearse: str = "now"  # or "aside": in a thread of its own; "" for never
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
        self._remaining: list[int] = []
        self._engine = transfers.engine
        self._planned = prefetcher is not None and self.eviction.planned
        self._scores = np.zeros(len(table.pages))
        if prefetcher is not None and self._planned:
            self._scores = prefetcher.until
        self._rehearsal: Rehearsal | None = None
        if isinstance(prefetcher, OrderPrefetcher) and self._planned and self.tuning.rehearse:
            self._rehearsal = Rehearsal(library, prefetcher, self.tuning.rehearse == "aside")
        self._queue = VictimQueue(table, self._scores)
        self._version = -1
        self._visit_of: list[tuple[Visit, int] | None] = [None] * len(table.groups)
        self._created = False  # this visit has made fresh what it does
        self._margin = _SET_MARGIN if library.stations.sets else 1.0
        self._largest = max((p.num_bytes for p in table.pages), default=0)
        self._flight_bytes = max(self.tuning.flight_bytes, 2 * self._largest)
        self._mark = self._engine.now_ns()

    # -- what hooks call -------------------------------------------------------------------------

    def begin_pass(self, ctx: int, tokens: int = 0) -> None:
        """A forward of the whole model begins, in context ``ctx``."""
        self.library.begin_pass(ctx)
        self.tokens = tokens
        self._visit = None
        self._remaining = []
        if self._rehearsal is not None:
            self._rehearsal.begin_pass(self.transfers)
        order = self.library.order
        if order is not None:  # deep enough for the longest time without a hook
            gap = int(order.longest_ns * self.transfers.bytes_per_ns) + self._largest
            self._flight_bytes = max(self.tuning.flight_bytes, 2 * self._largest, gap)

    def open_set(
        self, set_index: int, members: Sequence[int], phase: Phase, resident_first: bool = True
    ) -> list[int]:
        """The members of a set that a forward needs are known; returns them in the order to run.

        Resident members come first, then those on their way, then the rest: misses turn into
        overlap.
        """
        station = self.stations.of_group[self.stations.sets[set_index][members[0]]]
        self._account()
        visit = self._start_visit(station, phase)
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
            self.prefetcher.advance(visit, self.tokens, self._remaining)
            self._poll()
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
        self._note_release(group)
        self._unpin(table.of(group, kind) if part is None else table.of_part(group, kind, part))

    def _note_release(self, group: int) -> None:
        last = self._visit_of[group]
        if last is not None:
            visit, number = last
            visit.span = len(self.library.live) - number
            if visit is self._visit:
                visit.held_ns = visit.dur_ns + self._engine.now_ns() - self._mark

    def _unpin(self, ids: Sequence[int]) -> None:
        table = self.table
        for page in ids:
            table.pins[page] -= 1
            assert table.pins[page] >= 0, f"page {page} released more often than accessed"
            if table.pins[page] == 0 and table.state[page] == PageState.RESIDENT:
                table.is_evictable[page] = 1
                self._rank(page)

    def _rank(self, page: int) -> None:
        """A page's use ended: when is it used next, and when does it go?"""
        if self.prefetcher is not None:
            self.prefetcher.until[page] = self.prefetcher.next_use(page)
        if self._planned:
            time = float(self._scores[page])
            if LEAVES_NS < time < UNKNOWN_NS / 8 and self.prefetcher.scheduled:
                self._evict([page])  # at once: nothing is won by waiting
            else:
                self._queue.push(page, time)
        else:
            score = self._scores[page] = self.eviction.score(page, self._time)
            self._queue.push(page, score)

    def drop(self, group: int, kind: Kind) -> None:
        """Unpin pages whose content is dead; a compact group's shared page lives on."""
        if self.table.groups[group].compact:
            self.release(group, kind)
            return
        if self.sink is not None:
            phase = self._visit.phase if self._visit is not None else Phase.OTHER
            self._write_need(group, kind, Op.DROP, 0, Phase(phase))
        if self._visit is not None:
            self._visit.drops |= 1 << kind
        self._note_release(group)
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

    def _start_visit(self, station: int, phase: Phase) -> Visit:
        self._visit = self.library.visit(station, phase)
        self._seq += 1
        self._created = False
        return self._visit

    def _enter(self, group: int, phase: Phase) -> Visit:
        station = self.stations.of_group[group]
        visit = self._visit
        if visit is None or visit.station != station or visit.phase != phase:
            visit = self._start_visit(station, phase)
            self._remaining = self._taped(station, phase)
            if self.prefetcher is not None:
                self.prefetcher.advance(visit, self.tokens, self._remaining)
        return visit

    def _taped(self, station: int, phase: Phase) -> list[int]:
        """Members of a set that a visit without ``open_set`` will use, in order."""
        set_index = self.stations.stations[station].set_index
        if set_index >= 0 and self.library.tape[set_index] is not None:
            tape = self.library.tape_order[set_index]
            if phase == Phase.BACKWARD:
                return tape[::-1]
            if phase == Phase.RECOMPUTE:
                return list(tape)
        return []

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
        self._visit_of[group] = (visit, len(self.library.live))
        pages: list[tuple[int, Op]] = []
        for kind, op in needs:
            visit.note(kind, op, member)
            if self.sink is not None and not part:
                self._write_need(group, kind, op, compute_ns, Phase(visit.phase))
                compute_ns = 0
            ids = table.of(group, kind) if part is None else table.of_part(group, kind, part)
            if op == Op.CREATE:
                if table.groups[group].compact:
                    op = Op.WRITE
                else:
                    self._created = True
            for page in ids:
                table.pins[page] += 1
                table.is_evictable[page] = 0
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
        self._poll()
        waiting = self._demand(pages)
        if self.prefetcher is not None:
            self._think()
        else:
            self.table.left.clear()
        stalled = False
        for page in waiting:
            stalled = self._settle(page) or stalled
        if stalled and self.prefetcher is not None:
            self._think()

    def _poll(self) -> None:
        """Take note of what the engine has done, and of what the plan has changed."""
        transfers = self.transfers
        transfers.poll()
        if transfers.arrived:
            for page in transfers.arrived:
                self.eviction.arrived(page, self._time)
                if self.table.is_evictable[page]:
                    if not self._planned:
                        self._scores[page] = self.eviction.score(page, self._time)
                    self._queue.push(page, float(self._scores[page]))
            transfers.arrived.clear()
        prefetcher = self.prefetcher
        if prefetcher is not None and prefetcher.version != self._version:
            self._version = prefetcher.version
            if self._planned:
                self._queue.invalidate()

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
            chosen = take_victims(self.table, self._queue, frames - transfers.available)
            if chosen is not None:
                self._evict(chosen)
                return
            self._evict(list(self._queue.first()))
            if transfers.available >= frames or transfers.cancel_one_prefetch():
                continue
            on_the_way = any(not self.table.pins[page] for page in transfers.loading)
            if not (on_the_way and transfers.wait_any()):
                raise BudgetError(self._no_room(frames))
            self._poll()

    def _evict(self, pages: list[int]) -> None:
        for page in pages:
            self.eviction.evicted(page)
            self.transfers.evict(page)

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

    def _settle(self, page: int) -> bool:
        """Wait for a page; returns whether that took time."""
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
        return waited > 0

    # -- thinking ahead --------------------------------------------------------------------------

    def _think(self) -> None:
        """Load ahead and write back early, as far as the plan and the lines allow."""
        assert self.prefetcher is not None
        transfers, tuning = self.transfers, self.tuning
        stores = tuning.early_stores - len(transfers.storing)
        scarce = self._load_ahead()
        if tuning.early_write_back and stores > 0 and scarce:
            self._clean(stores)

    def _line_is_fed(self) -> bool:
        """Whether what is in flight keeps the way in busy until the next hook.

        More would take frames from pages that are used until then. Under a schedule it takes them
        only from pages that leave.
        """
        transfers = self.transfers
        order, place = self.library.order, self.library.position
        scheduled = self.prefetcher is not None and self.prefetcher.scheduled
        if scheduled:
            return transfers.in_flight_bytes >= 2 * self._flight_bytes
        if not transfers.bytes_per_ns or order is None or place < 0:
            return transfers.in_flight_bytes >= self._flight_bytes
        return transfers.in_busy_ns >= order.entries[place].dur_ns

    def _load_ahead(self) -> bool:
        """Loads what the plan wants; returns whether it wants more than there is room for."""
        transfers, prefetcher, table = self.transfers, self.prefetcher, self.table
        assert prefetcher is not None
        if self._line_is_fed():
            return True
        items = None
        if self.tuning.max_items is not None:
            items = self.tuning.max_items - transfers.num_resident - len(transfers.loading)
        room = Room(transfers.available, items)
        now, until, scheduled = self.library.now_ns, prefetcher.until, prefetcher.scheduled
        later_than = LEAVES_NS
        for page in prefetcher.wanted():
            room.reserve = self._frames_to_reserve()
            if not scheduled:
                later_than = now + self._margin * (float(until[page]) - now)
            victims = choose_load(
                table, page, self._queue, until, later_than, room, clean_first=scheduled
            )
            if victims is None:
                return True
            self._evict(victims)
            transfers.load(page, -1, room.reserve)
            if self._line_is_fed():
                return True
        return False

    def _frames_to_reserve(self) -> int:
        """Frames to leave for what will be made fresh before the page that is looked at."""
        prefetcher = self.prefetcher
        order, place = self.library.order, self.library.position
        if order is None or place < 0:
            return 0
        here, dies = order.frames_to_create(place), order.entries[place].dies
        if prefetcher is not None and prefetcher.scheduled:
            ahead = prefetcher.fresh_until_cursor()
        else:
            ahead = order.frames_to_create(place + 1)
        if not self._created:
            return max(here, ahead) if dies else here + ahead
        return max(ahead - here, 0) if dies else ahead

    def _clean(self, stores: int) -> None:
        """Write back early what will have to go for the loads ahead."""
        transfers, prefetcher = self.transfers, self.prefetcher
        victims: Iterable[int] = self._queue.first()
        frames = self.tuning.lookahead_bytes // FRAME_BYTES - transfers.available
        if prefetcher is not None and prefetcher.scheduled:
            until = prefetcher.until
            victims = takewhile(lambda page: until[page] > LEAVES_NS, victims)
            frames = transfers.num_frames
        if frames > 0:
            chosen = choose_write_backs(self.table, victims, transfers.storing, frames, stores)
            for page in chosen:
                transfers.store(page, early=True)
