"""What layers save: counted as it is, and kept, recomputed or moved home without a changed bit."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import odc
from odc.memory.activations import predict_peak
from odc.memory.events import Tier
from odc.memory.manager import MemoryManager
from tests.fsdp import models
from tests.fsdp.paged_loop import settle
from tests.fsdp.pair import LR, assert_equal_values, assert_same, paged_pair, plain_pair
from tests.fsdp.plain_loop import VOCAB

MIB = 1024 * 1024
MODES = ("keep", "checkpoint", "offload")
BUDGETS = {"dense": 12, "moe": 14}


def batch(step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """(size, 32) tokens and those after them; with 4 sequences a layer's input is 64 KiB."""
    tokens = torch.randint(0, VOCAB, (size, 33), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def account_of(model: nn.Module):
    return model.memory.ledger.activations


def home_bytes(model: nn.Module) -> int:
    """Host memory of storages that are not dead yet, once the engine is done with them."""
    gc.collect()
    settle(model.memory)
    offloader = model._odc_runtime.activations.offloader
    offloader.sweep()
    return offloader.home_bytes


CASES = (
    ("dense", "checkpoint", "backward"),
    ("moe", "offload", "step"),
    ("adapters", "checkpoint", "step"),
    ("called twice", "offload", "backward"),
)
SLOW_CASES = (
    ("dense", "offload", "step"),
    ("dense", "offload", "backward"),
    ("moe", "checkpoint", "step"),
    ("moe", "offload", "backward"),
    ("tied", "offload", "backward"),
    ("frozen in front", "checkpoint", "step"),
    ("frozen in the middle", "offload", "step"),
    ("adapters", "offload", "step"),
    ("called twice", "checkpoint", "step"),
    ("dense, checkpointed", "offload", "step"),
    ("moe, checkpoint of two", "offload", "step"),
)


@pytest.mark.parametrize(
    ("name", "mode", "update"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_no_mode_changes_a_bit(name, mode, update):
    def script(model, optimizer):
        return train(model, optimizer, range(3))

    assert_same(script, name, budget=20, activations=mode, update=update)


def test_clipping_and_accumulation_change_no_bit_either():
    plain, _ = plain_pair(models.build("dense"))
    expected = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
    options = {"accumulate": 2, "max_grad_norm": 0.5, "activations": "offload"}
    with paged_pair("dense", 16, **options) as (paged, optimizer):
        for step in range(3):
            for model, own in ((plain, expected), (paged, optimizer)):
                own.zero_grad()
                for micro in range(2):
                    (model(*batch(10 * step + micro)) / 2).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5, foreach=False)
            expected.step()
            optimizer.step()
        weights = paged.state_dict()
        assert all(torch.equal(weights[k], v) for k, v in plain.state_dict().items())


def saved_bytes(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> int:
    """Bytes of the distinct storages that autograd saves in a plain model, parameters aside."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    given = {t.untyped_storage()._cdata for t in inputs}
    found: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights | given:
            found[storage._cdata] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*inputs)
    del loss
    return sum(size for _, size in found.values())


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_peak_is_what_is_saved_and_falls_as_predicted(name):
    expected = saved_bytes(models.build(name), batch(0))
    kept = None
    for mode in MODES:
        with paged_pair(name, BUDGETS[name], activations=mode) as (model, optimizer):
            train(model, optimizer, range(1))
            account = account_of(model)
            measured, profile = account.max_peak_bytes, account.profile
            assert account.live_bytes == 0
            if mode == "keep":
                kept = profile
                assert measured == expected
                assert set(profile.by_layer()) == {
                    n for n, _ in model.named_modules() if n[:-1] == "layers."
                }
            predicted = predict_peak(kept, mode)
            assert abs(measured - predicted) <= 0.1 * (expected - predicted) + 1024
            if mode == "checkpoint":
                assert measured < 0.6 * expected
                assert [predict_peak(profile, m) for m in MODES] == [
                    predict_peak(kept, m) for m in MODES
                ]


def test_a_chunked_loss_saves_what_was_predicted():
    with paged_pair("dense", 12) as (model, optimizer):
        train(model, optimizer, range(1))
        predicted = account_of(model).savings()["loss_chunk"]
        before = account_of(model).max_peak_bytes
    chunked = models.build("dense")
    chunked.loss_chunk = 32
    with paged_pair(chunked, 12) as (model, optimizer):
        train(model, optimizer, range(1))
        saved = before - account_of(model).max_peak_bytes
    assert saved == pytest.approx(predicted, rel=0.1)


def test_a_larger_batch_and_a_traced_step_are_measured_anew():
    with paged_pair("dense", 12) as (model, optimizer):
        train(model, optimizer, range(1))
        account, meter = account_of(model), model._odc_runtime.activations.meter
        small = account.max_peak_bytes
        train(model, optimizer, range(1, 2))
        assert not meter.active
        optimizer.zero_grad()
        model(*batch(2, size=6)).backward()
        assert account.max_peak_bytes == pytest.approx(1.5 * small, rel=0.1)
        assert account.profile.tokens == 6 * 32
        assert account.live_bytes == 0


def test_offload_moves_activations_apart_from_pages():
    moved = {}
    for mode in ("keep", "offload"):
        memory = MemoryManager(page_budget=12 * MIB, link_bandwidth=2e9)
        with paged_pair("dense", None, memory=memory, activations=mode) as (model, optimizer):
            settle(memory)
            memory.take()
            before = memory.home.traffic[Tier.HOST].bytes_in
            train(model, optimizer, range(3))
            settle(memory)
            moved[mode] = memory.take()
            assert memory.home.traffic[Tier.HOST].bytes_in - before == moved[mode].bytes_in
            assert (memory._home_bytes > memory.home.used_bytes) == (mode == "offload")
    assert moved["keep"].activation_bytes_in == moved["keep"].activation_bytes_out == 0
    assert moved["offload"].activation_bytes_out >= moved["offload"].activation_bytes_in > MIB


# -- nothing leaks -----------------------------------------------------------------------------


class Trap:
    """Raises in the forward or the backward of a module, once."""

    def __init__(self, module: nn.Module) -> None:
        self.where = ""
        module.register_forward_hook(self._forward)

    def _forward(self, module, args, output):
        self._spring("forward")
        output.register_hook(lambda grad: self._spring("backward"))

    def _spring(self, where):
        if self.where == where:
            self.where = ""
            raise KeyError("trap")


@pytest.mark.parametrize("mode", ["keep", "checkpoint", "offload"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(mode, where):
    def script(model, optimizer):
        trap = Trap(model.layers[2].attn)
        losses = train(model, optimizer, range(1))
        optimizer.zero_grad()
        trap.where = where
        with pytest.raises(KeyError, match="trap"):
            model(*batch(1)).backward()
        losses += train(model, optimizer, range(2, 4))
        if mode == "offload" and hasattr(model, "memory"):
            assert home_bytes(model) == 0
        return losses

    assert_same(script, budget=12, activations=mode)


@pytest.mark.parametrize("mode", MODES)
def test_graphs_that_are_dropped_kept_or_walked_twice_leave_nothing_behind(mode):
    def script(model, optimizer):
        found = train(model, optimizer, range(1))
        optimizer.zero_grad()
        model(*batch(1))  # its backward never comes
        with torch.no_grad():
            found.append(model(*batch(2)))
        first, second = model(*batch(3)), model(*batch(4))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        optimizer.step()
        found += [first.detach(), second.detach()]
        del first, second
        if hasattr(model, "memory"):
            assert account_of(model).live_bytes == 0
            if mode == "offload":
                assert home_bytes(model) == 0
        return found

    assert_same(script, budget=12, activations=mode)


def test_a_kept_graph_leaves_the_device_between_its_backwards():
    with paged_pair("dense", 12, activations="offload") as (model, optimizer):
        loss = model(*batch(0))
        account = account_of(model)
        waiting = account.live_bytes
        for _ in range(2):
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
            assert account.live_bytes <= waiting
        last = max(account.profile.by_layer().values())  # its storages stay where they are
        assert account.max_peak_bytes <= 1.1 * (predict_peak(account.profile, "offload") + last)
        assert home_bytes(model) > 0
        del loss
        assert home_bytes(model) == 0


class InPlace(nn.Module):
    """Layers, one of which changes what another has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.spoil = False

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x).exp()
        second = self.layers[1](first)
        if self.spoil:
            with torch.no_grad():
                first.add_(1)
        return self.layers[3](self.layers[2](second)).sum()


@pytest.mark.parametrize("mode", ["keep", "offload"])
def test_a_saved_tensor_that_was_changed_in_place_is_refused_as_in_plain_pytorch(mode):
    model, _ = odc.paged(InPlace(), page_budget="8MB", activations=mode)
    x = torch.randn(64, 128)
    for spoil in (False, True, True):
        model.spoil = spoil
        loss = model(x)
        if spoil:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
    model.close()


class Noisy(nn.Module):
    """Layers with dropout, and one number that every layer is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NoisyLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


class NoisyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 256)
        self.back = nn.Linear(256, 128)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.back(nn.functional.dropout(self.inner(x), 0.3))


def test_recomputed_dropout_draws_the_same_numbers():
    found = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = Noisy().state_dict()
        for mode in MODES:
            model = Noisy()
            model.load_state_dict(state)
            made, optimizer = odc.paged(model, page_budget="8MB", activations=mode)
            torch.manual_seed(1)
            losses = []
            for _ in range(3):
                loss = made(torch.randn(32, 128))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            found.append(losses)
            made.close()
    assert_equal_values(found[1], found[0])
    assert_equal_values(found[2], found[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_of_ones_own_inside_a_layer_still_recomputes(mode):
    runs = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(x.shape)
            return super().forward(x).relu()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    model, _ = odc.paged(Model(), page_budget="8MB", activations=mode)
    model(torch.randn(64, 128, requires_grad=True)).backward()
    assert len(runs) >= 6
    model.close()


# -- errors ------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused():
    with pytest.raises(odc.ConfigError, match="keep, checkpoint, offload, got 'drop'"):
        odc.paged(models.build("dense"), activations="drop")
    with pytest.raises(odc.ConfigError, match=r"no nn\.ModuleList .* use 'keep'"):
        odc.paged(nn.Linear(4, 4), activations="checkpoint")


def test_a_budget_that_activations_exceed_names_them_and_what_would_help():
    with paged_pair("dense", None, total_mem="96MB") as (model, optimizer):
        train(model, optimizer, range(1))
        ledger = model.memory.ledger
        taken = ledger.base_bytes + model.memory.pool.num_bytes + model.memory._home_bytes
        ledger.usage = lambda: (taken, max(taken + 95 * MIB, ledger.seen_peak_bytes + 1))
        with pytest.raises(odc.BudgetError) as caught:
            model.memory.rebalance()
        text = str(caught.value)
        saves = ledger.activations.savings()["checkpoint"]
        for part in (
            "activations",
            "layers.0",
            "logits",
            'activations="checkpoint" saves about',
            "micro-batch",
        ):
            assert part in text, text
        assert odc.sizes.format_bytes(saves) in text


# -- models of transformers ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen"])
def test_layers_that_are_given_caches_save_what_was_predicted(kind):
    transformers = pytest.importorskip("transformers")
    width = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    shared = {**width, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 500}
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    build = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=500)
        ),
        "qwen": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**shared, **experts)
        ),
    }[kind]
    kept, expected = None, []
    for mode in MODES:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, optimizer = odc.paged(
                build().train(), page_budget="24MB", activations=mode, lr=1e-3
            )
            losses = []
            for _ in range(2):
                ids = torch.randint(0, 500, (4, 64))
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        account = account_of(model)
        kept = kept or account.profile
        expected = expected or losses
        assert losses == expected
        assert account.max_peak_bytes == pytest.approx(predict_peak(kept, mode), rel=0.05)
        model.close()
