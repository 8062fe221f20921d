"""Homes: bytes come back as they went, nothing is left on disk, errors name page and file."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from odc.errors import BudgetError, ConfigError, PageIOError
from odc.memory.frames import FRAME_BYTES, map_anonymous, unmap
from odc.memory.home import DiskHome, Home, HostHome

RW = 3


@pytest.fixture
def block():
    address = map_anonymous(FRAME_BYTES, RW)
    yield address
    unmap(address, FRAME_BYTES)


def as_array(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * FRAME_BYTES).from_address(address))


def make(kind: str, folder: Path) -> Home:
    return HostHome(4 * FRAME_BYTES) if kind == "host" else DiskHome(4 * FRAME_BYTES, folder)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_is_stored_is_what_is_loaded(kind: str, tmp_path: Path, block: int) -> None:
    home = make(kind, tmp_path)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, FRAME_BYTES, np.uint8) for _ in range(4)]
    for page in (2, 0, 3, 1):
        as_array(block)[:] = values[page]
        home.store(page, page * FRAME_BYTES, block, FRAME_BYTES)
    for page in (1, 3, 0, 2):
        home.load(page, page * FRAME_BYTES, block, FRAME_BYTES)
        assert (as_array(block) == values[page]).all()
    home.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_new_home_is_zero(kind: str, tmp_path: Path, block: int) -> None:
    home = make(kind, tmp_path)
    as_array(block)[:] = 5
    home.load(0, FRAME_BYTES, block, FRAME_BYTES)
    assert not as_array(block).any()
    home.close()


def test_a_disk_home_has_no_name_from_the_start(tmp_path: Path) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path / "deep")
    assert list((tmp_path / "deep").iterdir()) == []
    assert os.fstat(home._fd).st_blocks * 512 >= FRAME_BYTES
    home.close()


def test_a_page_cut_off_by_the_file_names_page_and_file(tmp_path: Path, block: int) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path)
    os.ftruncate(home._fd, 0)
    with pytest.raises(PageIOError, match=r"page 7 in .*odc-home-.*the file ends") as caught:
        home.load(7, 0, block, FRAME_BYTES)
    assert caught.value.page == 7 and caught.value.path == home.path
    home.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_io_error_names_page_file_and_cause(
    verb: str, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path)

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(PageIOError, match=f"page 3 in .*cannot {verb} .*Input/output error"):
        (home.load if verb == "read" else home.store)(3, 0, block, FRAME_BYTES)
    home.close()


def test_a_transfer_goes_on_after_a_short_read_or_write(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path)
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: real_read(fd, [v[0][:8192]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: real_write(fd, [v[0][:4096]], at))
    value = np.random.default_rng(1).integers(0, 256, 65536, np.uint8)
    as_array(block)[:65536] = value
    home.store(0, 0, block, 65536)
    as_array(block)[:65536] = 0
    home.load(0, 0, block, 65536)
    assert (as_array(block)[:65536] == value).all()
    home.close()


def test_a_full_disk_shows_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        BudgetError, match="^home_dir: .* free, the model.s state needs 2MiB; name another"
    ):
        DiskHome(FRAME_BYTES, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="^home_dir: cannot make a file in"):
        DiskHome(FRAME_BYTES, tmp_path / "file")


def test_a_host_home_counts_the_spare_bytes_that_are_used(block: int) -> None:
    home = HostHome(FRAME_BYTES, 3 * FRAME_BYTES)
    assert home.used_bytes == FRAME_BYTES
    home.store(5, 2 * FRAME_BYTES, block, FRAME_BYTES)
    home.store(5, 2 * FRAME_BYTES, block, FRAME_BYTES)
    home.store(0, 0, block, FRAME_BYTES)
    assert home.used_bytes == 2 * FRAME_BYTES
    home.close()
