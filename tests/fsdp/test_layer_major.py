"""Layer-major accumulation trains as a plain loop does, and reads each parameter twice a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import odc
from odc.errors import BudgetError, ConfigError
from odc.fsdp.decoder_chain import FAMILIES
from odc.memory.events import Act, Kind, Op, Phase
from odc.memory.manager import MemoryManager, popularity
from odc.memory.replay import Link, Workload
from odc.memory.replay.simulate import virtual_drive
from odc.memory.victims import CostAware
from odc.train.config_model import ModelConfig
from odc.train.models import build_model
from odc.train.recorder import page_rows
from tests.fsdp.models import build
from tests.fsdp.paged_loop import MIB, Watch, settle
from tests.fsdp.plain_loop import (
    LR,
    VOCAB,
    Loop,
    Result,
    assert_equal,
    batch,
    moments_by_name,
    parameter_groups,
    schedule,
    train_plainly,
)


class AdaptedChain:
    """Of ``tests.fsdp.models.Adapted``, whose blocks read a tensor made in front of them."""

    def __init__(self, model):
        self.model, self.blocks = model, list(model.layers)

    def embed(self, batch):
        shared = self.model.first(self.model.embed(batch[0]))
        return {"x": shared, "shared": shared.view_as(shared)}

    def block(self, index, state):
        x = self.blocks[index](state["x"]) + 0.1 * state["shared"]
        return {"x": x, "shared": state["shared"]}

    def loss(self, state, batch):
        logits = self.model.head(state["x"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class DroppingChain:
    """A ``Transformer`` with dropout behind every block."""

    def __init__(self, model):
        self.inner = model.as_chain()
        self.blocks, self.embed, self.loss = self.inner.blocks, self.inner.embed, self.inner.loss
        self.masks = []

    def block(self, index, state):
        x, *rest = self.inner.block(index, state)
        kept = nn.functional.dropout(torch.ones_like(x), 0.2)
        self.masks.append((index, kept))
        return x * kept, *rest


def train(
    name: str, loop: Loop, *, update: str = "backward", make_chain=None, **memory
) -> tuple[Result, MemoryManager]:
    """As ``train_plainly``, in layer-major order."""
    model, optimizer = odc.paged(
        build(name),
        param_groups=lambda made: parameter_groups(loop, made),
        update=update,
        accumulate=loop.accumulate,
        max_grad_norm=loop.max_grad_norm,
        lr=LR,
        **memory,
    )
    chain = odc.layer_major(model, make_chain(model) if make_chain else None)
    rates, result = schedule(optimizer), Result()
    for step in range(loop.steps):
        result.losses += chain.step([batch(loop, step, m) for m in range(loop.accumulate)])
        optimizer.step()
        optimizer.zero_grad()
        if loop.max_grad_norm is not None:
            result.norms.append(optimizer.grad_norm)
        rates.step()
        model.memory.transfers.poll()
        model.memory.transfers.check()
    table = model.memory.table
    assert (
        not any(
            n for p, n in enumerate(table.pins) if not table.groups[table.pages[p].group].pinned
        )
        or model.memory.unlimited
    )
    result.weights = model.state_dict()
    result.moments = moments_by_name(model, optimizer.state_dict())
    settle(model.memory)
    model.close()
    return result, model.memory


@pytest.mark.parametrize(
    ("name", "accumulate", "update", "memory"),
    [
        ("dense", 3, "backward", {"page_budget": 16 * MIB}),
        ("dense", 1, "step", {"page_budget": 16 * MIB, "home": "disk"}),
        ("moe", 3, "backward", {"page_budget": 16 * MIB, "page_size": 2 * MIB}),
        ("moe", 2, "step", {"page_budget": 16 * MIB}),
        ("frozen in the middle", 2, "backward", {"page_budget": 16 * MIB}),
        ("frozen in front", 2, "step", {"page_budget": 16 * MIB}),
        ("dense", 2, "backward", {"page_budget": 16 * MIB, "where": "home"}),
        ("dense", 2, "step", {}),
        ("moe", 2, "backward", {}),
    ],
)
def test_equals_a_plain_loop_to_the_last_bit(name, accumulate, update, memory):
    clip = 0.3 if update == "step" else None
    loop = Loop(steps=4, accumulate=accumulate, max_grad_norm=clip, decay_groups=True)
    assert_equal(train(name, loop, update=update, **memory)[0], train_plainly(build(name), loop))


@pytest.mark.parametrize(
    ("name", "summed", "make_chain"),
    [("tied", "embed.weight", None), ("adapters", "first.", AdaptedChain)],
)
def test_what_several_parts_use_differs_by_the_rounding_of_sums_alone(name, summed, make_chain):
    loop = Loop(steps=1, accumulate=3)
    found, _ = train(name, loop, make_chain=make_chain, page_budget=16 * MIB)
    plain = train_plainly(build(name), loop)
    assert any(parameter.startswith(summed) for parameter in plain.moments)
    for parameter, state in plain.moments.items():
        ours, theirs = found.moments[parameter]["exp_avg"], state["exp_avg"]
        if parameter.startswith(summed):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
        else:
            assert torch.equal(ours, theirs), parameter


def test_a_block_draws_the_same_random_numbers_again():
    chains = []

    def make(model):
        chains.append(DroppingChain(model))
        return chains[0]

    train("dense", Loop(steps=1, accumulate=2), make_chain=make, page_budget=16 * MIB)
    masks = chains[0].masks
    forward, again = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(forward) == 2 * 4
    by_block = {i: [m for j, m in forward if j == i] for i in range(4)}
    for index, mask in again:
        assert torch.equal(mask, by_block[index].pop(0))
    assert not torch.equal(forward[0][1], forward[1][1])


class Recording(Watch):
    """A sink that keeps needs as a trace does, and adds up the parameters that are loaded."""

    COLUMNS = ("seq", "t_ns", "step", "micro", "phase", "ctx", "group", "kind", "op")

    def __init__(self, memory):
        super().__init__()
        self.pages = memory.table.pages
        self.rows: list[tuple[int, ...]] = []
        self.parameter_bytes = 0

    def need(self, *row):
        self.rows.append(row)

    def action(self, t_ns, seq, page, act, src, dst, num_bytes, dur_ns, wait_ns, policy):
        if act in (Act.LOAD, Act.PREFETCH) and self.pages[page].kind == Kind.PARAMETER:
            self.parameter_bytes += num_bytes

    def columns(self) -> dict[str, np.ndarray]:
        names = (*self.COLUMNS, "compute_ns", "tokens")
        return {n: np.array([row[i] for row in self.rows]) for i, n in enumerate(names)}


def model_of_blocks(frozen: bool) -> nn.Module:
    """Sixteen blocks of 3.5 MiB between a small embedding and a small head."""
    shape = ModelConfig(hidden_size=256, mlp_size=832, num_layers=16, num_heads=4)
    model = build_model(shape, VOCAB)
    model.layers.requires_grad_(not frozen)
    return model


def recorded(order: str, accumulate: int, frozen: bool, micro_ns: int = 4_000_000) -> Workload:
    """Eight steps of one order; a micro-batch computes as long in every visit."""
    model, optimizer = odc.paged(
        model_of_blocks(frozen),
        update="backward",
        accumulate=accumulate,
        activations="checkpoint",
    )
    chain = odc.layer_major(model) if order == "layer_major" else None
    sink = Recording(model.memory)
    model.memory.set_sink(sink)
    batches = [batch(Loop(), 0, micro) for micro in range(accumulate)]
    if chain is not None:
        chain.step(batches)
    else:
        for one in batches:
            (model(*one) / accumulate).backward()
    optimizer.step()
    pages = list(page_rows(model.memory.table))
    model.close()
    need = sink.columns()
    begins = np.diff(need["seq"], prepend=-1) != 0
    need["compute_ns"] = begins * micro_ns * (accumulate if chain is not None else 1)
    columns = {name: np.array([page[name] for page in pages]) for name in pages[0]}
    return Workload.from_trace(need, columns).repeated(8)


def replayed(workload: Workload) -> tuple[list[int], list[int]]:
    """(bytes of parameters loaded, demand loads) of each step, with room for 30 % of the state."""
    budget = -(-int(0.3 * workload.pages["bytes"].sum()) // (2 * MIB)) * 2 * MIB
    drive = virtual_drive(
        workload,
        budget_bytes=budget,
        link=Link(2e9),
        eviction=CostAware(),
        prefetch=popularity,
    )
    sink = Recording(drive.pager)
    drive.pager.set_sink(sink)
    loaded = []
    for step in range(1, 9):
        drive.run(step)
        loaded.append(sink.parameter_bytes)
        sink.parameter_bytes = 0
    return loaded, drive.result.misses


@pytest.mark.parametrize(("accumulate", "frozen"), [(2, True), (4, True), (4, False)])
def test_parameters_come_in_a_kth_as_often_and_never_on_demand(accumulate, frozen):
    loaded, misses = replayed(recorded("layer_major", accumulate, frozen))
    assert misses[2:] == [0] * 6
    if frozen:
        micro, _ = replayed(recorded("micro_major", accumulate, frozen))
        assert loaded[-1] == pytest.approx(micro[-1] / accumulate, rel=0.05)


@pytest.mark.slow
def test_eight_micro_batches_load_no_more_than_two():
    eight, misses = replayed(recorded("layer_major", 8, True))
    assert misses[2:] == [0] * 6
    assert eight[-1] == replayed(recorded("layer_major", 2, True))[0][-1]


def test_needs_of_a_step_are_one_read_of_each_block_forward_and_one_back():
    model, optimizer = odc.paged(build("dense"), update="backward", accumulate=4)
    watch = Watch()
    model.memory.set_sink(watch)
    odc.layer_major(model).step([batch(Loop(), 0, micro) for micro in range(4)])
    optimizer.step()
    names = [spec.name for spec in model.memory.table.groups]
    needs = [
        (Phase(phase).name, names[group], Kind(kind).name, Op(op).name)
        for _, phase, group, kind, op in watch.needs
        if names[group] == "layers.2"
    ]
    assert not any(phase == Phase.OPTIMIZER for _, phase, *_ in watch.needs)
    assert needs == [
        ("FORWARD", "layers.2", "PARAMETER", "READ"),
        ("RECOMPUTE", "layers.2", "PARAMETER", "READ"),
        ("BACKWARD", "layers.2", "GRADIENT", "CREATE"),
        ("BACKWARD", "layers.2", "PARAMETER", "WRITE"),
        ("BACKWARD", "layers.2", "MOMENT", "WRITE"),
        ("BACKWARD", "layers.2", "GRADIENT", "DROP"),
    ]
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 4])
def test_real_transfers_of_parameters_are_a_kth_as_many(accumulate):
    found = {}
    for order in ("micro_major", "layer_major"):
        model, optimizer = odc.paged(
            model_of_blocks(True),
            update="backward",
            accumulate=accumulate,
            page_budget=20 * MIB,
            activations="checkpoint",
        )
        chain = odc.layer_major(model) if order == "layer_major" else None
        sink = Recording(model.memory)
        model.memory.set_sink(sink)
        loaded = found[order] = []
        for step in range(7):
            settle(model.memory)
            sink.parameter_bytes = 0
            batches = [batch(Loop(), step, micro) for micro in range(accumulate)]
            if chain is not None:
                chain.step(batches)
            else:
                for one in batches:
                    (model(*one) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            loaded.append(sink.parameter_bytes)
        model.close()
    wanted = min(found["micro_major"][3:]) / accumulate
    assert min(found["layer_major"][3:]) == pytest.approx(wanted, rel=0.05)


def test_other_passes_between_steps_change_nothing():
    loop = Loop(steps=1, accumulate=2)
    model, optimizer = odc.paged(
        build("moe"), update="backward", accumulate=2, page_budget=16 * MIB, lr=LR
    )
    chain = odc.layer_major(model)
    losses = []
    for step in range(3):
        losses += chain.step([batch(loop, step, micro) for micro in range(2)])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(*batch(loop, step, 7))
        for micro in range(2):  # a step in the usual order
            loss = model(*batch(loop, step, 3 + micro)) / 2
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    plain = build("moe")
    reference = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
    expected = []
    for step in range(3):
        for micro in (0, 1, 3, 4):
            loss = plain(*batch(loop, step, micro)) / 2
            loss.backward()
            expected.append(loss.detach())
            if micro in (1, 4):
                reference.step()
                reference.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    model.close()


def test_a_step_that_failed_leaves_nothing_pinned():
    loop = Loop(steps=1, accumulate=2)
    model, optimizer = odc.paged(build("moe"), update="step", page_budget=16 * MIB, lr=LR)
    chain = odc.layer_major(model)
    batches = [batch(loop, 0, micro) for micro in range(2)]

    def stop(loss):
        raise ArithmeticError("not this one")

    with pytest.raises(ArithmeticError):
        chain.step(batches, on_loss=stop)
    table = model.memory.table
    assert not any(
        n for p, n in enumerate(table.pins) if not table.groups[table.pages[p].group].pinned
    )
    optimizer.zero_grad()
    losses = chain.step(batches)
    optimizer.step()
    plain = build("moe")
    for ours, one in zip(losses, batches, strict=True):
        assert torch.equal(ours, (plain(*one) / 2).detach())
    model.close()


def test_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match=r"odc\.paged returned, got Transformer"):
        odc.layer_major(build("dense"))
    model, _ = odc.paged(build("called twice"), update="backward", accumulate=2)
    with pytest.raises(ConfigError, match=r"Twice is not known as a chain .* pass chain="):
        odc.layer_major(model)
    model.close()
    model, _ = odc.paged(build("dense"), update="backward", accumulate=2)
    chain = odc.layer_major(model)
    with pytest.raises(ValueError, match="accumulate=2 with update='backward', got 3"):
        chain.step([batch(Loop(), 0, micro) for micro in range(3)])
    with pytest.raises(ValueError, match="at least one"):
        chain.step([])
    model.close()


def test_runs_in_the_least_budget_that_micro_major_order_runs_in():
    for name in ("dense", "moe"):
        memory = MemoryManager(page_budget=2 * MIB)
        with pytest.raises(BudgetError):
            odc.paged(build(name), memory=memory)
        probe = MemoryManager()
        model, _ = odc.paged(build(name), memory=probe)
        least = probe._least_frames * 2 * MIB
        model.close()
        loop = Loop(steps=2, accumulate=2)
        assert_equal(train(name, loop, page_budget=least)[0], train_plainly(build(name), loop))


def decoder(family: str):
    """A small random model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        use_sliding_window=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).train()


def padded(step: int, micro: int) -> dict[str, torch.Tensor]:
    """Two sequences, the first of them shorter."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    "family",
    [f if f == "llama" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_decoders_of_transformers_equal_a_plain_loop(family):
    plain = decoder(family)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
    model, optimizer = odc.paged(
        decoder(family), update="backward", accumulate=2, page_budget=10 * MIB, lr=LR
    )
    chain = odc.layer_major(model)
    for step in range(2):
        batches = [padded(step, micro) for micro in range(2)]
        expected = []
        for one in batches:
            loss = plain(**one, use_cache=False).loss / 2
            loss.backward()
            expected.append(loss.detach())
        reference.step()
        reference.zero_grad()
        found = chain.step(batches)
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    model.close()
