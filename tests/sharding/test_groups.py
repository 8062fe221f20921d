"""Granularities and groups: what the planner is given."""

from __future__ import annotations

import gzip

import pytest

from odc.errors import ConfigError
from odc.sharding import GranularityRules, TensorSpec, parse_granularity
from odc.sharding.granularity import block_numels
from odc.sharding.groups import layer_groups, read_shapes

FUSED = TensorSpec("experts", (8, 6, 10))
VECTOR = TensorSpec("norm", (10,))


@pytest.mark.parametrize(
    ("granularity", "fused", "vector"),
    [
        ("element", 1, 1),
        ("block", 10, 1),
        ("rows:4", 40, 1),
        ("tile:4,5", 40, 1),
        ("tensor", 480, 10),
    ],
)
def test_blocks_are_rows_of_the_last_dimension(granularity, fused, vector):
    assert block_numels([FUSED, VECTOR], granularity) == [fused, vector]


def test_a_function_gives_each_parameter_its_granularity():
    def chosen(fqn: str, shape: tuple[int, ...]) -> str:
        return "rows:2" if fqn == "experts" else "tensor"

    assert block_numels([FUSED, VECTOR], chosen) == [20, 10]


def test_the_first_rule_whose_regex_is_found_holds():
    rules = GranularityRules.parse(["rows:3", "norm=element", "expe=rows:2", ".*=tensor"])
    assert block_numels([FUSED, VECTOR, TensorSpec("w", (3, 4))], rules) == [20, 1, 12]
    assert str(rules) == "rows:3 norm=element expe=rows:2 .*=tensor"


@pytest.mark.parametrize("text", ["", "row:3", "rows:", "rows:-1", "rows:0", "tile:4", "tile:0,4"])
def test_what_is_no_granularity_is_told(text):
    with pytest.raises(ConfigError, match="granularity"):
        parse_granularity(text)
    with pytest.raises(ConfigError, match="are both defaults"):
        GranularityRules.parse(["block", "element"])
    with pytest.raises(ConfigError, match="is no regex"):
        GranularityRules.parse(["(=element"])


def model(layers: int) -> list[TensorSpec]:
    found = [TensorSpec("embed.weight", (32, 8))]
    for layer in range(layers):
        wide = 16 if layer == 0 else 8
        found += [
            TensorSpec(f"model.layers.{layer}.up", (wide, 8)),
            TensorSpec(f"model.layers.{layer}.experts.3.down", (8, wide)),
        ]
    return found


def test_equal_layers_are_one_group_with_a_count():
    groups = layer_groups(model(5))
    assert [(g.name, len(g.tensors), g.count) for g in groups] == [
        ("root", 1, 1),
        ("model.layers.0", 2, 1),
        ("model.layers.1", 2, 4),
    ]


def test_neighbouring_layers_make_a_group():
    groups = layer_groups(model(6), layers=2)
    assert [(g.name, g.count) for g in groups] == [
        ("root", 1),
        ("model.layers.0..1", 1),
        ("model.layers.2..3", 2),
    ]
    assert layer_groups(model(3), layers=2)[-1].name == "model.layers.2"


def test_layers_whose_granularity_differs_are_kept_apart():
    rules = GranularityRules("block", [(r"layers\.2\.", "rows:2")])
    assert [g.count for g in layer_groups(model(4), granularity=rules)] == [1, 1, 2, 1]


def test_a_parameter_list_is_read_without_its_buffers(tmp_path):
    path = tmp_path / "m.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(
            "kind,name,shape,dtype\nparam,a,3x4,float32\nbuffer,b,9,float32\nparam,c,,bf16\n"
        )
    assert read_shapes(path) == [TensorSpec("a", (3, 4), "float32"), TensorSpec("c", (), "bf16")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,shape\na,3\n", "lacks dtype"),
        ("name,shape,dtype\na,3xq,float32\n", "line 2"),
        ("name,shape,dtype\na,3,float31\n", "line 2: dtype 'float31' is unknown"),
        ("name,shape,dtype\n", "no parameters"),
        ("", "lacks dtype, name, shape"),
    ],
)
def test_a_list_that_is_none_is_told(tmp_path, text, message):
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_shapes(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shapes(tmp_path / "missing.csv")
    (tmp_path / "broken.csv.gz").write_bytes(b"\x1f\x8b\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shapes(tmp_path / "broken.csv.gz")
