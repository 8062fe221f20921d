"""What `odc doctor` looks at: one function a subject, from the kernel's files to findings.

A finding says what is, why it matters, and the command that changes it. Functions take what they
judge as arguments (records, or `root`, below which the kernel's files are read), so that tests
describe machines instead of finding them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from odc.memory.frames import FRAME_BYTES
from odc.memory.machine import Cgroup, Limit, Machine, meminfo
from odc.sizes import format_bytes

_LEAST_BYTES = 1 << 30  # to train anything: torch alone takes a quarter of it
_LEAST_DISK_BYTES = 1 << 30
_RESERVED_PAGES = 1024
_MAP_COUNT = 65530


class Level(Enum):
    """How much a finding matters."""

    OK = "OK"
    ADVICE = "ADVICE"  # training works, and would be faster or safer otherwise
    PROBLEM = "PROBLEM"  # training cannot work


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        level: How much it matters.
        subject: What was looked at.
        what: What was found.
        why: What follows from it; empty where nothing does.
        how: The command, or the change, that would help.
    """

    level: Level
    subject: str
    what: str
    why: str = ""
    how: str = ""


def ok(subject: str, what: str, why: str = "", how: str = "") -> Finding:
    """Nothing to change."""
    return Finding(Level.OK, subject, what, why, how)


def advice(subject: str, what: str, why: str, how: str) -> Finding:
    """Training works without it."""
    return Finding(Level.ADVICE, subject, what, why, how)


def problem(subject: str, what: str, why: str, how: str) -> Finding:
    """Training does not work."""
    return Finding(Level.PROBLEM, subject, what, why, how)


