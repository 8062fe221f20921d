"""What a choice costs: the shipped scheduler on a virtual clock, and a bound beside it.

The bound is `max(compute, what must cross each link)` over the settled steps: the window bound of
`odc.memory.replay.bounds` with anything on the device at their beginning. No schedule is faster.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from odc.errors import BudgetError
from odc.memory.ahead import Tuning
from odc.memory.engines.base import TierSpeed
from odc.memory.events import Kind, Tier
from odc.memory.home_plan import DISK_COST
from odc.memory.replay import (
    Accesses,
    Link,
    PassResult,
    Residency,
    Workload,
    simulate,
    window_bound,
)
from odc.memory.replay.simulate import Tiers
from odc.train.fit.accounts import Accounts, offloaded_bytes
from odc.train.fit.choice import Choice
from odc.train.fit.groups import Paged
from odc.train.fit.rates import Rates
from odc.train.fit.work import Times, make_workload
from odc.train.policies import make_policy

WARM_UP, MEASURED = 2, 2  # steps
SHORT = 1, 1  # of models known by their shapes alone: full-size ones
_PASSES, _SHORT_PASSES = 4, 3  # micro-batches of a step that are simulated
POLICY = "cost_aware+popularity"
# How far a step may be from the simulated one, either way: assumed.
MEASURED_SPREAD, TOLD_SPREAD = 0.2, 0.35


@dataclass(frozen=True)
class Prediction:
    """A step of a choice; times in s.

    Attributes:
        step_s: As simulated.
        compute_s: Of it, computing.
        bound_s: No schedule is faster.
        bytes_in, bytes_out: That cross the links in a step.
        tokens: Of a step.
        spread: Of the step's time, either way.
        limit: What the bound is made of: compute, the link or the disk.
    """

    step_s: float
    compute_s: float
    bound_s: float
    bytes_in: int
    bytes_out: int
    tokens: int
    spread: float
    limit: str

    @property
    def tokens_s(self) -> float:
        """Tokens a second, expected."""
        return self.tokens / self.step_s

    @property
    def bound_tokens_s(self) -> float:
        """Tokens a second that no schedule exceeds."""
        return self.tokens / self.bound_s

    @property
    def range_tokens_s(self) -> tuple[float, float]:
        """Tokens a second, least and most that are expected."""
        low, high = self.tokens_s / (1 + self.spread), self.tokens_s / (1 - self.spread)
        return low, high


def predict(
    paged: Paged, times: Times, rates: Rates, accounts: Accounts, *, rehearse: bool = True
) -> Prediction:
    """Simulates settled steps of a choice.

    Of many micro-batches those in the middle are alike: four are simulated, the others take what
    those in their middle do. Where computing is slower beside a copy, it is so for the share of the
    step in which something moves; the bound knows nothing of that.

    Args:
        paged: Groups and choice.
        times: What computing takes.
        rates: Links.
        accounts: How much pages have.
        rehearse: Look for schedules as a run does; it takes most of the time, and gains up to a
            tenth of a step.

    Raises:
        BudgetError: Something that is needed at once does not fit.
    """
    if not accounts.fits:
        raise BudgetError("\n".join(accounts.problems))
    link = link_of(paged, rates, accounts)
    made = _simulated(paged, times, rates, link, accounts.pages, rehearse)
    moved = offloaded_bytes(paged) * paged.choice.accumulate
    if rates.crowding <= 1.0 and not moved:
        return made
    out = link.bandwidth_out or link.bandwidth_in
    copying = (made.bytes_in + moved) / link.bandwidth_in + (made.bytes_out + moved) / out
    crowded = 1.0 + (rates.crowding - 1.0) * min(copying / made.step_s, 1.0)
    most = max(made.bytes_in, made.bytes_out, 1)
    shared = _faster(link, (most + moved) / most)  # activations take their part of the link
    found = _simulated(paged, times.scaled(crowded), rates, shared, accounts.pages, rehearse)
    bound = max(made.bound_s, moved / link.bandwidth_in, moved / out)
    return replace(found, bound_s=min(bound, found.step_s), limit=made.limit)


def _simulated(
    paged: Paged, times: Times, rates: Rates, link: Link, pages: int, rehearse: bool
) -> Prediction:
    """One run of the simulator."""
    choice = paged.choice
    small = paged.model.config is not None
    warm_up, measured = (WARM_UP, MEASURED) if small else SHORT
    alike = _alike(choice, _PASSES if small else _SHORT_PASSES)
    shorter = replace(paged, choice=replace(choice, accumulate=choice.accumulate - alike))
    workload = make_workload(shorter, times, warm_up + measured)
    eviction, prefetch = make_policy(POLICY, workload)
    result = simulate(
        workload,
        budget_bytes=pages,
        link=link,
        eviction=eviction,
        prefetch=prefetch,
        tuning=Tuning(rehearse="now" if rehearse else ""),
    ).after(warm_up)
    sums = _Sums.of(result.passes, alike)
    bound, limit = _step_bound(workload.part(warm_up), pages, link, alike)
    return Prediction(
        step_s=sums.elapsed_s,
        compute_s=sums.compute_s,
        bound_s=min(bound, sums.elapsed_s),
        bytes_in=sums.bytes_in,
        bytes_out=sums.bytes_out,
        tokens=choice.step_tokens,
        spread=MEASURED_SPREAD if rates.flops is None else TOLD_SPREAD,
        limit=limit,
    )


def _alike(choice: Choice, passes: int) -> int:
    """Micro-batches of a step that are not simulated."""
    return max(choice.accumulate - passes, 0) if choice.order == "micro_major" else 0


@dataclass(frozen=True)
class _Sums:
    """Of a step, means over the settled ones."""

    elapsed_s: float
    compute_s: float
    bytes_in: int
    bytes_out: int

    @staticmethod
    def of(passes: list[PassResult], alike: int) -> "_Sums":
        """Sums of all passes, those in the middle taken as often as there are more of them."""
        steps = len({one.step for one in passes})
        most = max(one.micro for one in passes)
        weight = 1.0 + alike / max(most - 1, 1)

        def total(value: Callable[[PassResult], int]) -> float:
            inside = (weight if 0 < one.micro < most else 1.0 for one in passes)
            return sum(w * value(one) for w, one in zip(inside, passes, strict=True)) / steps

        return _Sums(
            total(lambda one: one.elapsed_ns) / 1e9,
            total(lambda one: one.compute_ns) / 1e9,
            round(total(lambda one: one.bytes_in)),
            round(total(lambda one: one.bytes_out)),
        )


def _step_bound(workload: Workload, pages: int, link: Link, alike: int) -> tuple[float, str]:
    """(s, what limits) of a step: windows that follow each other add up."""
    bound, limit = bound_of(workload, pages, link)
    steps = len(workload.steps)
    if not alike:
        return bound / steps, limit
    first = workload.steps[0]
    most = max(v.micro for v in workload.visits)
    middle = [v for v in workload.visits if v.step == first and 0 < v.micro < most]
    one, _ = bound_of(replace(workload, visits=middle, lead_ns=0), pages, link)
    return bound / steps + one / (most - 1) * alike, limit


def link_of(paged: Paged, rates: Rates, accounts: Accounts) -> Link:
    """The link of a choice, with its home's tiers."""
    choice = paged.choice
    update = _update_rate(paged, rates, accounts)
    if choice.home != "host+disk":
        return replace(rates.link(choice.home), update_rate=update)
    on_host = accounts.on_host | np.array(
        [p.kind == Kind.GRADIENT for p in paged.table.pages], bool
    )
    host, disk = replace(rates.host, update_rate=update), rates.disk
    if on_host.all():
        return host
    speeds = {
        tier: TierSpeed(link.bandwidth_in, link.bandwidth_out or link.bandwidth_in, link.latency_ns)
        for tier, link in ((Tier.HOST, host), (Tier.DISK, disk))
    }
    cost = np.where(on_host, 1.0, DISK_COST)
    return replace(host, tiers=Tiers(on_host, speeds, cost))


