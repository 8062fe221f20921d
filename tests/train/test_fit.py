"""Claims about `odc fit`: its accounts and its workload are those of the runtime."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from odc.errors import ConfigError
from odc.memory.events import Kind, Phase
from odc.memory.replay import Workload
from odc.sharding.groups import read_shapes
from odc.train.compose import make_memory, make_model
from odc.train.config_model import ModelConfig
from odc.train.fit.accounts import (
    Target,
    account,
    index_bytes,
    input_bytes,
    layer_bytes,
    rest_of,
    saved_elements,
    told_machine,
)
from odc.train.fit.answer import find_answer
from odc.train.fit.choice import Choice, choice_of, overrides
from odc.train.fit.groups import page
from odc.train.fit.hf import model_of_hf
from odc.train.fit.model import Role, model_of_config
from odc.train.fit.predict import predict
from odc.train.fit.rates import Rates
from odc.train.fit.report import count_in_words
from odc.train.fit.search import Fixed
from odc.train.fit.work import Times, make_workload
from odc.train.models import build_model, rope_tables
from odc.train.trainer import train
from profiler.reader import TraceReader

MODELS = Path(__file__).parent.parent / "data" / "models"
NAMES = ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
GIB = 1 << 30

SHAPES = {
    "dense": ModelConfig(hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=2),
    "gelu": ModelConfig(hidden_size=64, num_layers=2, num_heads=4, mlp="gelu", mlp_size=192),
    "moe": ModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_experts=6, top_k=2, expert_size=96
    ),
    "tied": ModelConfig(hidden_size=64, num_layers=3, num_heads=4, tie_embeddings=True),
}


def flat_times(forward: float = 1e6, update: float = 1.0) -> Times:
    times = dict.fromkeys(Role, forward)
    return Times(forward=times, backward={r: 2 * ns for r, ns in times.items()}, update=update)


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_known_models_follow_from_config_json(name):
    folder = MODELS / name
    derived = model_of_hf(folder / "config.json")
    listed = model_of_hf(folder / "config.json", folder / "shapes.csv.gz")
    assert derived.numel == sum(t.numel for t in read_shapes(folder / "shapes.csv.gz"))
    assert {u.name: dict(u.parameters) for u in derived.units} == {
        u.name: dict(u.parameters) for u in listed.units
    }


def test_parameters_are_told_in_billions_or_millions():
    told = [count_in_words(numel) for numel in (20_914_757_184, 134_515_008, 8_700_000, 41_000)]
    assert told == ["20.915 B", "0.135 B", "8.7 M", "0.041 M"]


def test_bundled_experts_keep_their_parameters():
    model = model_of_hf(MODELS / "qwen3-30b-a3b" / "config.json")
    small = model.bundled(8)
    assert len(small.of(Role.EXPERT)) == 48 * 8
    assert small.numel == model.numel


def test_a_config_of_another_model_is_refused(tmp_path):
    values = json.loads((MODELS / "llama-3-8b" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"num_hidden_layers": 5}))
    with pytest.raises(ConfigError, match="32 for num_hidden_layers, config.json says 5"):
        model_of_hf(path, MODELS / "llama-3-8b" / "shapes.csv.gz")
    path.write_text(json.dumps(values | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type 'mamba' is not known"):
        model_of_hf(path)


# -- pages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        *((shape, {}) for shape in SHAPES),
        ("moe", {"optimizer.where": "home"}),
        ("dense", {"optimizer.where": "home", "train.dtype": "bfloat16"}),
        ("dense", {"adapter.kind": "lora"}),
        ("dense", {"adapter.kind": "lora", "adapter.rank": 200, "train.dtype": "bfloat16"}),
        ("dense", {"adapter.kind": "lora", "memory.frozen_format": "int4"}),
        ("moe", {"adapter.kind": "lora", "adapter.targets": ["all-linear"]}),
        ("moe", {"adapter.kind": "lora", "memory.frozen_format": "int8", "memory.home": "disk"}),
    ],
)
def test_groups_and_smallest_budget_are_those_of_the_runtime(shape, more, make_config):
    keys = {
        f"model.{name}": value
        for name, value in SHAPES[shape].shown().items()
        if value != ModelConfig().shown()[name]
    }
    config = make_config("dense", **{"memory.page_budget": "64MB", **keys, **more})
    memory = make_memory(config)
    try:
        make_model(config, 400, memory)
        paged = page(model_of_config(config.model, 400), choice_of(config))
        assert [g.spec for g in paged.groups] == memory.table.groups
        assert paged.least[0] == memory._least_frames * (2 << 20)
        assert [(p.kind, p.num_bytes, p.num_frames, p.home_bytes) for p in paged.table.pages] == [
            (p.kind, p.num_bytes, p.num_frames, p.home_bytes) for p in memory.table.pages
        ]
    finally:
        memory.close()


def visits_of(workload: Workload) -> list[tuple]:
    """(micro, phase, whether it begins a pass, {group: its kinds and operations})."""
    return [
        (
            v.micro,
            Phase(v.phase),
            v.begins_pass,
            sorted((b.group, [(Kind(k), o) for k, o, _ in b.rows]) for b in v.bundles),
        )
        for v in workload.visits
    ]


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("dense", {"train.accumulate": 2}),
        ("dense", {"model.tie_embeddings": True}),
        ("dense", {"activations.mode": "checkpoint"}),
        ("dense", {"optimizer.update": "step"}),
        ("moe", {"train.accumulate": 2, "activations.mode": "checkpoint"}),
        ("moe", {}),
        ("moe", {"optimizer.where": "home", "train.accumulate": 2}),
        ("dense", {"optimizer.where": "home", "optimizer.update": "step"}),
        ("dense", {"adapter.kind": "lora", "train.accumulate": 2}),
        ("dense", {"adapter.kind": "lora", "activations.mode": "checkpoint"}),
        ("moe", {"adapter.kind": "lora"}),
    ],
)
def test_the_workload_is_what_a_run_records(model, keys, make_config, tmp_path):
    steps = {"train.steps": 2, "profiler.trace_interval": 1, "checkpoint.every": None}
    few = {"model.num_layers": 2, "model.num_experts": 3, "model.top_k": 3}
    few = few if model == "moe" else {"model.num_layers": 2}
    config = make_config(model, **{**few, **steps, **keys})
    outcome = train(config, tmp_path / "run")
    reader = TraceReader(outcome.run_dir)
    recorded = Workload.from_trace(reader.need(range(1, 2)), reader.pages)
    vocab = recorded_vocab(config, outcome)
    paged = page(model_of_config(config.model, vocab), choice_of(config))
    made = make_workload(paged, flat_times(), 1)
    assert made.sets == recorded.sets
    # an adapter is saved at the end of a run
    recorded.visits = [v for v in recorded.visits if v.phase != Phase.OTHER]
    assert visits_of(made) == visits_of(recorded)


def recorded_vocab(config, outcome) -> int:
    from odc.train.tokens import load_tokens

    return load_tokens(config.data).tokenizer.vocab_size


# -- accounts --------------------------------------------------------------------------------------


def saved_bytes(run, parameters) -> int:
    """Bytes of the storages that autograd saves, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    seen: dict[int, int] = {}
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_a_layer_saves(shape):
    config, batch, length = SHAPES[shape], 2, 40
    model = build_model(config, 300)
    x = torch.randn(batch, length, config.hidden_size, requires_grad=True) * 1.0
    rope = rope_tables(0, length, config, x.device)
    layer = model.layers[0]
    saved = saved_bytes(lambda: layer(x, rope), model.parameters())
    tables = 2 * rope[0].nbytes  # of all layers together
    predicted = layer_bytes(model_of_config(config, 300), Choice(seq_len=length, micro_batch=batch))
    assert predicted == pytest.approx(saved - tables, rel=0.01)


