"""Contenders of benchmarks live in processes of their own and say what went wrong in them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from odc.train.bench_ranks import Step, ask, ranks_of

pytestmark = pytest.mark.dist


def counting(start: int, rank: int, ranks: int) -> Step:
    total = start * ranks + rank

    def step(more: int = 1) -> dict[str, Any]:
        nonlocal total
        total += more
        if total > 100:
            raise ValueError("more than a hundred")
        if total < 0:
            os._exit(3)
        return {"total": total, "setting": os.environ.get("OF_CONTENDER")}

    return step


def failing(rank: int, ranks: int) -> Step:
    raise ValueError(f"rank {rank} of {ranks} cannot")


def test_each_contender_keeps_its_own_state_and_environment() -> None:
    with (
        ranks_of(partial(counting, 10), 2, {"OF_CONTENDER": "one"}) as one,
        ranks_of(partial(counting, 50), 1) as other,
    ):
        assert [a["total"] for a in ask(one)] == [21, 22]
        assert [a["total"] for a in ask(other, 7)] == [57]
        answers = ask(one)
        assert [a["total"] for a in answers] == [22, 23]
        assert [a["setting"] for a in answers] == ["one", "one"]
        assert ask(other)[0]["setting"] is None
    assert "OF_CONTENDER" not in os.environ


def test_a_failure_is_told_by_the_one_who_asked() -> None:
    def ask_once(make: Any, *args: int) -> None:
        with ranks_of(make, 1) as pipes:
            ask(pipes, *args)

    with pytest.raises(RuntimeError, match="rank 0: ValueError: rank 0 of 1 cannot"):
        ask_once(failing)
    with pytest.raises(RuntimeError, match="rank 0: ValueError: more than a hundred"):
        ask_once(partial(counting, 0), 101)
    with pytest.raises(RuntimeError, match="rank 0 ended without a word"):
        ask_once(partial(counting, 0), -1)
