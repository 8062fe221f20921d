"""Loads a folder into pages, reads all of it once, saves it, and prints its peaks of memory.

    python hf_memory_program.py FOLDER TARGET HOME HOME_DIR PAGE_BUDGET OPTIMIZER

Peaks are VmHWM less what the process held after its imports, in bytes.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # what from_pretrained would import

import odc

warnings.simplefilter("ignore")


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak() -> int:
    """Since the last call."""
    found = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return found


def main(folder: str, target: str, home: str, home_dir: str, budget: str, optimizer: str) -> None:
    torch.set_num_threads(1)
    # the first model builds what every later one shares
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )(input_ids=torch.tensor([[1, 2]]))
    peak()
    base = status("VmRSS")
    model, _ = odc.from_pretrained(
        folder,
        torch.optim.AdamW if optimizer == "adamw" else None,
        page_budget=budget,
        page_size="16MB",
        home=home,
        home_dir=home_dir if home == "disk" else None,
    )
    told = {"load": peak() - base}
    odc.save_pretrained(model, target)
    told["save"] = peak() - base
    tiers = model.memory.home.traffic
    told["home"] = sum(used.num_bytes for used in tiers.values())
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
