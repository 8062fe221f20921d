"""Preflight: does what a configuration needs fit this machine? Asked before anything is taken.

A pool that is faulted in, or an arena of host memory, beyond what the machine has does not raise:
the kernel kills the process, often hours later and without a word. So needs are compared with the
machine's limits first, and the error says what would fit. Nothing here is switched off by an
option: change what is needed, or the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from odc.errors import BudgetError
from odc.memory.frames import FRAME_BYTES
from odc.memory.machine import Folder, Limit, Machine
from odc.sizes import exact_size, format_bytes

MIN_MARGIN_BYTES = 256 << 20
_MARGIN = 0.05  # of free memory, that is not offered


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model will take.

    Attributes:
        home: value of the option ``home``.
        frame_bytes: the pool of frames.
        host_bytes: pages at home in host memory.
        spare_bytes: gradients at home in host memory: addresses at once, memory only if they ever
            have to go there.
        disk_bytes: pages at home on disk.
        rest_bytes: memory that will be taken later: gradients that come home, what else the device
            is to hold (``total_mem`` without pages).
        locked_bytes: host memory that must be page-locked.
    """

    home: str
    frame_bytes: int
    host_bytes: int = 0
    spare_bytes: int = 0
    disk_bytes: int = 0
    rest_bytes: int = 0
    locked_bytes: int = 0

    @property
    def sure_bytes(self) -> int:
        """Host memory that is taken at once (the device of a machine without one is memory)."""
        return self.frame_bytes + self.host_bytes


def margin_bytes(machine: Machine) -> int:
    """Memory to leave to everything else."""
    return max(int(_MARGIN * machine.free_bytes), MIN_MARGIN_BYTES)


def host_mem_that_fits(machine: Machine, frame_bytes: int, rest_bytes: int = 0) -> int:
    """Host memory for pages beside frames, in whole frames; 0 if there is none.

    Args:
        machine: where.
        frame_bytes: the pool of frames.
        rest_bytes: what activations and the rest may take.
    """
    left = machine.free_bytes - frame_bytes - rest_bytes - margin_bytes(machine)
    return max(left, 0) // FRAME_BYTES * FRAME_BYTES


def check(machine: Machine, needs: Needs, prefix: str = "") -> list[str]:
    """Compare needs with a machine.

    Args:
        machine: where; with its folder, if anything goes to disk.
        needs: what will be taken.
        prefix: what stands before the names of options.

    Returns:
        Warnings: it can work, and may be slow or tight.

    Raises:
        BudgetError: it cannot work; says what would.
    """
    problems = [
        *_memory_problems(machine, needs, prefix),
        *_limit_problems(machine, needs, prefix),
        *_disk_problems(machine, needs, prefix),
    ]
    if problems:
        raise BudgetError("\n".join(problems))
    return [*_memory_warnings(machine, needs, prefix), *_disk_warnings(machine, needs, prefix)]


def _in_memory(machine: Machine, needs: Needs) -> int:
    """Sure bytes, and those of a "disk" that is memory."""
    folder = machine.folder
    on_disk = needs.disk_bytes if folder is not None and folder.is_memory else 0
    return needs.sure_bytes + on_disk


def _memory_problems(machine: Machine, needs: Needs, prefix: str) -> Iterator[str]:
    need = _in_memory(machine, needs)
    if need <= machine.free_bytes + machine.swap_bytes:
        return
    parts = [f"{format_bytes(needs.frame_bytes)} for pages on the device"]
    if needs.host_bytes:
        parts.append(f"{format_bytes(needs.host_bytes)} for their home in host memory")
    if need > needs.sure_bytes:
        parts.append(f"{format_bytes(needs.disk_bytes)} for files on tmpfs, which is memory")
    where = "this machine has"
    if machine.cgroup is not None and machine.cgroup.free_bytes < machine.available_bytes:
        where = f"control group {machine.cgroup.path} leaves"
    yield (
        f"{prefix}home {needs.home}: {' and '.join(parts)} are {format_bytes(need)}, and {where} "
        f"{format_bytes(machine.free_bytes)} free; {_what_fits(machine, needs, prefix)}"
    )


