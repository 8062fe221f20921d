"""A run directory has one writer."""

from pathlib import Path

import pytest

from odc.errors import ConfigError
from odc.train.run_dir import RunDir


def test_a_second_writer_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    first.open(0)
    with pytest.raises(ConfigError, match="another process"):
        second.open(0)
    first.close()
    second.open(0)
    second.close()
