"""The names of policies, and what they stand for: one place for configuration, tables and commands.

A policy is `EVICTION+PREFETCH`. Whoever adds an eviction order or a prefetcher that needs nothing
but its name adds it here; the rest takes it from here.
"""

from collections.abc import Callable

import odc.memory.manager as managing
from odc.errors import ConfigError
from odc.memory.auto_eviction import Auto
from odc.memory.manager import PrefetchFactory
from odc.memory.next_k import NextKPrefetcher
from odc.memory.orders import OrderLibrary
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay import Workload, oracle_factory
from odc.memory.scores import ReplayScorer
from odc.memory.scores_auto import auto_prefetcher
from odc.memory.scores_markov import MarkovScorer
from odc.memory.victims import Belady, CostAware, EvictionPolicy, Fifo, Gdsf, Lfu, Lru, Mru

EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "mru": Mru,
    "fifo": Fifo,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "cost_aware": CostAware,
    "belady": Belady,
    "auto": Auto,
}
# Without knowledge of the future these order by last use: no row of their own under `none`.
_PLANNED = ("cost_aware", "belady")
_DEFAULT_NEXT_K = 4


def _no_prefetcher(library: OrderLibrary, limits: Limits) -> None:
    return None


def _next_k(library: OrderLibrary, limits: Limits) -> Prefetcher:
    k = _DEFAULT_NEXT_K if limits.page_prefetch is None else limits.page_prefetch
    return NextKPrefetcher(library, k)


def _replay(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return OrderPrefetcher(library, ReplayScorer(library.stations.members), limits)


def _popularity(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return managing.popularity(library, limits)


def _markov(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return OrderPrefetcher(library, MarkovScorer(library.stations.members), limits)


def _auto(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return auto_prefetcher(library, limits)


# Those that need nothing but their name; an oracle also needs the future, a predictor its folder.
PREFETCHES: dict[str, PrefetchFactory] = {
    "none": _no_prefetcher,
    "next_k": _next_k,
    "replay": _replay,
    "popularity": _popularity,
    "markov": _markov,
    "auto": _auto,
}


def prefetch_factory(name: str) -> PrefetchFactory:
    """Returns the factory of a prefetcher that needs nothing but its name.

    Args:
        name: A key of `PREFETCHES`.
    """
    return PREFETCHES[name]


def ladder() -> list[str]:
    """Returns the policies worth a row: each knows more than those before it.

    Every eviction order without prefetch; LRU, then cost-aware eviction, with each prefetcher; what
    chooses for itself; what knows the future.
    """
    demand = [f"{name}+none" for name in EVICTIONS if name not in (*_PLANNED, "auto")]
    ahead = [name for name in PREFETCHES if name not in ("none", "auto")]
    guided = [f"lru+{name}" for name in ahead if name in ("next_k", "replay")]
    guided += [f"cost_aware+{name}" for name in ahead if name != "next_k"]
    if "auto" in EVICTIONS or "auto" in PREFETCHES:
        eviction = "auto" if "auto" in EVICTIONS else "cost_aware"
        guided.append(f"{eviction}+{'auto' if 'auto' in PREFETCHES else 'popularity'}")
    return [*demand, *guided, "belady+oracle", "cost_aware+oracle"]


def parse_policies(text: str) -> list[str]:
    """Returns the policies of `all`, or of a list such as `lru+none,cost_aware+replay`.

    Raises:
        ConfigError: A name is unknown, or the two halves do not go together.
    """
    if text == "all":
        return ladder()
    chosen = list(dict.fromkeys(text.split(",")))
    for name in chosen:
        _check(name)
    return chosen


def _check(name: str) -> None:
    eviction, _, prefetch = name.partition("+")
    prefetches = [*PREFETCHES, "oracle"]
    if eviction not in EVICTIONS or prefetch not in prefetches:
        raise ConfigError(
            f"policy: got {name!r}; allowed: all, or EVICTION+PREFETCH with EVICTION one of "
            f"{', '.join(EVICTIONS)} and PREFETCH one of {', '.join(prefetches)}"
        )
    if eviction == "belady" and prefetch != "oracle":
        raise ConfigError(
            f"policy: got {name!r}; allowed: belady+oracle (Belady's order needs the future)"
        )


def make_policy(name: str, workload: Workload) -> tuple[EvictionPolicy, PrefetchFactory | None]:
    """Returns the objects of a policy, new ones at each call.

    Args:
        name: As `parse_policies` returns it.
        workload: What will be run: an oracle's future.
    """
    eviction, _, prefetch = name.partition("+")
    if prefetch == "oracle":
        return EVICTIONS[eviction](), oracle_factory(workload)
    return EVICTIONS[eviction](), None if prefetch == "none" else prefetch_factory(prefetch)
