"""The same loop on a paged model, with a watch on what the pager does in every step."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import odc
from odc.memory.events import Act, Phase, Tier
from odc.memory.manager import MemoryManager, PrefetchFactory, popularity
from odc.memory.next_k import NextKPrefetcher
from odc.memory.orders import OrderLibrary
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits
from odc.memory.replay.oracle import FutureScorer, FutureTimes
from odc.memory.scores import ReplayScorer
from odc.memory.victims import Belady, CostAware, EvictionPolicy, Lru
from odc.sizes import parse_size
from tests.fsdp.plain_loop import (
    LR,
    Loop,
    Result,
    evaluate,
    losses_of_step,
    moments_by_name,
    parameter_groups,
    schedule,
)
from tests.memory.wrong_hints import random_hints

MIB = 1024 * 1024


@dataclass
class Watch:
    """A sink that counts what happens in a step and remembers what was needed."""

    acts: Counter = field(default_factory=Counter)
    needs: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    loaded: Counter = field(default_factory=Counter)  # bytes by tier, as the trace has them
    stored: Counter = field(default_factory=Counter)

    def need(self, seq, t_ns, step, micro, phase, ctx, group, kind, op, compute_ns, tokens):  # type: ignore[no-untyped-def]
        self.needs.append((seq, phase, group, kind, op))

    def action(self, t_ns, seq, page, act, src, dst, num_bytes, dur_ns, wait_ns, policy):  # type: ignore[no-untyped-def]
        self.acts[Act(act)] += 1
        if act in (Act.LOAD, Act.PREFETCH):
            self.loaded[Tier(src)] += num_bytes
        elif act in (Act.WRITE_BACK, Act.EARLY_WRITE_BACK):
            self.stored[Tier(dst)] += num_bytes

    def mem(self, t_ns, step, tier, account, allocated, peak):  # type: ignore[no-untyped-def]
        """Of no interest here."""

    def step(self, row):  # type: ignore[no-untyped-def]
        """Of no interest here."""

    def end_step(self, expect_traffic: bool) -> None:
        """Every step must have evicted, loaded and written back."""
        acts, self.acts = self.acts, Counter()
        if expect_traffic:
            assert acts[Act.EVICT], acts
            assert acts[Act.LOAD] + acts[Act.PREFETCH], acts
            assert acts[Act.WRITE_BACK] + acts[Act.EARLY_WRITE_BACK], acts


def oracle(needs: list[tuple[int, int, int, int, int]]) -> PrefetchFactory:
    """A prefetcher that knows the experts of an earlier run of the same steps."""

    def make(library: OrderLibrary, limits: Limits) -> OrderPrefetcher:
        stations = library.stations
        visits: list[dict[int, np.ndarray]] = [{} for _ in stations.sets]
        for seq, phase, group, _, _ in needs:
            set_index = stations.stations[stations.of_group[group]].set_index
            if set_index >= 0 and phase == Phase.FORWARD:
                used = visits[set_index].setdefault(
                    seq, np.zeros(len(stations.sets[set_index]), bool)
                )
                used[stations.member_of[group]] = True
        future = [np.array(list(rows.values())) for rows in visits]
        return OrderPrefetcher(library, FutureScorer(future), limits, sets=FutureTimes)

    return make


def replay(library: OrderLibrary, limits: Limits) -> OrderPrefetcher:
    """The recorded order, and of each set the members of its last visit."""
    return OrderPrefetcher(library, ReplayScorer(library.stations.members), limits)


POLICIES: dict[str, tuple[type[EvictionPolicy], PrefetchFactory]] = {
    "lru+none": (Lru, lambda library, limits: None),
    "lru+next_k": (Lru, lambda library, limits: NextKPrefetcher(library)),
    "lru+replay": (Lru, replay),
    "cost_aware+popularity": (CostAware, popularity),
    "cost_aware+random": (CostAware, random_hints),
}


@dataclass(frozen=True)
class Paging:
    """How a model is paged."""

    budget: int | None = 16 * MIB
    policy: str = "cost_aware+popularity"
    home: str = "host"
    host_mem: int | None = None
    update: str = "step"
    page_size: int = 256 * MIB
    where: str = "device"
    master_weights: bool = False


class PagedRun:
    """A paged model in a loop."""

    def __init__(
        self,
        model: nn.Module,
        loop: Loop,
        paging: Paging,
        future: list[tuple[int, int, int, int, int]] | None = None,
    ) -> None:
        self.loop, self.paging = loop, paging
        if paging.policy == "belady+oracle":
            assert future is not None
            eviction, prefetch = Belady, oracle(future)
        else:
            eviction, prefetch = POLICIES[paging.policy]
        memory = MemoryManager(
            page_budget=paging.budget,
            page_size=paging.page_size,
            home=paging.home,
            host_mem=paging.host_mem,
            eviction=eviction(),
            prefetch=prefetch,
        )
        self.model, self.optimizer = odc.paged(
            model,
            torch.optim.AdamW,
            param_groups=lambda made: parameter_groups(loop, made),
            update=paging.update,
            accumulate=1 if loop.forwards_first == "one backward" else loop.accumulate,
            max_grad_norm=loop.max_grad_norm,
            where=paging.where,
            master_weights=paging.master_weights,
            memory=memory,
            lr=LR,
        )
        self.watch = Watch()
        settle(memory)  # what building has moved is not the loop's
        memory.set_sink(self.watch)
        self._home, self._built = memory.home, {}
        self._built = self.moved()
        self.reordered = 0
        for module in model.modules():
            if getattr(module, "expert_order", None) is not None:
                self._watch_order(module)

    def moved(self) -> dict[Tier, tuple[int, int]]:
        """Bytes (in, out) of each tier since the model was built, as its home counts them."""
        found = {}
        for tier, used in self._home.traffic.items():
            before = self._built.get(tier, (0, 0))
            found[tier] = used.bytes_in - before[0], used.bytes_out - before[1]
        return found

    def _watch_order(self, module: nn.Module) -> None:
        choose = module.expert_order

        def watched(experts: list[int], routing: torch.Tensor) -> list[int]:
            order = choose(experts, routing)
            self.reordered += order != sorted(order)
            return order

        module.expert_order = watched

    def train(self, expect_traffic: bool = True) -> Result:
        """Train as the plain loop does; the pager's books must balance after every step."""
        model, optimizer, loop = self.model, self.optimizer, self.loop
        transfers = model.memory.transfers
        rates = schedule(optimizer)
        result = Result()
        for step in range(loop.steps):
            optimizer.zero_grad()
            result.losses += losses_of_step(loop, model, step)
            optimizer.step()
            if loop.max_grad_norm is not None:
                result.norms.append(optimizer.grad_norm)
            rates.step()
            if loop.evaluate:
                result.evaluations += evaluate(loop, model, step)
            transfers.poll()
            transfers.check()
            self.watch.end_step(expect_traffic and self.paging.budget is not None)
        assert not any(
            n for p, n in enumerate(model.memory.table.pins) if not self._pinned_for_good(p)
        ), "a page is still pinned after a step"
        result.weights = model.state_dict()
        result.moments = moments_by_name(model, optimizer.state_dict())
        return result

    def _pinned_for_good(self, page: int) -> bool:
        table = self.model.memory.table
        spec = table.groups[table.pages[page].group]
        return spec.pinned or self.paging.budget is None

    def close(self) -> None:
        settle(self.model.memory)
        self.model.close()


def settle(memory: MemoryManager) -> None:
    """Wait until nothing moves any more, and take note of it."""
    memory.transfers.drain()
    while not memory.transfers.engine.is_idle():
        time.sleep(0.001)


def smallest_budget(model: nn.Module, page_size: int = 256 * MIB) -> int:
    """The budget that the error of a far too small one names."""
    memory = MemoryManager(page_budget=2 * MIB, page_size=page_size)
    try:
        odc.paged(model, torch.optim.AdamW, memory=memory)
    except odc.BudgetError as error:
        found = re.search(r"at least (\S+?),", str(error))
        assert found is not None, error
        return parse_size(found[1])
    memory.close()
    return 2 * MIB
