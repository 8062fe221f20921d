"""The gate: a prefetcher that is not the pager's own is listened to while it earns its keep.

A ghost of the policy's own order, loading on demand, runs beside the pager: the time for which
demand paging would have waited. What was waited for less than that, a prefetcher has earned; what
was waited for more, it has cost. Each context has an account of it in ns:

    + 1 % of the time that passes   (so all that can be lost in the long run is 1 %)
    + what was earned, - what was cost
    at most an eighth of the time in which the link fills the device, at the beginning of a pass

Below zero the gate shuts, at once: loads ahead that have not begun are taken back, nothing is
loaded or stored ahead any more, and pages go in the ghost's order. What is waited for because the
device lacks what the ghost has is charged as well. When 1 % of the time has paid for all that, the
prefetcher is tried again, from the beginning of a pass on; it is told of every visit meanwhile.

A ghost waits for loads, and for stores before them. What demand paging waits for beyond that
(updates at home) is measured while the gate is shut; the least of the last passes counts.

``OrderPrefetcher`` needs no gate: it says what was recorded, its scores are only the order of
guesses, and a schedule is followed where its rehearsal is faster. ``NextKPrefetcher`` has none
either: who names it wants to see what it does. Nothing here runs beside them.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from odc.memory.auto_eviction import Auto
from odc.memory.events import Op
from odc.memory.frames import FRAME_BYTES
from odc.memory.ghosts import DemandClock, PolicyGhost
from odc.memory.pages import PageTable
from odc.memory.prefetch import Prefetcher
from odc.memory.transfers import Transfers
from odc.memory.victims import EvictionPolicy, Lru

_log = logging.getLogger(__name__)

SHARE = 0.01  # of the time, that a prefetcher may cost
_DEPTH = 1 / 8  # the most on an account, in times in which the link fills the device
_LEAST_LOADS = 2  # but so many loads of the largest page
_TRIED_AT = 0.5  # of the most, at which a prefetcher is tried again
_PASSES = 4  # with the gate shut, of which the least waiting counts
_LEAST_PASSES = 2  # before which none does


@dataclass(slots=True)
class _Account:
    """Of a context.

    Attributes:
        is_open: the prefetcher is listened to.
        ns: what it may still cost.
        beyond: of the last passes that were shut, waiting beyond the ghost's, ns an access.
        excess: the least of them, if all have one sign; 0 until there are enough.
    """

    is_open: bool = True
    ns: float = math.inf
    beyond: deque[float] = field(default_factory=lambda: deque(maxlen=_PASSES))
    excess: float = 0.0

    def note(self, beyond: float) -> None:
        """A pass without the prefetcher, and without what it left, has ended."""
        self.beyond.append(beyond)
        if len(self.beyond) >= _LEAST_PASSES:
            self.excess = max(min(self.beyond), 0.0) or min(max(self.beyond), 0.0)


class _Own(Lru):
    """The order of eviction that one that chooses has without a plan."""

    def __init__(self, auto: Auto) -> None:
        self._auto = auto

    def score(self, page: int, time: int) -> float:
        return float(self._auto.ghosts[self._auto.own].scores[page])


class Gate:
    """An order of eviction, with or without what a prefetcher says.

    Args:
        policy: the order, which may be one that chooses for itself.
        transfers: says what was waited for.

    Attributes:
        awake: it wants to be told of accesses and of what dies.
        is_open: the prefetcher is listened to.
        on_change: called when that has changed.
        times_shut: how often it was shut because the prefetcher cost too much.
    """

    awake = True

    def __init__(self, policy: EvictionPolicy, transfers: Transfers) -> None:
        self.policy = policy
        self.is_open = True
        self.on_change: Callable[[], None] = lambda: None
        self.times_shut = 0
        self._auto = policy if isinstance(policy, Auto) else None
        self._transfers = transfers
        self._accounts: dict[int, _Account] = {}
        self._account = _Account()  # before the first pass
        self._payer = self._account  # of the pass that was last listened in
        self._debt = self._most_debt = 0.0  # ns that what it left may still cost
        self._shut_passes = 0  # since then
        self._start_ns = transfers.engine.now_ns()
        self._waited_ns = 0
        self._ghost_ns = 0.0
        self._time = self._accesses = 0
        self._beyond = 0.0  # waited for beyond the ghost's, in this pass

    # -- an order of eviction --------------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether pages go by the prefetcher's times."""
        return self.is_open and self.policy.planned

    @property
    def chosen(self) -> str:
        """The order in use."""
        if self._auto is None:
            return "open" if self.is_open else "shut"
        return f"open {self._auto.chosen}" if self.is_open else f"shut {self._auto.own}"

    @property
    def scores(self) -> np.ndarray:
        """(num_pages,) of the order in use."""
        if not self.is_open:
            return self._ghost.scores
        return self._scores if self._auto is None else self._auto.scores

    def arrived(self, page: int, time: int) -> None:
        """A page came into frames (see ``EvictionPolicy.arrived``)."""
        self.policy.arrived(page, time)

    def score(self, page: int, time: int) -> float:
        """As the order in use has it (see ``EvictionPolicy.score``)."""
        own = self.policy.score(page, time)
        return own if self.is_open else float(self._ghost.scores[page])

    def evicted(self, page: int) -> None:
        """A page was chosen to go."""
        self.policy.evicted(page)

    # -- what happens ----------------------------------------------------------------------------

    def watch(self, table: PageTable, prefetcher: Prefetcher | None) -> None:
        """Take the pages that will be seen."""
        pairs = zip(table.pages, table.load_weight, strict=True)
        loads = [page.home_bytes * weight for page, weight in pairs]
        self._table = table
        self._loads = np.array(loads)
        # Loads are weighted by their tier, the measured rate is that of all tiers.
        self._weight = sum(loads) / max(sum(page.home_bytes for page in table.pages), 1)
        self._scores = np.zeros(len(loads))
        if self._auto is None:
            own = copy.deepcopy(self.policy)
        else:
            self._auto.watch(table, prefetcher, always=True)
            own = _Own(self._auto)
        self._ghost = PolicyGhost(table, loads, own)
        self._clock = self._ghost.clock = DemandClock(table, loads)

    def accessed(
        self, pages: Sequence[int], changed: Sequence[tuple[int, Op]], capacity: int
    ) -> None:
        """Pages are needed and held, some to be changed; ``capacity``: frames there are."""
        self._settle()
        self._time += 1
        self._accesses += 1
        if self._auto is not None:
            self._auto.accessed(pages, changed, capacity)
        transfers, clock = self._transfers, self._clock
        self._ghost.time = self._time
        clock.begin(transfers.engine.now_ns() - transfers.waited_ns, changed, capacity)
        self._ghost.accessed(pages, changed, capacity)
        clock.end()
        if self.is_open:
            if self._account.ns < 0.0:
                self._shut()
        elif len(self._table.left) > 4 * len(self._loads):
            self._shorten_left()

    def released(self, page: int, time: int) -> None:
        """A page's last use for now ended, at a virtual time."""
        if self._auto is not None:
            self._auto.released(page, time)
        self._ghost.release(page, time)

    def dropped(self, page: int) -> None:
        """A page's content died."""
        if self._auto is not None:
            self._auto.dropped(page)
        self._ghost.drop(page)

    def emptied(self) -> None:
        """Pages have left that nobody had asked to leave: no order is to blame for it."""
        for page in np.flatnonzero(self._table.absent).tolist():
            self._ghost.drop(page)
        self._mark()

    def _mark(self) -> None:
        self._waited_ns, self._ghost_ns = self._transfers.waited_ns, self._clock.waited_ns

    def _settle(self) -> None:
        """Book what was waited for since the last call."""
        transfers, clock = self._transfers, self._clock
        rate = transfers.bytes_per_ns
        if rate:
            waited = transfers.waited_ns - self._waited_ns
            beyond = waited - (clock.waited_ns - self._ghost_ns)
            self._beyond += beyond
            lost = beyond - self._account.excess
            if self.is_open:
                account = self._account  # within a pass what was earned may be spent again
                account.ns = (self._most_ns() if account.ns == math.inf else account.ns) - lost
            elif self._debt > 0.0:
                lost = max(min(lost, self._debt), self._debt - self._most_debt)
                self._debt -= lost
                self._payer.ns -= lost
            clock.load_ns = self._load_ns(1.0)
            clock.store_ns = 1.0 / (transfers.bytes_out_per_ns or rate)
        self._mark()

    def _load_ns(self, load: float) -> float:
        return load / (self._transfers.bytes_per_ns * self._weight)

    def _most_ns(self) -> float:
        """The most that may be on an account."""
        transfers = self._transfers
        filling = transfers.num_frames * FRAME_BYTES / transfers.bytes_per_ns
        return max(_DEPTH * filling, _LEAST_LOADS * self._load_ns(float(self._loads.max())))

    # -- opening and shutting --------------------------------------------------------------------

    def begin_pass(self, ctx: int) -> None:
        """A pass begins: its context may be tried again."""
        self._settle()
        self._end_pass()
        if self._auto is not None:
            own = self._auto.own
            self._auto.begin_pass(ctx)
            if self._auto.own != own:
                self._ghost.reorder(self._auto.ghosts[self._auto.own].scores)
        before, self._account = self._account, self._account_of(ctx)
        account, knows_rate = self._account, self._transfers.bytes_per_ns > 0.0
        if not account.is_open and knows_rate:
            account.is_open = account.ns >= _TRIED_AT * self._most_ns()
        if self.is_open and not account.is_open:
            self._go_without(before)
        elif account.is_open and not self.is_open:
            self.is_open = True
            self._scores[:] = self._ghost.scores
            self.on_change()
        if not self.is_open:
            self._shorten_left()

    def _account_of(self, ctx: int) -> _Account:
        account = self._accounts.get(ctx)
        if account is None:
            account = _Account()
            if not all(known.is_open for known in self._accounts.values()):
                account.is_open, account.ns = False, 0.0  # what is new is not trusted more
            self._accounts[ctx] = account
        return account

    def _end_pass(self) -> None:
        """What has passed pays."""
        now, account = self._transfers.engine.now_ns(), self._account
        self._shut_passes += 1
        if not self.is_open and self._shut_passes > 1 and self._accesses:
            account.note(self._beyond / self._accesses)
        if self._transfers.bytes_per_ns:
            account.ns = min(account.ns + SHARE * (now - self._start_ns), self._most_ns())
        self._start_ns, self._accesses, self._beyond = now, 0, 0.0

    def _shut(self) -> None:
        """The prefetcher has cost too much in this context."""
        _log.info("the prefetcher costs more time than it saves; it is tried again later")
        self.times_shut += 1
        self._account.is_open = False
        self._go_without(self._account)

    def _go_without(self, payer: _Account) -> None:
        """From here on, at the expense of the context that was listened in until now."""
        transfers = self._transfers
        self.is_open = False
        while transfers.cancel_one_prefetch():
            pass
        transfers.rescue_all()
        lacks = np.frombuffer(self._ghost.is_here, bool) & self._table.absent
        stores = transfers.out_flight_bytes / (transfers.bytes_out_per_ns or math.inf)
        self._debt = self._most_debt = self._load_ns(float(self._loads[lacks].sum())) + stores
        self._payer, self._shut_passes = payer, 0
        self.on_change()

    def _shorten_left(self) -> None:
        """Nobody asks for what left while the gate is shut: keep each page once."""
        self._table.left[:] = list(dict.fromkeys(self._table.left))