def test_modes_keep_what_they_say():
    model = model_of_config(SHAPES["dense"], 300)
    keep = Choice(seq_len=64, micro_batch=2)
    checkpoint = replace(keep, mode="checkpoint")
    whole, inputs = rest_of(page(model, keep)), rest_of(page(model, checkpoint))
    assert whole.activations == 2 * layer_bytes(model, keep)
    assert inputs.activations == 2 * input_bytes(model, keep)
    assert inputs.transients == whole.transients + layer_bytes(model, keep)
    chunked = rest_of(page(model, replace(keep, loss_chunk=32)))
    assert chunked.loss < whole.loss


def test_what_does_not_fit_is_told_with_its_numbers():
    model = model_of_config(SHAPES["dense"], 300)
    paged = page(model, Choice(seq_len=64, total_mem=6 << 20))
    found = account(paged, Target(6 << 20, told_machine(GIB, 0)))
    assert not found.fits
    assert "are left for pages" in found.problems[0]


# -- speed -----------------------------------------------------------------------------------------


def rates(bandwidth: float = 1e9, flops: float | None = 1e11) -> Rates:
    from odc.memory.replay import Link

    link = Link(bandwidth, bandwidth, latency_ns=0, frame_move_ns=0)
    return Rates(flops, 1e-9, 1e-9, link, link, hook_ns=0.0)


