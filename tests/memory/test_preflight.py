"""Preflight: what does not fit is refused before anything is taken, with what would fit."""

from __future__ import annotations

import dataclasses
import errno
import re
from pathlib import Path

import pytest

import odc.memory.home_plan as home_plan
from odc.errors import BudgetError
from odc.memory.frames import FRAME_BYTES
from odc.memory.machine import Cgroup, Folder, Limit, Machine, find_cgroup, gather, look_at
from odc.memory.machine import filesystem_of as filesystem
from odc.memory.manager import MemoryManager
from odc.memory.pages import GroupSpec
from odc.memory.preflight import Needs, check, host_mem_that_fits
from odc.sizes import parse_size

GIB = 1 << 30
DISK = Folder(Path("/data"), 100 * GIB, "ext4", direct=True)
ROOMY = Machine(64 * GIB, 60 * GIB, folder=DISK)


def machine(**what: object) -> Machine:
    return dataclasses.replace(ROOMY, **what)  # type: ignore[arg-type]


def needs(home: str = "host", **sizes: int) -> Needs:
    return Needs(home, **({"frame_bytes": 4 * GIB, "host_bytes": 8 * GIB} | sizes))


def refused(where: Machine, what: Needs) -> str:
    with pytest.raises(BudgetError) as caught:
        check(where, what, "memory.")
    return str(caught.value)


# -- memory ----------------------------------------------------------------------------------------


def test_what_fits_passes_without_a_word() -> None:
    assert check(ROOMY, needs()) == []
    assert check(ROOMY, needs("disk", host_bytes=0, disk_bytes=50 * GIB)) == []


def test_too_little_memory_is_refused_with_the_homes_that_would_fit() -> None:
    told = refused(machine(available_bytes=10 * GIB), needs())
    assert told.startswith("memory.home host: 4.00 GiB for pages on the device and 8.00 GiB for")
    assert "are 12.0 GiB, and this machine has 10.0 GiB free" in told
    assert "use memory.home: disk, or memory.home: host+disk with memory.host_mem: " in told


def test_the_host_mem_that_is_named_passes() -> None:
    small = machine(available_bytes=10 * GIB)
    named = re.search(r"host_mem: (\S+) or less", refused(small, needs()))
    assert named is not None
    host = parse_size(named[1])
    assert host == host_mem_that_fits(small, 4 * GIB) > 4 * GIB
    fits = needs("host+disk", host_bytes=host, disk_bytes=8 * GIB - host)
    assert check(small, fits, "memory.") == []


def test_the_page_budget_that_is_named_passes() -> None:
    small = machine(available_bytes=3 * GIB)
    what = needs("disk", host_bytes=0, disk_bytes=GIB)
    named = re.search(r"use memory.page_budget: (\S+) or less", refused(small, what))
    assert named is not None
    fits = needs("disk", frame_bytes=parse_size(named[1]), host_bytes=0, disk_bytes=GIB)
    assert check(small, fits, "memory.") == []


def test_the_limit_of_a_control_group_counts_and_is_named() -> None:
    boxed = machine(cgroup=Cgroup("/box", 9 * GIB, GIB))
    told = refused(boxed, needs())
    assert "control group /box leaves 8.00 GiB free" in told
    assert check(machine(cgroup=Cgroup("/box", 30 * GIB, GIB)), needs()) == []


def test_what_only_swap_can_hold_is_a_warning() -> None:
    (told,) = check(machine(available_bytes=10 * GIB, swap_bytes=8 * GIB), needs(), "memory.")
    assert "pages will be swapped" in told and "memory.home: disk" in told


def test_pages_that_leave_nothing_to_the_rest_are_a_warning() -> None:
    (told,) = check(machine(available_bytes=12 * GIB + (50 << 20)), needs(), "memory.")
    assert "leave 50.0 MiB of this machine's free memory to gradients, activations" in told
    (told,) = check(machine(available_bytes=14 * GIB), needs(rest_bytes=3 * GIB), "memory.")
    assert "leave 2.00 GiB" in told


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, need, flag",
    [("address_space", 13, "-v"), ("data", 17, "-d"), ("locked", 2, "-l")],
)
def test_limits_of_the_process_are_compared(name: str, need: int, flag: str) -> None:
    """Frames count twice as private memory: where they are, and where they came from."""
    what = needs(spare_bytes=GIB, locked_bytes=2 * GIB)
    tight = machine(**{name: Limit(need * GIB + 5 - 1, used_bytes=5)})
    assert f"raise the limit (ulimit {flag})" in refused(tight, what)
    assert check(machine(**{name: Limit(need * GIB + 5, used_bytes=5)}), what) == []


