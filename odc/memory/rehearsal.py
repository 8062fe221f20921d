"""Rehearsals: when to look for a schedule, and when to follow it.

At the beginning of a pass the expected chain of contexts is looked at. If it is a cycle of passes
that are known and need the same pages each time, its schedule is found once and followed as long
as orders, capacity and the rates of the link stay what they were. The search is bounded; beside a
real device it runs in a thread of its own, and the pass goes on without a schedule meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from odc.memory.cycle import Cycle, Rates, Start
from odc.memory.orders import OrderLibrary
from odc.memory.plan import OrderPrefetcher
from odc.memory.recorded import RecordedOrder
from odc.memory.schedule import Schedule, search
from odc.memory.transfers import Transfers

_CHANGED = 0.2  # rates that differ by more than this share make a schedule stale
_LONGEST = 4  # passes of a cycle
_SHARE = 0.02  # of a pass, that a search for it alone may take
_USE_NS = 1200.0  # what decoding a use takes
_KEPT = 64  # schedules that are remembered

_Key = tuple[tuple[tuple[int, int], ...], int]


class Rehearsal:
    """Finds schedules for a prefetcher.

    Args:
        library: recorded orders.
        prefetcher: follows the schedules.
        aside: search in a thread of its own.
    """

    def __init__(self, library: OrderLibrary, prefetcher: OrderPrefetcher, aside: bool) -> None:
        self.library = library
        self.prefetcher = prefetcher
        self._pool = ThreadPoolExecutor(1, "odc-rehearsal") if aside else None
        self._followed: Schedule | None = None
        self._turn = 0
        self._found: dict[_Key, tuple[Rates, Schedule | None]] = {}
        self._last: dict[tuple[tuple[int, ...], int], Schedule] = {}
        self._pending: tuple[_Key, Rates, Future[Schedule | None]] | None = None

    def begin_pass(self, transfers: Transfers) -> None:
        """A pass has begun: give the prefetcher its schedule, or none."""
        contexts = self._cycle()
        rates = self._rates(transfers)
        if rates is None or not contexts:
            self._followed = None
            self._follow_run(transfers, rates)
            return
        first = min(range(len(contexts)), key=lambda n: contexts[n:] + contexts[:n])
        turned = contexts[first:] + contexts[:first]
        orders = [self.library.orders[ctx] for ctx in turned]
        key = (
            tuple((ctx, o.compiled) for ctx, o in zip(turned, orders, strict=True)),
            transfers.num_frames,
        )
        self._follow(self._schedule(key, orders, rates), orders, -first % len(contexts))

    def rest(self) -> None:
        """A pass that follows no schedule has begun."""
        self._followed = None
        self.prefetcher.follow(None, [], [])

    def _follow_run(self, transfers: Transfers, rates: Rates | None) -> None:
        """A pass that is no part of a cycle: a schedule for it alone, from what is resident.

        The next pass is rehearsed with it, so that it finds what it needs; its time counts as much
        as it is likely. Where nothing is
        written the rule without a schedule does as well, and does not depend on what comes next.
        """
        library = self.library
        order = library.order
        schedule = None
        if rates is not None and order is not None and order.is_certain and order.writes:
            orders = [order]
            orders += [library.orders[c] for c in library.chain[:1] if self._is_certain(c)]
            table = library.stations.table
            transfers.rescue_all()
            here = [p for p, absent in enumerate(table.is_absent) if not absent]
            start = Start(here, transfers.in_busy_ns, transfers.stored_ns(rates.store))
            chances = (library.next_chance, library.orders.get(library.other), library.other_chance)
            run = Cycle(table, orders, transfers.num_frames, rates, start, *chances)
            schedule = search(run, work=int(_SHARE * order.total_ns / _USE_NS))
        if schedule is None or order is None:
            self.prefetcher.follow(None, [], [])
        else:
            self.prefetcher.follow(schedule, [order], schedule.leaves[:1], schedule.first)

    def _follow(
        self,
        schedule: Schedule | None,
        orders: Sequence[RecordedOrder],
        turn: int,
    ) -> None:
        if schedule is None:
            self._followed = None
            self.prefetcher.follow(None, [], [])
            return
        if schedule is not self._followed:
            self._followed = schedule
            self._turn = turn
        else:
            self._turn += 1
        length = len(schedule.leaves)
        places = [(self._turn - n) % length for n in range(length)]
        self.prefetcher.follow(
            schedule,
            [orders[place % len(orders)] for place in places],
            [schedule.leaves[place] for place in places],
        )

    def _cycle(self) -> tuple[int, ...]:
        """The contexts that recur from this pass on; () if their orders cannot be rehearsed.

        They must have run just before: from another residency a schedule is a poor start.
        """
        library = self.library
        chain = (library.ctx, *library.chain)
        for length in range(1, _LONGEST + 1):
            cycle = chain[:length]
            recurs = all(ctx == chain[at % length] for at, ctx in enumerate(chain))
            if recurs and len(chain) >= 2 * length and self._has_run(cycle):
                return cycle
        alone = chain[:1]  # for as long as the next pass is the same again
        return alone if chain[:2] == alone * 2 and self._has_run(alone) else ()

    def _has_run(self, cycle: tuple[int, ...]) -> bool:
        """Whether the passes just before were those of a cycle, and can be rehearsed."""
        before = tuple(self.library.past[-1 - len(cycle) : -1])
        return before == cycle and all(self._is_certain(ctx) for ctx in cycle)

    def _is_certain(self, ctx: int) -> bool:
        order = self.library.orders.get(ctx)
        return order is not None and order.is_certain

    @staticmethod
    def _rates(transfers: Transfers) -> Rates | None:
        load = transfers.bytes_per_ns
        if not load:
            return None
        return Rates(1.0 / load, 1.0 / (transfers.bytes_out_per_ns or load))

    def _schedule(self, key: _Key, orders: list[RecordedOrder], rates: Rates) -> Schedule | None:
        self._collect()
        known = self._found.get(key)
        if known is not None and _are_close(known[0], rates):
            return known[1]
        contexts = tuple(ctx for ctx, _ in key[0])
        last = self._last.get((contexts, key[1]))
        if last is not None and not _is_of(last, orders):
            last = None
        cycle = Cycle(self.library.stations.table, orders, key[1], rates)
        if self._pool is None:
            self._keep(key, rates, search(cycle, last))
            return self._found[key][1]
        if self._pending is None:
            self._pending = (key, rates, self._pool.submit(search, cycle, last))
        return last

    def _collect(self) -> None:
        if self._pending is not None and self._pending[2].done():
            key, rates, future = self._pending
            self._pending = None
            self._keep(key, rates, future.result())

    def _keep(self, key: _Key, rates: Rates, schedule: Schedule | None) -> None:
        if len(self._found) >= _KEPT:
            self._found.pop(next(iter(self._found)))
        self._found[key] = (rates, schedule)
        if schedule is not None:
            self._last[tuple(ctx for ctx, _ in key[0]), key[1]] = schedule

    def close(self) -> None:
        """Stop searching."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _is_of(schedule: Schedule, orders: Sequence[RecordedOrder]) -> bool:
    """Whether a schedule's places are those of the orders as they are now."""
    return all(
        len(places) == len(orders[number % len(orders)].entries)
        for number, places in enumerate(schedule.leaves)
    )


def _are_close(a: Rates, b: Rates) -> bool:
    pairs = ((a.load, b.load), (a.store, b.store))
    return all(abs(x - y) <= _CHANGED * max(x, y) for x, y in pairs)
