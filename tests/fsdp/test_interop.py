"""Sharded models come from and go to other programs: safetensors, transformers, checkpoints."""

from __future__ import annotations

import pytest

from tests.fsdp import dcp_claims, hugging_face_claims, safetensors_claims
from tests.fsdp.claims import cases

CLAIMS = dcp_claims.CLAIMS | hugging_face_claims.CLAIMS | safetensors_claims.CLAIMS


@pytest.mark.dist
@pytest.mark.parametrize(("size", "name"), cases(CLAIMS))
def test_on_ranks(check, size, name):
    check(size, name)
