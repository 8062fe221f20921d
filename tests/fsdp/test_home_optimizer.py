"""Groups that are updated at home train as on the device, and as in plain PyTorch, to the last bit.

What crosses the link is counted against what the rule in ``update_place`` says, and a failed update
is told where its parameters are needed.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import odc
from odc.errors import ConfigError, PageIOError
from odc.memory.events import Kind
from odc.memory.manager import MemoryManager
from odc.memory.update_place import link_bytes_per_parameter
from odc.memory.victims import Lru
from tests.fsdp import models
from tests.fsdp.paged_loop import MIB, PagedRun, Paging
from tests.fsdp.pair import assert_same, loss_of, paged_pair, train
from tests.fsdp.plain_loop import (
    LR,
    Loop,
    Result,
    assert_equal,
    losses_of_step,
    parameter_groups,
    schedule,
    train_plainly,
)

SHORT = 4  # steps
SLOW = pytest.mark.slow
BUDGETS = {"moe": 16, "all sizes": 26, "frozen in the middle": 12, "called twice": 12}
UPDATES = ("step", "backward")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def home(name: str, **options: object) -> Paging:
    return Paging(budget=BUDGETS.get(name, 14) * MIB, where="home", **options)  # type: ignore[arg-type]


def trained(name: str, loop: Loop, paging: Paging, dtype: torch.dtype = torch.float32) -> Result:
    run = PagedRun(models.build(name, dtype), loop, paging)
    try:
        assert any(g.spec.at_home for g in run.model._odc_runtime.groups)
        return run.train()
    finally:
        run.close()


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, update, loop",
    [
        ("dense", "backward", Loop(SHORT)),
        ("moe", "backward", Loop(SHORT, accumulate=1, decay_groups=True, evaluate=True)),
        pytest.param("moe", "step", Loop(SHORT, max_grad_norm=0.3), marks=SLOW),
        ("tied, checkpointed", "step", Loop(SHORT, max_grad_norm=0.3)),
        pytest.param("frozen in the middle", "backward", Loop(SHORT, accumulate=1), marks=SLOW),
        pytest.param(
            "called twice", "backward", Loop(SHORT, forwards_first="two backwards"), marks=SLOW
        ),
    ],
)
def test_updates_at_home_change_no_bit(name, update, loop):
    assert_equal(
        trained(name, loop, home(name, update=update)), train_plainly(models.build(name), loop)
    )


@pytest.mark.parametrize(
    "name, options",
    [
        ("dense", {"home": "disk", "update": "backward"}),
        pytest.param(
            "all sizes",
            {"home": "host+disk", "host_mem": 24 * MIB, "page_size": 2 * MIB},
            marks=SLOW,
        ),
    ],
)
def test_moments_on_disk_are_updated_there(name, options):
    loop = Loop(SHORT)
    run = PagedRun(models.build(name), loop, home(name, **options))
    try:
        assert_equal(run.train(), train_plainly(models.build(name), loop))
        disk = list(run.model.memory.home.traffic.values())[-1]
        assert disk.read_bytes > disk.written_bytes > 0
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_is_updated_at_home_as_in_plain_pytorch(name, where, update):
    clip = 0.3 if update == "step" else None
    loop = Loop(max_grad_norm=clip, decay_groups=True, evaluate=where == "disk")
    page_size = (2 if where == "disk" else 256) * MIB
    paging = home(name, home=where, update=update, page_size=page_size)
    assert_equal(trained(name, loop, paging), train_plainly(models.build(name), loop))


@pytest.mark.parametrize("update", ["backward", pytest.param("step", marks=SLOW)])
def test_settings_are_those_of_the_step_that_was_made(update):
    """Rates and counters that change while an update waits are the next step's."""

    def script(model, optimizer):
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if step % 2 else 1.9
                group["betas"] = (0.8 + step / 100, 0.99)
            losses.append(loss.detach())
        return losses

    assert_same(script, budget=14, where="home", update=update)


def test_parameters_without_gradients_are_skipped_where_torch_skips_them():
    def script(model, optimizer):
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            skipped = list(model.layers[step % 3].parameters())
            for parameter in skipped[:2] if step % 2 else skipped:
                parameter.grad = None
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert_same(script, budget=14, where="home")


@pytest.mark.parametrize("kind", ["disk", pytest.param("host", marks=SLOW)])
def test_a_state_goes_on_where_it_was_taken(kind):
    def go(model, optimizer, steps):
        return train(model, optimizer, steps)

    with paged_pair(budget=14, where="home", home=kind) as (model, optimizer):
        go(model, optimizer, range(3))
        weights, state = model.state_dict(), optimizer.state_dict()
        expected = go(model, optimizer, range(3, 6))
    for where in ("home", "device"):
        with paged_pair(budget=14, where=where, home=kind) as (model, optimizer):
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            assert all(map(torch.equal, go(model, optimizer, range(3, 6)), expected))


