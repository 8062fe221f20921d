"""What a careless user does to a paged model: a clear error, and a way on."""

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import odc
import odc.fsdp.optimizer as kernel
from odc.memory.manager import MemoryManager


def small(**arguments: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    model, optimizer = odc.paged(Chain(), page_budget="12MB", lr=1e-3, **arguments)
    assert optimizer is not None
    return model, optimizer


X = torch.ones(2, 512)


@pytest.mark.filterwarnings("ignore:.*compute threads")
class TestMisuse:
    def test_a_closed_model_says_so(self) -> None:
        model, _ = small()
        loss = model(X)
        model.close()
        for use in (lambda: model(X), loss.backward, model.state_dict):
            with pytest.raises(odc.OdcError, match="closed"):
                use()

    def test_a_closed_model_can_be_collected(self) -> None:
        model, optimizer = small()
        model(X).backward()
        optimizer.step()
        model.close()
        layer = weakref.ref(model.layers[0])
        del model, optimizer
        gc.collect()
        assert layer() is None

    @pytest.mark.parametrize("options", [{}, {"page_budget": "16MB", "where": "home"}])
    def test_a_model_that_is_dropped_gives_its_memory_back(self, options) -> None:
        model, optimizer = odc.paged(
            nn.Sequential(nn.Linear(512, 512)), torch.optim.AdamW, lr=1e-3, **options
        )
        model(X).sum().backward()
        optimizer.step()
        memory, before = model.memory, threading.active_count()
        layer = weakref.ref(model[0])
        del model, optimizer
        gc.collect()
        assert layer() is None and threading.active_count() < before
        with pytest.raises(odc.OdcError, match="closed"):
            memory.begin_pass(0)

    def test_an_interrupted_update_leaks_no_pins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = small()
        original, calls = kernel.update, []

        def interrupted(*arguments: object) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            original(*arguments)

        monkeypatch.setattr(kernel, "update", interrupted)
        model(X).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
        optimizer.zero_grad()
        model.memory.transfers.check()
        assert not any(model.memory.table.pins)

    def test_an_interrupted_backward_that_updated_can_be_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = small(update="backward")
        original, calls = kernel.update, []

        def interrupted(*arguments: object) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            original(*arguments)

        monkeypatch.setattr(kernel, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(X).backward()
        for _ in range(2):  # what was updated stays: the step counts, and training goes on
            optimizer.step()
            optimizer.zero_grad()
            model(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(model.memory.table.pins)

    @pytest.mark.parametrize(
        "arguments",
        [{"max_grad_norm": -1.0}, {"max_grad_norm": float("nan")}, {"accumulate": 2.5}],
    )
    def test_numbers_that_cannot_work_are_refused(self, arguments: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            small(**arguments)

    def test_two_limits_at_once_are_refused(self) -> None:
        with pytest.raises(odc.ConfigError, match=r"drop page_budget .* or drop total_mem"):
            small(total_mem="1GB")
        with pytest.raises(odc.ConfigError, match="memory: .*drop total_mem and page_budget"):
            small(memory=MemoryManager(page_budget="12MB"))
        small(total_mem="unlimited")

    def test_errors_name_arguments_as_python_does(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for arguments, told in (
            ({"page_budget": "2MB"}, r"^page_budget: .*\(page_size\)"),
            ({"total_mem": "2MB"}, r"^total_mem: .*\(page_size\)"),
            ({"home": "tape"}, "^home must be"),
            ({"page_budget": "40MB", "home": "disk", "home_dir": tmp_path / "file"}, "^home_dir: "),
        ):
            with pytest.raises(odc.OdcError, match=told):
                odc.paged(nn.Linear(1024, 1024), lr=1e-3, **arguments)

    def test_an_optimizer_that_was_made_already_is_refused(self) -> None:
        model = nn.Linear(4, 4)
        with pytest.raises(odc.OdcError, match="optimizer must be a class, got an instance of SGD"):
            odc.paged(model, torch.optim.SGD(model.parameters()))

    def test_a_parameter_without_a_shape_is_named(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
        with pytest.raises(odc.OdcError, match=r"^1\.weight has no shape .* run one forward"):
            odc.paged(model, lr=1e-3)
        model(torch.ones(1, 4))
        odc.paged(model, lr=1e-3)

    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_a_sparse_gradient_is_refused_before_training(self, kind: type[nn.Module]) -> None:
        with pytest.raises(odc.OdcError, match="^0: sparse=True .* use sparse=False"):
            odc.paged(nn.Sequential(kind(8, 4, sparse=True)), lr=1e-3)
        odc.paged(nn.Sequential(kind(8, 4, sparse=True)), None)

    def test_a_model_without_trainable_parameters_names_the_argument(self) -> None:
        with pytest.raises(ValueError, match="optimizer=None"):
            odc.paged(nn.Linear(4, 4).requires_grad_(False), lr=1e-3)

    def test_smaller_pages_fit_a_smaller_budget(self) -> None:
        with pytest.raises(odc.BudgetError):
            odc.paged(nn.Linear(2048, 2048), page_budget="40MB", lr=1e-3)
        model, optimizer = odc.paged(
            nn.Linear(2048, 2048), page_budget="40MB", page_size="2MB", lr=1e-3
        )
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.step()

    def test_a_forked_child_is_told_that_it_has_no_transfers(self) -> None:
        model, _ = small()
        model(X)
        pid = os.fork()
        if pid == 0:
            try:
                model(X)
            except odc.OdcError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(("name", "meant"), [("hom", "home"), ("lrr", "lr"), ("xyzzy", None)])
def test_an_argument_that_nobody_knows_is_not_blamed_on_adamw(name: str, meant: str | None) -> None:
    with pytest.raises(TypeError, match=f"argument {name}") as raised:
        odc.paged(nn.Linear(2, 2), torch.optim.AdamW, **{name: 1})
    assert ("did you mean" in str(raised.value)) == (meant is not None)
    assert meant is None or str(raised.value).endswith(f"did you mean {meant}?")
