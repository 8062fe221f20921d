"""The codes and columns are those of docs/architecture.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from profiler import schema

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def documented_codes(name: str) -> dict[str, int]:
    text = ARCHITECTURE.read_text()
    line = re.search(rf"^\* `{re.escape(name)}` ((?:.|\n)*?)(?=^\* |^`|^\n)", text, re.M)
    assert line, name
    return {word: int(code) for code, word in re.findall(r"\b(\d+) ([a-z_]+)", line[1])}


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("phase", schema.Phase),
        ("kind", schema.Kind),
        ("op", schema.Op),
        ("act", schema.Act),
        ("tier", schema.Tier),
        ("account", schema.Account),
        ("comm.op", schema.CommOp),
    ],
)
def test_documented_codes_are_the_codes(name: str, codes: type) -> None:
    documented = documented_codes(name)
    ours = {member.name.lower(): int(member) for member in codes}
    assert len(documented) >= 3
    assert documented.items() <= ours.items()


def test_documented_columns_are_the_columns_in_order() -> None:
    text = ARCHITECTURE.read_text()
    for name, stream in schema.STREAMS.items():
        row = re.search(rf"^\| `{name}` \| `([^`]+)`", text, re.M)
        assert row, name
        documented = [word.split()[0] for word in row[1].split(",")]
        assert [column.name for column in stream.columns] == documented
    row = re.search(r"^\| `pages.arrow` \| `(.+)` \|$", text, re.M)
    assert row
    documented = re.findall(r"(\w+) (?:i64|i32|i16|u8|utf8)", row[1])
    assert list(schema.PAGE_COLUMNS) == documented


def test_a_packed_row_is_a_record() -> None:
    for stream in schema.STREAMS.values():
        values = tuple(range(1, len(stream.columns) + 1))
        record = np.frombuffer(stream.packer.pack(*values), stream.record)[0]
        assert tuple(record) == values


def test_schema_metadata_explains_the_codes() -> None:
    codes = json.loads(schema.NEED.schema().metadata[b"odc.codes"])
    assert codes["act"]["early_write_back"] == 3
    evict = ["lru", "cost_aware", "belady", "mru", "fifo", "lfu", "gdsf", "auto"]
    assert codes["evict"] == {name: code for code, name in enumerate(evict)}
    prefetch = ["none", "next_k", "replay", "popularity", "predictor", "oracle", "markov", "auto"]
    assert codes["prefetch"] == {name: code for code, name in enumerate(prefetch)}


def test_policy_names_and_codes_are_inverse() -> None:
    assert schema.policy_code("lru", "none") == 0
    assert schema.policy_code(schema.Evict.COST_AWARE, "popularity") == 19
    for evict in schema.Evict:
        for prefetch in schema.Prefetch:
            name = schema.policy_name(schema.policy_code(evict, prefetch))
            assert name == f"{evict.name.lower()}+{prefetch.name.lower()}"


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gdsf, auto, got 'arc'"):
        schema.policy_code("arc", "none")
    with pytest.raises(ValueError, match="got 255"):
        schema.policy_name(255)
