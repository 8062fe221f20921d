"""What a policy could reach that does not know which layers a pass will use.

A pass goes through *places*: at each it uses one of some pages, or none, drawn anew in every pass
(a layer that is dropped, a branch), and backward through what it used. Only when a use begins is it
known which page the place drew. Pages are clean and of one size, a use computes for one unit, a
load takes ``load`` of them, runs to its end, and one runs at a time.

The best schedule of ``best_found`` knows all draws. ``least_expected`` is the least expected time
of all policies that do not, by dynamic programming over what they can know: where the pass is, what
it has used, which pages are there, and what moves. That is for tiny models; ``rollout.py`` has
policies for large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from odc.memory.events import FORWARD_PHASES
from odc.memory.replay.workload import Workload

NOTHING = -1
Place = tuple[tuple[int, float], ...]  # (page or NOTHING, its chance)


@dataclass(frozen=True)
class Model:
    """What passes may use.

    Attributes:
        places: of a pass, in the order of its forward.
        capacity: pages that fit.
        load: time of a load, in computations of a use.
    """

    places: tuple[Place, ...]
    capacity: int
    load: float

    @cached_property
    def num_pages(self) -> int:
        return 1 + max(page for place in self.places for page, _ in place)

    def drawn(self, used: Sequence[int]) -> tuple[Place, ...]:
        """The places of a pass that is known to use ``used``: its forward, each page once."""
        wanted = set(used)
        return tuple(
            ((next((page for page, _ in place if page in wanted), NOTHING), 1.0),)
            for place in self.places
        )


def dropped_layers(layers: int, rate: float) -> tuple[Place, ...]:
    """Places of a model whose layers are each dropped at ``rate``."""
    return tuple(((page, 1.0 - rate), (NOTHING, rate)) for page in range(layers))


def places_of(workload: Workload) -> tuple[Place, ...]:
    """Places of a workload of layers named ``layers.PLACE`` or ``layers.PLACE.BRANCH``.

    Chances are shares of its passes, those of one place's pages alike; pages are groups.
    """
    names = workload.pages["module_path"].tolist()
    owners = workload.pages["group"].tolist()
    by_place = sorted({(int(name.split(".")[1]), g) for g, name in zip(owners, names, strict=True)})
    passes = used_groups(workload)
    places: list[Place] = []
    for _, members in groupby(by_place, key=lambda item: item[0]):
        groups = [g for _, g in members]
        share = float(np.mean([any(g in used for g in groups) for used in passes]))
        place = [(g, share / len(groups)) for g in groups]
        places.append((*place, (NOTHING, 1.0 - share)) if share < 1.0 else tuple(place))
    return tuple(places)


def used_groups(workload: Workload) -> list[list[int]]:
    """Of each pass, the groups that its forward uses, in order."""
    found: list[list[int]] = []
    for visit in workload.visits:
        if visit.begins_pass:
            found.append([])
        if visit.phase in FORWARD_PHASES:
            found[-1].append(visit.bundles[0].group)
    return found


@dataclass(frozen=True, slots=True)
class _State:
    """What is known at a moment.

    Attributes:
        passes: that are still to begin.
        place: of the use that waits or computes.
        forward: it is one of the forward.
        used: pages that this pass has used or, in backward, will use again, in order.
        here: pages that are there, as bits.
        coming: page that is being loaded, -1 for none.
        load, compute: ticks until that and the computation end; compute is -1 for a use that waits.
    """

    passes: int
    place: int
    forward: bool
    used: tuple[int, ...]
    here: int
    coming: int = -1
    load: int = 0
    compute: int = -1


class _Program:
    """Least expected ticks from each state."""

    def __init__(self, passes: Sequence[tuple[Place, ...]], capacity: int, ticks: int, unit: int):
        self.passes, self.capacity, self.ticks, self.unit = passes, capacity, ticks, unit
        self.pages = sorted(
            {p for places in passes for place in places for p, _ in place if p >= 0}
        )
        self.known: dict[_State, float] = {}

    def begin(self, passes: int, here: int, coming: int = -1, load: int = 0) -> float:
        """The next pass begins, ``passes`` behind it are still to come after it."""
        state = _State(passes, -1, True, (), here, coming, load, 0)
        return self._next_use(state)

    def _next_use(self, state: _State) -> float:
        """A use has ended: draw what comes, and go on from there."""
        if not state.forward:
            if len(state.used) > 1:
                return self.value(replace(state, used=state.used[:-1], compute=-1))
            return self._end_pass(state)
        places = self.passes[len(self.passes) - 1 - state.passes]
        total, alive = 0.0, 1.0
        for place in range(state.place + 1, len(places)):
            nothing = 1.0
            for page, chance in places[place]:
                if page >= 0 and chance > 0.0:
                    after = replace(state, place=place, used=(*state.used, page), compute=-1)
                    total += alive * chance * self.value(after)
                    nothing -= chance
            alive *= max(nothing, 0.0)
            if alive < 1e-12:
                return total
        if not state.used:
            return total + alive * self._end_pass(state)
        return total + alive * self.value(replace(state, place=-1, forward=False, compute=-1))

    def _end_pass(self, state: _State) -> float:
        if not state.passes:
            return 0.0
        return self.begin(state.passes - 1, state.here, state.coming, state.load)

    def value(self, state: _State) -> float:
        """Least expected ticks that are left."""
        known = self.known.get(state)
        if known is None:
            known = self.known[state] = self._value(state)
        return known

    def _value(self, state: _State) -> float:
        page = state.used[-1]
        if state.compute < 0 and state.here >> page & 1:
            state = replace(state, compute=self.unit)
        if state.coming >= 0:
            return self._advance(state)
        return min(self._advance(after) for after in self._choices(state))

    def _choices(self, state: _State) -> Iterator[_State]:
        """What can be begun: nothing, while something computes, or a load over a victim.

        A use that waits is loaded for at once: in another order the same loads end no sooner.
        """
        page = state.used[-1]
        wants = [page]
        if state.compute >= 0:
            yield state
            wants = self.pages
        for wanted in wants:
            if state.here >> wanted & 1:
                continue
            began = replace(state, coming=wanted, load=self.ticks)
            if state.here.bit_count() < self.capacity:
                yield began
                continue
            for victim in self.pages:
                if state.here >> victim & 1 and not (victim == page and state.compute >= 0):
                    yield replace(began, here=state.here & ~(1 << victim))

    def _advance(self, state: _State) -> float:
        """Let time pass until something ends."""
        loads, computes = state.coming >= 0, state.compute >= 0
        passed = min(state.load if loads else 1 << 30, state.compute if computes else 1 << 30)
        here, coming, load = state.here, state.coming, state.load - passed if loads else 0
        if loads and not load:
            here, coming = here | 1 << coming, -1
        compute = state.compute - passed if computes else -1
        after = replace(state, here=here, coming=coming, load=load, compute=compute)
        return passed + (self.value(after) if compute else self._next_use(after))


def least_expected(
    model: Model,
    passes: int | Sequence[tuple[Place, ...]],
    ticks_per_unit: int = 2,
) -> float:
    """The least expected time of passes from an empty device, over all policies.

    Args:
        model: pages, capacity and load time; a load must be a whole number of ticks.
        passes: how many, or the places of each: with chances of 1 it is what a policy reaches
            that knows all draws.
        ticks_per_unit: ticks of a computation.

    Returns:
        Units of computation.

    Raises:
        ValueError: a load is no whole number of ticks.
    """
    ticks = round(model.load * ticks_per_unit)
    if abs(ticks - model.load * ticks_per_unit) > 1e-9 or not ticks:
        raise ValueError(
            f"load must be a multiple of 1 / {ticks_per_unit} and above 0, got {model.load}"
        )
    chosen = [model.places] * passes if isinstance(passes, int) else list(passes)
    program = _Program(chosen, model.capacity, ticks, ticks_per_unit)
    return program.begin(len(chosen) - 1, 0) / ticks_per_unit
