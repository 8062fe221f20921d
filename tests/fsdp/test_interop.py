"""Sharded models come from and go to other programs; the claims are in `interop_claims.py`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fsdp.interop_claims import CLAIMS
from tests.fsdp.ragged_world import run

SIZES = (2, 1, 3, 4)  # two first: its checkpoints are loaded by the others
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(world size, slow) -> what went wrong, claim by claim."""
    shared = tmp_path_factory.mktemp("shared")
    found: dict[tuple[int, bool], dict[str, str]] = {}

    def outcome(size: int, slow: bool) -> dict[str, str]:
        for needed in (2, size):
            names = [
                name
                for name, entry in CLAIMS.items()
                if needed in entry.sizes
                and entry.slow == slow
                and (HAS_TRANSFORMERS or not entry.transformers)
            ]
            if (needed, slow) not in found:
                out = shared / f"world{needed}{'-slow' if slow else ''}"
                found[needed, slow] = run(needed, names, shared, out, "tests.fsdp.interop_claims")
        return found[size, slow]

    return outcome


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=[pytest.mark.slow] if entry.slow else [])
        for size in SIZES
        for name, entry in CLAIMS.items()
        if size in entry.sizes
    ],
)
def test_on_ranks(outcomes, size, name):
    entry = CLAIMS[name]
    if entry.transformers and not HAS_TRANSFORMERS:
        pytest.skip("transformers is not installed: pip install 'odc-runtime[hf]'")
    wrong = outcomes(size, entry.slow)[name]
    assert not wrong, wrong
