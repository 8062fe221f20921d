"""Claims about several ranks: they train as one process does, into one run directory."""

from __future__ import annotations

import io
import json
import pickle
import shutil

import numpy as np
import pytest

from dashboard.catalog import RunPlace
from dashboard.data import RunData
from dashboard.state import ViewState
from dashboard.theme import LIGHT
from dashboard.views import communication
from odc.errors import CheckpointError
from odc.train.dcp_metadata import load_metadata
from odc.train.trainer import train
from profiler import TraceReader
from profiler.schema import CommOp
from tests.train import rank_program

pytestmark = pytest.mark.dist

STEPS = 4
KEYS = {
    "train.steps": STEPS,
    "train.accumulate": 2,
    "train.eval_every": 2,
    "train.eval_batches": 3,
    "optimizer.max_grad_norm": 0.5,
    "profiler.trace_interval": 1,
    "checkpoint.every": 2,
    "memory.page_budget": None,
}


@pytest.fixture(scope="module")
def keys(corpus):
    """Configuration keys of a model."""

    def of(model: str, **changed):
        shape = {"model.hidden_size": 64, "model.num_layers": 2, "data.vocab_size": 400}
        if model == "moe":
            shape |= {"model.num_experts": 6, "model.expert_size": 96}
        small = {"train.seq_len": 24, "train.micro_batch": 2, "train.threads": 1}
        rate = {"optimizer.lr": 3e-3, "optimizer.schedule": "cosine", "data.eval_fraction": 0.2}
        made = {**corpus, **shape, **small, **rate, **KEYS, **changed}
        return {k: str(v) if hasattr(v, "__fspath__") else v for k, v in made.items()}

    return of


@pytest.fixture(scope="module")
def runs(run_ranks, keys, tmp_path_factory):
    """Folder with the runs `dense`, `moe` and `resumed` of 2 ranks, and what each rank counted."""
    folder = tmp_path_factory.mktemp("ranks")
    counts = run_ranks(rank_program.whole_and_resumed, 2, keys("dense"), keys("moe"), folder)
    return folder, counts


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_two_ranks_train_as_one_process_that_accumulates_twice_as_much(
    runs, keys, read_metrics, tmp_path, model
):
    train(rank_program.config_of(keys(model, **{"train.accumulate": 4})), tmp_path / "one")
    ours, one = read_metrics(runs[0] / model), read_metrics(tmp_path / "one")
    for name in ("loss", "tokens", "eval_loss"):
        mine, theirs = ([line[name] for line in m if name in line] for m in (ours, one))
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, err_msg=name)


def test_a_resumed_run_is_bit_equal_at_the_same_number_of_ranks(runs, read_metrics):
    whole, again = (read_metrics(runs[0] / name) for name in ("dense", "resumed"))
    for name in ("loss", "eval_loss"):
        assert [line.get(name) for line in again] == [line.get(name) for line in whole]
    records = [
        json.loads((runs[0] / name / "checkpoints" / "step-000004" / "checkpoint.json").read_text())
        for name in ("dense", "resumed")
    ]
    data = [{n: f for n, f in r["files"].items() if n.endswith(".distcp")} for r in records]
    assert len(data[0]) == 2 and data[0] == data[1]


