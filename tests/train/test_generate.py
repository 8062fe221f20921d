"""Claims about generation: the cache changes nothing, and the seed decides."""

import pytest
import torch

from odc.train.config_model import ModelConfig
from odc.train.generate import Sampling, _choose, generate, stream
from odc.train.kv_cache import KVCache
from odc.train.models import build_model

VOCAB = 61


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def model(**changes):
    # Wide weights make the choices of an untrained model differ from one another.
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "init_std": 0.3}
    return build_model(ModelConfig(**{**shape, **changes}), VOCAB)


def prompt(size: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(VOCAB, (size, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 2}, {"num_experts": 4, "expert_size": 24}]
)
def test_greedy_generation_equals_full_recompute(changes):
    net = model(**changes)
    idx = prompt()
    with torch.no_grad():
        for _ in range(12):
            idx = torch.cat([idx, net(idx)[:, -1].argmax(-1, keepdim=True)], dim=1)
    got = generate(net, prompt(), 12)
    assert torch.equal(got, idx)
    assert len(set(got[0, 5:].tolist())) > 2


def test_logits_with_a_cache_equal_those_without_however_the_text_is_cut():
    net, idx = model(num_kv_heads=1), prompt(2, 11)
    whole = net(idx)
    for cuts in ([11], [1] * 11, [4, 1, 5, 1], [3, 8]):
        cache = KVCache(net.config, batch_size=2, capacity=11, like=net.embed.weight)
        with torch.no_grad():
            parts = torch.cat([net(part, cache=cache) for part in idx.split(cuts, dim=1)], dim=1)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
        assert cache.length == 11


def test_a_full_cache_says_so():
    net = model()
    cache = KVCache(net.config, batch_size=2, capacity=4, like=net.embed.weight)
    with torch.no_grad(), pytest.raises(RuntimeError, match="holds 4 positions, got 5"):
        net(prompt(), cache=cache)


def test_the_same_seed_draws_the_same_text_and_another_seed_another():
    net = model()
    drawn = [generate(net, prompt(), 20, sampling=Sampling(seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0][:, :5], prompt())


def test_one_candidate_is_greedy():
    net = model()
    greedy = generate(net, prompt(), 10)
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-6)):
        assert torch.equal(generate(net, prompt(), 10, sampling=sampling), greedy)


def test_draws_follow_the_probabilities_that_are_left():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log().expand(20_000, 4)

    def frequencies(**options) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        drawn = _choose(logits, Sampling(**options), generator)
        return torch.bincount(drawn, minlength=4) / len(drawn)

    def close(got, *expected):
        torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0.015)

    close(frequencies(), 0.1, 0.5, 0.25, 0.15)
    close(frequencies(top_k=2), 0, 2 / 3, 1 / 3, 0)
    close(frequencies(top_p=0.7), 0, 2 / 3, 1 / 3, 0)
    close(frequencies(temperature=0.5), 0.029, 0.725, 0.181, 0.065)


def test_a_row_ends_at_the_stop_token_and_generation_when_all_have_ended():
    net = model()
    free = generate(net, prompt(), 30)
    stop = int(free[0, 8])
    stopped = generate(net, prompt(), 30, stop_token=stop)
    first = int((free[0, 5:] == stop).nonzero()[0]) + 5
    assert torch.equal(stopped[0, : first + 1], free[0, : first + 1])
    assert stopped[0, first:].eq(stop).all()
    assert generate(net, prompt(1), 30, stop_token=stop).size(1) == first + 1


def test_generation_keeps_the_mode_of_the_model_also_between_tokens():
    net = model()
    tokens = stream(net, prompt(), 3)
    next(tokens)
    assert net.training
    generate(net.eval(), prompt(), 2)
    assert not net.training


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Sampling(**options)


def test_an_empty_prompt_is_refused_and_no_new_tokens_are_none():
    with pytest.raises(ValueError, match="at least 1"):
        generate(model(), torch.zeros(1, 0, dtype=torch.long), 3)
    assert torch.equal(generate(model(), prompt(), 0), prompt())
