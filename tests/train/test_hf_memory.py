"""Loading and saving a folder takes the page budget and little beside it, whatever its size."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from odc.fsdp.safetensors_file import (
    find_files,
    lay_out,
    read_entries,
    read_span,
    write_span,
)
from odc.sizes import parse_size
from odc.train.pretrained import build_on_meta

MIB = 1 << 20
PROGRAM = Path(__file__).parent / "hf_memory_program.py"
SIZES = {  # of a folder in float32, MB -> width, width of the MLP, layers
    60: (384, 1024, 8),
    1000: (1024, 2816, 19),
}


def write_folder(folder: Path, megabytes: int, dtype: torch.dtype) -> int:
    """A Llama of random weights, written tensor by tensor; returns its bytes."""
    import transformers

    width, inner, layers = SIZES[megabytes]
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shapes = {n: tuple(p.shape) for n, p in build_on_meta(config, dtype).named_parameters()}
    layout = lay_out(folder / "model.safetensors", {n: (dtype, s) for n, s in shapes.items()})
    layout.create()
    generator = torch.Generator().manual_seed(0)
    with open(folder / "model.safetensors", "r+b") as file:
        for name, shape in shapes.items():
            values = torch.randn(math.prod(shape), generator=generator).mul_(0.02).to(dtype)
            write_span(file.fileno(), layout.entries[name], 0, values)
    return layout.size


def check(tmp_path: Path, megabytes: int, dtype: torch.dtype, home: str, optimizer: str) -> None:
    size = write_folder(tmp_path / "model", megabytes, dtype)
    budget = "160MB" if megabytes > 100 else "40MB"
    arguments = [tmp_path / "model", tmp_path / "saved", home, tmp_path / "home", budget, optimizer]
    (tmp_path / "home").mkdir()
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    print({key: f"{value / MIB:.0f} MiB" for key, value in told.items()}, f"of {size / MIB:.0f}")
    allowed = parse_size(budget) + size // 5 + (told["home"] if home == "host" else 0)
    assert told["load"] <= allowed, (told, allowed)
    assert told["save"] <= allowed, (told, allowed)
    assert_same(tmp_path / "saved", tmp_path / "model")


def assert_same(saved: Path, source: Path) -> None:
    found, wanted = (read_entries(find_files(folder)) for folder in (saved, source))
    assert found.keys() == wanted.keys()
    for name, entry in wanted.items():
        tensors = [torch.empty(entry.numel) for _ in range(2)]
        for tensor, one in zip(tensors, (entry, found[name]), strict=True):
            read_span(one, 0, tensor)
        assert torch.equal(*tensors), name


def test_a_small_folder(tmp_path):
    check(tmp_path, 60, torch.float32, "disk", "adamw")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "dtype", "optimizer"),
    [
        ("disk", torch.float32, "adamw"),
        ("disk", torch.bfloat16, "none"),
        ("host", torch.float32, "none"),
    ],
)
def test_a_gigabyte(tmp_path, home, dtype, optimizer):
    check(tmp_path, 1000, dtype, home, optimizer)
