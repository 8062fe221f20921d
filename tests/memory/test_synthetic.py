"""The made workloads: what they need, that they repeat, C and r, and the traces of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from odc.errors import BudgetError, ConfigError
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import Workload, budget_for, link_for, synthetic
from odc.memory.replay.ratios import compute_ns, managed_bytes, ratio_of, read_bytes
from odc.memory.replay.synthetic import TOKENS, UNEVEN, WORKLOADS, Shape, expand, find
from profiler.reader import TraceReader
from tests.data import write_traces

P, G, M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT
ALL = [*WORKLOADS, *(name + UNEVEN for name in WORKLOADS)]
LAYER = 4 * FRAME_BYTES
MS = 1_000_000


def needs(workload: Workload, step: int = 0) -> list[tuple[Phase, int, int]]:
    """(phase, group, micro) of the visits of a step."""
    visits = [v for v in workload.visits if v.step == step]
    return [(v.phase, v.bundles[0].group, v.micro) for v in visits]


def groups_in(workload: Workload, phase: Phase, step: int = 0) -> list[int]:
    return [group for found, group, _ in needs(workload, step) if found == phase]


def contexts(workload: Workload, steps: range) -> list[int]:
    return [v.ctx for v in workload.visits if v.begins_pass and v.step in steps]


def equal_pages(a: Workload, b: Workload) -> bool:
    return all((a.pages[name] == b.pages[name]).all() for name in a.pages | b.pages)


# -- what is needed --------------------------------------------------------------------------------


def test_w1_reads_forward_and_backward_and_dirties_nothing() -> None:
    workload = synthetic("W1")
    layers = list(range(24))
    for step in workload.steps:
        assert groups_in(workload, Phase.FORWARD, step) == layers
        assert groups_in(workload, Phase.BACKWARD, step) == layers[::-1]
    rows = {(k, op) for v in workload.visits for b in v.bundles for k, op, _ in b.rows}
    assert rows == {(P, Op.READ)}
    assert set(workload.pages["kind"]) == {P} and len(workload.pages["page"]) == 24


def test_w1a_counts_micro_steps_as_the_runtime_does() -> None:
    workload = synthetic("W1a", steps=2)
    assert contexts(workload, range(1)) == [0, 2, 4, 6]
    assert [v.micro for v in workload.visits if v.begins_pass] == [0, 1, 2, 3] * 2
    assert needs(workload)[:48] == [(p, g, 0) for p, g, _ in needs(synthetic("W1"))]


def test_w1r_recomputes_each_segment_before_its_backward() -> None:
    told = [(p, g) for p, g, _ in needs(synthetic("W1r"))][24:]
    assert told[:8] == [
        (Phase.BACKWARD, 23),
        *((Phase.RECOMPUTE, g) for g in (20, 21, 22, 23)),
        *((Phase.BACKWARD, g) for g in (22, 21, 20)),
    ]
    assert Counter(p for p, _ in told) == {Phase.RECOMPUTE: 24, Phase.BACKWARD: 24}
    # forward, recompute and backward of 24 layers
    assert compute_ns(synthetic("W1r", steps=1)) == 3 * 24 * 10 * MS


def test_w2_updates_each_layer_in_its_backward() -> None:
    workload = synthetic("W2", steps=1)
    assert len(workload.pages["page"]) == 24 * 4
    backward = [v.bundles[0] for v in workload.visits if v.phase == Phase.BACKWARD]
    assert [b.group for b in backward] == list(range(24))[::-1]
    for bundle in backward:
        assert bundle.rows == [
            (P, Op.READ, 0),
            (G, Op.CREATE, 20 * MS),
            (P, Op.WRITE, 0),
            (M, Op.WRITE, 0),
            (G, Op.DROP, 2_500_000),
        ]
    assert compute_ns(workload) == 24 * (10 * MS + 20 * MS + 2_500_000)


def test_w2s_keeps_all_gradients_until_the_optimizer() -> None:
    workload = synthetic("W2s", steps=1)
    assert groups_in(workload, Phase.OPTIMIZER) == list(range(24))
    kinds = [(k, op) for v in workload.visits for b in v.bundles for k, op, _ in b.rows]
    assert Counter(kinds)[G, Op.CREATE] == Counter(kinds)[G, Op.DROP] == 24
    assert kinds.index((G, Op.DROP)) > max(
        at for at, row in enumerate(kinds) if row == (G, Op.CREATE)
    )


def test_w3_is_passes_without_a_gradient() -> None:
    workload = synthetic("W3", steps=3)
    assert contexts(workload, range(3)) == [1, 1, 1]
    assert {v.phase for v in workload.visits} == {Phase.EVALUATION}


def test_w4_mixes_contexts_and_shows_each_of_them_in_its_warm_up() -> None:
    workload, chosen = synthetic("W4"), find("W4")
    warm = contexts(workload, range(chosen.warm_up))
    measured = contexts(workload, range(chosen.warm_up, chosen.warm_up + chosen.measured))
    assert set(warm) == set(measured) == {0, 1, 3}
    assert warm[: len(measured)] != measured[: len(warm)], "the order of contexts does not repeat"
    reference = {v.bundles[0].group for v in workload.visits if v.ctx == 3}
    policy = {v.bundles[0].group for v in workload.visits if v.ctx in (0, 1)}
    assert reference == set(range(12, 24)) and policy == set(range(12))
    tokens = {v.tokens for v in workload.visits if v.ctx == 1}
    assert tokens == {TOKENS, 256, 4}, "evaluation, prompts, and tokens one by one"
    assert [len(groups_in(workload, Phase.EVALUATION, step)) for step in range(3)] == [0, 36, 12]


@pytest.mark.parametrize(("name", "rate"), [("W5p10", 0.1), ("W5p20", 0.2), ("W5p30", 0.3)])
def test_w5_drops_layers_at_its_rate_anew_in_each_step(name: str, rate: float) -> None:
    workload = synthetic(name, steps=100)
    kept = [groups_in(workload, Phase.FORWARD, step) for step in range(100)]
    for step in range(100):
        assert groups_in(workload, Phase.BACKWARD, step) == kept[step][::-1]
    dropped = 1 - sum(map(len, kept)) / (100 * 24)
    assert abs(dropped - rate) < 4 * (rate * (1 - rate) / 2400) ** 0.5
    assert len({tuple(k) for k in kept}) > 80


def test_w5b_runs_one_of_three_layers_at_each_branch() -> None:
    workload = synthetic("W5b", steps=60)
    names = [str(n) for n in workload.pages["module_path"]]
    taken = Counter()
    for step in range(60):
        run = [names[g] for g in groups_in(workload, Phase.FORWARD, step)]
        assert [int(n.split(".")[1]) for n in run] == list(range(24)), "every place once, in order"
        taken.update(n for n in run if n.count(".") == 2)
    assert len(taken) == 24 and min(taken.values()) > 5


# -- sizes, seeds, prefixes ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_name_and_a_seed_are_one_workload(name: str) -> None:
    made, again = synthetic(name), synthetic(name)
    assert made.visits == again.visits and equal_pages(made, again)
    assert made.steps == list(range(find(name).warm_up + find(name).measured))
    short = synthetic(name, steps=3)
    assert short.visits == made.visits[: len(short.visits)], "fewer steps are a prefix"


@pytest.mark.parametrize("name", ["W1-uneven", "W2-uneven", "W5p20", "W5b"])
def test_another_seed_is_another_workload(name: str) -> None:
    assert synthetic(name).visits != synthetic(name, seed=1).visits


@pytest.mark.parametrize("name", [n for n in ALL if n.endswith(UNEVEN)])
def test_uneven_workloads_have_pages_and_times_of_many_sizes(name: str) -> None:
    workload, even = synthetic(name), synthetic(name.removesuffix(UNEVEN))
    assert len(set(workload.pages["bytes"])) > 8 and len(set(even.pages["bytes"])) == 1
    assert (workload.pages["bytes"] % 4096 == 0).all()
    assert workload.pages["part"].max() == 1, "some layers are cut into two pages"
    table = workload.table()
    assert not any(spec.compact for spec in table.groups)
    assert all(3 * 2**20 <= spec.num_bytes <= 12 * 2**20 for spec in table.groups)
    firsts = [v.bundles[0].after_ns for v in workload.visits if v.begins_pass]
    assert len(set(firsts)) > 4, "batches differ"
    assert len(workload.visits) == len(even.visits), "the same visits"


def test_a_shape_sets_layers_bytes_and_times() -> None:
    shape = Shape(layers=5, layer_bytes=6 * FRAME_BYTES, page_bytes=2 * FRAME_BYTES, compute_ns=100)
    workload = synthetic("W1", steps=1, shape=shape)
    assert workload.pages["part"].tolist() == [0, 1, 2] * 5
    assert compute_ns(workload) == 2 * 5 * 100


def test_families_stand_for_their_members() -> None:
    assert expand("W5") == ["W5p10", "W5p20", "W5p30", "W5b"]
    assert expand("W5-uneven") == [f"{n}-uneven" for n in expand("W5")]
    assert expand("W1") == ["W1"], "not its variants"
    with pytest.raises(ConfigError, match="got 'W9'; allowed: W1, W1a"):
        expand("W9")


# -- C and r ---------------------------------------------------------------------------------------


def test_c_counts_pages_with_a_home_and_one_gradient() -> None:
    assert managed_bytes(synthetic("W1").table()) == 24 * LAYER
    for name in ("W2", "W2s"):
        assert managed_bytes(synthetic(name).table()) == (24 * 3 + 1) * LAYER
    assert managed_bytes(synthetic("W4").table()) == (12 * 3 + 1 + 12) * LAYER
    assert budget_for(synthetic("W2"), 0.5) == 73 * LAYER // 2
    uneven = synthetic("W2-uneven").table()
    largest = max(s.num_bytes for s in uneven.groups)
    homes = sum(p.num_frames * FRAME_BYTES for p in uneven.pages if p.kind != G)
    assert managed_bytes(uneven) == homes + -(-largest // FRAME_BYTES) * FRAME_BYTES


def test_a_share_that_trains_no_layer_is_refused_with_one_that_does() -> None:
    workload = synthetic("W2")
    with pytest.raises(BudgetError, match=r"group layers.0 needs 16; use at least 5\.5%"):
        budget_for(workload, 0.05)
    assert budget_for(workload, 0.0549) == 16 * FRAME_BYTES


def test_r_is_transfer_over_compute_of_an_access() -> None:
    one = synthetic("W1")
    assert link_for(one, 2.0).bandwidth_in == pytest.approx(LAYER / 0.010 / 2.0)
    # A step of W2 reads 1 page in forward, 3 in backward, and computes 3.25 forwards.
    trained = synthetic("W2")
    assert link_for(trained, 1.0).bandwidth_in == pytest.approx(4 * LAYER / 0.0325)
    assert read_bytes(trained) == 10 * 24 * 4 * LAYER
    # The optimizer reads what backward created: parameters, gradient, two moments.
    assert read_bytes(synthetic("W2s", steps=1)) == 24 * (1 + 1 + 4) * LAYER


@pytest.mark.parametrize("name", ALL)
def test_r_of_its_own_link_is_r(name: str) -> None:
    workload = synthetic(name, steps=4)
    link = link_for(workload, 1.7)
    assert ratio_of(workload, link.bandwidth_in) == pytest.approx(1.7)
    assert (link.bandwidth_out, link.latency_ns, link.frame_move_ns) == (None, 0, 0)


def test_r_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="r must be above 0"):
        link_for(synthetic("W1"), 0.0)


# -- parts, repeats, traces ------------------------------------------------------------------------


def test_parts_and_repeats_keep_visits() -> None:
    workload = synthetic("W5p20", steps=4)
    later = workload.part(1, 3)
    assert later.steps == [1, 2]
    assert later.visits == [v for v in workload.visits if v.step in (1, 2)]
    thrice = workload.repeated(3)
    assert thrice.steps == list(range(12))
    assert needs(thrice, 9) == needs(workload, 1)


@pytest.mark.parametrize("name", write_traces.NAMES)
def test_the_trace_of_a_workload_holds_what_the_generator_makes(name: str) -> None:
    run_dir = Path(write_traces.__file__).parent / name
    assert sum(p.stat().st_size for p in run_dir.rglob("*") if p.is_file()) < 100_000
    reader = TraceReader(run_dir)
    assert reader.problems == []
    traced, made = Workload.from_trace(reader.need(), reader.pages), synthetic(name)
    made.visits[-1].bundles[-1].after_ns = 0  # nothing tells what ran behind the last need
    assert traced.visits == made.visits
    assert equal_pages(traced, made)
    assert (traced.sets, traced.lead_ns) == (made.sets, made.lead_ns)


def test_a_trace_that_is_written_anew_reads_the_same(tmp_path: Path) -> None:
    workload = synthetic("W4-uneven", steps=4)
    write_traces.write(workload, tmp_path)
    reader = TraceReader(tmp_path)
    traced = Workload.from_trace(reader.need(), reader.pages)
    assert [v.bundles for v in traced.visits[:-1]] == [v.bundles for v in workload.visits[:-1]]
    assert np.array_equal(traced.pages["bytes"], workload.pages["bytes"])
