"""Claims about the training loop: it trains as a plain loop does, and records each step once."""

import json
import os
import signal
import threading

import pytest
import torch

from odc.errors import ConfigError
from odc.memory.events import Phase
from odc.memory.replay import Workload
from odc.sizes import format_bytes
from odc.train.compose import check_ranks, decay_groups
from odc.train.config import load_config
from odc.train.models import build_model
from odc.train.run_dir import METRIC_KEYS, RunDir, summarize
from odc.train.schedule import lr_factor, make_schedule
from odc.train.tasks import make_task
from odc.train.trainer import INTERRUPTED, Trainer, train
from profiler import TraceReader
from profiler.schema import Account


class StoppingTask:
    """A task that does something when a step's batch is asked for."""

    def __init__(self, config, step, action):
        self._inner, self._step, self._action = make_task(config), step, action

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def batch(self, step, micro):
        if step == self._step and micro == 0:
            self._action()
        return self._inner.batch(step, micro)


def interrupting(config, step):
    return StoppingTask(config, step, lambda: os.kill(os.getpid(), signal.SIGINT))


def losses(metrics):
    return [line["loss"] for line in metrics]


def train_plainly(config) -> list[float]:
    """The same run without pages, with torch's own optimizer."""
    torch.set_num_threads(1)
    task = make_task(config)
    model = build_model(config.model, task.vocab_size, seed=config.train.seed)
    chosen, accumulate = config.optimizer, config.train.accumulate
    optimizer = torch.optim.AdamW(
        decay_groups(model, chosen.weight_decay),
        lr=chosen.lr,
        betas=tuple(chosen.betas),
        eps=chosen.eps,
        fused=True,
    )
    schedule = make_schedule(optimizer, chosen, config.train.steps)
    found = []
    for step in range(config.train.steps):
        total = 0.0
        for micro in range(accumulate):
            loss = task.loss(model, task.batch(step, micro)) / accumulate
            loss.backward()
            total += loss.item()
        if chosen.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(total)
    return found


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("dense", {}),
        ("moe", {}),
        ("moe", {"train.accumulate": 2, "train.steps": 5}),
        ("moe", {"train.accumulate": 2, "optimizer.max_grad_norm": 0.5, "train.steps": 5}),
        ("dense", {"activations.mode": "checkpoint", "train.steps": 4}),
        ("dense", {"activations.mode": "offload", "train.steps": 4}),
        ("moe", {"memory.page_budget": "unlimited", "train.steps": 5}),
        (
            "moe",
            {"train.accumulate": 2, "accumulation.order": "layer_major", "train.steps": 4},
        ),
        (
            "dense",
            {
                "train.accumulate": 3,
                "accumulation.order": "layer_major",
                "optimizer.max_grad_norm": 0.5,
                "train.steps": 4,
            },
        ),
    ],
)
def test_losses_are_those_of_a_plain_loop_to_the_last_bit(
    make_config, read_metrics, tmp_path, model, overrides
):
    config = make_config(model, **overrides)
    train(config, tmp_path / "run")
    assert losses(read_metrics(tmp_path / "run")) == train_plainly(config)


def test_evaluation_between_steps_does_not_change_training(make_config, read_metrics, tmp_path):
    train(make_config(), tmp_path / "plain")
    train(make_config(**{"train.eval_every": 2}), tmp_path / "evaluated")
    plain, evaluated = read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "evaluated")
    assert losses(plain) == losses(evaluated)
    assert [line["step"] for line in evaluated if "eval_loss" in line] == [1, 3, 5, 7]
    assert not any("eval_loss" in line for line in plain)


def test_policies_change_no_loss(make_config, read_metrics, tmp_path):
    train(make_config(**{"train.steps": 4}), tmp_path / "default")
    expected = losses(read_metrics(tmp_path / "default"))
    for prefetch in ("none", "next_k", "replay"):
        policy = {"memory.evict_strategy": "lru", "memory.prefetch": prefetch, "train.steps": 4}
        outcome = train(make_config(**policy), tmp_path / prefetch)
        assert losses(read_metrics(tmp_path / prefetch)) == expected, prefetch
        assert outcome.summary["policy"] == f"lru+{prefetch}"


