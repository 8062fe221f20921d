"""`odc train` with `model.path`: a Hugging Face model trained on, resumed, exported, continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import odc
from odc.cli.main import main
from odc.errors import CheckpointError
from odc.train.compose import decay_groups
from odc.train.config import Config, load_config
from odc.train.corpus import load_corpus
from odc.train.pretrained_task import ContinuePretraining
from odc.train.tasks import make_task
from odc.train.tokenizer import Tokenizer, train_tokenizer
from odc.train.trainer import train
from tests.train import hf_models

Make = Callable[..., Config]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    return hf_models.write(root / "qwen3_moe", "qwen3_moe", vocab_size=300)


@pytest.fixture
def make(folder: Path, corpus: dict[str, Path]) -> Make:
    def made(**overrides: object) -> Config:
        keys = {
            **corpus,
            "model.path": str(folder),
            "train.steps": 4,
            "train.seq_len": 48,
            "train.micro_batch": 2,
            "train.threads": 1,
            "memory.page_budget": "12MB",
            "memory.page_size": "2MB",
            "checkpoint.every": 2,
        }
        return load_config(None, {**keys, **overrides})[0]

    return made


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def reference(config: Config, folder: Path) -> list[float]:
    """A plain loop over transformers' model, with the batches of the run."""
    torch.set_num_threads(1)
    task, chosen = make_task(config), config.optimizer
    model = hf_models.load(folder).train()
    optimizer = torch.optim.AdamW(
        decay_groups(model, chosen.weight_decay),
        lr=chosen.lr,
        betas=tuple(chosen.betas),
        eps=chosen.eps,
        fused=True,
    )
    found = []
    for step in range(config.train.steps):
        inputs, targets = task.batch(step, 0)
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_run_is_a_plain_loop_and_resumes_and_is_exported(make, folder, tmp_path, capsys):
    train(make(), tmp_path / "run")
    assert losses(tmp_path / "run") == reference(make(), folder)
    train(make(**{"train.steps": 2}), tmp_path / "half")
    train(make(), tmp_path / "half", resume=True)
    assert losses(tmp_path / "half") == losses(tmp_path / "run")

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = hf_models.load(tmp_path / "out")
    prompt = torch.tensor([make_task(make()).tokenizer.encode("def parse(")])
    wanted = theirs.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=-1)
    assert wanted.shape[1] == prompt.shape[1] + 5
    capsys.readouterr()
    options = ["--prompt", "def parse(", "--max-new-tokens", "5"]
    assert main(["generate", str(tmp_path / "run"), *options]) == 0
    text = make_task(make()).tokenizer.decode(wanted[0].tolist())
    assert capsys.readouterr().out.strip() == text.rstrip("\ufffd").strip()


@pytest.mark.slow
def test_activations_may_be_recomputed_or_moved_and_logits_left_out(make, tmp_path):
    short = {"checkpoint.every": None, "train.steps": 2}
    train(make(**short), tmp_path / "plain")
    for mode in ("checkpoint", "offload"):
        train(make(**short, **{"activations.mode": mode}), tmp_path / mode)
        assert losses(tmp_path / mode) == losses(tmp_path / "plain")
    train(make(**short, **{"activations.loss_chunk": 16}), tmp_path / "chunked")
    assert losses(tmp_path / "chunked") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def test_the_tokenizer_of_the_folder_is_used(make, folder, tmp_path):
    source = hf_models.write(tmp_path / "model", "llama", vocab_size=300)
    learned = make_task(make())
    assert isinstance(learned, ContinuePretraining)
    assert learned.vocab_size <= 300
    documents = list(load_corpus(make().data).documents())
    own = train_tokenizer(documents[:1], 290)
    own.save(source / "tokenizer.json")
    task = make_task(make(**{"model.path": str(source)}))
    assert task.vocab_size == own.vocab_size and task.tokenizer.hash == own.hash
    assert task.corpus_hash != learned.corpus_hash
    inputs, targets = task.batch(0, 0)
    assert int(inputs.max()) < own.vocab_size and torch.equal(inputs[:, 1:], targets[:, :-1])
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "e"}))
    assert (
        make_task(make(**{"model.path": str(source)})).tokenizer.end_of_text == own.encode("e")[0]
    )
    train_tokenizer(documents, 310).save(source / "tokenizer.json")
    with pytest.raises(odc.ConfigError, match="310 token ids, the model 300"):
        make_task(make(**{"model.path": str(source)}))
    assert Tokenizer.load(source / "tokenizer.json").vocab_size == 310


def test_what_does_not_go_together_is_refused(make, folder, tmp_path):
    with pytest.raises(odc.ConfigError, match=r"model\.hidden_size: set beside model\.path"):
        make(**{"model.hidden_size": 128})
    with pytest.raises(odc.ConfigError, match="at most 128, the positions"):
        train(make(**{"train.seq_len": 129}), tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="a configuration but no weights"):
        train(make(**{"model.path": str(empty)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
