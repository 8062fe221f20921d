"""The doctor's findings: machines are described, and each gets the advice that fits it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from odc.memory.machine import Cgroup, Folder, Limit, Machine
from odc.train import findings
from odc.train.findings import Finding, Level
from odc.train.network import Rings, network, network_cards

GIB = 1 << 30
DISK = Folder(Path("/data"), 100 * GIB, "ext4", direct=True)
MACHINE = Machine(64 * GIB, 60 * GIB, folder=DISK)


def machine(**what: object) -> Machine:
    return dataclasses.replace(MACHINE, **what)  # type: ignore[arg-type]


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def by_subject(found) -> dict[str, Finding]:  # type: ignore[no-untyped-def]
    return {one.subject: one for one in found}


THP = "sys__kernel__mm__transparent_hugepage__enabled"


# -- memory ----------------------------------------------------------------------------------------


def test_memory_for_nothing_is_a_problem() -> None:
    assert by_subject(findings.memory(MACHINE))["memory"].level == Level.OK
    found = by_subject(findings.memory(machine(available_bytes=GIB // 2)))["memory"]
    assert found.level == Level.PROBLEM and found.how
    boxed = machine(cgroup=Cgroup("/box", GIB, GIB // 2))
    found = by_subject(findings.memory(boxed))
    assert found["memory"].level == Level.PROBLEM
    assert "/box allows 1.00 GiB, 512 MiB of it free" in found["control group"].what


def test_swap_is_advised_against() -> None:
    found = by_subject(findings.memory(machine(swap_bytes=GIB)))["swap"]
    assert found.level == Level.ADVICE and found.how.startswith("swapoff -a")


@pytest.mark.parametrize(
    "mode, measured, level, how",
    [
        ("always [madvise] never", 1.0, Level.OK, ""),
        ("[always] madvise never", None, Level.OK, ""),
        ("always madvise [never]", 0.0, Level.ADVICE, "echo madvise | sudo tee"),
        ("always [madvise] never", 0.3, Level.ADVICE, "compact_memory"),
    ],
)
def test_huge_pages_are_judged_by_what_frames_get(
    mode: str, measured: float | None, level: Level, how: str, tmp_path: Path
) -> None:
    root = tree(tmp_path, **{THP: mode, "proc__meminfo": "HugePages_Total: 0"})
    found = by_subject(findings.huge_pages(root, measured))["huge pages"]
    assert found.level == level and how in found.how and found.why


def test_reserved_huge_pages_are_explained_and_missed_by_nobody(tmp_path: Path) -> None:
    files = {"proc__meminfo": "HugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB"}
    found = by_subject(findings.huge_pages(tree(tmp_path, **files), None))["reserved huge pages"]
    assert found.level == Level.OK and found.how == "sudo sysctl vm.nr_hugepages=1024"
    files = {"proc__meminfo": "HugePages_Total: 2048\nHugePages_Free: 2000\nHugepagesize: 2048 kB"}
    found = by_subject(findings.huge_pages(tree(tmp_path, **files), None))["reserved huge pages"]
    assert found.level == Level.ADVICE and found.how == "sudo sysctl vm.nr_hugepages=0"


def test_a_kernel_without_moving_frames_and_with_few_mappings_is_told(tmp_path: Path) -> None:
    files = {
        "proc__sys__kernel__osrelease": "5.4.0",
        "proc__sys__vm__max_map_count": "4096",
        "proc__sys__vm__overcommit_memory": "2",
    }
    found = by_subject(findings.frames(tree(tmp_path, **files), can_move=False))
    assert [found[s].level for s in ("frames", "mappings", "overcommit")] == [Level.ADVICE] * 3
    assert "4.00 GiB of resident pages" in found["mappings"].what
    files = {"proc__sys__vm__max_map_count": "65530", "proc__sys__vm__overcommit_memory": "0"}
    found = by_subject(findings.frames(tree(tmp_path, **files), can_move=True))
    assert set(found) == {"frames", "mappings"}
    assert all(one.level == Level.OK for one in found.values())


def test_limits_are_told_and_tight_ones_are_problems() -> None:
    assert [f.what for f in findings.limits(MACHINE)] == ["unlimited"]
    limited = machine(locked=Limit(8 << 20), address_space=Limit(4 * GIB, 3 * GIB + 1))
    found = by_subject(findings.limits(limited))
    assert found["page-locked memory"].level == Level.ADVICE
    assert found["address space"].level == Level.PROBLEM
    assert found["address space"].how == "ulimit -v unlimited"
    roomy = machine(address_space=Limit(400 * GIB, GIB))
    assert by_subject(findings.limits(roomy))["address space"].level == Level.ADVICE


# -- disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder, rates, level, part",
    [
        ({}, (3e9, 2e9), Level.OK, "reads 3.00 GB/s, writes 2.00 GB/s, direct I/O"),
        ({}, (3e9, 1e8), Level.ADVICE, "writes 0.10 GB/s"),
        ({"filesystem": "tmpfs"}, (9e9, 9e9), Level.ADVICE, "/data (tmpfs)"),
        ({"direct": False}, (1e9, 1e9), Level.ADVICE, "/data (ext4)"),
        ({"free_bytes": 5}, (1e9, 1e9), Level.ADVICE, "5 B free"),
        ({}, None, Level.OK, "100 GiB free"),
    ],
)
def test_the_disk_is_judged(folder: dict, rates: tuple, level: Level, part: str) -> None:
    where = machine(folder=dataclasses.replace(DISK, **folder))
    found = findings.disk(where, rates)
    assert found.level == level and part in found.what
    assert level == Level.OK or (found.why and "memory.home_dir" in found.how)


def test_a_disk_that_cannot_be_written_says_why() -> None:
    found = findings.disk(MACHINE, None, "home_dir: cannot make a file in /data")
    assert found.level == Level.ADVICE and "cannot make a file" in found.what


# -- processors ------------------------------------------------------------------------------------


def nodes(count: int) -> dict[str, str]:
    return {
        f"sys__devices__system__node__node{n}__cpulist": f"{n * 8}-{n * 8 + 7}"
        for n in range(count)
    }


def test_one_core_or_all_cores_for_computing_is_advised_against(tmp_path: Path) -> None:
    root = tree(tmp_path, **nodes(1))
    assert by_subject(findings.processors(root, 1, None))["cores"].level == Level.ADVICE
    found = by_subject(findings.processors(root, 8, "8"))
    assert found["cores"].level == Level.OK
    assert found["threads"].how == "export OMP_NUM_THREADS=7"
    assert "threads" not in by_subject(findings.processors(root, 8, "7"))


@pytest.mark.parametrize(
    "files",
    [
        {"sys__fs__cgroup__cpu.max": "350000 100000"},
        {
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "350000",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000",
        },
    ],
)
def test_a_quota_of_processor_time_is_seen(files: dict[str, str], tmp_path: Path) -> None:
    found = by_subject(findings.processors(tree(tmp_path, **files), 16, None))
    assert found["processor quota"].what == "the control group allows 3.5 cores of 16"
    assert found["processor quota"].how == "train.threads=2"


def test_no_quota_is_no_finding(tmp_path: Path) -> None:
    root = tree(tmp_path, **{"sys__fs__cgroup__cpu.max": "max 100000"})
    assert "processor quota" not in by_subject(findings.processors(root, 16, None))


def test_a_process_on_several_nodes_is_told_how_to_stay_on_one(tmp_path: Path) -> None:
    files = nodes(2) | {"proc__self__status": "Cpus_allowed: ff\nMems_allowed_list:\t0-1"}
    found = by_subject(findings.processors(tree(tmp_path, **files), 16, None))["NUMA"]
    assert found.level == Level.ADVICE
    assert found.how.startswith("numactl --cpunodebind=0 --membind=0")
    files = nodes(2) | {"proc__self__status": "Mems_allowed_list:\t1"}
    found = by_subject(findings.processors(tree(tmp_path, **files), 16, None))["NUMA"]
    assert found.level == Level.OK


# -- software and network --------------------------------------------------------------------------


def test_torch_is_needed_and_old_ones_do_not_do() -> None:
    missing = by_subject(findings.torch_and_cuda(None, [], "No module named 'torch'"))
    assert missing["PyTorch"].level == Level.PROBLEM
    assert by_subject(findings.torch_and_cuda("2.9.1", []))["PyTorch"].level == Level.PROBLEM
    found = by_subject(findings.torch_and_cuda("2.13.0+cpu", ["H200"]))
    assert found["PyTorch"].level == Level.OK and found["CUDA"].what == "H200"


def cards(root: Path, *names: str, rdma: bool = False) -> Path:
    for name in names:
        (root / "sys/class/net" / name / "device").mkdir(parents=True)
    (root / "sys/class/net/lo").mkdir(parents=True)
    if rdma:
        (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    return root


def test_settings_of_nccl_are_explained(tmp_path: Path) -> None:
    found = by_subject(network(cards(tmp_path), {}, {}))["NCCL sockets"]
    assert found.how == "export NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=2"
    env = {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2"}
    found = by_subject(network(cards(tmp_path / "b"), env, {}))["NCCL sockets"]
    assert not found.how and "NCCL_NSOCKS_PERTHREAD=4" in found.what


def test_short_queues_of_a_card_are_told_with_the_command(tmp_path: Path) -> None:
    root = cards(tmp_path, "eth0", "eth1", "eth2", rdma=True)
    assert network_cards(root) == ["eth0", "eth1", "eth2"]
    rings = {"eth0": Rings(128, 512, 4096, 4096), "eth1": Rings(256, 256, 256, 256)}
    found = by_subject(network(root, {}, rings))
    assert found["queues of eth0"].level == Level.ADVICE
    assert found["queues of eth0"].how == "sudo ethtool -G eth0 rx 1024 tx 1024"
    assert "time-outs that nothing explains" in found["queues of eth0"].why
    assert found["queues of eth1"].level == found["queues of eth2"].level == Level.OK
    assert found["RDMA"].what == "mlx5_0"


def test_a_card_that_cannot_have_longer_queues_is_left_alone(tmp_path: Path) -> None:
    root = cards(tmp_path, "eth0")
    found = by_subject(network(root, {}, {"eth0": Rings(64, 64, 128, 128)}))
    assert found["queues of eth0"].level == Level.OK
