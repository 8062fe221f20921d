"""`fully_shard` trains as one process does; the claims are in `fully_shard_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.fully_shard_claims import CLAIMS
from tests.fsdp.ragged_world import run

SIZES = (2, 3, 4)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """World size -> what went wrong, claim by claim."""
    found: dict[int, dict[str, str]] = {}

    def outcome(size: int) -> dict[str, str]:
        if size not in found:
            folder = tmp_path_factory.mktemp("sharded")
            names = [name for name, entry in CLAIMS.items() if size in entry.sizes]
            found[size] = run(size, names, folder, folder / "out", "tests.fsdp.fully_shard_claims")
        return found[size]

    return outcome


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "name"),
    [(size, name) for size in SIZES for name, entry in CLAIMS.items() if size in entry.sizes],
)
def test_on_ranks(outcomes, size, name):
    wrong = outcomes(size)[name]
    assert not wrong, wrong
