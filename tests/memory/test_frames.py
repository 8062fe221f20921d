"""Frames: constant addresses, protected ranges, an exact count, any thread, any kernel."""

from __future__ import annotations

import ctypes
import errno
import random
import subprocess
import sys
import threading

import pytest

from odc.memory import frames
from odc.memory.frames import FRAME_BYTES, AddressRange, FaultingPool, FramePool

POOLS = [FramePool, FaultingPool]


def fill(address: int, num_frames: int, value: int) -> None:
    ctypes.memset(address, value, num_frames * FRAME_BYTES)


def first_and_last(address: int, num_frames: int) -> tuple[bytes, bytes]:
    end = address + num_frames * FRAME_BYTES
    return ctypes.string_at(address, 8), ctypes.string_at(end - 8, 8)


@pytest.mark.parametrize("pool_type", POOLS)
def test_a_range_can_be_used_while_frames_are_mapped(pool_type: type[FramePool]) -> None:
    pool, room = pool_type(4), AddressRange(6 * FRAME_BYTES)
    pool.map(room.address + FRAME_BYTES, 3)
    assert pool.num_free == 1
    fill(room.address + FRAME_BYTES, 3, 7)
    assert first_and_last(room.address + FRAME_BYTES, 3) == (b"\7" * 8, b"\7" * 8)
    pool.unmap(room.address + FRAME_BYTES)
    assert pool.num_free == pool.num_frames == 4


@pytest.mark.parametrize("pool_type", ["FramePool", "FaultingPool"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_use_of_an_absent_page_is_a_fault(pool_type: str, moment: str) -> None:
    program = f"""
import ctypes
from odc.memory.frames import AddressRange, {pool_type}
pool, room = {pool_type}(1), AddressRange(1)
if {moment!r} == "after":
    pool.map(room.address, 1)
    ctypes.memset(room.address, 1, 8)
    pool.unmap(room.address)
print("alive", flush=True)
ctypes.string_at(room.address, 1)
print("read")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "alive\n"
    assert done.returncode == -11


@pytest.mark.parametrize("pool_type", POOLS)
def test_the_pool_refuses_more_frames_than_it_has(pool_type: type[FramePool]) -> None:
    pool, room = pool_type(2), AddressRange(3 * FRAME_BYTES)
    with pytest.raises(RuntimeError, match="cannot map 3 frames: 2 of 2"):
        pool.map(room.address, 3)
    pool.map(room.address, 2)
    with pytest.raises(RuntimeError, match="cannot give back 1 frames: 0 of 2"):
        pool.shrink(1)
    assert pool.num_free == 0


@pytest.mark.parametrize("pool_type", POOLS)
def test_the_pool_grows_and_shrinks_to_the_frame(pool_type: type[FramePool]) -> None:
    pool, room = pool_type(2), AddressRange(5 * FRAME_BYTES)
    pool.grow(3)
    pool.map(room.address, 5)
    fill(room.address, 5, 3)
    pool.unmap(room.address)
    pool.shrink(4)
    assert (pool.num_frames, pool.num_free) == (1, 1)
    pool.map(room.address, 1)
    fill(room.address, 1, 9)


@pytest.mark.parametrize("pool_type", POOLS)
def test_random_moves_keep_every_range_apart(pool_type: type[FramePool]) -> None:
    """Also that free runs join again: in the end all frames move in one piece."""
    rng = random.Random(3)
    pool = pool_type(24)
    rooms = [AddressRange(n * FRAME_BYTES) for n in (1, 2, 3, 5, 8, 13, 4, 7)]
    mapped: dict[int, int] = {}
    for step in range(300):
        at = rng.randrange(len(rooms))
        count = rooms[at].num_bytes // FRAME_BYTES
        address = rooms[at].address
        if at in mapped:
            value = bytes([mapped.pop(at)]) * 8
            assert first_and_last(address, count) == (value, value)
            pool.unmap(address)
        elif pool.num_free >= count:
            pool.map(address, count)
            mapped[at] = step % 256
            fill(address, count, step % 256)
        assert pool.num_free == 24 - sum(rooms[i].num_bytes // FRAME_BYTES for i in mapped)
    for at in mapped:
        pool.unmap(rooms[at].address)
    if pool_type is FramePool:
        assert len(pool._free) == 1


def test_frames_that_are_neighbours_move_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = frames.move_frames

    def count(source: int, target: int, num_frames: int) -> None:
        calls.append(num_frames)
        real(source, target, num_frames)

    monkeypatch.setattr(frames, "move_frames", count)
    pool, room = FramePool(8), AddressRange(8 * FRAME_BYTES)
    pool.map(room.address, 8)
    pool.unmap(room.address)
    assert calls == [8, 8]


class OneMappingACall:
    """A kernel before 6.17: a call over several frames fails with EFAULT."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self.libc = libc
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.libc, name)

    def mremap(self, source: int, size: int, new: int, flags: int, target: int) -> int:
        self.calls += 1
        if size > FRAME_BYTES:
            ctypes.set_errno(errno.EFAULT)
            return 2**64 - 1
        return self.libc.mremap(source, size, new, flags, target)


def test_frames_move_one_by_one_where_the_kernel_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = OneMappingACall(frames._libc)
    monkeypatch.setattr(frames, "_libc", old)
    pool, room = FramePool(5), AddressRange(5 * FRAME_BYTES)
    pool.map(room.address, 5)
    fill(room.address, 5, 4)
    pool.unmap(room.address)
    assert pool.num_free == 5
    assert old.calls == 2 * (1 + 5)


def test_a_move_that_fails_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, rooms = FramePool(4), [AddressRange(4 * FRAME_BYTES) for _ in range(3)]
    pool.map(rooms[0].address, 1)
    pool.map(rooms[1].address, 2)
    pool.unmap(rooms[0].address)  # free: one frame, a gap of two, one frame
    real, calls = frames.move_frames, []

    def fail(source: int, target: int, num_frames: int) -> None:
        calls.append(num_frames)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, "no more mappings")
        real(source, target, num_frames)

    monkeypatch.setattr(frames, "move_frames", fail)
    with pytest.raises(OSError, match="no more mappings"):
        pool.map(rooms[2].address, 2)
    assert pool.num_free == 2
    pool.map(rooms[2].address, 2)
    fill(rooms[2].address, 2, 1)


