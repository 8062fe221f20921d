"""`odc plan`: rows, table, page and refusals."""

from __future__ import annotations

import json

import pytest

from odc.cli.main import main

ROWS = {
    "group",
    "count",
    "tensors",
    "ranks",
    "numel",
    "slice_numel",
    "buffers",
    "padding",
    "lower_bound_padding",
    "plan_s",
}


@pytest.fixture
def shapes(tmp_path):
    lines = ["name,shape,dtype", "embed,1000x64,bfloat16"]
    for layer in range(3):
        lines += [f"layers.{layer}.up,256x64,bfloat16", f"layers.{layer}.down,64x256,bfloat16"]
    path = tmp_path / "shapes.csv"
    path.write_text("\n".join(lines))
    return path


def test_json_has_a_row_for_each_group_and_number_of_ranks(shapes, capsys):
    words = ["plan", "--shapes", str(shapes), "--ranks", "2,8", "--granularity", "rows:4", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["group"], row["count"], row["ranks"]) for row in rows] == [
        ("root", 1, 2),
        ("layers.0", 3, 2),
        ("root", 1, 8),
        ("layers.0", 3, 8),
    ]
    for row in rows:
        assert set(row) == ROWS
        padding = row["slice_numel"] * row["ranks"] / row["numel"] - 1
        assert row["padding"] == pytest.approx(padding, abs=1e-12)
        assert 0 <= row["lower_bound_padding"] <= row["padding"]


def test_the_table_adds_the_groups_up_and_explains(shapes, capsys):
    words = ["plan", "--shapes", str(shapes), "--ranks", "48", "--granularity", "rows:64"]
    assert main([*words, "--explain"]) == 0
    said = capsys.readouterr().out
    assert "all" in said and "at least" in said
    assert "layers.0 (x3) on 48 ranks" in said and "What would help" in said


def test_a_configuration_is_a_model_too(capsys):
    words = ["plan", "tiny-dense", "--ranks", "4", "--group", "2-layers", "--json"]
    assert main([*words, "model.num_layers=4"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["group"] for row in rows] == ["root", "layers.0..1"]
    assert rows[1]["count"] == 2


def test_the_page_holds_all_it_needs(shapes, tmp_path, capsys):
    page = tmp_path / "out" / "plan.html"
    words = ["plan", "--shapes", str(shapes), "--ranks", "64", "--granularity", "up=rows:3"]
    assert main([*words, "--html", str(page)]) == 0
    text = page.read_text()
    assert "layers.0.down" in text and "up=rows:3" in text and "FSDP2" in text
    assert 'src="http' not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks: got '0'"),
        (["--ranks", "-4"], "--ranks: got '-4'"),
        (["--ranks", "99999999999"], "whole numbers from 1 to 1,048,576"),
        (["--ranks", "8,x"], "--ranks: got '8,x'"),
        (["--ranks", "8", "--granularity", "wrong"], "granularity 'wrong' is unknown"),
        (["--ranks", "8", "--granularity", "tile:4,5"], "hold no whole tiles of 5 columns"),
        (["--ranks", "8", "--group", "2"], "--group: got '2'"),
        (["--ranks", "8", "--gather-dtype", "q4"], "dtype 'q4' is unknown"),
        (["--ranks", "8", "--alignment", "0"], "alignment: got 0"),
        (["tiny-moe", "--ranks", "8"], "both name a model"),
    ],
)
def test_bad_input_is_one_clear_line(shapes, words, message, capsys):
    assert main(["plan", "--shapes", str(shapes), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_without_a_model_it_says_how_to_name_one(capsys):
    assert main(["plan", "--ranks", "8"]) == 2
    assert "name one model" in capsys.readouterr().err
