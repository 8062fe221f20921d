"""Sharded models come from and go to other programs; the claims are in `interop_claims.py`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fsdp.interop_claims import CLAIMS
from tests.fsdp.ragged_world import run

SIZES = (2, 1, 3, 4)  # two first: its checkpoints are loaded by the others
SAVES = {"two_ranks_save_checkpoints"}
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """World size -> what went wrong, claim by claim of those that are to run."""
    shared = tmp_path_factory.mktemp("shared")
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    found: dict[int, dict[str, str]] = {}

    def start(size: int, names: set[str]) -> None:
        ordered = [
            name
            for name, entry in CLAIMS.items()
            if name in names and (HAS_TRANSFORMERS or not entry.transformers)
        ]
        found[size] = run(
            size, ordered, shared, shared / f"world{size}", "tests.fsdp.interop_claims"
        )

    def outcome(size: int) -> dict[str, str]:
        if 2 not in found:  # others load what it saves
            start(2, {p["name"] for p in chosen if p["size"] == 2} | SAVES)
        if size not in found:
            start(size, {p["name"] for p in chosen if p["size"] == size})
        return found[size]

    return outcome


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=pytest.mark.slow)  # files and models of some size
        for size in SIZES
        for name, entry in CLAIMS.items()
        if size in entry.sizes
    ],
)
def test_on_ranks(outcomes, size, name):
    entry = CLAIMS[name]
    if entry.transformers and not HAS_TRANSFORMERS:
        pytest.skip("transformers is not installed: pip install 'odc-runtime[hf]'")
    wrong = outcomes(size)[name]
    assert not wrong, wrong
