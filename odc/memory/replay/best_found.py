"""The best offline schedule that a search finds: how far a policy could still go.

The bounds say what is impossible; this says what is possible. Several greedy plans are played
through, then the best of them is changed step by step: a page is kept through a gap or sent away in
it, a dirty page is stored at once or late, two loads change places, in one gap or in the same gap
of every pass. A change stays if the run ends sooner. Tiny runs are solved exactly instead.

What is found is a schedule, so no bound can be above it. That nothing better exists is said only
where the window bound is met or the whole space was searched.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from odc.errors import OdcError
from odc.memory.frames import FRAME_BYTES
from odc.memory.replay.accesses import NO_STEP, Accesses, Residency
from odc.memory.replay.bounds import check_capacity, window_bound
from odc.memory.replay.exact import exact_schedule
from odc.memory.replay.instance import Choices, Clean, Instance, Keep, Plan
from odc.memory.replay.schedule import Schedule, decode

SLICE_BYTES = 8 * 1024 * 1024
_WINDOWS = (4, 16, 64)
_NEAR = 96  # accesses around a stall in which changes are tried
_GAIN = 1e-9  # relative; less is rounding


@dataclass(frozen=True, slots=True)
class Certificate:
    """How a schedule was found.

    Attributes:
        plan: the greedy plan it started from.
        greedy_s: elapsed time of the best greedy plan.
        moves, accepted: changes that were tried, and that helped.
        optimal: nothing better exists: the window bound says so, or the whole space was searched.
    """

    plan: Plan
    greedy_s: float
    moves: int
    accepted: int
    optimal: bool


@dataclass(frozen=True, slots=True)
class BestFound:
    """The best schedule found.

    Attributes:
        elapsed_s: from the start to the end of the last computation.
        stall_s: the part of it in which nothing computes.
        bytes_in, bytes_out: what was loaded and stored.
        step_s: elapsed time of each training step, by step; without what lies between steps.
        pass_s: elapsed time of each pass, in order.
        certificate: how it was found.
    """

    elapsed_s: float
    stall_s: float
    bytes_in: int
    bytes_out: int
    step_s: dict[int, float]
    pass_s: list[float]
    certificate: Certificate


def best_found(
    accesses: Accesses,
    capacity_frames: int,
    bandwidth_in: float,
    bandwidth_out: float,
    half_duplex: bool = False,
    initial: Residency | None = None,
    moves: int = 300,
    seed: int = 0,
    slice_bytes: int = SLICE_BYTES,
    search_tiny: bool = True,
) -> BestFound:
    """Search for a good offline schedule.

    Args:
        accesses: what is needed, and when.
        capacity_frames: frames for pages.
        bandwidth_in, bandwidth_out: bytes/s each way.
        half_duplex: the two directions share one line.
        initial: what is on the device at the start; nothing where not given.
        moves: changes to try.
        seed: of the changes.
        slice_bytes: a load that runs ahead of need gives way at multiples of this.
        search_tiny: solve tiny runs exactly, if nothing moves at the start.

    Raises:
        BudgetError: something that is needed at once does not fit.
        OdcError: the residency at the start is unknown.
    """
    initial = accesses.start_from(initial)
    if not initial.known:
        raise OdcError(
            "a schedule starts from a known residency, got an unknown one; pass Residency.cold, "
            "or take per-step times of a longer run"
        )
    check_capacity(accesses, capacity_frames, initial)
    rates = (bandwidth_in, bandwidth_out)
    instance = Instance(accesses, capacity_frames, rates, half_duplex, initial, slice_bytes)
    capacity_bytes = capacity_frames * FRAME_BYTES
    bound = window_bound(accesses, capacity_bytes, *rates, half_duplex, initial).elapsed_s
    search = _Search(instance, seed)
    greedy_s = search.schedule.elapsed_s
    tried = search.improve(moves, bound * (1 + _GAIN))
    optimal = search.schedule.elapsed_s <= bound * (1 + _GAIN)
    found = search.schedule
    if search_tiny and not optimal and instance.moving == (None, None):
        exact = exact_schedule(instance)
        optimal = exact is not None
        found = exact or found
    certificate = Certificate(search.plan, greedy_s, tried, search.accepted, optimal)
    return _report(instance, found, certificate)


def _report(instance: Instance, found: Schedule, certificate: Certificate) -> BestFound:
    accesses = instance.accesses
    spent = np.array(found.stall_s) + accesses.compute_ns / 1e9
    steps = np.unique(accesses.step[accesses.step != NO_STEP])
    num_passes = int(accesses.in_pass.max()) + 1 if len(accesses.in_pass) else 0
    return BestFound(
        elapsed_s=found.elapsed_s,
        stall_s=max(found.elapsed_s - accesses.compute_s, 0.0),
        bytes_in=sum(instance.bytes[page] for page in found.loads),
        bytes_out=sum(instance.bytes[page] for page in found.stores),
        step_s={int(step): float(spent[accesses.step == step].sum()) for step in steps},
        pass_s=np.bincount(accesses.in_pass, spent, num_passes).tolist(),
        certificate=certificate,
    )


def greedy_plans(instance: Instance) -> list[Plan]:
    """The plans that a search starts from, without windows."""
    typical = int(np.median(instance.frames)) if instance.frames else 1
    stores = [(True, 0), (False, 2 * typical), (False, 4 * typical), (False, 8 * typical)]
    stores.append((False, 0))
    orders = (False, True) if instance.half_duplex else (False,)
    return [
        Plan(early, ahead, farthest, 0, first)
        for early, ahead in stores
        for farthest in (False, True)
        for first in orders
    ]


class _Search:
    """The best schedule so far, and changes to its choices."""

    def __init__(self, instance: Instance, seed: int) -> None:
        self.instance = instance
        self.random = random.Random(seed)
        self.choices = Choices.none(instance)
        self.accepted = 0
        self.plan = Plan()
        self.schedule = Schedule(inf, [], [], [], [], [])
        found = [(self._try(plan), at, plan) for at, plan in enumerate(greedy_plans(instance))]
        for _, _, plan in sorted(found)[:2]:
            for window in _WINDOWS:
                self._try(replace(plan, window=window))
        self.siblings = self._alike()
        self.since = instance.first + [-1] * len(instance.frames)
        holds = len(instance.page)
        self.dirt = {u for u in range(holds) if instance.dirties[u] and not instance.dies[u]}
        self.dirt |= {holds + page for page in instance.resident if instance.dirty[page]}
        self._look()

    def _try(self, plan: Plan) -> float:
        """Play a plan; its elapsed time. Of plans equally fast the one that moves least is kept."""
        found, best = decode(self.instance, plan, self.choices), self.schedule
        is_faster = found.elapsed_s < best.elapsed_s * (1 - _GAIN)
        is_as_fast = found.elapsed_s <= best.elapsed_s * (1 + _GAIN)
        if is_faster or (is_as_fast and self._moved(found) < self._moved(best)):
            self.schedule, self.plan = found, plan
        return found.elapsed_s

    def _moved(self, schedule: Schedule) -> int:
        """Bytes loaded and stored."""
        return sum(self.instance.bytes[page] for page in [*schedule.loads, *schedule.stores])

    def improve(self, moves: int, enough_s: float) -> int:
        """Try changes until ``moves`` were tried or nothing better can exist; number tried."""
        tried = 0
        for _ in range(4 * moves):  # some changes find nothing to change
            if tried == moves or self.schedule.elapsed_s <= enough_s:
                break
            changed = self._change(self._stalled())
            if changed is None:
                continue
            tried += 1
            limit = self.schedule.elapsed_s * (1 - _GAIN)
            found = decode(self.instance, self.plan, changed, limit)
            if found.elapsed_s < limit:
                self.schedule, self.choices = found, changed
                self.accepted += 1
                self._look()
        return tried

    def _alike(self) -> list[list[int]]:
        """Of each gap, the gaps of its page at the same place of every pass."""
        in_pass = self.instance.accesses.in_pass
        _, start = np.unique(in_pass, return_index=True)
        begin = dict(zip(np.unique(in_pass).tolist(), start.tolist(), strict=True))
        found: dict[tuple[int, int], list[int]] = {}
        kinds = []
        passes = in_pass.tolist()
        for hold, (page, first) in enumerate(
            zip(self.instance.page, self.instance.first, strict=True)
        ):
            kinds.append((page, first - begin[passes[first]]))
            found.setdefault(kinds[-1], []).append(hold)
        holds = len(kinds)
        first_gaps = [[gap] for gap in range(holds, len(self.instance.page_of))]
        return [found[kind] for kind in kinds] + first_gaps

    def _look(self) -> None:
        """What the best schedule did with gaps, for changes to start from."""
        instance, schedule = self.instance, self.schedule
        evicted, stored = set(schedule.evicted), set(schedule.stored)
        gaps = range(len(instance.page_of))
        self.went = [u for u in gaps if u in evicted]
        self.stayed = [u for u in gaps if u not in evicted and instance.next_load[u] >= 0]
        self.soiled = [u for u in gaps if u in stored or u in self.dirt]
        self.chosen = [u for u in gaps if self.choices.keep[u] or self.choices.clean[u]]
        self.stalls = [(at, s) for at, s in enumerate(schedule.stall_s) if s > 0.0]

    def _stalled(self) -> int:
        """An access that waited, the likelier the longer it did."""
        if not self.stalls:
            return self.instance.n
        accesses, waits = zip(*self.stalls, strict=True)
        return int(self.random.choices(accesses, waits)[0])

    def _near(self, gaps: list[int], access: int) -> int:
        """One of the gaps that lie shortly before an access, -1 for none."""
        far = self.instance.far
        near = [u for u in gaps if self.since[u] < access and far[u] >= access - _NEAR]
        return self.random.choice(near) if near else -1

    def _change(self, access: int) -> Choices | None:
        """Choices with one change near an access that stalled."""
        changed = self.choices.copy()
        kind = self.random.choice(("go", "go", "go", "stay", "trade", "clean", "order", "undo"))
        everywhere = self.random.random() < 0.4
        done = False
        if kind in ("go", "trade"):
            done = self._set(changed.keep, self.stayed, access, Keep.NEVER, everywhere)
        if kind in ("stay", "trade"):
            done |= self._set(changed.keep, self.went, access, Keep.ALWAYS, everywhere)
        if kind == "clean":
            when = self.random.choice((Clean.AT_ONCE, Clean.LATE))
            done = self._set(changed.clean, self.soiled, access, when, everywhere)
        if kind == "order":
            gap = self._near(self.went, access)
            if gap >= 0 and self.instance.next_load[gap] >= 0:
                # Orders are twice the access: odd steps put one load between two others.
                shift = self.random.choice((-9, -5, -3, 3, 5, 9))
                changed.order[self.instance.next_load[gap]] += shift
                done = True
        if kind == "undo":
            done = self._set(changed.keep, self.chosen, access, Keep.GREEDY, everywhere)
            done |= self._set(changed.clean, self.chosen, access, Clean.GREEDY, everywhere)
        return changed if done else None

    def _set(
        self, values: list[int], gaps: list[int], access: int, value: int, everywhere: bool
    ) -> bool:
        gap = self._near(gaps, access)
        if gap < 0:
            return False
        for one in self.siblings[gap] if everywhere else (gap,):
            values[one] = value
        return True
