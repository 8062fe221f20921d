"""What a sharded step copies, sends and holds; the claims are in `bytes_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.bytes_claims import CLAIMS
from tests.fsdp.claims import cases


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
