"""Schedules: which pages leave after which use, found by rehearsing a recorded cycle.

Loading the soonest absent page as early as any victim allows is right while the link has time to
spare. On a busy link it costs: a page is pushed out for one that could have waited, and is loaded
once more. Where a cycle of passes is known and needs the same pages each time, that choice is
made beforehand. Between two uses a page is *kept* or *leaves*; the choice for all of them is a
schedule. Loads then run in the order of need, each as early as a page that leaves makes room, and
dirty pages that leave are written at once: they will not change again.

``decode.py`` tells how long a cycle takes under a schedule. The
search begins with the schedules of fewest loads (L. A. Belady, 1966, run around the cycle with some
frames set aside so that loads overlap) and improves the best by local moves: keep what was waited
for, let something else go. At last it keeps what can stay without taking time: that saves loads.
It is deterministic, and its work is bounded.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

from odc.memory.cycle import Cycle, Keep
from odc.memory.decode import decode
from odc.memory.rules import Belady, Greedy
from odc.memory.timely import Timely

WORK = 250_000  # uses that a search may decode: about a third of a second
_MOVES = 600
_SLACKS = (0, 1, 2, 3, 4)  # frames set aside, in units of the largest page
_AIMED = 0.7  # share of moves that keep a page that was waited for
_AS_GOOD = 1.03  # a schedule that is followed is kept while it is no slower than this
_CLEARLY = 0.99  # the rule without a schedule must be faster than this share


@dataclass(frozen=True, slots=True)
class Schedule:
    """What leaves, and what that takes.

    Attributes:
        leaves: by order of the cycle and place in it, the pages that leave when this use ends.
        first: pages that leave at the beginning.
        keep: for each use of the cycle, whether its page stays until the next.
        cycle_ns: time of a cycle, as decoded.
        compute_ns: computation in it.
        loads: pages loaded in a cycle.
    """

    leaves: list[list[frozenset[int]]]
    keep: tuple[bool, ...]
    cycle_ns: float
    compute_ns: float
    loads: float
    first: frozenset[int] = frozenset()


def search(
    cycle: Cycle, last: Schedule | None = None, work: int = WORK, seed: int = 0
) -> Schedule | None:
    """The best schedule found; None if none fits or the rule without a schedule is faster.

    Args:
        cycle: what is rehearsed.
        last: what was followed until now. It is kept if it is nearly as good: another one
            costs loads until residency fits it.
        work: uses that may be decoded.
        seed: of the moves.
    """
    # With dirty pages the rule is slower than its rehearsal: stores are not begun in time.
    greedy_ns = None if any(use.dirties for use in cycle.uses) else Greedy(cycle).run()
    largest = max((cycle.frames[u.page] for u in cycle.uses), default=1)
    best: tuple[float, float] | None = None
    keep: Keep = []
    starts: list[Keep | None] = [Belady(cycle, n * largest).run() for n in _SLACKS]
    if not cycle.cyclic:
        starts += [Timely(cycle).run(), Timely(cycle, largest).run()]
        starts += [_now_first(cycle, keep) for keep in starts if keep is not None]
    starts.append([False] * len(cycle.uses))  # fits wherever anything does
    before = None
    if last is not None and len(last.keep) == len(cycle.uses):
        starts.append(list(last.keep))
        before = decode(cycle, list(last.keep))
    for tried in starts:
        found = decode(cycle, tried) if tried is not None else None
        if tried is not None and found is not None and (best is None or found < best):
            best, keep = found, tried
    if best is None:
        return None
    moves = min(_MOVES, work // (cycle.rounds * max(len(cycle.uses), 1)))
    keep, best, tried_moves = _improve(cycle, keep, best, moves, random.Random(seed))
    keep, best = _save_loads(cycle, keep, best, moves - tried_moves)
    if greedy_ns is not None and greedy_ns <= _CLEARLY * best[0]:
        return None
    if before is not None and before[0] <= _AS_GOOD * best[0]:
        return last
    return _schedule(cycle, keep, best)


def _now_first(cycle: Cycle, keep: Keep) -> Keep:
    """A start of a run for which what only the next pass needs leaves at once."""
    found = keep[:]
    for u in range(cycle.num_uses, len(cycle.uses)):
        following = cycle.next[u]
        found[u] = found[u] and following >= 0 and cycle.start[following] < cycle.surely
    return found


def _improve(
    cycle: Cycle, keep: Keep, best: tuple[float, float], moves: int, rng: random.Random
) -> tuple[Keep, tuple[float, float], int]:
    """Local moves, until nothing is waited for or ``moves`` were tried; and how many were."""
    lasting = _lasting(cycle)
    waits: list[int] = []
    decode(cycle, keep, waits)
    number = 0
    while lasting and number < moves:
        if best[0] <= cycle.compute_ns * (1 + 1e-9) and not waits:
            break
        number += 1
        tried = _move(cycle, keep, waits, lasting, rng)
        now_waits: list[int] = []
        found = decode(cycle, tried, now_waits)
        if found is not None and found <= best:
            best, keep, waits = found, tried, now_waits
    return keep, best, number


def _save_loads(
    cycle: Cycle, keep: Keep, best: tuple[float, float], moves: int
) -> tuple[Keep, tuple[float, float]]:
    """Keep what can stay as well, what is used again soonest first.

    A page's room is left free: loads are begun at accesses only, so that one without slack would
    be begun by the access that needs it.
    """
    tight = copy.copy(cycle)
    tight.num_frames -= max((cycle.frames[u.page] for u in cycle.uses), default=1)
    count = len(cycle.events)
    leaving = [u for u in _lasting(cycle) if not keep[u] and cycle.next[u] >= 0]
    leaving.sort(key=lambda u: (cycle.start[cycle.next[u]] - cycle.uses[u].end) % count)
    more = True
    while more and moves > 0:
        more = False
        for u in [u for u in leaving if not keep[u]][:moves]:
            moves -= 1
            tried = keep[:]
            tried[u] = True
            found = decode(tight, tried)
            if found is not None and found < best:
                best, keep, more = found, tried, True
    return keep, best


def _lasting(cycle: Cycle) -> list[int]:
    """Uses whose page is used again, or may be, whether it stays or leaves in between."""
    may = {u for u in cycle.last.values() if cycle.next[u] < 0}
    return [
        u for u, use in enumerate(cycle.uses) if not use.leaves and (cycle.next[u] >= 0 or u in may)
    ]


def _move(
    cycle: Cycle, keep: Keep, waits: list[int], lasting: list[int], rng: random.Random
) -> Keep:
    """A neighbour: something is kept that was waited for, something else leaves."""
    tried = keep[:]
    if waits and rng.random() < _AIMED:
        wanted = cycle.before[rng.choice(waits)]
    else:
        wanted = rng.choice(lasting)
    if wanted < 0:  # it was not there at the beginning
        wanted = rng.choice(lasting)
    kind = rng.random()
    if kind < 0.85:
        tried[wanted] = True
    if kind >= 0.1:
        for _ in range(8):
            other = rng.choice(lasting)
            if tried[other] and other != wanted:
                tried[other] = False
                break
    return tried


def _schedule(cycle: Cycle, keep: Keep, best: tuple[float, float]) -> Schedule:
    leaves: list[list[set[int]]] = [[set() for _ in order.entries] for order in cycle.orders]
    for event in cycle.events:
        number, place = event.place
        for u in event.uses:
            if not keep[u] and not cycle.uses[u].leaves:
                leaves[number][place].add(cycle.uses[u].page)
    frozen = [[frozenset(pages) for pages in order] for order in leaves]
    real = range(cycle.num_uses, len(cycle.uses))
    first = frozenset(cycle.uses[u].page for u in real if not keep[u])
    return Schedule(frozen, tuple(keep), best[0], cycle.compute_ns, best[1], first)
