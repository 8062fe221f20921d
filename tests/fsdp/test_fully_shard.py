"""`fully_shard` trains as one process does; the claims are in `fully_shard_*claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp import fully_shard_claims, fully_shard_module_claims
from tests.fsdp.claims import cases

CLAIMS = fully_shard_claims.CLAIMS | fully_shard_module_claims.CLAIMS


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
