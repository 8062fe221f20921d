"""Policies over workloads, beside bounds: the same accesses from an empty device, none faster."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from odc.errors import BudgetError, ConfigError
from odc.memory.replay.synthetic import UNEVEN, WORKLOADS
from odc.memory.victims import Lru
from odc.train.config_memory import MemoryConfig
from odc.train.policies import EVICTIONS, PREFETCHES, ladder, make_policy, parse_policies
from odc.train.simulation import (
    Case,
    SimRow,
    by_context,
    find_floors,
    made_case,
    make_setting,
    recorded_case,
    run_policy,
)

DATA = Path(__file__).parent.parent / "data"
NEARLY = 1 - 1e-6  # the virtual clock cuts transfers down to whole ns


def short(name: str) -> Case:
    warm_up = 4 if name.startswith("W4") else 2
    return made_case(name, seed=0, warm_up=warm_up, steps=2)


def rows(case: Case, policies: list[str], share: float = 0.4, r: float = 1.5) -> list[SimRow]:
    setting = make_setting(case, budget=share, r=r)
    floors = find_floors(case, setting, moves=1, seed=0, lp=False)
    return [run_policy(case, setting, policy, floors) for policy in policies]


@pytest.mark.parametrize(
    "name",
    [
        *WORKLOADS,
        *(n + UNEVEN for n in ("W1", "W5b")),
        *(pytest.param(n + UNEVEN, marks=pytest.mark.slow) for n in ("W2", "W4")),
    ],
)
def test_every_policy_runs_every_workload_and_none_is_faster_than_the_bound(name: str) -> None:
    case = short(name)
    for row in rows(case, ladder()):
        assert row.elapsed_s == pytest.approx(row.compute_s + row.stall_s)
        assert row.elapsed_s >= row.window_bound_s * NEARLY, row.policy
        assert row.window_bound_s >= row.compute_s * NEARLY
        assert row.best_found_s is not None
        assert row.best_found_s >= row.window_bound_s * NEARLY
        assert row.steps == 2 and row.bytes_in > 0
        assert len(row.passes) == sum(v.begins_pass for v in case.measured.visits)


def test_the_best_schedule_found_is_no_slower_than_demand_paging() -> None:
    for name in ("W1", "W2", "W3"):
        (row,) = rows(short(name), ["lru+none"])
        assert row.best_found_s is not None and row.best_found_s < row.elapsed_s


def test_the_linear_program_is_solved_for_small_workloads_and_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("odc.train.simulation.SMALL", 48 * 24)
    small, larger = (made_case("W3", seed=0, warm_up=1, steps=n) for n in (2, 3))
    for case, lp, solved in (
        (small, None, True),
        (small, False, False),
        (larger, None, False),
        (larger, True, True),
    ):
        setting = make_setting(case, budget=0.5, r=2.0)
        floors = find_floors(case, setting, moves=0, seed=0, lp=lp)
        assert floors.best_found_s is None
        assert (floors.lp_bound_s is not None) == solved
        if floors.lp_bound_s is not None:
            (row,) = [run_policy(case, setting, "cost_aware+replay", floors)]
            assert row.elapsed_s >= floors.lp_bound_s * NEARLY


def test_contexts_are_told_apart() -> None:
    case = made_case("W4", seed=0, warm_up=4, steps=4)
    (row,) = rows(case, ["cost_aware+popularity"])
    found = {one.ctx: one for one in by_context(row)}
    assert sorted(found) == [0, 1, 3]
    assert sum(one.passes for one in found.values()) == len(row.passes)
    total = sum(one.passes * one.elapsed_s for one in found.values())
    assert total == pytest.approx(row.elapsed_s)
    firsts = [p for p in row.passes if p.ctx == 3 and p.first]
    assert found[3].first_elapsed_s == pytest.approx(
        sum(p.elapsed_ns for p in firsts) / len(firsts) / 1e9
    )
    best = row.best_found_pass_s
    assert best is not None and len(best) == len(row.passes)
    assert sum(best) == pytest.approx(row.best_found_s)
    own = [at for at, p in enumerate(row.passes) if p.ctx == 3]
    assert found[3].best_found_s == pytest.approx(sum(best[at] for at in own) / len(own))


def test_rows_as_json_hold_every_field() -> None:
    (row,) = rows(short("W1"), ["lru+none"])
    told = row.as_json()
    assert set(told) == {f.name for f in fields(SimRow)}
    assert set(told["passes"][0]) == {
        *("step", "micro", "ctx", "tokens", "first", "misses"),
        *("elapsed_s", "compute_s", "stall_s", "bytes_in", "bytes_out"),
    }


def test_a_recorded_run_is_simulated_like_the_workload_it_came_from() -> None:
    recorded = recorded_case(DATA / "W2", warm_up=None, steps=None)
    made = made_case("W2", seed=0, warm_up=None, steps=None)
    assert (recorded.first, recorded.num_steps) == (made.first, made.num_steps) == (4, 6)
    a, b = (rows(case, ["lru+none", "cost_aware+replay"]) for case in (recorded, made))
    for one, other in zip(a, b, strict=True):
        assert (one.bytes_in, one.bytes_out) == (other.bytes_in, other.bytes_out)
        # The trace does not tell what ran behind its last need.
        assert one.stall_s == pytest.approx(other.stall_s, rel=0.01, abs=1e-3)


def test_the_last_steps_of_a_run_are_taken() -> None:
    case = recorded_case(DATA / "W3", warm_up=1, steps=2)
    assert case.workload.steps == [7, 8, 9] and case.measured.steps == [8, 9]
    with pytest.raises(ConfigError, match="10 steps traced in a row, 4 of warm-up and 7 measured"):
        recorded_case(DATA / "W3", warm_up=4, steps=7)


def test_the_link_is_the_one_named_or_the_recorded_one() -> None:
    case = recorded_case(DATA / "W1", warm_up=None, steps=None)
    recorded = make_setting(case, budget=0.5)
    assert recorded.r == pytest.approx(1.0, rel=0.01)
    twice = make_setting(case, budget=0.5, bandwidth=2 * recorded.link.bandwidth_in)
    assert twice.r == pytest.approx(recorded.r / 2)
    with pytest.raises(ConfigError, match=r"W1: has no link of its own; name one \(--r or --link"):
        make_setting(short("W1"), budget=0.5)


def test_a_budget_is_a_share_or_bytes() -> None:
    case = short("W1")
    share = make_setting(case, budget=0.5, r=1.0)
    assert share.budget_bytes == 12 * 8 * 2**20
    same = make_setting(case, budget=12 * 8 * 2**20, r=1.0)
    assert same == share
    with pytest.raises(BudgetError, match="use at least"):
        make_setting(case, budget=0.01, r=1.0)


# -- names -----------------------------------------------------------------------------------------


def test_names_of_policies_become_objects() -> None:
    case = short("W1")
    for name in ladder():
        eviction, prefetch = make_policy(name, case.workload)
        assert isinstance(eviction, EVICTIONS[name.partition("+")[0]])  # type: ignore[arg-type]
        assert (prefetch is None) == name.endswith("+none")
    assert isinstance(make_policy("lru+none", case.workload)[0], Lru)


def test_all_is_the_ladder_and_lists_are_taken_as_they_are() -> None:
    assert parse_policies("all") == ladder()
    assert {"lru+none", "lru+next_k", "cost_aware+popularity", "belady+oracle"} <= set(ladder())
    assert parse_policies("lru+replay,lru+none,lru+replay") == ["lru+replay", "lru+none"]


@pytest.mark.parametrize("name", ["lru", "lru+", "best+none", "lru+magic", "lru+none,", ""])
def test_unknown_names_are_told_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match="EVICTION one of lru, .* and PREFETCH one of none, "):
        parse_policies(name)


def test_belady_needs_the_future() -> None:
    with pytest.raises(ConfigError, match=r"belady\+oracle"):
        parse_policies("belady+replay")


def test_the_configuration_takes_the_same_names() -> None:
    for key, names in (("evict_strategy", EVICTIONS), ("prefetch", PREFETCHES)):
        for name in names:
            assert getattr(MemoryConfig(**{key: name}), key) == name
        with pytest.raises(ConfigError, match=", ".join(names)):
            MemoryConfig(**{key: "magic"})
