"""A frozen base that lies at home in 8 or 4 bits: the same results anywhere, few bytes moved."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import odc
from odc.errors import QuantizationError
from odc.memory.events import Kind, Tier
from odc.memory.manager import MemoryManager
from odc.train import checkpoint
from odc.train.checkpoint import Identity
from tests.fsdp import models
from tests.fsdp.block_reference import BITS, round_frozen, rounded
from tests.fsdp.paged_loop import Watch, settle
from tests.fsdp.pair import MIB, loss_of

WIDTH, INNER = 320, 1720  # rows end inside blocks, and parameters inside pages
LR = 1e-2


class Adapted(nn.Module):
    """A frozen MLP with a norm and a small trainable matrix beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.scale = nn.Parameter(torch.rand(3, 7, 11) + 0.5)  # ends inside a block
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y * self.scale.mean() + self.adapter(x)


class Net(nn.Module):
    """Three of them, about 4.4 MiB each."""

    def __init__(self, dtype: torch.dtype = torch.float32, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name or not frozen)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def inputs(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    found = []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(inputs(step, dtype))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def plain_losses(name: str, dtype: torch.dtype) -> tuple[list[float], nn.Module]:
    model = round_frozen(Net(dtype), name)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return losses(model, torch.optim.AdamW(trainable, lr=LR, fused=True)), model


@contextmanager
def paged(model: nn.Module, budget: int | None, name: str, **options):  # type: ignore[no-untyped-def]
    """``budget`` in MiB."""
    limit = None if budget is None else budget * MIB
    memory = MemoryManager(page_budget=limit, **options)
    train = any(p.requires_grad for p in model.parameters())
    made, optimizer = odc.paged(
        model,
        torch.optim.AdamW if train else None,
        memory=memory,
        frozen_format=name,
        **({"lr": LR} if train else {}),
    )
    try:
        yield made, optimizer
        settle(memory)
        memory.transfers.check()
    finally:
        made.close()


# -- results -----------------------------------------------------------------------------------


PLACES = [
    (None, {}),
    (14, {"page_size": "2MB"}),
    (18, {"home": "disk", "page_size": "4MB"}),
    (14, {"home": "host+disk", "host_mem": 4 * MIB, "page_size": "2MB"}),
]


@pytest.mark.parametrize(
    "name, dtype",
    [("int8", torch.float32), ("int4", torch.float32), ("int4", torch.bfloat16)],
)
def test_losses_and_weights_are_those_of_the_rounded_model_wherever_pages_are(name, dtype):
    expected, plain = plain_losses(name, dtype)
    assert expected != plain_losses("native", dtype)[0], "rounding would not be noticed"
    weights = plain.state_dict()
    for budget, options in PLACES:
        with paged(Net(dtype), budget, name, **options) as (model, optimizer):
            assert losses(model, optimizer) == expected, (budget, options)
            found = model.state_dict()
            assert all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_budget_gives_the_same_losses(name, home):
    expected, _ = plain_losses(name, torch.float32)
    for budget, page_size in itertools.product(range(10, 32, 2), (2, 4, 6, 256)):
        try:
            with paged(Net(), budget, name, home=home, page_size=page_size * MIB) as made:
                assert losses(*made) == expected, (budget, page_size)
        except odc.BudgetError:
            assert budget < 14


def test_the_first_forward_reads_what_a_load_gives():
    model = round_frozen(Net(), "int4")
    with torch.no_grad():
        expected = model(inputs(0, torch.float32)).item()
    for budget, options in PLACES:
        with paged(Net(), budget, "int4", **options) as (found, _), torch.no_grad():
            first = found(inputs(0, torch.float32)).item()
            assert [first, found(inputs(0, torch.float32)).item()] == [expected] * 2


def test_a_mixture_of_experts_is_evaluated_from_four_bits():
    plain = models.build("moe").requires_grad_(False)
    round_frozen(plain, "int4")
    with torch.no_grad():
        expected = [loss_of(plain, step) for step in range(3)]
    model = models.build("moe").requires_grad_(False)
    with paged(model, 10, "int4", page_size="2MB") as (made, _), torch.no_grad():
        assert [loss_of(made, step) for step in range(3)] == expected


def test_a_trainable_parameter_and_a_vector_keep_every_bit():
    plain = Net()
    with paged(Net(), 14, "int4", page_size="2MB") as (model, _):
        found = model.state_dict()
    for name, value in plain.named_parameters():
        same = torch.equal(found[name], value)
        assert same == (value.requires_grad or value.dim() < 2), name


# -- writing -----------------------------------------------------------------------------------


def test_what_is_written_is_rounded_when_the_block_ends_and_stays():
    with paged(Net(), 14, "int4", page_size="2MB") as (model, optimizer):
        new = torch.randn(INNER, WIDTH, generator=torch.Generator().manual_seed(9))
        weight, bias = model.layers[1].up.weight, model.layers[1].up.bias
        with model.resident("layers.1", write=True), torch.no_grad():
            weight.copy_(new)
            bias.fill_(0.3)
            assert torch.equal(weight, new)
        for _ in range(2):
            with model.resident("layers.1.up"):
                assert torch.equal(weight, rounded(new, "int4"))
                assert torch.equal(bias, torch.full_like(bias, 0.3))
            losses(model, optimizer, 1)  # everything has left by its end


def test_each_end_of_nested_writes_rounds():
    with paged(Net(), None, "int8") as (model, _):
        weight, new = model.layers[0].up.weight, torch.randn(2, INNER, WIDTH)
        with model.resident("layers.0.up", write=True), torch.no_grad():
            with model.resident("layers.0.up", write=True):
                weight.copy_(new[0])
            assert torch.equal(weight, rounded(new[0], "int8"))
            weight.copy_(new[1])
        assert torch.equal(weight, rounded(new[1], "int8"))


def test_a_state_dict_loads_again_without_a_change():
    torch.manual_seed(0)
    other = {k: torch.randn_like(v) for k, v in Net().state_dict().items()}
    for budget in (None, 14):
        with paged(Net(), budget, "int4", page_size="2MB") as (model, optimizer):
            model.load_state_dict(other)
            first = model.state_dict()
            frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
            for name in frozen:
                assert torch.equal(first[name], rounded(other[name], "int4")), name
            losses(model, optimizer, 1)
            model.load_state_dict(first)
            again = model.state_dict()
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_a_checkpoint_goes_on_to_the_last_bit(tmp_path):
    identity = Identity(structure_hash="net", corpus_hash="none", model={})
    with paged(Net(), 14, "int4", page_size="2MB") as (model, optimizer):
        losses(model, optimizer, 2)
        path = checkpoint.save(tmp_path, 2, model, optimizer, identity)
        expected = losses(model, optimizer)
        weights = model.state_dict()
    for budget in (None, 18):
        with paged(Net(), budget, "int4", home="disk") as (model, optimizer):
            with model.resident(write=True) if budget is None else nullcontext(), torch.no_grad():
                for parameter in model.parameters() if budget is None else ():
                    parameter.add_(1.0)
            checkpoint.load(path, model, optimizer, identity)
            assert losses(model, optimizer) == expected
            found = model.state_dict()
            assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_checkpoint_of_a_native_run_is_rounded_when_it_is_loaded(tmp_path):
    identity = Identity(structure_hash="net", corpus_hash="none", model={})
    with paged(Net(), None, "native") as (model, optimizer):
        losses(model, optimizer, 1)
        path = checkpoint.save(tmp_path, 1, model, optimizer, identity)
        saved = model.state_dict()
    for budget in (None, 14):
        with paged(Net(), budget, "int8", page_size="2MB") as (model, optimizer):
            checkpoint.load(path, model, optimizer, identity)
            found = model.state_dict()
            for name, parameter in model.named_parameters():
                trained = parameter.requires_grad
                expected = saved[name] if trained else rounded(saved[name], "int8")
                assert torch.equal(found[name], expected), name


def test_a_value_that_is_not_finite_is_refused_where_it_is_written():
    model = Net()
    with torch.no_grad():
        model.layers[2].down.weight[5, 6] = float("nan")
    with pytest.raises(QuantizationError, match=r"layers.2.down.weight is frozen.*as int4.*NaN"):
        odc.paged(model, lr=LR, frozen_format="int4", page_budget="14MB", page_size="2MB")
    with paged(Net(), 14, "int8", page_size="2MB") as (made, optimizer):
        with (
            pytest.raises(QuantizationError, match=r"layers.0.up.weight.*use frozen_format native"),
            made.resident("layers.0", write=True),
            torch.no_grad(),
        ):
            made.layers[0].up.weight[0, 0] = float("inf")
        with made.resident("layers.0", write=True), torch.no_grad():
            made.layers[0].up.weight[0, 0] = 1.0
        losses(made, optimizer, 1)


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loads_move_the_stored_bytes_and_a_tenth_more_at_most(home, name, dtype):
    """The counters, the trace and the home agree; scales and alignment are within 10 %."""
    model = Net(dtype).requires_grad_(False)
    with paged(model, 6, name, home=home, page_size="2MB") as (made, _), torch.no_grad():
        memory, watch = made.memory, Watch()
        tier = Tier.HOST if home == "host" else Tier.DISK
        made(inputs(0, dtype))
        settle(memory)
        memory.transfers.poll()
        memory.take()
        before = memory.home.traffic[tier].bytes_in
        memory.set_sink(watch)
        loads = Counter()
        note = watch.action
        watch.action = lambda *row: (loads.update([row[2]] if row[3] < 2 else []), note(*row))
        for step in range(4):
            made(inputs(step, dtype))
        settle(memory)
        memory.transfers.poll()
        counted = memory.take().bytes_in
        pages = memory.table.pages
        least = fewest_bytes(made, BITS[name])
        assert counted == watch.loaded[tier] == memory.home.traffic[tier].bytes_in - before
        assert counted == sum(pages[page].home_bytes * times for page, times in loads.items())
        assert 0 < counted <= 1.1 * sum(least[page] * times for page, times in loads.items())
        assert all(page.home_bytes <= 1.1 * least[page.page] for page in pages)


def fewest_bytes(model: nn.Module, bits: int) -> dict[int, float]:
    """By page: values of matrices times bits, and all else as it is."""
    table, found = model.memory.table, Counter()
    for group in model._odc_runtime.groups:
        for page in table.of(group.group, Kind.PARAMETER):
            begin, end = table.span_of(table.pages[page])
            for slot in group.slots:
                size = min(end, slot.offset + slot.num_bytes) - max(begin, slot.offset)
                share = bits / 8 / slot.dtype.itemsize if len(slot.shape) > 1 else 1.0
                found[page] += max(size, 0) * share
    return found


def test_a_home_is_as_large_as_what_it_stores():
    sizes = {}
    for name in ("native", "int8", "int4"):
        with paged(Net().requires_grad_(False), 14, name, page_size="2MB") as (model, _):
            sizes[name] = model.memory.home.used_bytes
    assert sizes["int8"] < 0.3 * sizes["native"] and sizes["int4"] < 0.16 * sizes["native"]


def test_slices_of_a_coded_page_are_loaded_one_by_one():
    """A page of more than one slice, with a parameter across its border."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1500, 900), nn.Linear(900, 1500), nn.Linear(1500, 700))
    net = nn.Module()
    net.layers = nn.ModuleList([model, nn.Linear(700, 1500)])
    net.requires_grad_(False)
    net.forward = lambda x: net.layers[1](net.layers[0](x)).square().mean()
    expected = {k: rounded(v, "int4") for k, v in net.state_dict().items()}
    with paged(net, 20, "int4", home="disk") as (made, _), torch.no_grad():
        table = made.memory.table
        assert max(p.num_bytes for p in table.pages) > 8 * MIB
        for _ in range(2):
            found = made.state_dict()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            made.memory._make_room(10)  # everything out
            settle(made.memory)


# -- what is refused ---------------------------------------------------------------------------


def test_a_format_that_does_not_exist_is_refused():
    with pytest.raises(
        odc.OdcError, match="frozen_format must be native, int8 or int4, got 'int2'"
    ):
        odc.paged(Net(), lr=LR, frozen_format="int2")


def test_a_model_without_frozen_matrices_is_told_that_nothing_is_stored_so():
    with pytest.warns(UserWarning, match="has no effect: the model has no frozen matrices"):
        model, _ = odc.paged(Net(frozen=False), lr=LR, frozen_format="int4")
    assert all(group.codec is None for group in model._odc_runtime.groups)
    model.close()


def test_a_gradient_for_what_is_stored_in_four_bits_is_refused():
    model, _ = odc.paged(Net(), None, frozen_format="int4")
    with pytest.raises(RuntimeError, match="adapter.weight, which is stored as int4"):
        model(inputs(0, torch.float32)).backward()
    model.close()


def test_a_frozen_group_is_never_written_back():
    with paged(Net(), 14, "int4", page_size="2MB") as (model, optimizer):
        losses(model, optimizer, 1)
        settle(model.memory)
        frozen = {g.group for g in model._odc_runtime.groups if g.codec is not None}
        table, transfers = model.memory.table, model.memory.transfers
        pages = [p.page for p in table.pages if p.group in frozen]
        for page in pages:  # what they were filled with goes home once
            if table.is_evictable[page]:
                transfers.evict(page)
        transfers.drain()
        assert pages and not any(table.is_dirty[p] for p in pages)
        stored = Counter()
        watch = Watch()
        watch.action = lambda *row: stored.update([row[2]] if row[3] in (2, 3) else [])
        model.memory.set_sink(watch)
        losses(model, optimizer, 2)
        assert stored and not set(stored) & set(pages)


def test_updates_at_home_go_on_beside_a_frozen_base_in_four_bits():
    expected, _ = plain_losses("int4", torch.float32)
    for home in ("host", "disk"):
        memory = MemoryManager(page_budget=14 * MIB, page_size="2MB", home=home)
        model, optimizer = odc.paged(
            Net(), torch.optim.AdamW, memory=memory, frozen_format="int4", where="home", lr=LR
        )
        assert losses(model, optimizer) == expected
        model.close()
