"""Claims about sizes and rates as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import ConfigError
from odc.sizes import exact_size, format_bytes, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("256MB", 256 * 1024 * 1024),
        ("256MiB", 256 * 1024 * 1024),
        ("40GB", 40 * 2**30),
        ("1.5 gb", 3 * 2**29),
        ("7", 7),
        ("12B", 12),
        ("2TB", 2 * 2**40),
        (0, 0),
        (1e9, 10**9),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_powers_of_1024_under_both_spellings(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1.5GB/s", 1_500_000_000), ("1GiB/s", 2**30), ("8MB", 8_000_000), (5e8, 500_000_000)],
)
def test_rates_are_powers_of_1000_unless_written_binary(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "wrong",
    ["256MBs", "4 parsecs", "", "-1GB", "1.5", 1.5, -1, True, None, "1GB/s", "3iB", "inf", "nan",
     float("inf"), float("nan"), [1], "1e9"],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_what_is_allowed(wrong):
    with pytest.raises(ConfigError, match="KB, MB, GB, TB"):
        parse_size(wrong)


def test_what_is_no_rate_is_refused_with_what_is_allowed():
    with pytest.raises(ConfigError, match="MB/s"):
        parse_rate("fast")


def test_bytes_are_shown_short():
    shown = [format_bytes(n) for n in (0, 1023, 1024, 1536, 256 << 20, 123456789, -(3 << 30))]
    assert shown == ["0 B", "1,023 B", "1.00 KiB", "1.50 KiB", "256 MiB", "118 MiB", "-3.00 GiB"]


@given(st.integers(min_value=0, max_value=2**60))
def test_the_exact_spelling_reads_back_as_the_same_number(num_bytes):
    assert parse_size(exact_size(num_bytes)) == num_bytes


@given(st.integers(0, 50), st.integers(1, 1023))
def test_whole_multiples_read_back_from_the_short_spelling_too(power, factor):
    assert parse_size(exact_size(factor << power)) == factor << power
