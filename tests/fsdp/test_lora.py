"""LoRA over a frozen base in pages: equal to the same model without pages, and cheap to page."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn

import odc
from odc.errors import ConfigError
from odc.fsdp.lora import LoraLinear, factors_of, lora_layers
from odc.memory.events import Act
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import MemoryManager
from odc.train.models import initializer
from tests.fsdp import models
from tests.fsdp.paged_loop import MIB, PagedRun, Paging, Watch, settle
from tests.fsdp.plain_loop import LR, Loop, assert_equal, batch, train_plainly

LOOP = Loop(steps=8)
ATTENTION = ("q_proj", "v_proj")
# name of the base, what `odc.lora` is told, budget
CASES = {
    "dense": ("dense", {"targets": ATTENTION}, 8),
    "all layers, dropout, checkpointed": (
        "dense, checkpointed",
        {"targets": "all-linear", "rank": 4, "dropout": 0.2},
        8,
    ),
    "tied head": ("tied", {"targets": ("o_proj", "head")}, 10),
    "experts": ("moe, checkpointed", {"targets": ("q_proj", "w1", "w2")}, 12),
    "experts, dropout": (
        "moe, checkpointed",
        {"targets": ("q_proj", "w1", "w2"), "dropout": 0.3},
        12,
    ),
    "large adapters": ("dense", {"targets": "all-linear", "rank": 128}, 12),
}


def adapted(base: str, options: dict) -> nn.Module:
    """The same values at every call, those of B as after some steps."""
    model = odc.lora(models.build(base), **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in model._odc_adapters.configs:
            for key, factor in factors_of(model, name):
                if key.endswith("lora_B"):
                    factor.weight.normal_(0, 0.02, generator=generator)
    return model


def cases_and_updates():
    """Each case with both updates; in the fast tier with one of them, and not the longest."""
    for number, case in enumerate(CASES):
        for turn, update in enumerate(("step", "backward")):
            slow = number % 2 != turn or case.startswith("experts")
            yield pytest.param(case, update, marks=(pytest.mark.slow,) if slow else ())


@pytest.mark.parametrize("case, update", list(cases_and_updates()))
def test_training_in_pages_is_bit_equal_to_training_without(case, update):
    base, options, budget = CASES[case]
    torch.manual_seed(3)
    expected = train_plainly(adapted(base, options), LOOP)
    paging = Paging(budget=budget * MIB, update=update)
    run = PagedRun(adapted(base, options), LOOP, paging)
    torch.manual_seed(3)
    try:
        assert_equal(run.train(expect_traffic=False), expected)
        assert sum(run.watch.loaded.values()) > 10 * MIB, "nothing was paged"
    finally:
        run.close()


def test_training_with_all_resident_is_bit_equal_too():
    expected = train_plainly(adapted("dense", {}), LOOP)
    run = PagedRun(adapted("dense", {}), LOOP, Paging(budget=None))
    assert_equal(run.train(expect_traffic=False), expected)
    run.close()


class ByPage(Watch):
    """Counts what is stored, page by page."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: Counter[int] = Counter()

    def action(self, t_ns, seq, page, act, src, dst, num_bytes, dur_ns, wait_ns, policy):
        if act in (Act.WRITE_BACK, Act.EARLY_WRITE_BACK):
            self.stores[page] += 1


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_base_is_stored_once_when_it_is_built_and_never_again(update):
    memory = MemoryManager(page_budget=8 * MIB)
    watch = ByPage()
    add = memory.seal
    memory.seal = lambda *a, **k: (add(*a, **k), memory.set_sink(watch))  # from the beginning
    model, optimizer = odc.paged(
        adapted("dense", {}), torch.optim.AdamW, memory=memory, update=update, lr=LR
    )
    table = memory.table
    base = [p.page for p in table.pages if not table.groups[p.group].has_gradient]
    assert base and len(base) < len(table.pages)
    for step in range(8):
        if step == 2:
            built = {page: watch.stores[page] for page in base}
        model(*batch(LOOP, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    settle(memory)
    assert all(count <= 1 for count in built.values())
    assert {page: watch.stores[page] for page in base} == built
    memory.set_sink(None)
    model.close()


def test_small_adapters_of_neighbouring_layers_share_one_frame():
    model, _ = odc.paged(odc.lora(models.build("dense")), lr=LR)
    sides = [g for g in model._odc_runtime.groups if g.adapter]
    assert [g.spec.name for g in sides] == ["layers.0 to layers.3 (adapter default)"]
    table = model.memory.table
    assert sum(p.num_frames for p in table.pages if p.group == sides[0].group) == 1
    model.close()


def test_groups_of_adapters_end_where_a_frame_is_full():
    options = {"targets": "all-linear", "rank": 24}
    model, _ = odc.paged(odc.lora(models.build("dense"), **options), lr=LR)
    sides = [g for g in model._odc_runtime.groups if g.adapter]
    assert [g.spec.name for g in sides] == [
        "layers.0 to layers.1 (adapter default)",
        "layers.2 to layers.3 (adapter default)",
    ]
    assert all(FRAME_BYTES / 2 < g.spec.state_bytes <= FRAME_BYTES for g in sides)
    model.close()


def test_adapters_of_experts_lie_with_the_layer_and_experts_stay_a_set():
    model, _ = odc.paged(adapted("moe", {"targets": ("w1", "w2")}), page_budget="16MB", lr=LR)
    memory, groups = model.memory, model._odc_runtime.groups
    members = [g for groups_of_set in memory.stations.sets for g in groups_of_set]
    assert len(members) == 2 * models.MOE["num_experts"]
    assert all(not groups[g].trainable and groups[g].spec.expert >= 0 for g in members)
    assert {groups[g].spec.set_index for g in members} == {0, 1}
    assert all(g.spec.expert == -1 for g in groups if g.adapter)
    model(*batch(LOOP, 0, 0)).backward()
    model.close()


def trained(model: nn.Module, order: list[str], budget: int | None) -> dict:
    """Losses by adapter, each of which sees its own batches, and the weights at the end."""
    model, optimizer = odc.paged(model, torch.optim.AdamW, page_budget=budget, lr=LR)
    seen: Counter[str] = Counter()
    losses: dict[str, list[float]] = {name: [] for name in order}
    for name in order:
        odc.set_adapter(model, name)
        loss = model(*batch(Loop(seed=ord(name)), seen[name], 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[name].append(loss.item())
        seen[name] += 1
    weights = {k: v for k, v in model.state_dict().items() if ".lora_" in k}
    model.close()
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize("budget", [8 * MIB, None])
def test_two_adapters_in_turn_train_as_each_does_alone(budget):
    names = ("a", "b")
    both = trained(adapted("dense", {"names": names}), ["a", "b"] * 4 + ["a", "a", "b"], budget)
    assert both["losses"]["a"] != both["losses"]["b"]
    for name in names:
        count = len(both["losses"][name])
        alone = trained(adapted("dense", {"names": names}), [name] * count, budget)
        assert alone["losses"][name] == both["losses"][name]
        own = [key for key in both["weights"] if f".{name}." in key]
        assert own
        assert all(torch.equal(both["weights"][key], alone["weights"][key]) for key in own)


def test_an_adapter_that_is_not_active_stays_at_home():
    options = {"names": ("a", "b"), "targets": "all-linear", "rank": 24}
    model, optimizer = odc.paged(adapted("dense", options), page_budget="10MB", lr=LR)
    watch = Watch()
    settle(model.memory)
    model.memory.set_sink(watch)
    for step in range(3):
        model(*batch(LOOP, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = model._odc_runtime.groups
    assert {groups[need[2]].adapter for need in watch.needs} == {"", "a"}
    odc.set_adapter(model, "b")
    watch.needs.clear()
    model(*batch(LOOP, 0, 0)).backward()
    optimizer.step()
    assert {groups[need[2]].adapter for need in watch.needs} == {"", "b"}
    model.memory.set_sink(None)
    model.close()


def test_a_graph_of_an_adapter_survives_the_change_to_another():
    def losses(budget):
        model = adapted("dense", {"names": ("a", "b")})
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        if budget is not None:
            model, optimizer = odc.paged(model, page_budget=budget, lr=LR)
        found = []
        for step in range(4):
            first = model(*batch(LOOP, step, 0))
            odc.set_adapter(model, "b")
            second = model(*batch(LOOP, step, 1))
            (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
            odc.set_adapter(model, "a")
            found += [first.item(), second.item()]
        if budget is not None:
            model.close()
        return found

    wanted = losses(None)
    assert losses(10 * MIB) == pytest.approx(wanted, rel=1e-6)  # torch's default is not fused


def test_without_an_adapter_the_model_is_its_base():
    base, model = models.build("dense"), adapted("dense", {})
    with torch.no_grad():
        wanted = base(*batch(LOOP, 0, 0))
        assert not torch.equal(model(*batch(LOOP, 0, 0)), wanted)
        odc.set_adapter(model, None)
        assert torch.equal(model(*batch(LOOP, 0, 0)), wanted)
        model, _ = odc.paged(model, None, page_budget="8MB")
        assert torch.equal(model(*batch(LOOP, 0, 0)), wanted)
    model.close()


def test_a_model_on_the_meta_device_gets_the_values_of_a_built_one():
    built = odc.lora(models.build("tied"), seed=7)
    meta = odc.lora(models.build("tied").to("meta"), seed=7)
    meta.tie_weights()
    meta, _ = odc.paged(meta, init=initializer(meta.config, 0), page_budget="10MB")
    state = meta.state_dict()
    for key, value in built.state_dict().items():
        if ".lora_" in key:
            assert torch.equal(state[key], value), key
    assert not torch.equal(state["head.weight"], torch.zeros_like(state["head.weight"]))
    meta.close()


def test_new_adapters_change_nothing_and_only_they_are_trained():
    base = models.build("dense")
    wanted = base(*batch(LOOP, 0, 0))
    names = list(dict(base.named_parameters()))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = odc.lora(base, targets=ATTENTION, names=("a", "b"))
    assert torch.equal(torch.get_rng_state(), before), "global random numbers were drawn"
    assert torch.equal(model(*batch(LOOP, 0, 0)), wanted)
    own = [n for n, p in model.named_parameters() if ".lora_" not in n]
    assert own == names, "the base's parameters keep their names"
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
    layers = lora_layers(model)
    assert len(layers) == 2 * len(model.layers)
    first, other = (layers["layers.0.attn.q_proj"].lora_A[n].weight for n in ("a", "b"))
    assert not torch.equal(first, other)
    reference = nn.init.kaiming_uniform_(torch.empty_like(first), a=5**0.5)
    assert first.abs().max().item() == pytest.approx(reference.abs().max().item(), rel=0.02)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"rank": 0}, "rank must be a whole number"),
        ({"alpha": -1}, "alpha must be a number above 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"targets": ("q_proj", "qkv")}, "no layer of the model is named qkv; .* are named head,"),
        ({"targets": ("norm",)}, "norm is a RMSNorm, and adapters go beside nn.Linear"),
        ({"targets": "("}, "is no pattern"),
        ({"names": ("a.b",)}, "expected letters"),
        ({"names": ("a", "a")}, "has an adapter 'a' already"),
    ],
)
def test_wrong_arguments_say_what_was_expected(options, expected):
    with pytest.raises(ConfigError, match=expected):
        odc.lora(models.build("dense"), **options)


def test_routers_are_refused_and_not_among_all_linear_layers():
    with pytest.raises(ConfigError, match="is a router, whose weight is read without a call"):
        odc.lora(models.build("moe"), targets=("router",))
    model = odc.lora(models.build("moe"), targets="all-linear")
    ends = {re.sub(r".*\.", "", name) for name in lora_layers(model)}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2"}


def test_a_paged_model_takes_no_new_adapter_and_knows_its_own():
    model, _ = odc.paged(odc.lora(models.build("dense")), page_budget="8MB")
    with pytest.raises(ConfigError, match="add all adapters before odc.paged"):
        odc.lora(model, names=("b",))
    with pytest.raises(ConfigError, match="no adapter 'b'; the model has 'default'"):
        odc.set_adapter(model, "b")
    model.close()
    with pytest.raises(ConfigError, match="the model has no adapter; call odc.lora"):
        odc.set_adapter(models.build("dense"), "a")


def test_an_adapter_is_not_exchanged_inside_a_forward_or_a_step_that_has_begun():
    model = adapted("dense", {"names": ("a", "b")})
    model, optimizer = odc.paged(model, page_budget="10MB", update="backward", accumulate=2)
    handle = model.layers[1].register_forward_hook(lambda *_: odc.set_adapter(model, "b"))
    with pytest.raises(RuntimeError, match="inside a forward or backward"):
        model(*batch(LOOP, 0, 0))
    handle.remove()
    model(*batch(LOOP, 0, 0)).backward()
    with pytest.raises(RuntimeError, match="after 1 of 2 backwards of a step"):
        odc.set_adapter(model, "b")
    model.close()


def test_adapters_beside_half_precision_are_in_full_precision():
    model = odc.lora(models.build("dense", torch.bfloat16))
    layer = model.layers[0].attn.q_proj
    assert isinstance(layer, LoraLinear) and layer.lora_A["default"].weight.dtype == torch.float32
    assert layer(torch.zeros(1, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16
    expected = train_plainly(model, LOOP)
    run = PagedRun(odc.lora(models.build("dense", torch.bfloat16)), LOOP, Paging(budget=8 * MIB))
    assert_equal(run.train(expect_traffic=False), expected)
    run.close()


def test_parameters_only_are_needed_where_nothing_is_trained():
    model, _ = odc.paged(adapted("dense", {"names": ("a", "b")}), None, page_budget="8MB")
    assert {g.adapter for g in model._odc_runtime.groups if g.rests} == {"b"}
    with torch.no_grad():
        first = model(*batch(LOOP, 0, 0))
        odc.set_adapter(model, "b")
        assert not torch.equal(model(*batch(LOOP, 0, 0)), first)
    model.close()


def test_a_loss_in_chunks_refuses_a_head_with_an_adapter():
    model = odc.lora(models.build("dense"), targets=("head",))
    model.loss_chunk = 4
    with pytest.raises(ConfigError, match="the head has an adapter, and a loss in chunks"):
        model(*batch(LOOP, 0, 0))
