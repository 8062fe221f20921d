"""Adapters beside peft's: the same numbers, the same files, and peft's own models in pages."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import odc
from odc.errors import CheckpointError, ConfigError
from odc.fsdp.lora import factors_of
from odc.fsdp.wrap import find_units
from tests.fsdp.paged_loop import MIB
from tests.fsdp.plain_loop import LR

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
missing = [n for n in ("transformers", "peft") if importlib.util.find_spec(n) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")

PREFIX = "base_model.model."
TARGETS = ("q_proj", "v_proj", "down_proj")
STEPS = 20


@cache
def base_model(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=384,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return LlamaForCausalLM(config)


def theirs(base: nn.Module, **options: object) -> nn.Module:
    import peft

    chosen = {"r": 8, "lora_alpha": 16, "target_modules": list(TARGETS), **options}
    return peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**chosen))


def with_values_of(model: nn.Module, other: nn.Module, adapter: str = "default") -> nn.Module:
    """Gives a model of ours the adapter of one of theirs."""
    state = other.state_dict()
    with torch.no_grad():
        for key, factor in factors_of(model, adapter):
            factor.weight.copy_(state[f"{PREFIX}{key}.{adapter}.weight"])
    return model


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 384, (2, 12), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, fused=True)


def near(found: list[float], wanted: list[float]) -> bool:
    return found == pytest.approx(wanted, rel=1e-6)


@cache
def reference(tied: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """peft's first values, gradients of the first batch, and losses."""
    model = theirs(base_model(tied))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(12)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as after some steps: A has no gradient while B is zero
                parameter.normal_(0, 0.02)
    first = {k: v.clone() for k, v in model.state_dict().items() if "lora_" in k}
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return first, gradients, train(model, plain_adamw(model))


def ours(tied: bool = False) -> nn.Module:
    model = odc.lora(copy.deepcopy(base_model(tied)), targets=TARGETS)
    first = reference(tied)[0]
    with torch.no_grad():
        for key, factor in factors_of(model, "default"):
            factor.weight.copy_(first[f"{PREFIX}{key}.default.weight"])
    return model


@pytest.mark.parametrize("tied, budget", [(False, 8 * MIB), (True, 8 * MIB), (False, None)])
def test_gradients_and_losses_of_twenty_steps_are_peft_s(tied, budget):
    _, gradients, losses = reference(tied)
    model, optimizer = odc.paged(ours(tied), torch.optim.AdamW, page_budget=budget, lr=LR)
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    named = dict(model.named_parameters())
    for name, wanted in gradients.items():
        found = optimizer.gradient(named[name.removeprefix(PREFIX)])
        assert torch.linalg.vector_norm(found - wanted) <= 1e-6 * torch.linalg.vector_norm(wanted)
    assert len(gradients) == sum(p.requires_grad for p in named.values()) == 24
    optimizer.zero_grad()
    assert near(train(model, optimizer), losses)
    model.close()


@pytest.mark.parametrize("tied, update", [(False, "step"), (True, "backward")])
def test_a_model_of_peft_trains_in_pages_as_it_does_without(tied, update):
    first, _, losses = reference(tied)
    model = theirs(base_model(tied))
    model.load_state_dict(first, strict=False)
    model, optimizer = odc.paged(model, page_budget="8MB", update=update, lr=LR)
    assert train(model, optimizer) == losses
    assert model.memory.take().peak_page_bytes <= 8 * MIB
    model.close()


def test_layers_embedding_and_head_of_a_model_of_peft_are_units():
    for tied in (False, True):
        found = {u.fqn.removeprefix(PREFIX): u for u in find_units(theirs(base_model(tied)))[0]}
        layers = [f"model.layers.{n}" for n in range(4)]
        assert list(found) == ["model.embed_tokens", *layers, "lm_head", ""]
        assert [p.fqn for p in found[""].owned] == [f"{PREFIX}model.norm.weight"]
        assert found["lm_head"].tied == ([found["model.embed_tokens"]] if tied else [])


def test_a_head_and_an_embedding_that_peft_adapts_stay_units_of_their_own():
    model = theirs(base_model(), target_modules=["embed_tokens", "q_proj", "lm_head"])
    model, optimizer = odc.paged(model, page_budget="10MB", lr=LR)
    names = [g.spec.name.removeprefix(PREFIX) for g in model._odc_runtime.groups]
    assert any(name.startswith("lm_head") for name in names)
    root = [g for g in model._odc_runtime.groups if g.unit.module is model]
    kinds = {slot.fqn.rsplit(".", 2)[-2] for g in root for slot in g.slots}
    assert kinds <= {"norm", "lora_embedding_A", "lora_embedding_B"}
    plain = theirs(base_model(), target_modules=["embed_tokens", "q_proj", "lm_head"])
    plain.load_state_dict(model.state_dict())
    assert train(model, optimizer, 4) == train(plain, plain_adamw(plain), 4)
    model.close()


