"""Models of transformers in pages: loaded, trained and saved as transformers itself would.

The reference is a plain loop over transformers' model with `torch.optim.AdamW(fused=True)`, with
its loop over experts (`experts_implementation="eager"`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import odc
from odc.fsdp.expert_list import ExpertList, unfuse_experts
from odc.fsdp.safetensors_file import find_files, read_entries
from odc.train.pretrained import describe_model
from tests.train import hf_models

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The other core is for transfers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FAST = ("llama", "mixtral", "gpt_oss")
KINDS = [
    kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow)
    for kind in hf_models.CONFIGS
]


@contextmanager
def paged(folder: Path, optimizer: Any = torch.optim.AdamW, **options: Any) -> Iterator[Any]:
    """The model of a folder in few and small pages, so that they come and go."""
    chosen = {"page_budget": "6MB", "page_size": "2MB", **options}
    model, opt = odc.from_pretrained(folder, optimizer, **(OPTIONS if optimizer else {}), **chosen)
    try:
        yield model, opt
    finally:
        model.close()


class Folders(dict[str, Path]):
    """By kind; each is written when it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, kind: str) -> Path:
        self[kind] = hf_models.write(self._root / kind, kind)
        return self[kind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("hf"))


def entries(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    found = read_entries(find_files(folder))
    return {name: (entry.dtype, entry.shape) for name, entry in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_is_saved_as_in_transformers(kind, folders, tmp_path):
    plain = hf_models.load(folders[kind])
    reference = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    with paged(folders[kind], home="disk") as (model, opt):
        assert torch.equal(hf_models.logits(model), hf_models.logits(plain))
        for number in range(3):
            wanted = hf_models.step(plain, reference, number)
            assert hf_models.step(model, opt, number) == wanted
        assert model.memory.take().bytes_in > 0
        assert torch.equal(hf_models.logits(model), hf_models.logits(plain))
        odc.save_pretrained(model, tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    assert entries(tmp_path / "saved") == entries(folders[kind])
    saved = hf_models.load(tmp_path / "saved")
    assert torch.equal(hf_models.logits(saved), hf_models.logits(plain))
    told = [
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "saved", folders[kind])
    ]
    assert told[0] == told[1]


def test_experts_come_and_go_one_by_one(folders):
    with paged(folders["mixtral"]) as (model, _):
        lists = [m for m in model.modules() if isinstance(m, ExpertList)]
        assert lists and all(m.expert_order is not None for m in lists)
        table = model.memory.table
        experts = {g.expert for g in table.groups if g.set_index >= 0}
        assert experts == set(range(5))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_any_order_of_experts_gives_the_same_bits(kind, folders):
    fused = hf_models.load(folders[kind])
    apart = hf_models.load(folders[kind])
    assert unfuse_experts(apart) > 0
    for module in apart.modules():
        if isinstance(module, ExpertList):
            module.expert_order = lambda used, routing: used[1:] + used[:1]
    ids = hf_models.batch(0)
    for model in (fused, apart):
        model(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad for name, p in fused.named_parameters()}
    for name, parameter in apart.named_parameters():
        stem, _, rest = name.partition(".experts.")
        if not rest:
            assert torch.equal(parameter.grad, wanted[name]), name
            continue
        expert, last = rest.split(".")
        of_expert = wanted[f"{stem}.experts.{last}"][int(expert)]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(grad, of_expert), name


def test_an_expert_without_tokens_is_left_as_it_is(folders):
    """As with a ModuleList of experts; the fused parameter's zero gradient would decay it."""
    apart = hf_models.load(folders["mixtral"])
    unfuse_experts(apart)
    reference = torch.optim.AdamW(apart.parameters(), fused=True, **OPTIONS)
    with paged(folders["mixtral"]) as (model, opt):
        for number in range(3):
            ids = hf_models.batch(number, shape=(1, 1)).repeat(1, 2)
            for one, optimizer in ((apart, reference), (model, opt)):
                one(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(hf_models.logits(model), hf_models.logits(apart))


def test_what_is_frozen_beforehand_stays_as_it_is(folders):
    def freeze(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" in name)

    plain = hf_models.load(folders["mixtral"])
    freeze(plain)
    trainable = [p for p in plain.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(trainable, fused=True, **OPTIONS)
    with paged(folders["mixtral"], prepare=freeze, page_budget="20MB") as (model, opt):
        for number in range(2):
            wanted = hf_models.step(plain, reference, number)
            assert hf_models.step(model, opt, number) == wanted


def test_gradient_checkpointing_changes_nothing(folders):
    plain = hf_models.load(folders["mixtral"])
    reference = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    with paged(folders["mixtral"]) as (model, opt):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for number in range(2):
            wanted = hf_models.step(plain, reference, number)
            assert hf_models.step(model, opt, number) == wanted


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss"])
def test_a_state_dict_has_the_names_of_the_files(kind, folders):
    with paged(folders[kind]) as (model, _):
        state = model.state_dict()
        stored = entries(folders[kind])
        assert state.keys() == stored.keys()
        assert all(tuple(state[name].shape) == shape for name, (_, shape) in stored.items())
        before = hf_models.logits(model)
        changed = {name: value * 0.5 for name, value in state.items()}
        model.load_state_dict(changed)
        assert not torch.equal(hf_models.logits(model), before)
        again = model.state_dict()
        assert all(torch.equal(again[name], changed[name]) for name in changed)
        with pytest.raises(RuntimeError, match="missing"):
            model.load_state_dict({name: state[name] for name in list(state)[1:]})


def test_dtypes_are_converted_and_told(tmp_path):
    source = hf_models.write(tmp_path / "bf16", "llama", dtype=torch.bfloat16)
    plain = hf_models.load(source, torch.float32)
    with pytest.warns(UserWarning, match="of bfloat16 become .* of float32"):
        opened = odc.from_pretrained(source, None, page_budget="8MB", page_size="2MB")
    model, opt = opened
    assert opt is None
    assert torch.equal(hf_models.logits(model), hf_models.logits(plain))
    odc.save_pretrained(model, tmp_path / "again", dtype=torch.bfloat16)
    model.close()
    assert entries(tmp_path / "again") == entries(source)
    again = hf_models.load(tmp_path / "again", torch.bfloat16)
    theirs = hf_models.load(source, torch.bfloat16)
    assert torch.equal(hf_models.logits(again), hf_models.logits(theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = odc.from_pretrained(source, None, dtype=torch.bfloat16, page_budget="34MB")
        assert torch.equal(hf_models.logits(model), hf_models.logits(theirs))
        model.close()


def test_what_lies_beside_the_weights_goes_along(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders["llama"], source)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"not read")
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    with paged(source, None, page_budget="8MB") as (model, _):
        assert model.generation_config.temperature == 0.5
        odc.save_pretrained(model, tmp_path / "saved")
        with pytest.raises(odc.OdcError, match="is not empty"):
            odc.save_pretrained(model, tmp_path / "saved")
        model.save_pretrained(tmp_path / "saved", overwrite=True)
    assert sorted(os.listdir(tmp_path / "saved")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    told = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_that_cannot_be_used_says_why(folders, tmp_path):
    with pytest.raises(odc.ConfigError, match="no folder"):
        odc.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(odc.ConfigError, match=r"no config\.json in it"):
        odc.from_pretrained(tmp_path)
    source = tmp_path / "model"
    shutil.copytree(folders["llama"], source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(odc.OdcError, match=r"of another shape \(9\)"):
        odc.from_pretrained(source)
    (source / "config.json").write_text(json.dumps({**config, "model_type": "nobody"}))
    with pytest.raises(odc.ConfigError, match="nobody"):
        odc.from_pretrained(source)
    quantized = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    with pytest.raises(odc.ConfigError, match="quantized"):
        odc.from_pretrained(source)
    (source / "model.safetensors").unlink()
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(odc.OdcError, match="no weights"):
        odc.from_pretrained(source)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_configuration_describes_its_model_without_weights(kind, folders, tmp_path):
    shutil.copy(folders[kind] / "config.json", tmp_path)
    told = describe_model(tmp_path)
    plain = hf_models.load(folders[kind])
    assert told.num_parameters == sum(p.numel() for p in plain.parameters())
    assert all(p.is_meta for p in told.model.parameters())
    assert (told.num_layers, told.hidden_size, told.vocab_size) == (3, 64, hf_models.VOCAB)
    assert (told.num_experts, told.top_k) == ((5, 3) if kind == "mixtral" else (0, 0))


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(odc.ConfigError, match=r"pip install 'odc-runtime\[hf\]'"):
        odc.from_pretrained("anywhere")
