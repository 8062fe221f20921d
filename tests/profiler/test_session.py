"""`Profiler` works in a plain script, and leaves torch as it found it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from odc.monitor import Profiler
from profiler.capture import CommCapture, group_number, sample_memory
from profiler.reader import TraceReader
from profiler.schema import Account, CommOp, Tier
from tests.profiler import rank_program


def train(profiler: Profiler, steps: int) -> None:
    model = torch.nn.Linear(4, 4)
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        profiler.step(loss=loss, tokens=8)


def test_a_plain_script_gives_a_run_directory(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        from odc.monitor import Profiler
        with Profiler(trace_interval=2) as profiler:
            for i in range(5):
                profiler.step(loss=1 / (i + 1), tokens=10)
        print(profiler.run_dir)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    run = tmp_path / done.stdout.strip()
    assert run.parent == tmp_path / "runs" and run.name.startswith("profile-")
    reader = TraceReader(run)
    assert reader.problems == [] and reader.steps()["step"].tolist() == [1, 2, 3, 4, 5]
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


def test_every_step_has_a_row_and_every_nth_a_footprint(tmp_path: Path) -> None:
    with Profiler(trace_interval=3, run_dir=tmp_path) as profiler:
        train(profiler, 7)
    reader = TraceReader(tmp_path)
    steps = reader.steps()
    assert steps["step"].tolist() == list(range(1, 8))
    assert (steps["step_ns"] > 0).all() and steps["tokens"].tolist() == [8] * 7
    accounted = steps["compute_ns"] + steps["comm_ns"] + steps["profiler_ns"]
    assert (accounted <= steps["step_ns"] + steps["profiler_ns"]).all()
    mem = reader.mem()
    host = mem["tier"] == Tier.HOST
    assert mem["step"][host].tolist() == [1, 4, 7]
    assert set(mem["account"].tolist()) == {Account.PROCESS}
    assert (mem["peak"][host] >= mem["allocated"][host]).all()
    assert (mem["allocated"][host] > 10**7).all()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["loss"] for line in lines] == pytest.approx(steps["loss"].tolist())
    assert reader.manifest["trace_interval"] == 3


def test_steps_survive_without_a_stop(tmp_path: Path) -> None:
    profiler = Profiler(trace_interval=1, run_dir=tmp_path).start()
    profiler.step()
    profiler.step(loss=float("nan"))
    assert TraceReader(tmp_path).steps()["step"].tolist() == [1, 2]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["loss"] is None
    profiler.stop()


def test_an_exception_is_passed_on_and_the_run_marked(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Profiler(run_dir=tmp_path) as profiler:
        profiler.step()
        raise ZeroDivisionError
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert TraceReader(tmp_path).problems == []


def test_an_unknown_metric_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"among comm_vol, mem_footprint, got \['flops'\]"):
        Profiler(metrics=["comm_vol", "flops"])
    with pytest.raises(ValueError, match="trace_interval must be at least 1, got 0"):
        Profiler(trace_interval=0)


def test_calls_at_the_wrong_moment_name_the_right_one(tmp_path: Path) -> None:
    profiler = Profiler(run_dir=tmp_path)
    with pytest.raises(RuntimeError, match="call start"):
        profiler.step()
    with pytest.raises(RuntimeError, match="call start"):
        _ = profiler.run_dir
    profiler.start()
    with pytest.raises(RuntimeError, match="call stop"):
        profiler.start()
    profiler.stop()
    profiler.stop()


def test_a_resumed_loop_continues_the_trace(tmp_path: Path) -> None:
    for first in (1, 4):
        with Profiler(1, ["mem_footprint"], tmp_path, first_step=first) as profiler:
            for _ in range(4):
                profiler.step()
    steps = TraceReader(tmp_path).steps()
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert steps["session"].tolist() == [1, 1, 1, 2, 2, 2, 2]


def test_ranks_that_cannot_agree_on_a_directory_are_told(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group, or give run_dir"):
        Profiler().start()


def torch_functions() -> dict[str, object]:
    return {**dist.ProcessGroup.__dict__, "work.wait": dist.Work.__dict__["wait"]}


def test_off_restores_the_very_functions(tmp_path: Path) -> None:
    before = torch_functions()
    capture = CommCapture()
    capture.start()
    capture.start()
    during = torch_functions()
    changed = {name for name in before if before[name] is not during[name]}
    assert {"allreduce", "_allgather_base", "send", "barrier", "work.wait"} <= changed
    capture.stop()
    assert all(torch_functions()[name] is before[name] for name in before)
    with Profiler(run_dir=tmp_path):
        assert torch_functions()["allreduce"] is not before["allreduce"]
    assert all(torch_functions()[name] is before[name] for name in before)


def test_without_comm_vol_nothing_is_replaced(tmp_path: Path) -> None:
    before = torch_functions()
    with Profiler(metrics=["mem_footprint"], run_dir=tmp_path):
        assert all(torch_functions()[name] is before[name] for name in before)


def test_someone_elses_wrapper_is_left_in_place(monkeypatch) -> None:
    capture = CommCapture()
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", dist.ProcessGroup.__dict__["allreduce"])
    capture.start()
    other = lambda *args: None  # noqa: E731
    dist.ProcessGroup.allreduce = other  # type: ignore[method-assign]
    capture.stop()
    assert dist.ProcessGroup.__dict__["allreduce"] is other


def test_the_host_peak_begins_anew_with_each_sample() -> None:
    sample_memory()
    block = np.ones(60_000_000, np.uint8)
    high = [f for f in sample_memory() if f.tier == Tier.HOST]
    del block
    sample_memory()
    low = [f for f in sample_memory() if f.tier == Tier.HOST]
    if not high:
        pytest.skip("no /proc/self/status on this system")
    assert high[0].peak >= high[0].allocated > low[0].allocated
    assert low[0].peak >= low[0].allocated


def test_group_numbers_are_the_same_on_all_ranks_and_fit_their_column() -> None:
    assert group_number("0") == 0 and group_number("12") == 12
    hashed = group_number("a3f5c0de")
    assert 1 << 14 <= hashed < 1 << 15 and hashed == group_number("a3f5c0de")
    assert 1 << 14 <= group_number("99999999") < 1 << 15


def test_visualize_hands_the_run_to_the_dashboard(tmp_path: Path, monkeypatch, capsys) -> None:
    calls: list[tuple] = []
    app, report = type(sys)("dashboard.app"), type(sys)("dashboard.report")
    app.serve = lambda root, **options: calls.append(("serve", root)) or "http://x"
    report.write_report = lambda run, path: calls.append(("report", run, path))
    monkeypatch.setitem(sys.modules, "dashboard.app", app)
    monkeypatch.setitem(sys.modules, "dashboard.report", report)
    with Profiler(run_dir=tmp_path) as profiler:
        profiler.step()
        assert profiler.visualize() == "http://x"
        assert "http://x" in capsys.readouterr().out
        target = tmp_path / "report.html"
        assert profiler.visualize(show=False, path=target) == str(target)
        profiler.rank = 1
        assert profiler.visualize() is None
        profiler.rank = 0
    assert calls == [("serve", tmp_path), ("report", tmp_path, target)]


@pytest.mark.dist
def test_two_ranks_record_their_collectives(run_ranks, tmp_path: Path) -> None:
    matrices = run_ranks(rank_program.record_collectives, 2, tmp_path)
    assert matrices == [[[0, 40_000], [40_000, 0]]] * 2
    reader = TraceReader(tmp_path)
    # Per traced step and rank, by hand: 4,000 B each of all-reduce, two all-gathers and broadcast
    # (rank 1 only) or send (rank 0 only), 2,000 B of reduce-scatter and of all-to-all.
    comm = reader.comm()
    assert set(comm["step"].tolist()) == {1, 3}
    mine = reader.comm([1], rank=0)
    assert mine["op"].tolist() == [
        CommOp.ALL_REDUCE, CommOp.ALL_GATHER, CommOp.ALL_GATHER, CommOp.REDUCE_SCATTER,
        CommOp.BROADCAST, CommOp.ALL_TO_ALL, CommOp.SEND, CommOp.ALL_REDUCE, CommOp.BARRIER,
    ]  # fmt: skip
    assert mine["bytes"].tolist() == [4000, 8000, 8000, 4000, 4000, 4000, 4000, 4000, 0]
    assert mine["src"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert mine["dst"].tolist() == [-1] * 6 + [1, -1, -1]
    assert (mine["dur_ns"] > 0).all()
    theirs = reader.comm([1], rank=1)
    received = theirs["op"] == CommOp.RECV
    assert theirs["src"][received].tolist() == [0] and theirs["dst"][received].tolist() == [1]
    assert reader.process_groups["0"] == [0, 1]
    alone = reader.comm([1])["pg"][[7, 16]].tolist()
    assert [reader.process_groups[str(pg)] for pg in alone] == [[0], [1]]
    steps = reader.steps(rank=None)
    assert (steps["comm_ns"] > 0).all() and steps["rank"].tolist() == [0, 0, 0, 1, 1, 1]
