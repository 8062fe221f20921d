"""The context library: recorded orders of visits, and the place of the pass that runs in its own.

Each context (training by micro-step, evaluation, generation, another model) keeps one recorded
order (``recorded.py``). On a visit that was not expected its place is looked up again, and replay
goes on from there.

Within a pass, backward mirrors forward: a backward visit is expected if and only if its station's
forward ran in this pass (the *tape*). Which context follows which is a Markov model of variable
order over the contexts that ran.

The clock of the library is compute time along the expected order: a stall does not move it, so
that a time of use, once told, stays true until the order is left.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from odc.memory.contexts import Followers, Shapes, base_of
from odc.memory.events import Phase
from odc.memory.recorded import FORWARD, MIRRORED, SUFFIX, RecordedOrder
from odc.memory.stations import Stations, Visit, visit_key

_log = logging.getLogger(__name__)

_NONE = range(0)


class OrderLibrary:
    """Recorded orders by context, the pass that runs, and the tape of its forward.

    Attributes:
        ctx: context of the pass that runs.
        order: its recorded order, None in its first pass.
        position: place of the visit that runs, -1 before the first.
        skipped: places that the visit that runs has left out.
        live: visits of the pass that runs.
        base_ns: the clock at the beginning of the pass.
        chain: the contexts expected after this one.
        passes: passes begun.
        as_expected: the pass that runs is the one that was expected, and no order has changed.
        has_run: by station, whether its forward ran in this pass.
        tape, tape_order: by set, the members that its forward used.
        touched: by set, members with a gradient.
    """

    def __init__(self, stations: Stations) -> None:
        self.stations = stations
        self.orders: dict[int, RecordedOrder] = {}
        self.ctx = -1
        self.order: RecordedOrder | None = None
        self.position = -1
        self.skipped: range = _NONE
        self.live: list[Visit] = []
        self.base_ns = 0.0
        self.chain: tuple[int, ...] = ()
        self.next_chance = self.other_chance = 0.0
        self.other = -1
        self.passes = 0
        self.as_expected = False
        self.divergences: Counter[tuple[int, str]] = Counter()
        self.has_run = bytearray(len(stations.stations))
        self.tape: list[np.ndarray | None] = [None] * len(stations.sets)
        self.tape_order: list[list[int]] = [[] for _ in stations.sets]
        self.touched: list[np.ndarray | None] = [None] * len(stations.sets)
        self._followers = Followers()
        self._shapes = Shapes()

    @property
    def past(self) -> list[int]:
        """The contexts that ran, this one the last."""
        return self._followers.past

    @property
    def diverged(self) -> int:
        """Visits that were not expected."""
        return sum(self.divergences.values())

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, ctx: int, tokens: int = 0) -> None:
        """A pass in context ``ctx`` begins; the one before it is recorded.

        Args:
            ctx: its context.
            tokens: of its batch, 0 if unknown.
        """
        expected = base_of(self.chain[0]) if self.chain else None
        changed = self._end_pass()
        if self.order is not None:
            self.base_ns += self.order.total_ns
        self.as_expected = expected == ctx and not changed
        known = self.orders.get(ctx)
        ctx = self._shapes.of(ctx, tokens, known is not None and known.is_forward)
        self.ctx = ctx
        self.order = self.orders.get(ctx)
        if self.order is None and known is not None:  # the same pages, at another pace
            self.order = self.orders[ctx] = known.copy()
        self.live = []
        self.position = -1
        self.skipped = _NONE
        self.passes += 1
        self._followers.begin(ctx)
        self.chain = self._followers.chain()
        chances = self._followers.chances()
        self.next_chance = chances.pop(self.chain[0], 0.0)
        self.other = max(chances, key=lambda ctx: (chances[ctx], ctx), default=-1)
        self.other_chance = chances.get(self.other, 0.0)
        self.tape = [None] * len(self.tape)
        self.has_run = bytearray(len(self.has_run))

    def _end_pass(self) -> bool:
        if not self.live:
            return True
        order = self.orders.get(self.ctx)
        if order is None:
            order = self.orders[self.ctx] = RecordedOrder(self.stations)
        changed = order.record(self.live)
        self._followers.learn()
        return changed

    def end_update(self) -> None:
        """The optimizer step is over: no set has a gradient any more."""
        self.touched = [None] * len(self.touched)

    # -- visits ----------------------------------------------------------------------------------

    def visit(self, station: int, phase: int) -> Visit:
        """Begin a visit; finds its place in the recorded order."""
        set_index = self.stations.set_of[station]
        made = Visit(station, phase)
        if set_index >= 0:
            made.used = np.zeros(len(self.stations.sets[set_index]), bool)
        if phase in FORWARD:
            self.has_run[station] = 1
        order, expected = self.order, self.position + 1
        self.skipped = _NONE
        if order is not None:
            keys = order.keys  # (``visit_key`` written out)
            if expected < len(keys) and keys[expected] == station * 8 + phase:
                self.position = made.place = expected
            else:
                made.place = self._find_again(order, visit_key(station, phase))
        self.live.append(made)
        return made

    def _find_again(self, order: RecordedOrder, key: int) -> int:
        last_keys = [v.key for v in self.live[-SUFFIX:]]
        place = order.find(key, self.position, last_keys)
        kind = "new" if place < 0 else "back" if place <= self.position else "skip"
        if kind == "skip":
            self.skipped = range(self.position + 1, place)
            if not any(self.expects(order, p) for p in self.skipped):
                self.position = place
                return place
        self.divergences[self.ctx, kind] += 1
        if self.divergences[self.ctx, kind] == 1:
            _log.info(
                "context %d: a visit that was not expected (%s) at place %d; the recorded order is "
                "followed from there on, and such visits are only counted from now on",
                self.ctx,
                {"new": "unknown", "back": "behind", "skip": "further ahead"}[kind],
                self.position + 1,
            )
        if place >= 0:
            self.position = place
        return place

    def expects(self, order: RecordedOrder, place: int) -> bool:
        """Whether an entry ahead in this pass will be visited, as far as the tape knows."""
        mirror = order.mirror[place]
        if mirror < 0 or mirror > self.position:
            return True
        return bool(self.has_run[order.entries[place].station])

    def forward_done(self, set_index: int, used: np.ndarray, order: list[int]) -> None:
        """The members that a set's forward needs are known: its backward needs the same."""
        self.tape[set_index] = used
        self.tape_order[set_index] = order
        seen = self.touched[set_index]
        self.touched[set_index] = used.copy() if seen is None else seen | used

    def taped(self, set_index: int, phase: int) -> list[int]:
        """The members that a visit behind a set's forward needs, in the order of their use."""
        if phase == Phase.OPTIMIZER:  # it walks through the groups one by one
            touched = self.touched[set_index]
            return [] if touched is None else np.flatnonzero(touched).tolist()
        ran = self.tape_order[set_index]
        if self.tape[set_index] is None or phase not in MIRRORED:
            return []
        return ran[::-1] if phase == Phase.BACKWARD else list(ran)

    # -- the clock -------------------------------------------------------------------------------

    @property
    def now_ns(self) -> float:
        """Compute time along the expected order, at the beginning of the visit that runs."""
        order = self.order
        if order is None or self.position < 0:
            return self.base_ns
        return self.base_ns + order.start_ns[self.position]

    @property
    def end_ns(self) -> float:
        """The same at the end of the pass that runs."""
        return self.base_ns + (self.order.total_ns if self.order is not None else 0.0)