def _update_rate(paged: Paged, rates: Rates, accounts: Accounts) -> float:
    """Bytes/s of parameters updated at home: the kernel, and the disk's share of what it reads."""
    if paged.choice.where != "home":
        return math.inf
    item = paged.choice.item_bytes
    seconds = rates.home_update_s / item
    trained = [p for p in paged.table.pages if paged.table.groups[p.group].has_gradient]
    parameters = sum(p.num_bytes for p in trained if p.kind == Kind.PARAMETER)
    stay = [p for p in trained if p.kind != Kind.GRADIENT and not accounts.on_host[p.page]]
    on_disk = sum(p.num_bytes for p in stay)
    out = rates.disk.bandwidth_out or rates.disk.bandwidth_in
    seconds += on_disk / max(parameters, 1) * (1 / rates.disk.bandwidth_in + 1 / out)
    return 1.0 / seconds


def _faster(link: Link, share: float) -> Link:
    """The link where `share` bytes cross for one of a page."""
    out = link.bandwidth_out
    tiers = link.tiers
    if tiers is not None:
        speeds = {
            tier: TierSpeed(s.bandwidth_in / share, s.bandwidth_out / share, s.latency_ns)
            for tier, s in tiers.speeds.items()
        }
        tiers = replace(tiers, speeds=speeds)
    return replace(
        link,
        bandwidth_in=link.bandwidth_in / share,
        bandwidth_out=None if out is None else out / share,
        tiers=tiers,
    )


def bound_of(workload: Workload, budget_bytes: int, link: Link) -> tuple[float, str]:
    """(s, what limits): the largest of compute, each tier's window bound, and both together."""
    accesses = Accesses.from_workload(workload)
    unknown = Residency.unknown(accesses.num_pages)
    compute = accesses.compute_s
    if link.tiers is None:
        out = link.bandwidth_out or link.bandwidth_in
        found = window_bound(accesses, budget_bytes, link.bandwidth_in, out, initial=unknown)
        return found.elapsed_s, "compute" if found.elapsed_s < 1.02 * compute else "link"
    best, limit = compute, "compute"
    for tier, name in ((Tier.HOST, "link"), (Tier.DISK, "disk")):
        own = _only(accesses, link.tiers, tier)
        speed = link.tiers.speeds[tier]
        found = window_bound(
            own, budget_bytes, speed.bandwidth_in, speed.bandwidth_out, initial=unknown
        )
        if found.elapsed_s > 1.02 * best:
            best, limit = found.elapsed_s, name
    return best, limit


def _only(accesses: Accesses, tiers: Tiers, tier: Tier) -> Accesses:
    """The same accesses with the pages of one tier alone: what they need is a part of it all."""
    keep = tiers.on_host[accesses.page] == (tier == Tier.HOST)
    names = ("page", "first", "last", "through", "creates", "dirties", "dies")
    return replace(accesses, **{name: getattr(accesses, name)[keep] for name in names})
