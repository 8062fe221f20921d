"""Eviction that chooses its order: the plan's, unless another would have loaded clearly less.

Ghosts of LRU, MRU, LFU and of the plan's order run on the access ids of every pass. Each is
charged with what it would have had to load; bytes, weighted by the tier they come from, are time
on the link up to a constant that all share. At the beginning of a pass its context uses the order
with the least charge over a fading window of four of the context's passes, if that saves 3 %;
until enough passes were charged, and where nothing is saved, it is the plan's. So a wrong plan
costs little more than the best simple order and the switch.

The passes in which a plan is still being made do not count: without a recorded order the plan's
order is LRU's, and the pass after starts from what that left. Ghosts take time, so that they run
in the first passes of each context, and then in a round of passes in eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from odc.memory.events import Op
from odc.memory.ghosts import FrequencyGhost, Ghost, PlanGhost, RecencyGhost
from odc.memory.pages import PageTable
from odc.memory.prefetch import Prefetcher
from odc.memory.victims import Lru

MARGIN = 0.03  # saved before another order takes over
WINDOW = 4.0  # passes of a context
_FIRST = 2  # passes of a context that do not count
_LEAST = 2  # passes that must have counted
_WATCHED = 16  # first passes of a context in which ghosts run, and some behind them
_ROUND, _REST = 12, 7  # then they run in rounds of passes, and rest for so many rounds
_SETTLE = 4  # passes of a round that do not count: they start from what was there long ago
PLAN = "plan"


@dataclass(slots=True)
class _Context:
    """What ghosts were charged in the passes of a context.

    Attributes:
        passes: that began.
        charged: that counted.
        costs: fading sums, by order.
        weight: the fading number of passes that they are of.
        chosen: the order in use.
        own: the order that would be in use without a plan.
    """

    chosen: str
    own: str
    passes: int = 0
    charged: int = 0
    weight: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)


class Auto(Lru):
    """Chooses among the orders of eviction; a pager calls ``watch`` before anything else.

    Attributes:
        chosen: the order of the pass that runs: ``plan``, ``lru``, ``mru`` or ``lfu``.
        own: the same without the plan's, if it is to be always awake.
        awake: ghosts run in this pass: it wants to be told of accesses and of what dies.
    """

    def __init__(self) -> None:
        self.ghosts: dict[str, Ghost] = {}
        self.chosen, self.own = PLAN, "lru"
        self.awake = True
        self._always = False  # awake
        self._round = _SETTLE  # passes since they woke up
        self._stays = 0  # the pass until which they stay awake
        self._passes = 0
        self._plan: PlanGhost | None = None
        self._prefetcher: Prefetcher | None = None
        self._version = -1
        self._contexts: dict[int, _Context] = {}
        self._ctx: _Context | None = None
        self._default = PLAN
        self._largest = 0.0
        self._keep = math.exp(-1.0 / WINDOW)

    @property
    def planned(self) -> bool:  # type: ignore[override]
        """Whether the pass that runs goes by the plan."""
        return self.chosen == PLAN

    def watch(self, table: PageTable, prefetcher: Prefetcher | None, always: bool = False) -> None:
        """Take the pages that will be seen. Without a prefetcher LRU stands for the plan.

        Args:
            table: the pages.
            prefetcher: has a plan.
            always: ghosts run in every pass, and ``own`` is kept.
        """
        self._always = always
        pairs = zip(table.pages, table.load_weight, strict=True)
        loads = [page.home_bytes * weight for page, weight in pairs]
        self._prefetcher = prefetcher
        self._largest = max(loads, default=0.0)
        if prefetcher is not None:
            self._plan = self.ghosts[PLAN] = PlanGhost(table, loads, prefetcher.until)
        self.ghosts["lru"] = RecencyGhost(table, loads, latest_first=False)
        self.ghosts["mru"] = RecencyGhost(table, loads, latest_first=True)
        self.ghosts["lfu"] = FrequencyGhost(table, loads)
        self.chosen = self._default = next(iter(self.ghosts))  # the plan's, if there is one

    # -- what happens ----------------------------------------------------------------------------

    def accessed(
        self, pages: Sequence[int], changed: Sequence[tuple[int, Op]], capacity: int
    ) -> None:
        """Pages are needed and held, some to be changed; ``capacity``: frames there are."""
        plan = self._plan
        if plan is not None and self._prefetcher is not None:
            version = self._prefetcher.version
            if version != self._version:
                self._version = version
                plan.changed()
        for ghost in self.ghosts.values():
            ghost.accessed(pages, changed, capacity)

    def released(self, page: int, time: int) -> None:
        """A page's last use for now ended, at a virtual time."""
        if self.awake:
            for ghost in self.ghosts.values():
                ghost.release(page, time)
        elif self.chosen != PLAN:
            self.ghosts[self.chosen].note(page, time)

    def dropped(self, page: int) -> None:
        """A page's content died."""
        for ghost in self.ghosts.values():
            ghost.drop(page)

    def score(self, page: int, time: int) -> float:
        """As the order in use has it (see ``EvictionPolicy.score``)."""
        return float(self.scores[page])

    @property
    def scores(self) -> np.ndarray:
        """(num_pages,) of the order in use; of the plan's, as its ghost has them."""
        return self.ghosts[self.chosen].scores

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, ctx: int) -> None:
        """Charge the pass that ended, and choose for the one that begins."""
        self._charge()
        context = self._contexts.setdefault(ctx, _Context(self._default, "lru"))
        context.passes += 1
        if context.charged >= _LEAST:
            context.chosen = self._choose(context, context.chosen, self._default)
            if self._always:
                context.own = self._choose(context, context.own, "lru")
        self.chosen, self.own, self._ctx = context.chosen, context.own, context
        self._passes += 1
        if context.passes <= _WATCHED:
            self._stays = self._passes + _ROUND
        was_awake = self.awake
        in_round = self._passes // _ROUND % (1 + _REST) == 0
        self.awake = in_round or self._passes < self._stays or self._always
        self._round = self._round + 1 if was_awake else 0
        if self.awake and not was_awake:
            for ghost in self.ghosts.values():
                ghost.wake()

    def _charge(self) -> None:
        context = self._ctx
        counts = context is not None and context.passes > _FIRST
        counts = counts and self.awake and self._round >= _SETTLE
        for name, ghost in self.ghosts.items():
            if context is not None and counts:
                context.costs[name] = self._keep * context.costs.get(name, 0.0) + ghost.cost
            ghost.cost = 0.0
        if context is not None and counts:
            context.charged += 1
            context.weight = self._keep * context.weight + 1.0

    def _choose(self, context: _Context, chosen: str, default: str) -> str:
        """The cheapest, if it saves enough over the one in use, or over the default."""
        costs = context.costs
        among = [name for name in self.ghosts if name != PLAN or default == PLAN]
        best = min(among, key=lambda name: costs[name])  # ties: the default comes first
        if not self._saves(best, default, context):
            best = default
        return best if self._saves(best, chosen, context) else chosen

    def _saves(self, one: str, other: str, context: _Context) -> bool:
        """Whether an order saved clearly more than chance: 3 %, and more than a load a pass.

        On a loop two orders with equally many loads in the long run take turns in having one more.
        """
        saved = context.costs[other] - context.costs[one]
        return saved > max(MARGIN * context.costs[other], self._largest * context.weight)