# -- disk ------------------------------------------------------------------------------------------


def on_disk(**folder: object) -> Machine:
    return machine(folder=dataclasses.replace(DISK, **folder))  # type: ignore[arg-type]


def test_a_disk_that_is_too_small_is_refused() -> None:
    told = refused(on_disk(free_bytes=GIB), needs("host+disk", disk_bytes=2 * GIB))
    assert told == (
        "memory.home_dir: /data has 1.00 GiB free, the model's pages on disk need 2GiB; name "
        "another folder or raise host_mem"
    )


def test_a_file_larger_than_allowed_is_refused() -> None:
    limited = machine(file_size=Limit(GIB))
    assert "ulimit -f" in refused(limited, needs("disk", host_bytes=0, disk_bytes=2 * GIB))
    assert check(limited, needs()) == [], "no file, no limit"


def test_all_that_is_wrong_is_told_at_once() -> None:
    small = machine(available_bytes=GIB, folder=dataclasses.replace(DISK, free_bytes=1))
    assert len(refused(small, needs("host+disk", disk_bytes=GIB)).splitlines()) == 2


def test_a_disk_that_is_memory_is_counted_as_memory() -> None:
    what = needs("disk", host_bytes=0, disk_bytes=9 * GIB)
    (told,) = check(on_disk(filesystem="tmpfs"), what, "memory.")
    assert "/data is tmpfs, which is memory and not a disk" in told
    small = dataclasses.replace(on_disk(filesystem="tmpfs"), available_bytes=12 * GIB)
    told = refused(small, what)
    assert "9.00 GiB for files on tmpfs" in told and "a real disk (memory.home_dir)" in told


def test_a_folder_without_direct_io_is_a_warning() -> None:
    what = needs("disk", host_bytes=0, disk_bytes=GIB)
    (told,) = check(on_disk(direct=False, filesystem="nfs"), what)
    assert "/data (nfs) takes no direct I/O" in told
    assert check(on_disk(direct=False), needs()) == [], "nothing goes there"


# -- what the kernel says --------------------------------------------------------------------------


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V1 = "sys__fs__cgroup__memory__"
V2 = "sys__fs__cgroup__"


def test_the_tightest_control_group_of_version_2_is_found(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "0::/a/b",
        f"{V2}a__b__memory.max": "max",
        f"{V2}a__b__memory.current": "100",
        f"{V2}a__memory.max": "5000",
        f"{V2}a__memory.current": "3000",
        f"{V2}a__memory.stat": "anon 1\ninactive_file 500\nactive_file 700",
    }
    found = find_cgroup(tree(tmp_path, **files))
    assert found == Cgroup("/a", 5000, 2500) and found.free_bytes == 2500


def test_the_control_group_of_version_1_is_found_beside_an_empty_version_2(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/",
        f"{V1}job__memory.limit_in_bytes": "8000",
        f"{V1}job__memory.usage_in_bytes": "1000",
        f"{V1}job__memory.stat": "inactive_file 1\ntotal_inactive_file 400",
        f"{V1}memory.limit_in_bytes": "9223372036854771712",
    }
    assert find_cgroup(tree(tmp_path, **files)) == Cgroup("/job", 8000, 600)


def test_in_a_container_the_group_that_is_visible_counts(tmp_path: Path) -> None:
    """The path in /proc is the host's; only the container's own root is mounted."""
    files = {"proc__self__cgroup": "0::/kube/pod1", f"{V2}memory.max": "7000"}
    assert find_cgroup(tree(tmp_path, **files)) == Cgroup("/", 7000, 0)


def test_no_limit_is_no_control_group(tmp_path: Path) -> None:
    assert find_cgroup(tree(tmp_path, proc__self__cgroup="0::/")) is None