@pytest.mark.slow
def test_three_ranks_and_one_go_on_from_two(run_ranks, runs, keys, read_metrics, tmp_path):
    for name in ("three", "one"):
        shutil.copytree(runs[0] / "moe", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-000004")
    run_ranks(rank_program.resumed, 3, keys("moe"), tmp_path / "three")
    one = keys("moe", **{"train.accumulate": 6})
    train(rank_program.config_of(one), tmp_path / "one", resume=True)
    three, one = (read_metrics(tmp_path / name) for name in ("three", "one"))
    assert [line["step"] for line in three] == list(range(STEPS))
    losses = [[line["loss"] for line in run] for run in (three, one)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_the_trace_of_every_rank_holds_what_its_collectives_counted(runs):
    folder, counts = runs
    reader = TraceReader(folder / "dense")
    assert reader.ranks == [0, 1] and not reader.problems
    assert [path.parent.name for path in folder.glob("dense/trace/**/manifest.json")] == ["trace"]
    listed = {segment["file"].split("/")[0] for segment in reader.manifest["segments"]}
    assert listed == {"rank00000", "rank00001"}
    for rank, counted in enumerate(counts):
        comm = reader.comm(rank=rank)
        assert set(comm["step"].tolist()) == set(range(STEPS))
        assert (comm["dur_ns"] > 0).all() and (comm["wait_ns"] >= 0).all()
        for op, (calls, sent_bytes) in counted.items():
            rows = comm["op"] == CommOp[op]
            part = 1 if op == "ALL_REDUCE" else 2  # a rank sends the half that is its own
            assert rows.sum() == calls and comm["bytes"][rows].sum() // part == sent_bytes
        assert reader.steps(rank=rank)["step"].tolist() == list(range(STEPS))
        assert set(comm["group"].tolist()) == {-1, 0, 1, 2}
    assert reader.process_groups == {"0": [0, 1]}


def test_the_communication_view_shows_traffic_by_group_and_rank(runs):
    folder, _ = runs
    run = RunData(RunPlace("dense", folder / "dense"))
    page = communication.build(run, ViewState(), LIGHT)
    assert [panel.key for panel in page.panels] == ["matrix", "groups"]
    _, names, ops = communication.by_group_and_op(run, run.comm)
    assert names == ["no group named", "Transformer", "L0", "L1"]
    assert "all_gather" in ops and "reduce_scatter" in ops
    links = next(table for table in page.tables if table.key == "links")
    assert [row[:2] for row in sorted(links.rows)] == [(0, 1), (1, 0)]


@pytest.fixture(scope="module")
def ends(run_ranks, keys, tmp_path_factory):
    """Folder with the runs `signal` and `failure`; how these and a refused one ended, by rank."""
    folder = tmp_path_factory.mktemp("ends")
    limited = keys("dense", **{"memory.page_budget": "24MB", "memory.total_mem": "64MB"})
    args = (limited, keys("dense"), folder)
    return folder, run_ranks(rank_program.ends, 2, *args, last=True)


def test_a_signal_to_one_rank_ends_all_after_the_step(ends):
    folder, found = ends
    assert [rank["signal"] for rank in found] == [("interrupted", 3)] * 2
    assert (folder / "signal" / "checkpoints" / "step-000003" / "checkpoint.json").is_file()
    assert json.loads((folder / "signal" / "summary.json").read_text())["status"] == "interrupted"


def test_a_rank_that_fails_is_told_by_the_others(ends):
    folder, found = ends
    (code, _, text), own = (rank["failure"] for rank in found)
    assert own[0] == 3 and "Input/output error" in own[2]
    assert code == 3 and "rank 1" in text
    summary = json.loads((folder / "failure" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["reason"] == text


def test_a_page_budget_is_refused_in_one_line(ends):
    folder, found = ends
    for code, text in (rank["refusal"] for rank in found):
        assert code == 2 and "\n" not in text
        assert text.startswith("memory.total_mem and memory.page_budget: paging is not combined")
    assert not (folder / "refusal").exists()


class Foreign:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("value", [Foreign(), pytest.importorskip, ViewState()])
def test_metadata_with_a_foreign_class_is_refused(runs, value, capsys):
    with pytest.raises(CheckpointError, match="is not admitted"):
        load_metadata(io.BytesIO(pickle.dumps(value)), "x")
    assert "must not run" not in capsys.readouterr().out
    folder = runs[0] / "dense" / "checkpoints" / "step-000004"
    with open(folder / ".metadata", "rb") as file:
        assert "param.embed.weight" in load_metadata(file, folder).state_dict_metadata
