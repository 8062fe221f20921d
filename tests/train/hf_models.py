"""Random models of transformers, as folders that transformers writes, and plain loops."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
)

import torch
import transformers
from torch import nn

transformers.utils.logging.disable_progress_bar()

VOCAB = 211
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 3, "tie_word_embeddings": False}
CONFIGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"intermediate_size": 160}),
    "llama_tied": (
        transformers.LlamaConfig,
        {"intermediate_size": 160, "tie_word_embeddings": True},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"intermediate_size": 96, "num_local_experts": 5, **_MOE},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "intermediate_size": 160,
            "moe_intermediate_size": 96,
            "num_experts": 5,
            "head_dim": 16,
            "mlp_only_layers": [1],
            **_MOE,
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "intermediate_size": 96,
            "num_local_experts": 5,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_MOE,
            "num_experts_per_tok": 4,  # so that each is used in every step
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            "intermediate_size": 160,
            "moe_intermediate_size": 96,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            **_MOE,
        },
    ),
}


def write(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder with a random model of a kind, by transformers' own `save_pretrained`."""
    made, special = CONFIGS[kind]
    config = made(**{**_COMMON, **special, **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".router." not in name:  # with a biased one, some expert is never used
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' own model with its plain loop over experts, in memory as torch allocates it.

    Transformers maps the file where it can, and what lies misaligned there is multiplied by other
    kernels, to other bits.
    """
    options = {"dtype": dtype}
    if transformers.AutoConfig.from_pretrained(folder).model_type != "llama":
        options["experts_implementation"] = "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def batch(step: int, vocab: int = VOCAB, shape: tuple[int, int] = (4, 24)) -> torch.Tensor:
    return torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """A training step as anyone writes it; returns the loss."""
    ids = batch(number)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def logits(model: nn.Module, number: int = 1000) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=batch(number)).logits