def test_a_kernel_that_cannot_move_gets_a_pool_that_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(frames.make_pool(1)) is FramePool

    def refuse(source: int, target: int, num_frames: int) -> None:
        raise OSError(errno.EINVAL, "mremap of a frame")

    monkeypatch.setattr(frames, "move_frames", refuse)
    assert type(frames.make_pool(1)) is FaultingPool


def test_moves_from_several_threads_do_not_mix() -> None:
    pool = FramePool(16)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        room = AddressRange(4 * FRAME_BYTES)
        for _ in range(60):
            count = rng.randint(1, 4)
            pool.map(room.address, count)
            fill(room.address, count, seed)
            value = bytes([seed]) * 8
            if first_and_last(room.address, count) != (value, value):
                failures.append(f"thread {seed}")
            pool.unmap(room.address)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_free == 16 and len(pool._free) == 1


def test_evicted_ranges_leave_no_mappings_behind() -> None:
    """The kernel allows 65,530 mappings a process; only what is resident may take some."""

    def mappings() -> int:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
            return sum(1 for _ in lines)

    pool, room = FramePool(8), AddressRange(64 * FRAME_BYTES)
    before = mappings()
    for start in range(0, 64, 8):
        order = list(range(8))
        random.Random(start).shuffle(order)
        for at in order:
            pool.map(room.address + (start + at) * FRAME_BYTES, 1)
        for at in range(8):
            pool.unmap(room.address + (start + at) * FRAME_BYTES)
    assert mappings() <= before + 2
