"""What holds of sharded models of transformers; the names are the claims."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import odc
from odc.fsdp.interop import load_safetensors, save_safetensors
from tests.fsdp.claims import Entry, World, registry
from tests.fsdp.interop_models import folder_of, full
from tests.fsdp.sharded_models import batch, deviation

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
)

CLAIMS: dict[str, Entry] = {}
claim = functools.partial(registry(CLAIMS), slow=True)  # models of some size


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=37,
        moe_intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(config)


def train_hf(world: World, build: Callable[[], nn.Module], apply: Any) -> list[float]:
    """Ten losses of ranks, the model's own loss of its labels."""
    model = apply(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        tokens = batch(world.rank, step % 2)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world.size)
    return losses


def train_hf_single(world: World, model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        total = 0.0
        for rank in range(world.size):
            tokens = batch(rank, step % 2)
            loss = model(input_ids=tokens, labels=tokens).loss / world.size
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def fsdp2_layers(world: World) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            fsdp2(layer, mesh=world.mesh)
        return fsdp2(model, mesh=world.mesh)

    return apply


def check_hf_training(world: World, build: Callable[[], nn.Module]) -> None:
    wanted = train_hf_single(world, build())
    theirs = train_hf(world, build, fsdp2_layers(world))
    limit = max(2 * deviation(theirs, wanted), 1e-6)
    apply = functools.partial(
        odc.FullyShardedDataParallel,
        mesh=world.mesh,
        shard_granularity="rows:4" if world.size == 3 else "block",
    )
    mine = train_hf(world, build, apply)
    assert deviation(mine, wanted) <= limit, (mine, wanted)
    assert mine[-1] < mine[0]


@claim(2, 3, packages=("transformers",))
def a_llama_with_tied_embeddings_trains_as_one_process_does(world: World) -> None:
    check_hf_training(world, llama)


@claim(2, 3, packages=("transformers",))
def a_qwen3_moe_trains_as_one_process_does(world: World) -> None:
    check_hf_training(world, qwen3_moe)


@claim(2, packages=("transformers",))
def the_decoder_layers_of_hugging_face_models_are_found(world: World) -> None:
    for build in (llama, qwen3_moe):
        model = odc.FullyShardedDataParallel(build(), world.mesh)
        assert all(isinstance(layer, odc.FSDPModule) for layer in model.model.layers)
        others = [m for m in model.modules() if isinstance(m, odc.FSDPModule)]
        assert len(others) == len(model.model.layers) + 1
    tied = odc.FullyShardedDataParallel(llama(), world.mesh)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@claim(2, packages=("transformers",))
def generation_and_gradient_checkpointing_work_on_a_sharded_llama(world: World) -> None:
    plain = llama()
    model = odc.FullyShardedDataParallel(llama(), world.mesh)
    tokens = batch(0, 0)
    for one in (plain, model):
        one.eval()
    with torch.no_grad():
        chosen = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens, **chosen), plain.generate(tokens, **chosen))
    for one in (plain, model):
        one.train()
        one.gradient_checkpointing_enable({"use_reentrant": False})
        one(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), wanted.grad)


@claim(2, packages=("transformers",))
def transformers_and_odc_read_each_others_folders(world: World) -> None:
    from transformers import AutoModelForCausalLM

    for build in (llama, qwen3_moe):
        plain = build()
        source = folder_of(world, f"{build.__name__}-theirs")
        if world.rank == 0:
            plain.save_pretrained(source)
        dist.barrier()
        with torch.no_grad():
            for parameter in (other := build()).parameters():
                parameter.zero_()
        model = odc.FullyShardedDataParallel(other, world.mesh, shard_granularity="rows:4")
        assert load_safetensors(model, source) == ([], [])
        target = folder_of(world, f"{build.__name__}-ours")
        save_safetensors(model, target, max_shard_size=16000)
        read, told = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert type(read) is type(plain)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for mine, wanted in zip(read.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, wanted)
        theirs = load_file(source / "model.safetensors")
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == theirs.keys()
