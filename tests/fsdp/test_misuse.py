"""What a careless user does to a paged model: a clear error, and a way on."""

import os

import pytest
import torch
from torch import nn

import odc


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

    def test_an_interrupted_update_leaks_no_pins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = small()
        original, calls = optimizer._run_kernel, []

        def interrupted(*arguments: object) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            original(*arguments)

        monkeypatch.setattr(optimizer, "_run_kernel", interrupted)
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
        original, calls = optimizer._run_kernel, []

        def interrupted(*arguments: object) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            original(*arguments)

        monkeypatch.setattr(optimizer, "_run_kernel", interrupted)
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
