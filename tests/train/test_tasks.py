"""Claims about pretraining: on real text the loss falls, and runs repeat to the last bit."""

import importlib.util
from pathlib import Path

import pytest
import torch

from odc.train.config import Config, load_config
from odc.train.models import build_model
from odc.train.tasks import Pretrain, Task, make_task

_spec = importlib.util.spec_from_file_location(
    "reference_loop", Path(__file__).with_name("reference_loop.py")
)
reference_loop = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference_loop)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("cache")
    loaded, _ = load_config(
        None,
        {
            "data.cache_dir": cache,
            "data.max_bytes": "600KB",
            "data.vocab_size": 512,
            "data.eval_fraction": 0.1,
            "model.hidden_size": 48,
            "model.num_layers": 2,
            "model.num_experts": 4,
            "model.expert_size": 32,
            "train.seq_len": 32,
            "train.micro_batch": 4,
            "train.accumulate": 2,
            "train.steps": 30,
            "train.eval_batches": 4,
            "optimizer.lr": 3e-3,
            "optimizer.max_grad_norm": 1.0,
        },
    )
    return loaded.freeze()


@pytest.fixture(scope="module")
def task(config) -> Pretrain:
    return make_task(config)


def train(config: Config, task: Task):
    model = build_model(config.model, task.vocab_size, seed=config.train.seed)
    return model, reference_loop.train_plainly(config, task, model)


def test_the_loss_falls_on_real_text_and_a_second_run_repeats_every_bit(config, task):
    model, losses = train(config, task)
    assert losses[0] > 6.0 and losses[-1] < losses[0] - 0.7
    other, repeated = train(config, make_task(config))
    assert losses == repeated
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_evaluation_is_the_same_at_every_call_and_leaves_the_model_in_training(config, task):
    model = build_model(config.model, task.vocab_size)
    losses = {task.evaluate(model) for _ in range(2)}
    assert len(losses) == 1 and abs(losses.pop() - 6.24) < 0.2
    assert model.training and all(p.grad is None for p in model.parameters())


def test_the_task_says_what_it_is_trained_on(config, task):
    assert task.vocab_size == 512
    assert len(task.corpus_hash) == 64
    assert task.epoch(0) == 0 and task.epoch(10**6) > 0
    x, _ = task.batch(0, 1)
    assert isinstance(task.tokenizer.decode(x[0].tolist()), str)
