"""Sharded models come from and go to other programs; the claims are in `interop_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.claims import cases
from tests.fsdp.interop_claims import CLAIMS


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
