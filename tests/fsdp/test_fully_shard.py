"""`fully_shard` trains as one process does; the claims are in `fully_shard_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.claims import cases
from tests.fsdp.fully_shard_claims import CLAIMS


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
