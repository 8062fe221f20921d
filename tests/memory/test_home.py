"""Homes: bytes come back as they went, nothing is left on disk, errors name page and file."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from odc.errors import BudgetError, ConfigError, PageIOError
from odc.memory.events import Kind, Tier
from odc.memory.frames import FRAME_BYTES, map_anonymous, unmap
from odc.memory.home import DiskHome, Home, HostHome, TieredHome, Traffic
from odc.memory.pages import Page

RW = 3


@pytest.fixture
def block():
    address = map_anonymous(FRAME_BYTES, RW)
    yield address
    unmap(address, FRAME_BYTES)


def as_array(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * FRAME_BYTES).from_address(address))


def pages(count: int, frames: int = 1) -> list[Page]:
    size = frames * FRAME_BYTES
    return [Page(i, i, Kind.PARAMETER, 0, 0, size, frames, 0, i * size) for i in range(count)]


def tiered(folder: Path, on_host: str, spare: str = "....") -> TieredHome:
    """Pages of a frame: ``h`` lives in host memory, ``s`` takes it when it first comes home."""
    chosen, late = (np.array([c != "." for c in text]) for text in (on_host, spare))
    return TieredHome(pages(len(on_host)), chosen, late, folder)


def make(kind: str, folder: Path) -> Home:
    if kind == "host":
        return HostHome(4 * FRAME_BYTES)
    return DiskHome(4 * FRAME_BYTES, folder) if kind == "disk" else tiered(folder, "h.h.", "..s.")


KINDS = pytest.mark.parametrize("kind", ["host", "disk", "host+disk"])


@KINDS
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


@KINDS
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


# -- a disk that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, hint",
    [
        (errno.ENOSPC, "free space on that file system"),
        (errno.EDQUOT, "have the quota raised"),
        (errno.ESTALE, "the file vanished from its server"),
        (errno.EIO, "the kernel's log says more"),
    ],
)
def test_a_cause_that_somebody_can_remove_is_told(
    code: int, hint: str, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path)

    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(PageIOError, match=rf"page 4 in {home.path}: .*{hint}"):
        home.store(4, 0, block, FRAME_BYTES)
    assert home.traffic[Tier.DISK].bytes_out == 0
    home.close()


def test_a_file_that_is_gone_from_the_process_is_named(tmp_path: Path, block: int) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path)
    os.close(home._fd)
    home._fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(PageIOError, match=r"page 0 in .*odc-home-.*Bad file descriptor"):
        home.store(0, 0, block, FRAME_BYTES)
    home.close()


def test_a_folder_that_is_removed_takes_nothing_with_it(tmp_path: Path, block: int) -> None:
    home = DiskHome(FRAME_BYTES, tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    as_array(block)[:] = 7
    home.store(0, 0, block, FRAME_BYTES)
    as_array(block)[:] = 0
    home.load(0, 0, block, FRAME_BYTES)
    assert (as_array(block) == 7).all()
    home.close()


def test_a_transfer_goes_on_from_whole_blocks_after_a_ragged_one(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct I/O refuses offsets within a block, so the rest of the block is moved again."""
    home = DiskHome(FRAME_BYTES, tmp_path)
    real, offsets = os.pwritev, []

    def ragged(fd: int, views: list[memoryview], at: int) -> int:
        offsets.append(at)
        moved = real(fd, [views[0][:8192]], at)
        return moved - 100 if len(offsets) == 1 else moved

    monkeypatch.setattr(os, "pwritev", ragged)
    value = np.random.default_rng(1).integers(0, 256, 20480, np.uint8)
    as_array(block)[:20480] = value
    home.store(0, 0, block, 20480)
    assert offsets == [0, 4096, 12288]
    as_array(block)[:20480] = 0
    home.load(0, 0, block, 20480)
    assert (as_array(block)[:20480] == value).all()
    home.close()


@pytest.mark.parametrize(
    "code, told",
    [(errno.EDQUOT, "free, the model's state needs 2MiB"), (errno.EFBIG, "ulimit -f")],
)
def test_a_file_that_may_not_be_that_large_shows_at_the_start(
    code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BudgetError, match=told):
        DiskHome(FRAME_BYTES, tmp_path)
    assert len(set(os.listdir("/proc/self/fd"))) == len(before), "the file is still open"


# -- two tiers -------------------------------------------------------------------------------------


def test_each_page_of_two_tiers_moves_through_its_own(tmp_path: Path, block: int) -> None:
    home = tiered(tmp_path, "h..h")
    assert [home.tier_of(p) for p in range(4)] == [Tier.HOST, Tier.DISK, Tier.DISK, Tier.HOST]
    for page in range(4):
        home.store(page, page * FRAME_BYTES, block, FRAME_BYTES)
    home.load(1, FRAME_BYTES, block, 4096)
    assert home.traffic == {
        Tier.HOST: Traffic(2 * FRAME_BYTES, 0, 2 * FRAME_BYTES),
        Tier.DISK: Traffic(2 * FRAME_BYTES, 4096, 2 * FRAME_BYTES),
    }
    home.close()


def test_slices_of_a_page_keep_their_place_in_its_tier(tmp_path: Path, block: int) -> None:
    home = tiered(tmp_path, ".h.h")
    values = np.random.default_rng(2).integers(0, 256, FRAME_BYTES, np.uint8)
    as_array(block)[:] = values
    half = FRAME_BYTES // 2
    for page in (3, 2):
        for start in (half, 0):
            home.store(page, page * FRAME_BYTES + start, block + start, half)
    for page in (2, 3):
        as_array(block)[:] = 0
        home.load(page, page * FRAME_BYTES, block, FRAME_BYTES)
        assert (as_array(block) == values).all()
    for page in (0, 1):  # untouched
        home.load(page, page * FRAME_BYTES, block, FRAME_BYTES)
        assert not as_array(block).any()
    home.close()


def test_host_memory_of_gradients_is_taken_when_they_come_home(tmp_path: Path, block: int) -> None:
    home = tiered(tmp_path, "hh.h", ".s.s")
    assert home.used_bytes == FRAME_BYTES
    home.store(3, 3 * FRAME_BYTES, block, FRAME_BYTES)
    assert home.used_bytes == 2 * FRAME_BYTES
    home.close()


def test_an_error_of_the_disk_tier_names_page_and_file(tmp_path: Path, block: int) -> None:
    home = tiered(tmp_path, "h..h")
    os.ftruncate(home.disk._fd, FRAME_BYTES)
    home.load(1, FRAME_BYTES, block, FRAME_BYTES)
    with pytest.raises(PageIOError, match=rf"page 2 in {home.disk.path}: the file ends at offset"):
        home.load(2, 2 * FRAME_BYTES, block, FRAME_BYTES)
    home.load(3, 3 * FRAME_BYTES, block, FRAME_BYTES)
    home.close()


def test_host_memory_that_cannot_be_had_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("odc.memory.home.HostHome", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot allocate"):
        tiered(tmp_path, "h.", "..")
    assert len(os.listdir("/proc/self/fd")) == before
