"""Programs written for FSDP2 run on `fully_shard`; the claims are in `api_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.api_claims import CLAIMS
from tests.fsdp.claims import cases


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
