"""A pretrained model trains sharded as in one process; the claims are in `pretrained_claims.py`."""

from __future__ import annotations

import pytest

from tests.fsdp.claims import cases
from tests.fsdp.pretrained_claims import CLAIMS


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
