"""Which context follows, and which shape a pass has in its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from odc.memory.contexts import Followers, Shapes, base_of
from odc.memory.events import Phase
from odc.memory.orders import OrderLibrary
from tests.memory.passes import go, stations

WHOLE, PROMPT, TOKEN = 1024, 256, 4


def passes(library: OrderLibrary, kinds: str) -> list[int]:
    """T a training pass, E an evaluation, P a prompt, g a token; the contexts they ran in."""
    ran = []
    for kind in kinds:
        tokens = {"P": PROMPT, "g": TOKEN}.get(kind, WHOLE)
        library.begin_pass(0 if kind == "T" else 1, tokens)
        dur_ns = 0.01 * tokens
        for group in (0, 1):
            go(library, group, Phase.FORWARD if kind == "T" else Phase.EVALUATION, dur_ns)
        if kind == "T":
            go(library, 0, Phase.BACKWARD)
        ran.append(library.ctx)
    return ran


def test_passes_of_other_sizes_have_other_shapes_where_there_is_no_backward() -> None:
    shapes = Shapes()
    first = shapes.of(1, WHOLE, False)
    assert first == 1 and shapes.of(1, WHOLE, True) == 1
    prompt, token = shapes.of(1, PROMPT, True), shapes.of(1, TOKEN, True)
    assert len({1, prompt, token}) == 3
    assert base_of(prompt) == base_of(token) == 1
    assert shapes.of(1, WHOLE // 2, True) == 1, "batches are not all alike"
    assert shapes.of(1, PROMPT + 20, True) == prompt
    assert shapes.of(1, TOKEN + 1, True) == token
    assert shapes.of(0, PROMPT, False) == shapes.of(0, WHOLE, False) == 0
    assert shapes.of(-2, PROMPT, True) == base_of(-2) == -2
    assert shapes.of(1, 0, True) == 1, "unknown"


@pytest.mark.parametrize("seed", range(5))
def test_a_context_has_few_shapes_whatever_comes(seed: int) -> None:
    rng, shapes = random.Random(seed), Shapes()
    seen = {shapes.of(3, int(10 ** rng.uniform(0, 6)), True) for _ in range(1000)}
    assert 1 < len(seen) <= 4
    assert {base_of(ctx) for ctx in seen} == {3}


def test_a_new_shape_begins_with_the_order_of_its_context_and_times_of_its_own() -> None:
    library = OrderLibrary(stations(2))
    passes(library, "EE")
    prompt = passes(library, "P")[0]
    order = library.orders[prompt]
    assert [e.key for e in order.entries] == [e.key for e in library.orders[1].entries]
    assert order.passes == library.orders[1].passes
    token = passes(library, "gg")[0]
    assert len({1, prompt, token}) == 3
    assert library.orders[1].total_ns == pytest.approx(2 * 0.01 * WHOLE)
    assert library.orders[prompt].total_ns == pytest.approx(2 * 0.01 * PROMPT)
    assert library.orders[token].total_ns == pytest.approx(2 * 0.01 * TOKEN)


def test_a_pass_of_another_shape_than_expected_is_no_other_context() -> None:
    """It needs the same pages: what is loaded for it goes on."""
    library = OrderLibrary(stations(2))
    passes(library, "TETETETE")
    passes(library, "T")
    assert base_of(library.chain[0]) == 1
    passes(library, "g")
    assert library.ctx != 1 and library.as_expected
    passes(library, "g")
    assert not library.as_expected, "a training pass was"


def test_a_token_is_followed_by_tokens_though_evaluations_are_shorter() -> None:
    """Told by their context alone, three passes were evaluation, and training followed."""
    library = OrderLibrary(stations(2))
    passes(library, "TEEETEEETPggggggggggggTEEETEEE")
    passes(library, "TP")
    for _ in range(8):
        token = passes(library, "g")[0]
        assert library.chain[0] == token


def followers_of(contexts: Sequence[int]) -> Followers:
    followers = Followers()
    for ctx in contexts:
        followers.begin(ctx)
        followers.learn()
    return followers


def test_the_chance_of_a_follower_grows_with_how_often_it_was_and_stays_below_one() -> None:
    chances = [followers_of((0, 1) * times).chances()[0] for times in (2, 4, 6)]
    assert chances == sorted(chances) and chances[0] < chances[-1] < 1.0
    assert followers_of((0, 1) * 6).chain() == (0, 1) * 4
    assert followers_of([0]).chances() == {}


def test_what_followed_a_shorter_past_counts_where_the_longest_was_seen_once() -> None:
    """Behind 2, 0 there was only 3, behind 0 mostly 1."""
    followers = followers_of([0, 1, 0, 1, 0, 1, 0, 1, 2, 0, 3, 0, 1, 2, 0])
    assert followers.chain()[0] == 3
    chances = followers.chances()
    assert sum(chances.values()) < 1.0
    assert chances[3] > chances[1] > 0.1


def test_the_library_tells_what_may_follow_instead() -> None:
    library = OrderLibrary(stations(2))
    passes(library, "TETETTETETTE")
    passes(library, "T")
    assert library.other >= 0 and library.other != library.chain[0]
    assert 0.0 < library.other_chance < 1.0
    assert library.next_chance + library.other_chance < 1.0
