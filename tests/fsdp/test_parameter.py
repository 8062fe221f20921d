"""A parameter tells its shape and kind anywhere; its values are there while its group is pinned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import odc
from odc.errors import AbsentParameterError
from tests.fsdp import models
from tests.fsdp.pair import assert_same, paged_pair, train

READS = {
    "norm": lambda p: p.norm(),
    ".data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    ".T": lambda p: p.T,
    "__getitem__": lambda p: p[0],
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "linear": lambda p: nn.functional.linear(torch.zeros(1, p.size(1)), p),
    "_foreach_norm": lambda p: torch._foreach_norm([p]),
    "view": lambda p: nn.utils.parameters_to_vector([p]),
    "zero_": lambda p: nn.init.zeros_(p),
    "untyped_storage": lambda p: p.untyped_storage(),
}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    model, _ = odc.paged(models.build("dense"), page_budget="12MB")
    yield model
    model.close()


@pytest.mark.parametrize("name", READS)
def test_reading_a_parameter_that_is_not_there_is_an_error_that_says_how(model, name):
    weight = model.layers[1].attn.q_proj.weight
    with pytest.raises(AbsentParameterError) as caught:
        READS[name](weight)
    assert str(caught.value).startswith(f"{name} reads paged parameter layers.1.attn.q_proj.weight")
    assert "with model.resident('layers.1.attn.q_proj.weight'):" in str(caught.value)


@pytest.mark.parametrize("name", set(READS) - {"zero_"})
def test_what_is_pinned_can_be_read(model, name):
    weight = model.layers[1].attn.q_proj.weight.requires_grad_(False)
    with model.resident("layers.1"):
        READS[name](weight)


def test_shape_and_kind_can_be_asked_anywhere(model):
    weight = model.layers[1].attn.q_proj.weight
    assert weight.shape == (128, 128) and weight.size(0) == 128 and weight.numel() == 128 * 128
    assert weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_leaf
    assert weight.element_size() == 4 and weight.is_contiguous() and weight.dim() == 2
    assert torch.zeros_like(weight).sum() == 0 and len(weight) == 128
    assert weight.grad is None and hash(weight) == id(weight)


def test_values_are_those_of_the_plain_model(model):
    plain = dict(models.build("dense").named_parameters())
    for name, parameter in model.named_parameters():
        with model.resident(name):
            assert torch.equal(parameter, plain[name])


def test_a_tied_name_is_a_name():
    with (
        paged_pair("tied") as (model, _),
        model.resident("head.weight"),
    ):
        assert model.head.weight is model.embed.weight
        model.head.weight.norm()


def test_an_unknown_name_is_an_error(model):
    with pytest.raises(ValueError, match="'laters'"):
        model.resident("laters")


def test_changes_are_kept_where_they_are_announced():
    def script(model, optimizer):
        train(model, optimizer, range(2))
        resident = getattr(model, "resident", None)
        with torch.no_grad():
            if resident is None:
                model.layers[2].mlp.w1.weight.mul_(0.5)
            else:
                with resident("layers.2.mlp", write=True):
                    model.layers[2].mlp.w1.weight.mul_(0.5)
        return train(model, optimizer, range(2, 4))

    assert_same(script)


def test_changes_that_are_not_announced_are_an_error():
    with (
        paged_pair() as (model, _),
        pytest.raises(RuntimeError, match="write=True"),
        torch.no_grad(),
        model.resident("layers.2"),
    ):
        model.layers[2].mlp.w1.weight.mul_(0.5)


def test_a_submodule_can_be_called_by_itself():
    plain = models.build("dense")
    x = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(0))
    with paged_pair() as (model, _), torch.no_grad():
        for ours, theirs in ((model.embed, plain.embed), (model.head, plain.head)):
            given = torch.arange(4) if ours is model.embed else x
            assert torch.equal(ours(given), theirs(given))


def test_parameters_that_stay_resident_are_read_as_in_plain_pytorch():
    with paged_pair(budget=None) as (model, _):
        plain = models.build("dense")
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
