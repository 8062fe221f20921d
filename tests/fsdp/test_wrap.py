"""Which modules are units, who owns a parameter, and how a group's parameters lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from odc.fsdp.group import ALIGNMENT, lay_out
from odc.fsdp.wrap import Place, find_units
from odc.train.config_model import ModelConfig
from odc.train.models import build_model


def owned(model: nn.Module) -> dict[str, list[str]]:
    return {u.fqn: [p.fqn for p in u.owned] for u in find_units(model)[0]}


def transformer(**shape):
    return build_model(ModelConfig(hidden_size=32, num_layers=2, **shape), 300, device="meta")


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 2, 1)
        self.parts = nn.ModuleDict({"embed": nn.Embedding(4, 2), "up": nn.Linear(2, 2)})
        self.attention = nn.MultiheadAttention(2, 1)
        self.stages = nn.ModuleList(
            [
                nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
                nn.ModuleDict({"a": nn.Linear(2, 2)}),
                nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
                nn.ParameterList([torch.zeros(2)]),
            ]
        )


def test_layers_embeddings_heads_and_the_rest_are_units():
    found = owned(transformer())
    assert list(found) == ["embed", "layers.0", "layers.1", "head", ""]
    assert found["embed"] == ["embed.weight"]
    assert "layers.1.attn.q_proj.weight" in found["layers.1"]
    assert found[""] == ["norm.weight"]


def test_every_parameter_has_exactly_one_owner():
    for model in (transformer(num_experts=3), transformer(tie_embeddings=True), Nested()):
        places = [name for names in owned(model).values() for name in names]
        assert sorted(places) == sorted(name for name, _ in model.named_parameters())


def test_experts_are_units_inside_their_layer():
    units, sets = find_units(transformer(num_experts=3))
    by_name = {u.fqn: u for u in units}
    expert = by_name["layers.1.mlp.experts.2"]
    assert (expert.layer, expert.expert, expert.set_index) == (1, 2, 1)
    assert [p.fqn for p in expert.parents] == ["layers.1", ""]
    assert [len(s.members) for s in sets] == [3, 3]
    assert sets[1].members[2] is expert
    assert "layers.1.mlp.router.weight" in owned(transformer(num_experts=3))["layers.1"]


def test_a_tied_head_uses_the_embedding_s_group():
    units, _ = find_units(transformer(tie_embeddings=True))
    by_name = {u.fqn: u for u in units}
    assert by_name["head"].tied == [by_name["embed"]]
    assert not by_name["head"].owned
    assert [a.fqn for a in by_name["embed"].aliases] == ["head.weight"]


def test_containers_that_are_never_called_are_no_units():
    found = owned(Nested())
    assert found["stages.0.0"] == ["stages.0.0.weight", "stages.0.0.bias"]
    assert found["stages.1.a"] == ["stages.1.a.weight", "stages.1.a.bias"]
    assert found["stages.2"] == ["stages.2.0.weight", "stages.2.0.bias"]
    assert "stages.3.0" in found[""]
    assert found["parts.up"] == ["parts.up.weight", "parts.up.bias"]


def test_a_linear_layer_that_its_owner_may_read_without_calling_is_no_unit():
    found = owned(Nested())
    assert "attention.out_proj" not in found
    assert "attention.out_proj.weight" in found[""]


def test_a_layer_that_is_listed_twice_is_one_unit():
    model = nn.Module()
    layer = nn.Linear(2, 2)
    model.layers = nn.ModuleList([layer, nn.Linear(2, 2), layer])
    assert sum(bool(names) for names in owned(model).values()) == 2


def test_experts_without_parameters_of_their_own_are_not_a_set():
    model = transformer(num_experts=3)
    model.layers[0].mlp.experts[1] = nn.Identity()
    units, sets = find_units(model)
    assert len(sets) == 1 and sets[0].module is model.layers[1].mlp
    assert {u.set_index for u in units if u.fqn.startswith("layers.0.mlp.experts")} == {-1}
    assert {u.set_index for u in units if u.fqn.startswith("layers.1.mlp.experts")} == {0}


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32, torch.int8]])
def test_every_parameter_begins_at_a_multiple_of_64_bytes_and_none_overlap(dtypes):
    module = nn.Module()
    places = []
    for index, shape in enumerate([(3,), (5, 7), (), (16, 16), (0,), (1,)]):
        value = torch.zeros(shape, dtype=dtypes[index % len(dtypes)])
        places.append(Place(module, f"p{index}", f"p{index}", value))  # type: ignore[arg-type]
    slots, total = lay_out(places)
    end = 0
    for slot, place in zip(slots, places, strict=True):
        assert slot.offset % ALIGNMENT == 0 and slot.offset >= end
        assert slot.num_bytes == place.parameter.numel() * place.parameter.element_size()
        end = slot.offset + slot.num_bytes
    assert total % ALIGNMENT == 0 and total >= end


def test_a_group_without_elements_has_room_all_the_same():
    place = Place(nn.Module(), "p", "p", torch.zeros(0))  # type: ignore[arg-type]
    assert lay_out([place])[1] == ALIGNMENT
