"""Programs written for FSDP2 run on `fully_shard`; the claims are in `api_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.api_claims import CLAIMS
from tests.fsdp.ragged_world import run

SIZES = (2, 4)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """World size -> what went wrong, claim by claim of those that are to run."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    found: dict[int, dict[str, str]] = {}

    def outcome(size: int) -> dict[str, str]:
        if size not in found:
            folder = tmp_path_factory.mktemp("api")
            names = [params["name"] for params in chosen if params["size"] == size]
            found[size] = run(size, names, folder, folder / "out", "tests.fsdp.api_claims")
        return found[size]

    return outcome


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=pytest.mark.slow if size != min(entry.sizes) else ())
        for size in SIZES
        for name, entry in CLAIMS.items()
        if size in entry.sizes
    ],
)
def test_on_ranks(outcomes, size, name):
    wrong = outcomes(size)[name]
    assert not wrong, wrong