def _what_fits(machine: Machine, needs: Needs, prefix: str) -> str:
    host = host_mem_that_fits(machine, needs.frame_bytes, needs.rest_bytes)
    ways = []
    if needs.home == "host":
        ways.append(f"use {prefix}home: disk")
    if needs.home != "disk" and host:
        both = f"{prefix}home: host+disk with " if needs.home == "host" else "use "
        ways.append(f"{both}{prefix}host_mem: {exact_size(host)} or less")
    if needs.home == "host+disk" and not host:
        ways.append(f"use {prefix}home: disk")
    taken = _in_memory(machine, needs) - needs.frame_bytes
    taken = taken if needs.home == "disk" else 0
    frames = (machine.free_bytes - taken - margin_bytes(machine)) // FRAME_BYTES * FRAME_BYTES
    if 0 < frames < needs.frame_bytes:
        at = "with" if ways else "use"
        ways.append(f"{at} {prefix}page_budget: {exact_size(frames)} or less")
    if machine.folder is not None and machine.folder.is_memory:
        ways.append(f"name a folder on a real disk ({prefix}home_dir)")
    return ", or ".join(ways) if ways else "free memory, or use a larger machine"


def _limit_problems(machine: Machine, needs: Needs, prefix: str) -> Iterator[str]:
    host = needs.host_bytes + needs.spare_bytes
    # A frame that was moved into its range leaves its place in the pool mapped: data counts twice.
    for limit, need, name, flag in (
        (machine.address_space, needs.frame_bytes + host, "address space", "-v"),
        (machine.data, 2 * needs.frame_bytes + host, "private memory", "-d"),
        (machine.locked, needs.locked_bytes, "page-locked memory", "-l"),
    ):
        if limit is not None and need > limit.free_bytes:
            yield (
                f"{prefix}home {needs.home}: {format_bytes(need)} more of {name} are needed and "
                f"this process may have {_left(limit)}; raise the limit (ulimit {flag}), or use "
                f"{prefix}home: disk or a smaller {prefix}page_budget"
            )


def _left(limit: Limit) -> str:
    return f"{format_bytes(limit.free_bytes)} of its {format_bytes(limit.limit_bytes)}"


def _disk_problems(machine: Machine, needs: Needs, prefix: str) -> Iterator[str]:
    folder = machine.folder
    if folder is None or not needs.disk_bytes:
        return
    more = " or raise host_mem" if needs.home == "host+disk" else ""
    if needs.disk_bytes > folder.free_bytes:
        yield (
            f"{prefix}home_dir: {folder.path} has {format_bytes(folder.free_bytes)} free, the "
            f"model's pages on disk need {exact_size(needs.disk_bytes)}; name another folder{more}"
        )
    limit = machine.file_size
    if limit is not None and needs.disk_bytes > limit.limit_bytes:
        yield (
            f"{prefix}home_dir: a file of {exact_size(needs.disk_bytes)} is needed and this "
            f"process may write {exact_size(limit.limit_bytes)}; raise the limit (ulimit -f){more}"
        )


def _memory_warnings(machine: Machine, needs: Needs, prefix: str) -> Iterator[str]:
    need, free = _in_memory(machine, needs), machine.free_bytes
    if need > free:
        yield (
            f"{prefix}home {needs.home}: {format_bytes(need)} are needed and "
            f"{format_bytes(free)} of memory are free: pages will be swapped, which is slow; "
            f"{_what_fits(machine, needs, prefix)}"
        )
    elif need + needs.rest_bytes > free - MIN_MARGIN_BYTES // 2:
        left = format_bytes(free - need)
        yield (
            f"{prefix}home {needs.home}: pages leave {left} of this machine's free memory to "
            f"gradients, activations and everything else; {_what_fits(machine, needs, prefix)}"
        )


def _disk_warnings(machine: Machine, needs: Needs, prefix: str) -> Iterator[str]:
    folder = machine.folder
    if folder is None or not needs.disk_bytes:
        return
    if folder.is_memory:
        yield (
            f"{prefix}home_dir: {folder.path} is {folder.filesystem}, which is memory and not a "
            "disk: nothing is saved by it; name a folder on a disk"
        )
    elif folder.direct is False:
        yield _no_direct(folder, prefix)


def _no_direct(folder: Folder, prefix: str) -> str:
    return (
        f"{prefix}home_dir: {folder.path} ({folder.filesystem}) takes no direct I/O: pages go "
        "through the page cache, which costs a copy and memory; a folder on a local disk is faster"
    )
