"""Claims about batches: which tokens they hold, and that the step alone decides."""

import numpy as np
import pytest
import torch

from odc.errors import DataError
from odc.train.sampler import Sampler, evaluation_batches
from odc.train.tokens import DocumentSet


def documents(lengths: list[int]) -> DocumentSet:
    """Token values tell document (thousands) and position."""
    tokens = np.concatenate(
        [1000 * i + np.arange(length) for i, length in enumerate(lengths)]
    ).astype(np.uint16)
    ends = np.cumsum(lengths)
    return DocumentSet(
        tokens=tokens,
        starts=ends - lengths,
        ends=ends,
        kinds=np.zeros(len(lengths), dtype=np.uint8),
    )


LENGTHS = [3, 120, 17, 64, 5, 40, 1, 88]


def sampler(lengths: list[int] = LENGTHS, **changes) -> Sampler:
    options = {"seq_len": 8, "micro_batch": 3, "seed": 4}
    return Sampler(documents(lengths), **{**options, **changes})


def test_targets_are_the_inputs_one_later_and_steps_follow_on():
    sample, last = sampler(), None
    for step in range(sample.windows_per_epoch):
        x, y = sample.batch(step)
        assert x.shape == y.shape == (3, 8) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert last is None or torch.equal(x[:, 0], last)
        last = y[:, -1]


def test_an_epoch_holds_every_token_once_but_for_less_than_a_window_a_lane():
    sample = sampler()
    seen = torch.cat([sample.batch(step)[0] for step in range(sample.windows_per_epoch)], dim=1)
    values = seen.flatten().tolist()
    assert len(values) == len(set(values))
    assert sum(LENGTHS) - len(values) <= 3 * (8 + 1)


def test_a_long_document_spans_consecutive_steps_of_one_lane():
    sample = sampler([200, 4, 4], micro_batch=1)
    lane = torch.cat([sample.batch(step)[0] for step in range(sample.windows_per_epoch)], dim=1)[0]
    inside = lane[lane < 1000]
    assert torch.equal(inside, torch.arange(len(inside))) and len(inside) > 190


def test_a_batch_depends_on_the_step_alone():
    one, other = sampler(), sampler()
    steps = [40, 0, 7, 7, 39, 1, 100]
    expected = {step: one.batch(step) for step in sorted(set(steps))}
    for step in steps:
        for got, wanted in zip(other.batch(step), expected[step], strict=True):
            assert torch.equal(got, wanted)


def test_epochs_and_seeds_shuffle_the_documents():
    sample = sampler()
    windows = sample.windows_per_epoch
    assert [sample.epoch(step) for step in (0, windows - 1, windows, 2 * windows)] == [0, 0, 1, 2]
    first, second = sample.batch(0)[0], sample.batch(windows)[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, sampler(seed=5).batch(0)[0])


def test_micro_steps_take_windows_of_their_own():
    plain, accumulating = sampler(), sampler(accumulate=2)
    for step in range(3):
        for micro in range(2):
            assert torch.equal(accumulating.batch(step, micro)[0], plain.batch(2 * step + micro)[0])
    assert accumulating.epoch(plain.windows_per_epoch // 2 + 1) == 1
    with pytest.raises(ValueError, match="micro from 0 to 1"):
        accumulating.batch(0, 2)


def test_too_little_text_is_told_with_what_to_change():
    with pytest.raises(DataError, match="20 tokens are too few for 3 windows of 8"):
        sampler([20])


def test_evaluation_sees_the_same_held_back_windows_at_every_call():
    held_back = documents([50, 30])
    options = {"seq_len": 8, "micro_batch": 2, "num_batches": 3}
    first = list(evaluation_batches(held_back, **options))
    second = list(evaluation_batches(held_back, **options))
    assert len(first) == 3
    for (x, y), (again_x, again_y) in zip(first, second, strict=True):
        assert torch.equal(x, again_x) and torch.equal(y, again_y)
    assert len(list(evaluation_batches(held_back, **{**options, "num_batches": 99}))) == 4
    ((x, _),) = evaluation_batches(documents([20]), seq_len=8, micro_batch=16, num_batches=9)
    assert x.shape == (2, 8)
    with pytest.raises(DataError, match="too few"):
        list(evaluation_batches(documents([8]), **options))