def test_weights_that_are_read_or_written_between_steps_are_the_updated_ones():
    def script(model, optimizer):
        losses = train(model, optimizer, range(2))
        if hasattr(model, "resident"):
            with model.resident("layers.1", write=True), torch.no_grad():
                model.layers[1].attn.q_proj.weight.mul_(0.5)
        else:
            with torch.no_grad():
                model.layers[1].attn.q_proj.weight.mul_(0.5)
        return losses + train(model, optimizer, range(2, 4))

    assert_same(script, budget=14, where="home", update="backward")


# -- masters ---------------------------------------------------------------------------------------


def train_with_masters(model: nn.Module, loop: Loop) -> Result:
    """A model in bfloat16, its parameters in float32 beside it, and AdamW on those."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in trainable]
    of = {id(p): m for p, m in zip(trainable, masters, strict=True)}
    groups = [
        {**g, "params": [of[id(p)] for p in g["params"]]}  # type: ignore[attr-defined]
        for g in parameter_groups(loop, model)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    rates = schedule(optimizer)
    result = Result()
    for step in range(loop.steps):
        model.zero_grad()
        result.losses += losses_of_step(loop, model, step)
        if loop.max_grad_norm is not None:
            result.norms.append(
                nn.utils.clip_grad_norm_(trainable, loop.max_grad_norm, foreach=False)
            )
        for parameter, master in zip(trainable, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        rates.step()
        with torch.no_grad():
            for parameter, master in zip(trainable, masters, strict=True):
                parameter.copy_(master)
    result.weights = {name: value.clone() for name, value in model.state_dict().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    result.moments = {
        names[id(p)]: {**optimizer.state[m], "master": m}
        for p, m in zip(trainable, masters, strict=True)
        if m in optimizer.state
    }
    return result


@pytest.mark.parametrize(
    "name, options, loop",
    [
        ("dense", {"update": "backward"}, Loop(SHORT)),
        pytest.param(
            "moe", {"update": "step", "home": "disk"}, Loop(SHORT, max_grad_norm=0.3), marks=SLOW
        ),
        pytest.param(
            "all sizes",
            {"update": "backward", "page_size": 2 * MIB},
            Loop(SHORT, decay_groups=True),
            marks=SLOW,
        ),
    ],
)
def test_masters_in_float32_train_as_beside_a_plain_model_in_bfloat16(name, options, loop):
    paging = home(name, master_weights=True, **options)
    found = trained(name, loop, paging, torch.bfloat16)
    assert_equal(found, train_with_masters(models.build(name, torch.bfloat16), loop))


def test_a_master_follows_what_is_written_and_else_keeps_its_bits():
    options = {"budget": 14, "where": "home", "master_weights": True}
    with paged_pair(models.build("dense", torch.bfloat16), **options) as (model, optimizer):
        train(model, optimizer, range(3))
        before = {n: s["master"] for n, s in named_state(model, optimizer).items()}
        name, touched = "layers.1.attn.q_proj.weight", model.layers[1].attn.q_proj.weight
        with model.resident(name, write=True), torch.no_grad():
            touched[0, 0] = 7.0
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        train(model, optimizer, range(3, 4))
        after = {n: s["master"] for n, s in named_state(model, optimizer).items()}
    assert after[name][0, 0] == 7.0
    after[name][0, 0] = before[name][0, 0]
    assert all(torch.equal(before[n], after[n]) for n in before)
    rounded = [m.bfloat16().float() for m in before.values()]
    assert not all(map(torch.equal, before.values(), rounded))


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    return {names[i]: state for i, state in optimizer.state_dict()["state"].items()}


def test_masters_need_updates_at_home():
    with pytest.raises(ConfigError, match="where='home'"):
        odc.paged(models.build("dense", torch.bfloat16), page_budget=14 * MIB, master_weights=True)


# -- bytes -----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Groups of 8 MiB that leave between any two uses under a budget of two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[..., :1024].relu()
        return x.square().mean()


@pytest.mark.parametrize(
    "where, update, dtype, budget",
    [
        ("device", "backward", torch.float32, 34),
        pytest.param("device", "step", torch.float32, 34, marks=SLOW),
        ("home", "backward", torch.float32, 18),
        pytest.param("home", "step", torch.float32, 18, marks=SLOW),
        ("home", "backward", torch.bfloat16, 10),
    ],
)
def test_no_more_crosses_the_link_than_the_rule_says(where, update, dtype, budget):
    torch.manual_seed(0)
    model = Wide().to(dtype)
    masters = dtype != torch.float32
    demand = MemoryManager(  # loads nothing for nothing
        page_budget=budget * MIB, eviction=Lru(), prefetch=lambda library, limits: None
    )
    options = {"where": where, "update": update, "master_weights": masters}
    with paged_pair(model, None, memory=demand, **options) as (paged, optimizer):
        memory, numel = paged.memory, sum(p.numel() for p in paged.parameters())
        x = torch.randn(1, 1024, dtype=dtype)
        moved = []
        for _ in range(5):
            paged(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            memory.transfers.drain()
            counters = memory.take()
            moved.append((counters.bytes_in / numel, counters.bytes_out / numel))
    most = link_bytes_per_parameter(where, update, dtype.itemsize)
    for way in (0, 1):
        per_step = sum(m[way] for m in moved[2:]) / len(moved[2:])
        assert 0.5 * most[way] <= per_step <= most[way] + 0.01, (moved, most)


def test_moments_have_no_pages_on_the_device():
    with paged_pair(budget=14, where="home") as (model, optimizer):
        table = model.memory.table
        train(model, optimizer, range(2))
        moments = [p for p in table.pages if p.kind == Kind.MOMENT]
        assert moments and all(p.num_frames == 0 for p in moments)
        assert not any(table.resident[p.page] for p in moments)


# -- errors ----------------------------------------------------------------------------------------


def spoil(memory, monkeypatch, error):
    """The home fails where an update reads it, and tells on which thread."""
    threads = []

    def read(*args):
        threads.append(threading.current_thread())
        raise error

    monkeypatch.setattr(memory.home, "read", read)
    return threads


@pytest.mark.parametrize(
    "error", [PageIOError("no such block", page=0), ValueError("not a page"), MemoryError()]
)
def test_a_failed_update_is_told_where_its_parameters_are_needed(monkeypatch, error):
    with paged_pair(budget=14, where="home", home="disk", update="backward") as (model, optimizer):
        train(model, optimizer, range(2))
        threads = spoil(model.memory, monkeypatch, error)
        with pytest.raises(PageIOError, match=r"no such block|at home failed"):
            train(model, optimizer, range(2, 4))
        assert threads and threads[0] is not threading.main_thread()
        model.memory.transfers.check()
        monkeypatch.undo()
        for _ in range(2):  # what is half updated is never used
            with pytest.raises(PageIOError):
                optimizer.state_dict()
            with pytest.raises(PageIOError):
                train(model, optimizer, range(4, 5))


def test_an_update_while_its_parameters_are_in_use_is_refused():
    with paged_pair(budget=40, where="home") as (model, optimizer):
        loss_of(model, 0).backward()
        with (
            model.resident("layers.1"),
            pytest.raises(RuntimeError, match=r"leave model.resident"),
        ):
            optimizer.step()


def test_a_gradient_that_went_home_is_used():
    with paged_pair(budget=14, where="home") as (model, optimizer):
        loss_of(model, 0).backward()
        parameter = model.layers[0].attn.q_proj.weight
        assert optimizer.gradient(parameter).abs().sum() > 0
        optimizer.step()
        with pytest.raises(odc.OdcError, match="was used by the update"):
            _ = parameter.grad
        optimizer.zero_grad()
        assert parameter.grad is None


def test_a_model_is_closed_while_updates_wait():
    with paged_pair(budget=14, where="home", home="disk", update="backward") as (model, optimizer):
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        loss_of(model, 1).backward()


# -- where -----------------------------------------------------------------------------------------


def places(model: nn.Module) -> list[bool]:
    return [g.spec.at_home for g in model._odc_runtime.groups if g.trainable]


def test_auto_leaves_everything_on_the_device_where_nothing_has_to_move():
    for budget in (None, 1000):
        with paged_pair(budget=budget, where="auto") as (model, _):
            assert not any(places(model))


@pytest.mark.parametrize("link, at_home", [(1e6, True), (1e15, False)])
def test_auto_chooses_by_the_rates(link, at_home):
    memory = MemoryManager(page_budget=26 * MIB, link_bandwidth=link)
    model, optimizer = odc.paged(models.build("all sizes"), memory=memory, where="auto")
    try:
        for group in model._odc_runtime.groups:
            small = group.spec.num_bytes * 4 <= 2 * MIB
            assert group.spec.at_home == (at_home and not small), group.spec
    finally:
        model.close()


def test_updates_at_home_need_a_budget():
    with pytest.raises(ConfigError, match="needs a budget"):
        odc.paged(models.build("dense"), where="home")
    with pytest.raises(ValueError, match="device, home or auto"):
        odc.paged(models.build("dense"), where="host")
