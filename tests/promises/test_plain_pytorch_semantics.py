"""A loop on a paged model means what it means in plain PyTorch, or an error says what to change.

Each script runs on a plain model and on a paged one; losses, weights and moments must be equal to
the last bit.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import odc
from odc.errors import PagedGradientError
from tests.fsdp import models
from tests.fsdp.pair import assert_same, loss_of, paged_pair, plain_pair, train

UPDATES = ("step", "backward")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"update": "backward", "accumulate": 2}])
def test_a_second_backward_through_a_kept_graph_adds_up(options):
    def script(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()

    assert_same(script, **options)


def test_a_second_backward_after_an_update_in_backward_names_the_option():
    with paged_pair(update="backward") as (model, _):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="update='step'"):
            loss.backward()


def test_a_backward_through_a_graph_older_than_the_step_is_an_error():
    # torch's fused AdamW does not raise the version counter: plain PyTorch says nothing here
    with paged_pair() as (model, optimizer):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("way", ["model", "parameters"])
def test_every_way_to_forget_gradients_is_zero_grad(way, update):
    def script(model, optimizer):
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            if way == "model":
                model.zero_grad()
            else:
                for parameter in model.parameters():
                    parameter.grad = None

    assert_same(script, update=update)


def test_gradients_thrown_away_before_the_step_change_nothing():
    def script(model, optimizer):
        for step in range(4):
            loss_of(model, step).backward()
            if step == 2:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    assert_same(script)
    with (
        paged_pair(update="backward") as (model, optimizer),
        pytest.raises(RuntimeError, match="update='step'"),
    ):
        script(model, optimizer)


@pytest.mark.parametrize("update", UPDATES)
def test_forgetting_zero_grad_is_an_error(update):
    with paged_pair(update=update) as (model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()
        loss = loss_of(model, 1)
        with pytest.raises(RuntimeError, match="zero_grad"):
            loss.backward()


@pytest.mark.parametrize("update", UPDATES)
def test_stepping_twice_is_an_error(update):
    with paged_pair(update=update) as (model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="again without"):
            optimizer.step()


def test_more_backwards_than_declared_are_an_error():
    with paged_pair(update="backward", accumulate=2) as (model, _):
        for micro in range(2):
            loss_of(model, 0, micro).backward()
        loss = loss_of(model, 0, 2)
        with pytest.raises(RuntimeError, match="accumulate=2"):
            loss.backward()


def test_fewer_backwards_than_declared_are_a_step_all_the_same():
    def script(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    assert_same(script, update="backward", accumulate=3)


def test_zero_gradients_instead_of_none_are_refused():
    with paged_pair() as (model, optimizer):
        for owner in (model, optimizer):
            with pytest.raises(ValueError, match="set_to_none=True"):
                owner.zero_grad(set_to_none=False)


@pytest.mark.parametrize("update", UPDATES)
def test_a_gradient_is_never_silently_missing(update):
    with paged_pair(update=update) as (model, optimizer):
        weight = model.layers[0].attn.q_proj.weight
        assert weight.grad is None
        loss_of(model, 0).backward()
        with pytest.raises(PagedGradientError, match=r"max_grad_norm|update='step'"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with pytest.raises(PagedGradientError, match="total_mem='unlimited'"):
            _ = weight.grad
        optimizer.zero_grad()
        assert weight.grad is None


@pytest.mark.parametrize("update", UPDATES)
def test_loss_scaling_is_refused(update):
    with paged_pair(update=update) as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(PagedGradientError):
            scaler.step(optimizer)


def test_the_optimizer_hands_out_copies_of_gradients():
    plain, _ = plain_pair(models.build("dense"))
    loss_of(plain, 0).backward()
    with paged_pair() as (model, optimizer):
        loss_of(model, 0).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(optimizer.gradient(ours), theirs.grad)


def test_autograd_grad_returns_gradients_and_leaves_none_behind():
    def script(model, optimizer):
        found = []
        for step in range(4):
            optimizer.zero_grad()
            found += torch.autograd.grad(loss_of(model, step, 1), list(model.parameters()))
            loss_of(model, step).backward()
            optimizer.step()
        return found

    for update in UPDATES:
        assert_same(script, update=update)


def test_gradients_of_gradients_are_refused_under_a_budget_and_right_without_one():
    def script(model, optimizer):
        loss = loss_of(model, 0)
        weight = model.layers[0][1].weight
        (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
        (loss + first.square().sum()).backward()
        optimizer.step()

    assert_same(script, "called twice", budget=None)
    with (
        paged_pair("called twice") as (model, optimizer),
        pytest.raises(RuntimeError, match="unlimited"),
    ):
        script(model, optimizer)


# -- optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
def test_a_closure_is_called_as_in_plain_pytorch(update):
    def script(model, optimizer):
        losses = []
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return losses

    assert_same(script, update=update)


@pytest.mark.parametrize("update", UPDATES)
def test_schedules_that_change_rate_and_betas_are_followed(update):
    def script(model, optimizer):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8)
        for step in range(6):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
        return schedule.get_last_lr()

    assert_same(script, update=update)


def test_state_goes_to_plain_pytorch_and_back():
    plain, plain_optimizer = plain_pair(models.build("moe"))
    with paged_pair("moe", 14) as (model, optimizer):
        train(model, optimizer, range(3))
        plain.load_state_dict(model.state_dict())
        plain_optimizer.load_state_dict(optimizer.state_dict())
    expected = train(plain, plain_optimizer, range(3, 6))
    with paged_pair("moe", 14) as (model, optimizer):
        train(model, optimizer, range(3))
        assert all(map(torch.equal, train(model, optimizer, range(3, 6)), expected))
    with paged_pair("moe", 14) as (model, optimizer):
        train(model, optimizer, range(7, 9))  # something to be overwritten
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(plain_optimizer.state_dict())
        found = train(model, optimizer, range(6, 9))
        expected = train(plain, plain_optimizer, range(6, 9))
        assert all(map(torch.equal, found, expected))


def test_a_wrong_state_is_refused():
    with paged_pair() as (model, optimizer):
        state = model.state_dict()
        name = next(iter(state))
        with pytest.raises(RuntimeError, match="missing"):
            model.load_state_dict({k: v for k, v in state.items() if k != name})
        with pytest.raises(RuntimeError, match=r"shape \(1,\)"):
            model.load_state_dict({**state, name: torch.zeros(1)})
        train(model, optimizer, range(1))
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"] = torch.zeros(1)
        with pytest.raises(ValueError, match="shape"):
            optimizer.load_state_dict(saved)


def test_a_foreign_optimizer_is_refused_under_a_budget():
    with paged_pair() as (model, _):
        foreign = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        with pytest.raises(PagedGradientError):
            foreign.step()
    model, _ = odc.paged(models.build("dense"), None, page_budget="12MB")
    loss = loss_of(model, 0)
    with pytest.raises(RuntimeError, match="optimizer=torch.optim.AdamW"):
        loss.backward()
    model.close()


def test_other_optimizers_and_options_are_refused_by_name():
    for optimizer, options, words in (
        (torch.optim.SGD, {}, "unlimited"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
        (torch.optim.AdamW, {"update": "later"}, "'step' or 'backward'"),
        (torch.optim.AdamW, {"update": "backward", "max_grad_norm": 1.0}, "update='step'"),
    ):
        with pytest.raises(ValueError, match=words):
            odc.paged(models.build("dense"), optimizer, page_budget="12MB", **options)


def test_a_trainable_parameter_that_no_group_names_is_refused():
    def only_heads(model):
        return list(model.head.parameters())

    with pytest.raises(ValueError, match="requires_grad_"):
        odc.paged(models.build("dense"), page_budget="12MB", param_groups=only_heads)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_any_optimizer_trains_a_model_without_a_budget(kind):
    def loop(model):
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if kind == "SGD"
            else torch.optim.AdamW(model.parameters(), lr=1e-3)
        )
        for step in range(4):
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = loop(models.build("moe"))
    model, _ = odc.paged(models.build("moe"), None, total_mem="unlimited")
    found = loop(model)
    model.close()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_without_a_budget_gradients_are_where_torch_has_them():
    def script(model, optimizer):
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            loss_of(model, step, 1).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.step()
        return norms

    assert_same(script, budget=None)


# -- the model -----------------------------------------------------------------------------------


def test_a_paged_model_cannot_be_copied_or_pickled():
    with paged_pair() as (model, _):
        for action in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="state_dict"):
                action(model)
        with pytest.raises(RuntimeError, match="state_dict"):
            copy.deepcopy(model.norm.weight)


def test_a_paged_model_stays_where_it_is():
    with paged_pair() as (model, _):
        assert model.to("cpu") is model and model.float() is model
        with pytest.raises(RuntimeError, match="before odc.paged"):
            model.half()


def test_freezing_after_paging_skips_as_torch_does():
    def script(model, optimizer):
        for step in range(6):
            model.layers[1].requires_grad_(step % 3 != 1)
            model.layers[2].attn.q_proj.weight.requires_grad = step % 2 == 0
            train(model, optimizer, range(step, step + 1))

    for update in UPDATES:
        assert_same(script, update=update)


def test_thawing_what_was_frozen_when_it_was_paged_is_an_error():
    with paged_pair("frozen in the middle", 10) as (model, _):
        with pytest.raises(RuntimeError, match="before odc.paged"):
            model.layers[1].requires_grad_(True)
        model.layers[0].requires_grad_(True)


def test_a_model_without_a_budget_that_updates_in_backward_trains():
    for name in ("dense", "moe, checkpointed"):
        assert_same(
            lambda model, optimizer: train(model, optimizer, range(4)),
            name,
            budget=None,
            update="backward",
        )


def test_printing_loads_nothing():
    with paged_pair() as (model, _):
        before = model.memory.counters.accesses
        text = f"{model} {model.embed.weight} {model.embed.weight!r}"
        assert "PagedParameter(embed.weight, shape=(384, 128)" in text
        assert sum(p.numel() for p in model.parameters()) > 0
        assert model.memory.counters.accesses == before