def read(path: Path) -> str:
    """What a file of the kernel says, without the line's end; empty where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


# -- memory ----------------------------------------------------------------------------------------


def memory(machine: Machine) -> Iterator[Finding]:
    """Free memory, control group, swap."""
    free, total = machine.free_bytes, machine.total_bytes
    said = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < _LEAST_BYTES:
        yield problem(
            "memory",
            said,
            f"torch, activations and the smallest pool of frames need {format_bytes(_LEAST_BYTES)}",
            "end other programs, or raise the control group's limit",
        )
    else:
        yield ok("memory", said, how=f"memory.total_mem, memory.host_mem: up to {_gib(free)}")
    yield _cgroup(machine.cgroup)
    if machine.swap_bytes:
        yield advice(
            "swap",
            f"{format_bytes(machine.swap_bytes)} free",
            "memory that is swapped out stalls training where nothing shows it; odc pages to disk "
            "by itself, and knows when",
            "swapoff -a, and memory.home=disk for what does not fit",
        )
    else:
        yield ok("swap", "none in use by the kernel")


def _gib(num_bytes: int) -> str:
    return f"{max(num_bytes - (512 << 20), 0) / (1 << 30):.1f}GiB"


def _cgroup(cgroup: Cgroup | None) -> Finding:
    if cgroup is None:
        return ok("control group", "no memory limit")
    return ok(
        "control group",
        f"{cgroup.path} allows {format_bytes(cgroup.limit_bytes)}, "
        f"{format_bytes(cgroup.free_bytes)} of it free",
        "beyond it the kernel kills the process; odc compares with it before it allocates",
    )


def huge_pages(root: Path, measured: float | None) -> Iterator[Finding]:
    """Transparent huge pages, and whether frames get them; reserved ones (features.md A9).

    Args:
        root: Where `sys` and `proc` are.
        measured: Share of a pool of frames that is huge pages; `None`: not measured.
    """
    chosen = read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    mode = chosen[chosen.find("[") + 1 : chosen.find("]")] if "[" in chosen else "not there"
    got = "" if measured is None else f"; {measured:.0%} of a pool of frames are huge"
    why = (
        "a frame is 2 MiB: as one huge page it is faulted in and moved 512 times cheaper than as "
        "512 small ones"
    )
    how = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    if mode not in ("always", "madvise"):
        yield advice("huge pages", f"transparent: {mode}{got}", why, how)
    elif measured is not None and measured < 0.9:
        compact = "echo 1 | sudo tee /proc/sys/vm/compact_memory (memory is fragmented)"
        yield advice("huge pages", f"transparent: {mode}{got}", why, compact)
    else:
        yield ok("huge pages", f"transparent: {mode}{got}", why)
    yield _reserved_pages(meminfo(root))


def _reserved_pages(info: Mapping[str, int]) -> Finding:
    count, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0)
    size = info.get("Hugepagesize", FRAME_BYTES)
    what = f"{count} of {format_bytes(size)}, {free} free"
    why = (
        "frames are transparent huge pages and need no reserved ones; reserved pages are taken "
        "from everybody and serve programs only that ask for them (page-locked buffers of RDMA "
        "stacks, where 1024 is the usual advice)"
    )
    if free * size > (1 << 30):
        return advice("reserved huge pages", what, why, "sudo sysctl vm.nr_hugepages=0")
    return ok("reserved huge pages", what, why, f"sudo sysctl vm.nr_hugepages={_RESERVED_PAGES}")


def frames(root: Path, can_move: bool) -> Iterator[Finding]:
    """Whether frames can be moved, how many mappings they may make, strict overcommit."""
    kernel = read(root / "proc/sys/kernel/osrelease")
    if can_move:
        yield ok("frames", f"move (Linux {kernel})")
    else:
        yield advice(
            "frames",
            f"cannot move (Linux {kernel})",
            "every load faults its memory in anew: four to five times slower",
            "Linux 5.7 or newer (MREMAP_DONTUNMAP), outside of sandboxes that intercept mremap",
        )
    count = int(read(root / "proc/sys/vm/max_map_count") or _MAP_COUNT)
    most = format_bytes(count // 2 * FRAME_BYTES)
    if count < _MAP_COUNT:
        yield advice(
            "mappings",
            f"vm.max_map_count {count}: {most} of resident pages of one frame",
            "a page takes up to two mappings; when they run out, loads fail",
            f"sudo sysctl vm.max_map_count={_MAP_COUNT}, or a larger memory.page_size",
        )
    else:
        yield ok("mappings", f"vm.max_map_count {count}: {most} of resident pages of one frame")
    if read(root / "proc/sys/vm/overcommit_memory") == "2":
        yield advice(
            "overcommit",
            "strict (vm.overcommit_memory 2)",
            "addresses count as memory: pools and host homes are refused long before it is full",
            "sudo sysctl vm.overcommit_memory=0",
        )


def limits(machine: Machine) -> Iterator[Finding]:
    """Resource limits of this process."""
    locked = machine.locked
    if locked is None:
        yield ok("page-locked memory", "unlimited")
    else:
        yield advice(
            "page-locked memory",
            f"{format_bytes(locked.limit_bytes)} allowed",
            "copies to a GPU that run beside computing need page-locked host memory; without a "
            "GPU nothing is locked",
            "ulimit -l unlimited (or 'memlock unlimited' in /etc/security/limits.conf)",
        )
    for limit, name, flag in (
        (machine.address_space, "address space", "-v"),
        (machine.data, "private memory", "-d"),
        (machine.file_size, "size of a file", "-f"),
    ):
        if limit is not None:
            yield _limited(limit, name, flag)


def _limited(limit: Limit, name: str, flag: str) -> Finding:
    what = f"{format_bytes(limit.limit_bytes)} allowed, {format_bytes(limit.used_bytes)} used"
    why = "ranges are reserved for all of a model's state, whatever of it is resident"
    if limit.free_bytes < _LEAST_BYTES:
        return problem(name, what, why, f"ulimit {flag} unlimited")
    return advice(name, what, why, f"ulimit {flag} unlimited")


# -- disk ------------------------------------------------------------------------------------------


def disk(machine: Machine, rates: tuple[float, float] | None, refused: str = "") -> Finding:
    """The folder of a disk home.

    Args:
        machine: Its `folder` is judged.
        rates: Measured (read, write) bytes/s.
        refused: Why it could not be measured.
    """
    folder = machine.folder
    assert folder is not None, "the doctor always looks at one"
    new = "" if folder.exists else ", does not exist yet: made when training begins"
    what = f"{folder.path} ({folder.filesystem}{new}): {format_bytes(folder.free_bytes)} free"
    if rates is not None:
        what += f", reads {rates[0] / 1e9:.2f} GB/s, writes {rates[1] / 1e9:.2f} GB/s"
    if refused:
        return advice("disk", f"{what}; {refused}", "memory.home=disk has no place there", _FOLDER)
    if folder.is_memory:
        return advice("disk", what, "that is memory, not a disk: nothing is saved there", _FOLDER)
    if folder.direct is False:
        why = "no direct I/O: pages go through the page cache, a copy more and memory besides"
        return advice("disk", what, why, _FOLDER)
    if folder.free_bytes < _LEAST_DISK_BYTES:
        return advice("disk", what, "a model that needs a disk home needs more than that", _FOLDER)
    if rates is not None and min(rates) < 3e8:
        why = "pages of 1 GB take more than three seconds each way: training will wait for them"
        return advice("disk", f"{what}, direct I/O", why, f"a faster disk: {_FOLDER}")
    return ok("disk", f"{what}, direct I/O")


_FOLDER = "memory.home_dir=FOLDER on a local disk (and odc doctor --home-dir FOLDER)"


# -- processors ------------------------------------------------------------------------------------


def processors(root: Path, allowed: int, threads: str | None) -> Iterator[Finding]:
    """Cores, threads, NUMA nodes.

    Args:
        root: Where `sys` and `proc` are.
        allowed: Cores that this process may run on.
        threads: `OMP_NUM_THREADS`.
    """
    said = f"{allowed} for this process; train.threads auto: {max(1, allowed - 1)}"
    if allowed == 1:
        yield advice(
            "cores",
            said,
            "copies and computing take turns on one core, so that no transfer is hidden",
            "give the process a second core (taskset -c 0,1 odc train ...)",
        )
    else:
        yield ok("cores", said, "one is left to the transfers")
    quota = _cpu_quota(root)
    if quota is not None and quota < allowed:
        yield advice(
            "processor quota",
            f"the control group allows {quota:.1f} cores of {allowed}",
            "threads beyond it are stopped in the middle of a step",
            f"train.threads={max(1, int(quota) - 1)}",
        )
    if threads is not None and threads.isdigit() and int(threads) >= allowed > 1:
        yield advice(
            "threads",
            f"OMP_NUM_THREADS={threads} on {allowed} cores",
            "computing on all cores loses 20-30 % to the transfers (odc train sets its own number)",
            f"export OMP_NUM_THREADS={allowed - 1}",
        )
    yield _numa(root)


def _cpu_quota(root: Path) -> float | None:
    """Cores that a control group of version 1 or 2 allows, None for no limit."""
    words = read(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) < 2:
        folder = root / "sys/fs/cgroup/cpu"
        words = [read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")]
    if not (words[0].isdigit() and words[1].isdigit() and int(words[1])):
        return None
    return int(words[0]) / int(words[1])


def _numa(root: Path) -> Finding:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    where = [f"{node.name}: cores {read(node / 'cpulist')}" for node in nodes]
    if len(nodes) < 2:
        return ok("NUMA", where[0] if where else "one node")
    status = read(root / "proc/self/status").splitlines()
    mems = next((line.split()[1] for line in status if line.startswith("Mems_allowed_list")), "")
    said = f"{'; '.join(where)}; memory of nodes {mems} allowed"
    if mems.isdigit():
        return ok("NUMA", said)
    return advice(
        "NUMA",
        said,
        "frames on another node than the cores are copied at half the speed or less",
        f"numactl --cpunodebind={nodes[0].name[4:]} --membind={nodes[0].name[4:]} odc train ...",
    )


# -- software --------------------------------------------------------------------------------------


def torch_and_cuda(version: str | None, devices: list[str], error: str = "") -> Iterator[Finding]:
    """PyTorch, and what it finds.

    Args:
        version: Of torch; `None` where it cannot be imported.
        devices: Names of CUDA devices.
        error: Why it cannot be imported.
    """
    if version is None:
        yield problem("PyTorch", f"missing ({error})", "nothing trains", "pip install torch")
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < (2, 11):
        why = "odc needs 2.11 or newer"
        yield problem("PyTorch", version, why, "pip install --upgrade torch")
    else:
        yield ok("PyTorch", version)
    if devices:
        yield ok(
            "CUDA",
            ", ".join(devices),
            "odc.fully_shard uses it; pages live in host memory or on disk (no CUDA engine yet)",
        )
    else:
        yield ok("CUDA", "none; the device is a pool of frames in memory")
