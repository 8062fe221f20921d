"""The pager: makes pages resident when they are needed, and as few times as it can.

Hooks call it on the training thread; all decisions are made there and carried out by an engine.
One access is: note what is needed, make room, submit the loads, think ahead while they run, wait.
Correct under any hint, however wrong: a plan only decides what is loaded early and what goes
first; an access waits for its own pages whatever was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from odc.memory.ahead import Lookahead, Tuning
from odc.memory.events import Account, Act, Kind, Op, Phase, Sink, Tier
from odc.memory.frames import FRAME_BYTES
from odc.memory.gate import Gate
from odc.memory.next_k import NextKPrefetcher
from odc.memory.orders import OrderLibrary
from odc.memory.pages import PageState, PageTable
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Prefetcher
from odc.memory.rehearsal import Rehearsal
from odc.memory.room import NoRoom, Room
from odc.memory.stations import Visit
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy, Lru

Need = tuple[Kind, Op]
_RESIDENT = PageState.RESIDENT  # looking up a member's name is slow
_READ, _CREATE = Op.READ, Op.CREATE


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
    activation_bytes_in: int = 0
    activation_bytes_out: int = 0


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
        gate: decides whether the prefetcher is listened to; None for the pager's own, which is.
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
        self._ctx = -1
        self._seq = 0
        self._visit: Visit | None = None
        self._remaining: list[int] = []
        self._engine = transfers.engine
        self._now_ns = transfers.engine.now_ns
        self.gate: Gate | None = None
        is_own = isinstance(prefetcher, OrderPrefetcher | NextKPrefetcher)
        if prefetcher is not None and not is_own:
            self.gate = Gate(self.eviction, transfers) if self.tuning.gate else None
        self.room = Room(table, transfers, self.gate or self.eviction, prefetcher)
        self._ahead: Lookahead | None = None
        self._rehearsal: Rehearsal | None = None
        if prefetcher is not None:
            self._ahead = Lookahead(library, transfers, self.room, prefetcher, self.tuning)
        if self.gate is not None:
            self.gate.on_change = partial(self._listen, self._ahead)
        if isinstance(prefetcher, OrderPrefetcher) and self.eviction.planned:
            how = self.tuning.rehearse
            self._rehearsal = Rehearsal(library, prefetcher, how == "aside") if how else None
        self._visit_of: list[tuple[Visit, int] | None] = [None] * len(table.groups)
        self._station_of = self.stations.of_group
        self._least_free = transfers.num_frames  # since the last ``take``
        self._taken = 0  # accesses until then
        self._mark = self._engine.now_ns()

    # -- what hooks call -------------------------------------------------------------------------

    def begin_pass(self, ctx: int, tokens: int = 0) -> None:
        """A forward of the whole model begins, in context ``ctx``."""
        self.library.begin_pass(ctx, tokens)
        self.tokens = tokens
        self._ctx = ctx
        self._visit = None
        self._remaining = []
        if not self.library.as_expected:  # loads ahead were for another pass
            while self.transfers.cancel_one_prefetch():
                pass
            self.transfers.recall_all()
        self.room.begin_pass(ctx, self.library.end_ns)
        if self._rehearsal is not None:
            if self.room.planned:
                self._rehearsal.begin_pass(self.transfers)
            else:  # a schedule is an order of eviction
                self._rehearsal.rest()
        if self._ahead is not None:
            self._ahead.begin_pass()

    def open_set(
        self, set_index: int, members: Sequence[int], phase: Phase, resident_first: bool = True
    ) -> list[int]:
        """The members of a set that a forward needs are known; returns them in the order to run.

        Resident members come first, then those on their way, then the rest: misses turn into
        overlap.
        """
        station = self.stations.of_group[self.stations.sets[set_index][members[0]]]
        self._account()
        self._visit = visit = self.library.visit(station, phase)
        self._seq += 1
        if self._ahead is not None:
            self._ahead.created = False
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
            self.room.poll()
            self._think()
        self._mark = self._engine.now_ns()
        return order

    def tape(self, set_index: int, members: Sequence[int]) -> None:
        """Tell the members, in their order, of the forward that is recomputed and undone next.

        For passes that visit a set several times in forward before they go back.
        """
        used = np.zeros(len(self.stations.sets[set_index]), bool)
        used[list(members)] = True
        self.library.forward_done(set_index, used, list(members))

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
        # What is a line or two long is written out on this path: a call costs as much as they do.
        room, transfers, counters = self.room, self.transfers, self.counters
        compute_ns = self._now_ns() - self._mark
        counters.compute_ns += compute_ns
        room.time += 1
        visit = self._visit
        if visit is not None:
            visit.dur_ns += compute_ns
        if visit is None or visit.station != self._station_of[group] or visit.phase != phase:
            visit = self._enter(self._station_of[group], phase)
        pages, changed = self._pin(group, needs, part, visit, compute_ns)
        if room.chooser is not None and room.chooser.awake:
            room.chooser.accessed(pages, changed, transfers.num_frames)
        try:
            room.poll()
            state = self.table.state
            for page in pages:
                if state[page] is not _RESIDENT:
                    self._make_resident(pages, _created(changed))
                    break
            else:
                if self._ahead is not None:
                    self._ahead.think()
        except Exception:
            self._unpin(pages)
            raise
        for page, _ in changed:
            transfers.dirtied(page)
        if transfers.free < self._least_free:
            self._least_free = transfers.free
        self._mark = self._now_ns()

    def release(self, group: int, kind: Kind, part: int | None = None) -> None:
        """Unpin pages; they may be evicted from now on."""
        table = self.table
        self._note_release(group)
        if part is None:
            self._unpin(table.by_kind[group, kind])
        else:
            ids = table.by_part.get((group, kind, part)) or table.of_part(group, kind, part)
            self._unpin(ids)

    def _note_release(self, group: int) -> None:
        last = self._visit_of[group]
        if last is not None:
            visit, number = last
            visit.span = len(self.library.live) - number
            if visit is self._visit:
                visit.held_ns = visit.dur_ns + self._now_ns() - self._mark

    def _unpin(self, ids: Sequence[int]) -> None:
        table, pins = self.table, self.table.pins
        for page in ids:
            pins[page] = left = pins[page] - 1
            assert left >= 0, f"page {page} released more often than accessed"
            if not left and table.state[page] == _RESIDENT:
                table.is_evictable[page] = 1
                self.room.rank(page)

    def drop(self, group: int, kind: Kind) -> None:
        """Unpin pages whose content is dead; a compact group's shared page lives on."""
        if self.table.is_compact[group]:
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
                self._discard(page)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _discard(self, page: int) -> None:
        """Give the frames of a page back whose content is dead."""
        try:
            if self.table.state[page] == PageState.LOADING:
                self.transfers.settle(page)
        finally:
            if self.table.state[page] == PageState.RESIDENT:
                self.room.drop(page)

    def forget(self, group: int, kind: Kind) -> None:
        """Content of unpinned pages is dead (a gradient that was zeroed)."""
        if self.table.is_compact[group]:
            return
        for page in self.table.of(group, kind):
            self.table.pins[page] += 1
        self.drop(group, kind)

    def update(
        self, group: int, phase: Phase, run_of: Callable[[int], Callable[[], None] | None]
    ) -> None:
        """A group's gradient goes home, where the group is updated; does not wait for it.

        Its parameters leave the device: the next access loads what the update made of them.

        Args:
            group: group id; nothing of it is pinned.
            phase: for the recorded order and the trace.
            run_of: for each part, what updates it; None where nothing has a gradient.

        Raises:
            RuntimeError: its parameters are pinned.
            PageIOError: the home could not be read or written, or an earlier update failed.
        """
        table = self.table
        if any(table.pins[p] for p in table.of(group, Kind.PARAMETER)):
            raise RuntimeError(
                f"{table.groups[group].name} cannot be updated at home while its parameters are in "
                "use on the device; leave model.resident(...) before opt.step()"
            )
        compute_ns = self._account()
        station, visit = self.stations.of_group[group], self._visit
        if visit is None or visit.station != station or visit.phase != phase:
            visit = self._enter(station, phase)
        visit.go_home(1 << Kind.PARAMETER | 1 << Kind.GRADIENT, self.stations.member_of[group])
        if self.sink is not None:
            self._write_need(group, Kind.GRADIENT, Op.UPDATE, compute_ns, Phase(visit.phase))
        self.room.poll()
        gradients = table.of(group, Kind.GRADIENT)
        for part, page in enumerate(table.of(group, Kind.PARAMETER)):
            run = run_of(part)
            if run is None:
                self._discard(gradients[part])
            else:
                self.room.update(page, gradients[part], run)
        self._think()
        self._mark = self._engine.now_ns()

    def hold_pinned(self) -> None:
        """Groups of a few KiB stay: pin them for good."""
        for group, spec in enumerate(self.table.groups):
            if spec.pinned:
                for page in self.table.of(group, Kind.PARAMETER):
                    self.table.pins[page] += 1

    def end_update(self) -> None:
        """The optimizer step is over."""
        self.library.end_update()

    def hint(self, groups: Sequence[int], scores: Sequence[float]) -> None:
        """Tell what the past cannot: P(group is used at its next forward visit), group by group.

        Of members of sets it holds until their set is visited, of other groups for the pass that
        runs: tell it behind ``begin_pass``. Wrong scores cost time, never a result; without a
        prefetcher nothing reads them.

        Args:
            groups: group ids.
            scores: 0 to 1, one for each.

        Raises:
            ValueError: the two differ in length.
        """
        if len(groups) != len(scores):
            raise ValueError(f"scores must be one for each of {len(groups)}, got {len(scores)}")
        if self.prefetcher is not None:
            self.prefetcher.hint(groups, scores)

    def waited(self, wait_ns: int) -> None:
        """The training thread has waited for something else than pages."""
        self.counters.stall_ns += wait_ns
        self._mark += wait_ns

    def pause(self) -> None:
        """What happened since the last call was no computation, nor is the visit that runs."""
        if self.gate is not None:
            self.gate.emptied()
        self._mark = self._engine.now_ns()
        self._visit = None

    def take(self) -> Counters:
        """Counters since the last call."""
        self._account()
        counters = self.counters
        counters.bytes_in, self.transfers.bytes_in = self.transfers.bytes_in, 0
        counters.bytes_out, self.transfers.bytes_out = self.transfers.bytes_out, 0
        counters.peak_page_bytes = self._peak_bytes()
        counters.accesses, self._taken = self.room.time - self._taken, self.room.time
        self.counters, self._least_free = Counters(), self.transfers.free
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
                self._peak_bytes(),
            )

    def _peak_bytes(self) -> int:
        """The most that pages have held in frames, or booked, since the last ``take``."""
        return (self.transfers.num_frames - self._least_free) * FRAME_BYTES

    def _listen(self, ahead: Lookahead | None) -> None:
        """The gate has opened or shut."""
        self._ahead = ahead if self.gate is not None and self.gate.is_open else None
        self.room.reorder()

    def stop_rehearsing(self) -> None:
        """No schedule is looked for any more."""
        if self._rehearsal is not None:
            self._rehearsal.close()

    def set_sink(self, sink: Sink | None) -> None:
        """Trace to ``sink`` from now on; None stops."""
        self.sink = sink
        self.transfers.sink = sink

    # -- visits ----------------------------------------------------------------------------------

    def _account(self) -> int:
        compute_ns = self._now_ns() - self._mark
        self.counters.compute_ns += compute_ns
        if self._visit is not None:
            self._visit.dur_ns += compute_ns
        return compute_ns

    def _enter(self, station: int, phase: Phase) -> Visit:
        """A visit begins, without ``open_set``."""
        self._visit = visit = self.library.visit(station, phase)
        self._seq += 1
        self._remaining = remaining = self._taped(station, phase) if visit.used is not None else []
        if self._ahead is not None:
            self._ahead.created = False
            self._ahead.prefetcher.advance(visit, self.tokens, remaining)
        return visit

    def _taped(self, station: int, phase: Phase) -> list[int]:
        """Members of a set that a visit without ``open_set`` will use, in order."""
        return self.library.taped(self.stations.set_of[station], phase)

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
    ) -> tuple[Sequence[int], list[tuple[int, Op]]]:
        """Note and pin what is needed; returns the pages, and those that are not only read."""
        table, pins, is_evictable = self.table, self.table.pins, self.table.is_evictable
        self._visit_of[group] = (visit, len(self.library.live))
        if self._remaining:
            self._runs(self.stations.member_of[group])
        pages: Sequence[int] = ()
        changed: list[tuple[int, Op]] = []
        ids: Sequence[int]
        for kind, op in needs:
            if op is _READ and not visit.dur_ns and visit.used is None:
                visit.kinds |= 1 << kind  # (``note`` written out)
            else:
                visit.note(kind, op, self.stations.member_of[group])
            if self.sink is not None and not part:
                self._write_need(group, kind, op, compute_ns, Phase(visit.phase))
                compute_ns = 0
            if part is None:
                ids = table.by_kind[group, kind]
            else:
                ids = table.by_part.get((group, kind, part)) or table.of_part(group, kind, part)
            for page in ids:
                pins[page] += 1
                is_evictable[page] = 0
            if op != _READ:
                op = self._creating(group) if op == _CREATE else op
                changed += [(page, op) for page in ids]
            pages = [*pages, *ids] if pages else ids
        return pages, changed

    def _runs(self, member: int) -> None:
        """A member of the set that is visited runs."""
        if member in self._remaining:
            self._remaining.remove(member)

    def _creating(self, group: int) -> Op:
        """What it takes to make a kind fresh: a compact group's page holds the others as well."""
        if self.table.is_compact[group]:
            return Op.WRITE
        if self._ahead is not None:
            self._ahead.created = True
        return Op.CREATE

    def _write_need(self, group: int, kind: Kind, op: Op, compute_ns: int, phase: Phase) -> None:
        assert self.sink is not None
        self.sink.need(
            self._seq,
            self._engine.now_ns(),
            self.step,
            self.micro,
            phase,
            self._ctx,
            group,
            kind,
            op,
            compute_ns,
            self.tokens,
        )

    # -- making pages resident -------------------------------------------------------------------

    def _make_resident(self, pages: Sequence[int], created: Sequence[int]) -> None:
        waiting = self._demand(pages, created)
        self._think()
        stalled = False
        for page in waiting:
            stalled = self._settle(page) or stalled
        if stalled:  # some time has passed: the line in wants to be fed until the next hook
            self._think()

    def _think(self) -> None:
        if self._ahead is not None:
            self._ahead.think()

    def _demand(self, pages: Sequence[int], created: Sequence[int]) -> list[int]:
        """Submit what is missing; returns the pages to wait for."""
        table, transfers = self.table, self.transfers
        waiting: list[int] = []
        for page in pages:
            state = table.state[page]
            if state == PageState.RESIDENT or page in waiting:
                continue
            if state == PageState.EVICTING and transfers.rescue(page):
                continue
            waiting.append(page)
            if state == PageState.LOADING:
                continue
            self._make_room(table.frames[page])
            if page in created:
                transfers.create(page)
            else:
                self.counters.misses += 1
                transfers.load(page, self._seq)
        return waiting

    def _make_room(self, frames: int) -> None:
        try:
            self.room.make(frames)
        except NoRoom:
            raise self.room.error(frames, f"{self.option_prefix}page_budget") from None

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
                    self.transfers.tier_of(page),
                    Tier.DEVICE,
                    0,
                    0,
                    waited,
                    self.transfers.policy,
                )
        return waited > 0


def _created(changed: Sequence[tuple[int, Op]]) -> Sequence[int]:
    """The pages that are made fresh."""
    return [page for page, op in changed if op == _CREATE]