def test_peft_reads_what_we_write(tmp_path):
    import peft

    model, optimizer = odc.paged(ours(), page_budget="8MB", lr=LR)
    train(model, optimizer, 2)
    odc.save_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        wanted = model(input_ids=batch(0)).logits
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base_model()), tmp_path / "adapter")
    with torch.no_grad():
        found = loaded(input_ids=batch(0)).logits
    assert torch.linalg.vector_norm(found - wanted) <= 1e-6 * torch.linalg.vector_norm(wanted)
    state = model.state_dict()
    for name, value in loaded.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value, state[name.removeprefix(PREFIX)]), name
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.task_type) == (8, 16, "CAUSAL_LM")
    assert set(config.target_modules) == set(TARGETS)
    model.close()


@pytest.mark.parametrize("where", ["built", "meta", "paged"])
def test_we_read_what_peft_writes(tmp_path, where):
    made = theirs(base_model())
    made.load_state_dict(reference()[0], strict=False)
    made.save_pretrained(tmp_path)
    model = copy.deepcopy(base_model())
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    if where == "paged":
        model = odc.lora(model, targets=TARGETS)
    if where != "paged":
        model = model.to("meta") if where == "meta" else model
        odc.load_adapter(model, tmp_path)

    def init(fqn: str, module: nn.Module) -> None:
        if hasattr(module, "original_inv_freq"):  # the buffers of rotary embeddings
            source = base_model().get_submodule(fqn)
            module.inv_freq.copy_(source.inv_freq)
            module.original_inv_freq.copy_(source.original_inv_freq)
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data.copy_(weights[f"{fqn}.{name}"])

    model, optimizer = odc.paged(model, page_budget="8MB", lr=LR, init=init)
    if where == "paged":
        odc.load_adapter(model, tmp_path)
    assert near(train(model, optimizer, 5), reference()[2][:5])
    model.close()


def test_an_adapter_that_was_saved_is_read_again_bit_for_bit(tmp_path):
    options = {"rank": 4, "alpha": 2.5, "dropout": 0.25, "targets": r".*\.1\..*(q|k)_proj"}
    model = odc.lora(copy.deepcopy(base_model()), names=("one",), **options)
    odc.save_adapter(model, tmp_path)
    other = copy.deepcopy(base_model())
    odc.load_adapter(other, tmp_path, "two", seed=9)
    assert other._odc_adapters.configs["two"] == model._odc_adapters.configs["one"]
    pairs = list(zip(factors_of(model, "one"), factors_of(other, "two"), strict=True))
    assert len(pairs) == 4
    assert all(a[0] == b[0] and torch.equal(a[1].weight, b[1].weight) for a, b in pairs)


def changed(folder: Path, **keys: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    "keys, error, expected",
    [
        ({"use_dora": True}, ConfigError, "use_dora True: only plain LoRA is supported"),
        ({"bias": "all"}, ConfigError, "bias 'all': only plain LoRA"),
        ({"peft_type": "IA3"}, ConfigError, "peft_type 'IA3': only plain LoRA"),
        ({"init_lora_weights": "pissa"}, ConfigError, "init_lora_weights 'pissa'"),
        ({"r": 4}, CheckpointError, r"of another shape \(24\).*\(8, 128\) in the file"),
        ({"target_modules": ["q_proj"]}, CheckpointError, r"not in the model \(16\)"),
        ({"target_modules": None, "r": "x"}, CheckpointError, "cannot be read"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, keys, error, expected):
    odc.save_adapter(ours(), tmp_path)
    changed(tmp_path, **keys)
    model = copy.deepcopy(base_model())
    with pytest.raises(error, match=f"(?s){expected}"):
        odc.load_adapter(model, tmp_path)
    assert not hasattr(model, "_odc_adapters"), "the model was changed"


def test_an_adapter_of_another_rank_or_without_weights_is_refused(tmp_path):
    odc.save_adapter(ours(), tmp_path)
    model = odc.lora(copy.deepcopy(base_model()), rank=4, targets=TARGETS)
    with pytest.raises(CheckpointError, match="has rank 8 and alpha 16, adapter 'default' has"):
        odc.load_adapter(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no adapter_model.safetensors"):
        odc.load_adapter(ours(), tmp_path)
    with pytest.raises(CheckpointError, match="is no adapter: it holds no adapter_config.json"):
        odc.load_adapter(ours(), tmp_path / "nowhere")


@pytest.mark.slow
def test_a_pretrained_model_is_adapted_as_by_peft(tmp_path):
    from tests.fsdp import pretrained_claims as pretrained

    lacking = [n for n in pretrained.PACKAGES if importlib.util.find_spec(n) is None]
    if lacking:
        pytest.skip(f"{lacking} not installed: make test-slow installs them")
    pretrained.unpack(tmp_path, 1)
    base, [batches] = pretrained.load(tmp_path)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for one in [*batches, *batches]:
            loss = model(**one).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    made = theirs(base)
    model = with_values_of(odc.lora(base, targets=TARGETS), made)
    wanted = losses(made, torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True))
    del made
    model, optimizer = odc.paged(model, page_budget="160MB", lr=1e-3)
    found = losses(model, optimizer)
    assert near(found, wanted), (found, wanted)
    assert found[-1] < 0.8 * found[0] and len(found) == 20
    assert model.memory.take().peak_page_bytes <= 160 * MIB
    model.close()