def test_a_step_takes_its_compute_where_everything_stays():
    model = model_of_config(SHAPES["dense"], 300)
    paged = page(model, Choice(seq_len=64))
    found = account(paged, Target(GIB, told_machine(GIB, 0)))
    assert found.resident
    made = predict(paged, flat_times(), rates(), found)
    # Embedding, two layers, head: 1 ms forward and 2 ms backward each; the root has none of its
    # own but what the times give every role.
    assert made.step_s == pytest.approx(made.compute_s, rel=1e-3)
    assert made.bytes_in == 0


def test_many_micro_batches_take_what_simulating_all_of_them_says():
    model = model_of_config(replace(ModelConfig(), hidden_size=256, num_layers=6), 2000)
    choice = Choice(seq_len=64, accumulate=8, page_budget=20 << 20)
    paged = page(model, choice)
    found = account(paged, Target(GIB, told_machine(4 * GIB, 0)))
    times = flat_times(2e6)
    short = predict(paged, times, rates(5e9), found)
    import odc.train.fit.predict as module

    before, module._PASSES = module._PASSES, 99
    try:
        whole = predict(paged, times, rates(5e9), found)
    finally:
        module._PASSES = before
    assert short.step_s == pytest.approx(whole.step_s, rel=0.05)
    assert short.bytes_in == pytest.approx(whole.bytes_in, rel=0.25)
    assert short.bound_s <= whole.step_s


def test_the_bound_of_two_tiers_is_below_what_their_simulation_takes():
    model = model_of_config(replace(ModelConfig(), hidden_size=256, num_layers=6), 2000)
    choice = Choice(
        seq_len=64, page_budget=20 << 20, home="host+disk", host_mem=40 << 20, page_size=2 << 20
    )
    paged = page(model, choice)
    found = account(paged, Target(GIB, told_machine(4 * GIB, 4 * GIB)))
    assert 0 < found.on_host.sum() < len(found.on_host)
    from odc.memory.replay import Link

    slow = Link(5e8, 5e8, latency_ns=0, frame_move_ns=0)
    made = predict(paged, flat_times(1e5), replace(rates(5e9), disk=slow), found)
    assert made.limit == "disk"
    assert made.bound_s <= made.step_s
    on_disk = sum(p.num_bytes for p in paged.table.pages if not found.on_host[p.page])
    assert made.step_s > 0.3 * on_disk / 5e8


# -- answers ---------------------------------------------------------------------------------------


def test_a_model_that_fits_anyway_is_told_so_in_a_line():
    model = model_of_config(SHAPES["dense"], 300)
    target = Target(GIB, told_machine(GIB, 0))
    found = find_answer(model, Fixed(64, "float32", None), target, rates())
    assert found.line == (
        "fits with everything resident: no paging needed, use memory.total_mem=unlimited"
    )
    assert found.choice is not None and overrides(found.choice)["memory.total_mem"] == "unlimited"


def test_a_model_that_never_fits_is_told_so_with_its_numbers():
    model = model_of_hf(MODELS / "llama-3-8b" / "config.json")
    target = Target(GIB, told_machine(64 * GIB, 1024 * GIB))
    found = find_answer(model, Fixed(2048, "float32", None), target, rates())
    assert not found.fits
    assert found.line.startswith("no setting helps: the largest group (")
    assert "activations of one sequence of 2048" in found.line


def test_index_bytes_and_elements_are_those_of_routing():
    model = model_of_config(SHAPES["moe"], 300)
    assert index_bytes(model) == 2 * 3 * 8
    dense = replace(model, num_experts=0, top_k=0, mlp_width=96)
    assert saved_elements(model) > saved_elements(dense)
