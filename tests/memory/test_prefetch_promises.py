"""What may be relied on: nothing is waited for that was known, whatever else goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from odc.memory.events import Act, Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import popularity
from odc.memory.orders import OrderLibrary
from odc.memory.pager import Tuning
from odc.memory.plan import OrderPrefetcher
from odc.memory.prefetch import Limits, Prefetcher
from odc.memory.replay import Workload, budget_for, link_for, simulate, synthetic
from odc.memory.replay.drive import Drive
from odc.memory.replay.ratios import compute_ns
from odc.memory.replay.results import SimResult
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape
from odc.memory.replay.workload import Bundle, RecordedVisit
from odc.memory.victims import CostAware, Lru
from tests.memory.workloads import COMPUTE_NS, experts, in_turn, page_columns
from tests.memory.wrong_hints import random_hints

P = Kind.PARAMETER


def run(workload: Workload, share: float, r: float, **options: object) -> SimResult:
    chosen = {"eviction": CostAware(), "prefetch": popularity, **options}
    return simulate(
        workload,
        budget_bytes=budget_for(workload, share),
        link=link_for(workload, r),
        **chosen,  # type: ignore[arg-type]
    )


def elapsed(result: SimResult, first: int) -> int:
    return sum(p.elapsed_ns for p in result.passes if p.step >= first)


def by_step(result: SimResult) -> Counter[int]:
    """Loads that nobody had asked for before they were needed, by step."""
    found: Counter[int] = Counter()
    for made in result.passes:
        found[made.step] += made.misses
    return found


# -- static traces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["W1", "W1a", "W1r", "W2", "W3"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
def test_on_a_static_trace_every_load_is_asked_for_ahead_from_the_third_step_on(
    name: str, share: float, r: float
) -> None:
    """And where the link could bring everything in time (r <= 1), nothing is waited for.

    In the second step what is resident is what least recently used left, which for plain loops
    fits no schedule: a few loads come too late there.
    """
    result = run(synthetic(name, steps=4 if name == "W1a" else 5), share, r)
    misses = by_step(result)
    assert misses[0] > 0, "the first step knows nothing"
    assert misses[1] < (0.4 if name == "W3" else 0.15) * misses[0]
    assert [n for step, n in misses.items() if step >= 2] == [0] * (len(misses) - 2)
    if r <= 1:
        assert [p.stall_ns for p in result.passes if p.step >= 2] == [0] * sum(
            p.step >= 2 for p in result.passes
        )


@pytest.mark.parametrize("name", ["W1", "W2", "W3"])
def test_demand_paging_asks_for_nothing_ahead_on_the_same_traces(name: str) -> None:
    """So the claim above is one."""
    misses = by_step(run(synthetic(name, steps=4), 0.5, 1.0, eviction=Lru(), prefetch=None))
    assert min(misses.values()) > 20


# -- contexts in turn ------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [0.5, 1.0])
@pytest.mark.parametrize("pattern", ["TER", "TTTE", "TETR"])
def test_training_evaluation_and_generation_in_turn_each_keep_their_replay(
    pattern: str, r: float
) -> None:
    """Nothing is recorded anew at a switch, and the switch is seen coming."""
    workload = in_turn(pattern * 9)
    drive = virtual_drive(
        workload,
        budget_bytes=budget_for(workload, 0.5),
        link=link_for(workload, r),
        eviction=CostAware(),
        prefetch=popularity,
    )
    library = drive.pager.library
    drive.run(2 * len(pattern))
    known = {ctx: (order, order.compiled) for ctx, order in library.orders.items()}
    drive.run()
    assert library.diverged == 0
    assert {ctx: (order, order.compiled) for ctx, order in library.orders.items()} == known
    passes = drive.result.passes[-3 * len(pattern) :]
    assert [p.misses for p in passes] == [0] * len(passes)
    spent = sum(p.elapsed_ns for p in passes)
    assert spent <= 1.02 * sum(p.compute_ns for p in passes)


def test_contexts_in_no_order_cost_little_at_each_switch() -> None:
    """W4: training, evaluation, generation and another model, as they come."""
    workload = synthetic("W4")
    result = run(workload, 0.5, 1.0)
    passes = [p for p in result.passes if p.step >= 8]
    assert sum(p.misses for p in passes) <= 0.05 * len(passes) * 12
    assert sum(p.stall_ns for p in passes) <= 0.02 * sum(p.compute_ns for p in passes)


# -- storms ----------------------------------------------------------------------------------------


def storm(steps: int, seed: int = 0) -> Workload:
    """Six layers, then eight of sixteen in an order drawn in each step, then six layers again."""
    rng = random.Random(seed)
    pages = page_columns([(g, P, 0, -1, -1) for g in range(28)])
    visits = []
    for step in range(steps):
        middle = rng.sample(range(12, 28), 8)
        for at, group in enumerate([*range(6), *middle, *range(6, 12)]):
            bundle = Bundle(group, [(P, Op.READ, 0)], COMPUTE_NS)
            visits.append(RecordedVisit(step, 0, Phase.FORWARD, 0, 1, [bundle], at == 0))
    return Workload(pages, visits, [])


class DemandLoads:
    """A sink that counts loads nobody had asked for ahead, by page."""

    def __init__(self) -> None:
        self.pages: Counter[int] = Counter()

    def need(self, *_: object) -> None: ...

    def action(self, t_ns: int, seq: int, page: int, act: int, *_: object) -> None:
        self.pages[page] += act == Act.LOAD

    def mem(self, *_: object) -> None: ...

    def step(self, row: object) -> None: ...


@pytest.mark.parametrize("seed", range(3))
def test_in_a_storm_of_branches_what_all_passes_share_is_still_loaded_ahead(seed: int) -> None:
    """Of prefix and suffix at most one layer a step is not there: the one at the join."""
    workload = storm(30, seed)
    drive = virtual_drive(
        workload,
        budget_bytes=10 * FRAME_BYTES,
        link=link_for(workload, 0.5),
        eviction=CostAware(),
        prefetch=popularity,
    )
    drive.run(5)
    watch = DemandLoads()
    drive.pager.set_sink(watch)
    drive.run()
    drive.pager.transfers.check()
    assert drive.pager.library.diverged > 100
    shared = sum(watch.pages[page] for page in range(12))
    assert shared <= 25
    assert sum(watch.pages[page] for page in range(5)) == 0
    assert shared < 0.2 * sum(watch.pages.values())


@pytest.mark.parametrize("name", ["W5p10", "W5p30", "W5b"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_dropped_layers_and_branches_wait_far_less_than_on_demand(name: str, share: float) -> None:
    workload = synthetic(name)
    ahead = run(workload, share, 1.0).after(8)
    demand = run(workload, share, 1.0, eviction=Lru(), prefetch=None).after(8)
    assert ahead.stall_s < 0.2 * demand.stall_s
    assert sum(ahead.misses) < 0.25 * sum(demand.misses)


# -- wrong scores and wrong hints ------------------------------------------------------------------


class RandomScorer:
    """Scores that mean nothing, new ones at each visit."""

    def __init__(self, members: Sequence[int]) -> None:
        self._rng = np.random.default_rng(0)
        self._shape = (len(members), max(members))

    def observe(self, set_index: int, used: np.ndarray, tokens: int) -> None: ...

    def scores(self) -> np.ndarray:
        return self._rng.random(self._shape, np.float32)


def random_scores(library: OrderLibrary, limits: Limits) -> Prefetcher:
    return OrderPrefetcher(library, RandomScorer(library.stations.members), limits)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
def test_scores_that_mean_nothing_cost_less_than_no_prefetch(share: float, r: float) -> None:
    """The tape stays exact, whatever is said of the sets to come."""
    workload = experts(3, 8, 2, 15)
    wrong = run(workload, share, r, prefetch=random_scores)
    none = run(workload, share, r, eviction=Lru(), prefetch=None)
    assert elapsed(wrong, 3) <= 1.02 * elapsed(none, 3)
    assert wrong.accesses == none.accesses and wrong.compute_ns == none.compute_ns


def drive_of(
    workload: Workload, frames: int, prefetch: object, r: float = 1.0, gate: bool = True
) -> Drive:
    return virtual_drive(
        workload,
        budget_bytes=frames * FRAME_BYTES,
        link=link_for(workload, r),
        eviction=CostAware(),
        prefetch=prefetch,  # type: ignore[arg-type]
        tuning=Tuning(gate=gate),
    )


def test_ten_thousand_accesses_under_random_hints_leak_no_frame() -> None:
    """Books balance after every step, and at the end every frame can be had again."""
    workload = synthetic("W2", steps=105, shape=Shape(layers=24, layer_bytes=3 * FRAME_BYTES))
    drive = drive_of(workload, 60, random_hints, gate=False)
    transfers = drive.pager.transfers
    for step in workload.steps:
        drive.run(step + 1)
        transfers.check()
        assert transfers.used_bytes <= 60 * FRAME_BYTES
    assert sum(drive.result.accesses) >= 10_000
    assert sum(p.compute_ns for p in drive.result.passes) == compute_ns(workload)
    drive.empty()
    assert transfers.free == transfers.num_frames == 60
    assert transfers.in_flight_bytes == transfers.out_flight_bytes == 0


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, popularity, random_hints])
@pytest.mark.parametrize("name", ["W1", "W3", "W2"])
def test_pages_larger_than_any_buffer_work_in_the_smallest_pool(
    name: str, prefetch: object
) -> None:
    """Pages of 128 MiB, beyond all that is put in flight or cleaned ahead; room for one group."""
    shape = Shape(layers=3, layer_bytes=64 * FRAME_BYTES, page_bytes=64 * FRAME_BYTES)
    workload = synthetic(name, steps=4, shape=shape)
    least, _ = workload.table().smallest_budget()
    assert least == (64 if name != "W2" else 256)  # there with gradient and both moments
    drive = drive_of(workload, least, prefetch)
    result = drive.run()
    drive.pager.transfers.check()
    assert sum(p.compute_ns for p in result.passes) == compute_ns(workload)
    uses = len(workload.visits)
    assert sum(p.bytes_in for p in result.passes) <= 4 * uses * 64 * FRAME_BYTES


def test_the_line_is_fed_until_the_next_hook_and_not_much_further() -> None:
    """More in flight would take frames from pages that are used until then."""
    workload = synthetic("W1", steps=4)
    drive = drive_of(workload, budget_for(workload, 0.5) // FRAME_BYTES, popularity, 0.5)
    pager = drive.pager
    page_ns = 5_000_000
    most = 0.0
    plain = pager.access

    def access(*args: object, **kwargs: object) -> None:
        nonlocal most
        plain(*args, **kwargs)  # type: ignore[arg-type]
        if pager.step > 1 and not pager.room.scheduled:
            most = max(most, pager.transfers.in_busy_ns)

    pager.access = access  # type: ignore[method-assign]
    pager._rehearsal = None
    drive.run()
    assert 0 < most <= 10_000_000 + page_ns
