"""Blocks of 8 and 4 bits: how far values move, that they move once, and what they take."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import odc
from odc.errors import QuantizationError
from odc.fsdp.blocks import BLOCK, BlockFormat, is_coded
from tests.fsdp.block_reference import LEVELS, rounded, steps_of

NAMES = ("int8", "int4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def image_of(format: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    image = torch.zeros(sum(format.sizes(len(values))), dtype=torch.uint8)
    format.encode(values, image)
    return image


def there_and_back(name: str, values: torch.Tensor) -> torch.Tensor:
    """(num_blocks, 64) as they come back."""
    format = BlockFormat.of(name)
    assert format is not None
    found = torch.full_like(values, float("nan"))
    format.decode(image_of(format, values), found)
    return found


def adversarial(dtype: torch.dtype) -> torch.Tensor:
    """Blocks that a quantizer may get wrong."""
    info = torch.finfo(dtype)
    blocks = torch.zeros(12, BLOCK, dtype=torch.float64)
    blocks[1] = -torch.linspace(0.001, 3, BLOCK, dtype=torch.float64)  # negative only
    blocks[2] = 1e-3
    blocks[2, 17] = 100.0  # one outlier
    blocks[3, 5] = -7.0  # one value alone
    blocks[4] = info.max
    blocks[4, ::2] = -info.max
    blocks[5] = info.smallest_normal * torch.linspace(0, 1, BLOCK, dtype=torch.float64)
    blocks[6] = info.smallest_normal * 2.0 ** -torch.arange(BLOCK, dtype=torch.float64)
    blocks[7] = torch.linspace(-1, 1, BLOCK, dtype=torch.float64)
    blocks[8] = torch.arange(BLOCK, dtype=torch.float64) / 2 - 16  # ties
    blocks[9] = 127.5
    blocks[9, 1:] = torch.linspace(-127.4, 127.4, BLOCK - 1, dtype=torch.float64)
    blocks[10] = 5.0
    blocks[11, ::2] = -0.0
    return blocks.clamp(info.min, info.max).to(dtype)


def drawn(seed: int, dtype: torch.dtype, blocks: int = 200) -> torch.Tensor:
    """Blocks of all magnitudes and shapes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((blocks, BLOCK)) * 10.0 ** rng.uniform(-4, 4, (blocks, 1))
    values *= rng.random((blocks, BLOCK)) ** rng.uniform(0, 8, (blocks, 1))
    return torch.from_numpy(values).to(dtype)


def assert_within_half_a_step(name: str, values: torch.Tensor, found: torch.Tensor) -> None:
    """Half a step, and half a unit in the last place of the parameter's type."""
    exact, back = values.double(), found.double()
    step = torch.from_numpy(steps_of(values, name)).double()[:, None]
    assert (step >= exact.abs().amax(1, keepdim=True) / LEVELS[name] * (1 - 2**-8)).all()
    slack = torch.finfo(values.dtype).eps / 2 * back.abs()
    slack += torch.finfo(values.dtype).smallest_normal * torch.finfo(values.dtype).eps / 2
    allowed = step / 2 * (1 + 1e-5) + slack
    error = (exact - back).abs()
    assert (error <= allowed).all(), (error / step).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_moves_by_half_a_step_at_most_and_only_once(name, dtype):
    for values in (adversarial(dtype), *(drawn(seed, dtype) for seed in range(5))):
        found = there_and_back(name, values)
        assert_within_half_a_step(name, values, found)
        assert torch.equal(found, rounded(values, name))
        assert torch.equal(there_and_back(name, found), found)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES[:2]),
)
def test_any_finite_numbers_are_stored(numbers, name, dtype):
    values = torch.zeros(128)
    values[: len(numbers)] = torch.tensor(numbers, dtype=torch.float32)
    blocks = values.to(dtype).nan_to_num(0.0, 1.0, -1.0).view(-1, BLOCK)
    found = there_and_back(name, blocks)
    assert_within_half_a_step(name, blocks, found)
    assert torch.equal(there_and_back(name, found), found)


def test_all_scales_of_two_octaves_come_back():
    """Every bf16 mantissa as a block's largest value, with the values that are hardest to keep."""
    for name in NAMES:
        for dtype in DTYPES[:2]:
            most = (torch.arange(128, 512, dtype=torch.float32) / 128)[:, None]
            fractions = torch.linspace(-1, 1, BLOCK)[None, :].roll(1, 1)
            found = there_and_back(name, (most * fractions).to(dtype))
            assert torch.equal(there_and_back(name, found), found), (name, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad):
    values = torch.ones(300, BLOCK)
    values[211, 3] = bad
    for name in NAMES:
        with pytest.raises(QuantizationError, match="NaN or infinite"):
            there_and_back(name, values)


def test_scales_add_a_quarter_of_a_bit_to_a_value():
    for name, bits in (("int8", 8.25), ("int4", 4.25)):
        image = image_of(BlockFormat.of(name), torch.ones(1000, BLOCK))
        assert len(image) * 8 == bits * 1000 * BLOCK


def test_more_blocks_than_are_computed_at_a_time_are_the_same():
    values = drawn(7, torch.float32, 40_000)
    for name in NAMES:
        found = there_and_back(name, values)
        assert torch.equal(found[-10:], there_and_back(name, values[-10:]))
        assert torch.equal(found, rounded(values, name))


def test_a_thread_that_flushes_small_numbers_decodes_the_same():
    values = adversarial(torch.float32)
    format = BlockFormat.of("int4")
    image, expected = image_of(format, values), there_and_back("int4", values)
    found = torch.empty_like(values)

    def decode() -> None:
        torch.set_flush_denormal(True)
        format.decode(image, found)

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert torch.equal(found, expected)


def test_matrices_of_floating_point_are_coded_and_nothing_else():
    assert is_coded(torch.Size((4, 4)), torch.bfloat16)
    assert is_coded(torch.Size((2, 3, 4)), torch.float32)
    assert not is_coded(torch.Size((4,)), torch.float32)
    assert not is_coded(torch.Size((4, 4)), torch.float64)
    with pytest.raises(odc.OdcError, match="native, int8 or int4, got 'nf4'"):
        BlockFormat.of("nf4")