def test_the_oracle_follows_a_recorded_run(make_config, read_metrics, tmp_path):
    steps = {"train.steps": 5}
    train(make_config(**steps, **{"profiler.trace_interval": 1}), tmp_path / "profile")
    oracle = {
        "memory.evict_strategy": "belady",
        "memory.prefetch": "oracle",
        "memory.oracle_trace": tmp_path / "profile",
    }
    train(make_config(**steps, **oracle), tmp_path / "oracle")
    assert losses(read_metrics(tmp_path / "oracle")) == losses(read_metrics(tmp_path / "profile"))


def test_an_oracle_of_other_pages_is_refused(make_config, tmp_path):
    train(
        make_config("dense", **{"train.steps": 2, "profiler.trace_interval": 1}), tmp_path / "dense"
    )
    oracle = {"memory.prefetch": "oracle", "memory.oracle_trace": tmp_path / "dense"}
    with pytest.raises(ConfigError, match="has other pages"):
        train(make_config("moe", **oracle), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_metrics_have_every_key_once_a_step(make_config, read_metrics, tmp_path):
    train(make_config(**{"train.accumulate": 2, "train.steps": 4}), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    budget = 12 << 20
    for line in metrics:
        assert tuple(line) == (*METRIC_KEYS, "misses")
        assert line["tokens"] == 2 * 2 * 24
        assert line["compute_s"] == pytest.approx(line["step_s"] - line["stall_s"])
        assert 0 < line["page_bytes"] <= line["peak_page_bytes"] <= budget
    assert sum(line["bytes_in"] for line in metrics) > budget


def test_trace_holds_chosen_steps_and_a_row_of_every_step(make_config, read_metrics, tmp_path):
    train(make_config(**{"profiler.trace_interval": 3}), tmp_path / "run")
    reader = TraceReader(tmp_path / "run")
    assert set(reader.need()["step"].tolist()) == {0, 3, 6}
    assert reader.steps()["step"].tolist() == list(range(8))
    assert reader.steps()["loss"].tolist() == losses(read_metrics(tmp_path / "run"))
    assert set(reader.mem()["step"].tolist()) == {0, 3, 6}
    assert set(reader.mem()["account"].tolist()) == {
        Account.PAGES,
        Account.ACTIVATIONS,
        Account.TRANSIENTS,
    }
    assert all(reader.clean_end.values()) and not reader.problems
    manifest = reader.manifest
    assert manifest["model"]["class"] == "odc.train.models.Transformer"
    assert manifest["model"]["num_sets"] == 2
    assert manifest["memory"]["policy"] == "cost_aware+popularity"
    assert manifest["memory"]["page_budget"] == 12 << 20
    assert set(reader.pages["set"].tolist()) == {-1, 0, 1}


def test_a_step_in_layer_major_order_is_one_pass_of_its_trace(make_config, read_metrics, tmp_path):
    keys = {"train.accumulate": 3, "accumulation.order": "layer_major", "train.eval_every": 2}
    train(make_config(**keys, **{"profiler.trace_interval": 1}), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert {line["tokens"] for line in metrics} == {3 * 2 * 24}
    reader = TraceReader(tmp_path / "run")
    visits = Workload.from_trace(reader.need(), reader.pages).visits
    training = [visit.step for visit in visits if visit.begins_pass and visit.ctx % 2 == 0]
    assert training == [line["step"] for line in metrics]
    routed = [v for v in visits if v.step == 5 and v.phase == Phase.FORWARD and len(v.bundles) > 1]
    assert len(routed) == 2 * 3, "one visit of each layer's experts a micro-batch"


def test_layer_major_order_refuses_what_it_would_ignore(make_config, tmp_path):
    config = make_config(**{"accumulation.order": "layer_major"})
    with pytest.raises(ConfigError, match=r"several ranks: micro_major"):
        check_ranks(config)

    class Own(StoppingTask):
        def loss(self, model, batch):
            return model(*batch).square()

    with pytest.raises(ConfigError, match="Own has a loss of its own"):
        train(config, tmp_path / "run", task=Own(config, 0, lambda: None))


def test_bytes_of_the_trace_are_those_of_the_metrics(make_config, read_metrics, tmp_path):
    train(make_config(**{"profiler.trace_interval": 1}), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    actions = TraceReader(tmp_path / "run").actions()
    loaded = int(actions["bytes"][actions["act"] <= 1].sum())
    # Loads in flight when a step ends are counted when they are submitted, recorded when done.
    assert abs(loaded - sum(line["bytes_in"] for line in metrics)) <= 12 << 20


def test_a_printed_line_tells_what_its_step_moved(make_config, read_metrics, tmp_path, capsys):
    train(make_config(**{"train.steps": 3, "train.log_every": 2}), tmp_path / "run")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    moved = [
        f"{format_bytes(m['bytes_in'])} in  {format_bytes(m['bytes_out'])} out"
        for m in read_metrics(tmp_path / "run")[1:]
    ]
    assert [line.endswith(text) for line, text in zip(told, moved, strict=True)] == [True, True]


def test_summary_tells_how_the_run_went(make_config, read_metrics, tmp_path):
    outcome = train(make_config(**{"train.eval_every": 4}), tmp_path / "run")
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written == outcome.summary
    assert (written["status"], written["steps"]) == ("finished", 8)
    metrics = read_metrics(tmp_path / "run")
    assert written["final_loss"] == metrics[-1]["loss"]
    assert written["final_eval_loss"] == metrics[-1]["eval_loss"]
    assert written["totals"]["bytes_in"] == sum(line["bytes_in"] for line in metrics)
    assert written["machine"]["cores"] >= 1 and written["corpus_hash"]


def test_the_resolved_configuration_loads_back_equal(make_config, tmp_path):
    config = make_config(**{"train.steps": 1})
    train(config, tmp_path / "run")
    again, _ = load_config(tmp_path / "run" / "config.yaml")
    assert again == config


@pytest.mark.parametrize("checkpoints", [True, False])
def test_ctrl_c_ends_the_run_after_its_step(make_config, read_metrics, tmp_path, checkpoints):
    before = signal.getsignal(signal.SIGINT)
    every = {"checkpoint.every": 100} if checkpoints else {}
    config = make_config(**every, **{"profiler.trace_interval": 1})
    outcome = train(config, tmp_path / "run", task=interrupting(config, 2))
    assert outcome.status == outcome.summary["status"] == INTERRUPTED
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2]
    reader = TraceReader(tmp_path / "run")
    assert all(reader.clean_end.values())
    assert sorted(set(reader.need()["step"].tolist())) == [0, 1, 2]
    found = sorted(p.name for p in (tmp_path / "run").glob("checkpoints/*"))
    assert found == (["step-000003"] if checkpoints else [])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_run_at_once(make_config, read_metrics, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    config = make_config()
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", task=StoppingTask(config, 2, twice))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == INTERRUPTED


def test_a_run_directory_in_use_is_refused(make_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        train(make_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match="is a file"):
        train(make_config(), tmp_path / "run" / "notes.txt")


def test_belady_without_the_oracle_is_refused(make_config, tmp_path):
    config = make_config(
        **{"memory.evict_strategy": "belady", "memory.oracle_trace": tmp_path / "profile"}
    )
    with pytest.raises(ConfigError, match="memory.prefetch oracle"):
        train(config, tmp_path / "run")


def test_a_trainer_leaves_no_thread_behind(make_config, tmp_path):
    before = threading.active_count()
    config = make_config(**{"train.steps": 1, "memory.home": "disk", "memory.home_dir": tmp_path})
    trainer = Trainer(config, RunDir(tmp_path / "run"))
    assert threading.active_count() > before
    trainer.run()
    trainer.close()
    assert threading.active_count() == before
    assert not list(tmp_path.glob("odc-home-*"))


@pytest.mark.parametrize("home", ["host", "disk", "host+disk"])
def test_the_summary_tells_what_each_tier_held_and_moved(make_config, tmp_path, home):
    keys = {"memory.home": home, "memory.home_dir": tmp_path, "train.steps": 2}
    if home == "host+disk":
        keys["memory.host_mem"] = "10MB"
    told = train(make_config(**keys), tmp_path / "run").summary
    assert told["home"] == home and list(told["tiers"]) == home.split("+")
    for tier in told["tiers"].values():
        assert tier["home_bytes"] >= 10 << 20 and tier["bytes_in"] and tier["bytes_out"]
    moved = sum(tier["bytes_in"] for tier in told["tiers"].values())
    assert moved >= told["totals"]["bytes_in"], "building the model moves pages too"


def test_vectors_do_not_decay(make_config):
    config = make_config()
    model = build_model(config.model, 400, device="meta")
    decayed, plain = decay_groups(model, 0.1)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_rate_warms_up_and_falls_to_its_floor(make_config, schedule):
    optimizer = make_config(
        **{
            "optimizer.schedule": schedule,
            "optimizer.warmup_steps": 4,
            "optimizer.min_lr_ratio": 0.2,
        }
    ).optimizer
    factors = [lr_factor(optimizer, step, 20) for step in range(22)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[19] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    assert factors[21] == factors[19]
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_a_schedule_made_in_the_middle_stands_where_it_would():
    parameter = torch.nn.Parameter(torch.zeros(2))
    config = load_config(None, {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 3})[0]
    whole = torch.optim.AdamW([parameter], lr=1e-3)
    schedule = make_schedule(whole, config.optimizer, 20)
    for step in range(20):
        late = torch.optim.AdamW([parameter], lr=1e-3)
        make_schedule(late, config.optimizer, 20, first_step=step)
        assert late.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
        whole.step()
        schedule.step()


def test_a_half_written_line_is_left_out(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": null}\n{"step": 2, "lo')
    assert [line["step"] for line in run.read_metrics()] == [0, 1]
    summary = summarize(run.read_metrics())
    assert (summary["steps"], summary["final_loss"]) == (2, None)
    run.open(first_step=1)
    run.append({"step": 1, "loss": float("nan")})
    run.close()
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {"step": 0, "loss": 2.0},
        {"step": 1, "loss": None},
    ]


def test_a_run_tells_what_layers_kept_and_what_each_mode_would(make_config, read_metrics, tmp_path):
    peaks, predicted = {}, {}
    for mode in ("keep", "checkpoint", "offload"):
        config = make_config("dense", **{"activations.mode": mode, "train.steps": 3})
        told = train(config, tmp_path / mode).summary["activations"]
        assert told["mode"] == mode
        assert set(told["layers"]) == {f"layers.{index}" for index in range(4)}
        peaks[mode], predicted[mode] = told["peak_bytes"], told["predicted_peak_bytes"][mode]
        metrics = read_metrics(tmp_path / mode)
        assert all(0 < line["activation_bytes"] <= told["peak_bytes"] for line in metrics)
        assert (sum(line["activation_bytes_in"] for line in metrics) > 0) == (mode == "offload")
    assert peaks == pytest.approx(predicted, rel=0.1)
    assert peaks["checkpoint"] < peaks["offload"] < peaks["keep"]


def test_a_chunked_loss_is_that_of_all_logits(make_config, read_metrics, tmp_path):
    for name, chunk in (("all", None), ("chunked", 20)):
        train(make_config(**{"activations.loss_chunk": chunk, "train.steps": 4}), tmp_path / name)
    chunked, whole = (losses(read_metrics(tmp_path / name)) for name in ("chunked", "all"))
    assert chunked == pytest.approx(whole, rel=1e-4)
