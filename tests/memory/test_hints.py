"""Hints: what is known before a pass saves its stalls, and what is wrong changes no result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import odc
from odc.memory.frames import FRAME_BYTES
from odc.memory.manager import popularity
from odc.memory.replay import budget_for, link_for, synthetic
from odc.memory.replay.simulate import virtual_drive
from odc.memory.victims import CostAware, Lru


def elapsed_ns(name: str, told: bool) -> int:
    """Of the measured passes of a workload whose mask is told at the beginning of each, or not."""
    workload = synthetic(name)
    drive = virtual_drive(
        workload,
        budget_bytes=budget_for(workload, 0.5),
        link=link_for(workload, 2.0),
        eviction=CostAware(),
        prefetch=popularity,
    )
    pager = drive.pager
    used: dict[int, set[int]] = {}
    for visit in workload.visits:
        used.setdefault(visit.step, set()).add(visit.bundles[0].group)
    groups = list(range(len(pager.table.groups)))
    begin = pager.begin_pass

    def begin_pass(ctx: int, tokens: int = 0) -> None:
        begin(ctx, tokens)
        pager.hint(groups, [float(g in used[pager.step]) for g in groups])

    if told:
        pager.begin_pass = begin_pass  # type: ignore[method-assign]
    return sum(p.elapsed_ns for p in drive.run().after(8).passes)


@pytest.mark.parametrize(("name", "share"), [("W5p30", 0.88), ("W5b", 0.95)])
def test_a_mask_that_is_told_saves_time(name: str, share: float) -> None:
    assert elapsed_ns(name, told=True) < share * elapsed_ns(name, told=False)


def test_without_a_prefetcher_hints_are_not_read_and_each_needs_a_score() -> None:
    workload = synthetic("W1", steps=1)
    budget, link = budget_for(workload, 0.5), link_for(workload, 2.0)
    drive = virtual_drive(workload, budget_bytes=budget, link=link, eviction=Lru())
    drive.pager.hint([0], [0.0])
    with pytest.raises(ValueError, match="one for each of 2, got 1"):
        drive.pager.hint([0, 1], [0.0])
    drive.run()


# -- a paged model ---------------------------------------------------------------------------------

WIDTH, DEPTH = 400, 6


class LayerDrop(nn.Module):
    """Residual layers, some of which a mask leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
        self.mask = [True] * DEPTH
        self.inside: list[float] | None = None  # scores to tell within the forward

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            self.hint(list(self.layers), self.inside)  # type: ignore[operator]
        for layer, kept in zip(self.layers, self.mask, strict=True):
            if kept:
                x = x + layer(x)
        return x.square().mean()


def train(how: str, steps: int = 6) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, optimizer = odc.paged(
        LayerDrop(), page_budget=14 * FRAME_BYTES, page_size=2 * FRAME_BYTES, lr=1e-3
    )
    assert optimizer is not None
    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        model.mask = [bool(kept) for kept in rng.random(DEPTH) > 0.3]
        scores = [float(kept) for kept in model.mask]
        if how == "wrong":
            scores = [1.0 - score for score in scores]
        if how == "inside":
            model.inside = scores
        elif how != "none":
            model.hint([f"layers.{n}" for n in range(DEPTH)], scores)  # type: ignore[attr-defined]
        loss = model(torch.full((4, WIDTH), 0.5))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = model.state_dict()
    model.close()  # type: ignore[attr-defined]
    return losses, state


@pytest.fixture
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["right", "wrong", "inside"])
def test_hints_change_no_result(how: str, few_threads: None) -> None:
    losses, state = train("none")
    told_losses, told_state = train(how)
    assert losses == told_losses
    assert all(torch.equal(state[name], told_state[name]) for name in state)


def test_a_hint_before_a_forward_reaches_its_plan(few_threads: None) -> None:
    """And only that forward's."""
    model, _ = odc.paged(
        LayerDrop(), optimizer=None, page_budget=14 * FRAME_BYTES, page_size=2 * FRAME_BYTES
    )
    hinted: list[dict[int, float]] = []
    prefetcher = model.memory.prefetcher  # type: ignore[attr-defined]
    model.layers[2].register_forward_pre_hook(
        lambda *_: hinted.append(dict(prefetcher.hinted)), prepend=True
    )
    with torch.no_grad():
        for scores in ([0.0, 1.0], None):
            if scores is not None:
                model.hint([model.layers[1], "layers.2"], scores)  # type: ignore[attr-defined]
            model.mask = [True, False, True, True, True, True]
            model(torch.ones(2, WIDTH))
    assert sorted(hinted[0].values()) == [0.0, 1.0] and hinted[1] == {}
    model.close()  # type: ignore[attr-defined]


def test_what_is_unknown_is_refused_with_what_to_do(few_threads: None) -> None:
    model, _ = odc.paged(LayerDrop(), optimizer=None, page_budget=14 * FRAME_BYTES)
    for modules, scores, message in (
        (["layers.9"], [1.0], "no module 'layers.9'"),
        ([nn.Linear(2, 2)], [1.0], "this Linear is no module"),
        (["layers.0.1"], [1.0], "'layers.0.1' has no pages of its own; name the layer"),
        (["layers.0"], [1.5], "from 0 to 1, got 1.5"),
        (["layers.0"], [], "one a module, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            model.hint(modules, scores)  # type: ignore[attr-defined]
    model.close()  # type: ignore[attr-defined]