def test_memory_is_what_is_available_within_the_control_group(tmp_path: Path) -> None:
    meminfo = "MemTotal: 100 kB\nMemAvailable: 60 kB\nSwapFree: 7 kB\nHugePages_Total: 3"
    files = {"proc__meminfo": meminfo, "proc__self__cgroup": "0::/", f"{V2}memory.max": "5000"}
    found = gather(root=tree(tmp_path, **files))
    assert (found.total_bytes, found.available_bytes) == (102400, 61440)
    assert (found.swap_bytes, found.free_bytes) == (7168, 5000)


def test_a_folder_is_looked_at_before_it_exists(tmp_path: Path) -> None:
    found = look_at(tmp_path / "not" / "there")
    assert found.path == tmp_path / "not" / "there" and found.free_bytes > 0
    assert not (tmp_path / "not").exists() and list(tmp_path.iterdir()) == []


def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(tmp_path: Path) -> None:
    lines = [
        "22 1 8:1 / / rw - ext4 /dev/a rw",
        f"23 22 0:5 / {tmp_path} rw shared:1 - tmpfs tmpfs rw",
        f"24 23 0:6 / {tmp_path}/x\\040y rw - xfs /dev/b rw",
    ]
    root = tree(tmp_path, proc__self__mountinfo="\n".join(lines))
    assert filesystem(tmp_path / "z", root) == "tmpfs"
    assert filesystem(tmp_path / "x y" / "z", root) == "xfs"
    assert filesystem(Path("/usr"), root) == "ext4"


# -- the manager asks ------------------------------------------------------------------------------


def seal(monkeypatch: pytest.MonkeyPatch, found: Machine, **options: object) -> MemoryManager:
    monkeypatch.setattr(home_plan, "gather", lambda folder: found)
    made = MemoryManager(page_budget=8 * FRAME_BYTES, option_prefix="memory.", **options)  # type: ignore[arg-type]
    for number in range(4):
        made.add_group(GroupSpec(f"g{number}", 2 * FRAME_BYTES, 2, True))
    made.seal([], {})
    return made


def test_a_manager_refuses_before_it_takes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr("odc.memory.manager.make_home", never)
    monkeypatch.setattr("odc.memory.manager.make_pool", never)
    with pytest.raises(BudgetError, match=r"memory\.home host: 16\.0 MiB for pages on the device"):
        seal(monkeypatch, Machine(GIB, 20 << 20))


def test_addresses_that_cannot_be_reserved_are_told_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, f"mmap of {num_bytes} bytes: Cannot allocate memory")

    monkeypatch.setattr("odc.memory.manager.AddressRange", refuse)
    with pytest.raises(BudgetError, match=r"4\.00 MiB of addresses .*ulimit -v unlimited"):
        seal(monkeypatch, Machine(GIB, GIB))


def test_a_manager_warns_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Machine(GIB, GIB, folder=Folder(tmp_path, GIB, "nfs", direct=False))
    with pytest.warns(UserWarning, match=r"memory\.home_dir: .* takes no direct I/O"):
        made = seal(monkeypatch, found, home="disk", home_dir=tmp_path)
    made.close()


def test_without_host_mem_a_manager_takes_what_this_machine_has_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Folder(tmp_path, GIB, "ext4", direct=True)
    free = 8 * FRAME_BYTES + (256 << 20) + 10 * FRAME_BYTES
    made = seal(monkeypatch, Machine(GIB, free, folder=folder), home="host+disk", home_dir=tmp_path)
    assert made.home is not None
    sizes = {tier.name: t.num_bytes // FRAME_BYTES for tier, t in made.home.traffic.items()}
    assert sizes == {"HOST": 10, "DISK": 22}
    made.close()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"home": "tape"}, "memory.home must be host, disk or host.disk, got 'tape'"),
        ({"home": "disk", "host_mem": "1GB"}, "memory.host_mem limits the host memory of memory."),
    ],
)
def test_homes_that_make_no_sense_are_refused(options: dict[str, str], told: str) -> None:
    with pytest.raises(BudgetError, match=told):
        MemoryManager(option_prefix="memory.", **options)  # type: ignore[arg-type]
