"""From traces on disk to a predictor directory with a model card."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from predictor import load_predictor, read_visits, train_predictor
from predictor.features import split_by_time
from predictor.io import PredictorError
from predictor.model import KINDS
from predictor.quality import HORIZONS, compare_quality, judge_scores, quality_table
from profiler.errors import TraceError
from profiler.writer import TraceWriter


def test_visits_read_from_a_trace_are_those_that_were_written(tmp_path, uneven_visits, write_run):
    written = uneven_visits(passes=20)
    phases = np.array([0, 5, 4, 0])[np.arange(len(written)) // 3 % 4]
    object.__setattr__(written, "phase", phases)
    keep = written.used.any(axis=1)  # a set without a need is no visit
    read = read_visits(write_run(tmp_path / "run", written))
    assert read.structure.hash == written.structure.hash
    for name in ("step", "phase", "set_index", "tokens", "used"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name)[keep])


@pytest.mark.parametrize("kind", KINDS)
def test_a_predictor_trained_from_a_trace_has_a_card_and_beats_popularity(
    kind, tmp_path, dependent_visits, write_run, capfd
):
    run = write_run(tmp_path / "run", dependent_visits(passes=200, members=8))
    card = train_predictor([run], kind, tmp_path / "out", seed=1)
    predictor = load_predictor(tmp_path / "out", dependent_visits(passes=1, members=8).structure)
    assert predictor.kind == kind
    assert json.loads((tmp_path / "out" / "card.json").read_text()).items() <= card.items()
    held_out = card["held_out"]
    assert held_out[kind]["log_loss"] < held_out["popularity"]["log_loss"]
    assert set(held_out) == {"popularity", "replay", kind}
    assert card["parts"]["train"]["steps"]["0"][0] == 0
    assert card["parts"]["held_out"]["steps"]["0"] == [170, 199]
    assert card["structure"]["hash"] == predictor.structure.hash
    assert len(card["traces"][0]["sha256"]) == 64
    assert 0 <= held_out[kind]["calibration"]["expected_error"] <= 1
    assert capfd.readouterr().err == ""  # no progress bar where stderr is no terminal


def test_training_on_a_range_of_steps_ignores_the_others(tmp_path, random_visits, write_run):
    run = write_run(tmp_path / "run", random_visits(passes=80))
    card = train_predictor([run], "sklearn", tmp_path / "out", steps=range(10, 50))
    extents = [part["steps"]["0"] for part in card["parts"].values()]
    assert extents[0][0] == 10
    assert extents[-1][1] == 49


def test_a_held_out_run_is_judged_and_never_learned(tmp_path, dependent_visits, write_run):
    whole = dependent_visits(passes=150, members=8)
    first = write_run(tmp_path / "first", whole.take(slice(0, 400)))
    second = write_run(tmp_path / "second", whole.take(slice(400, 600)))
    card = train_predictor([first], "lstm", tmp_path / "out", held_out_runs=[second])
    assert set(card["parts"]["train"]["steps"]) == {"0"}
    assert set(card["parts"]["held_out"]["steps"]) == {"1"}
    assert card["parts"]["held_out"]["visits"] == 200
    assert card["held_out"]["lstm"]["recall"] > card["held_out"]["popularity"]["recall"] + 0.1


def test_a_trace_without_sets_is_refused_with_advice(tmp_path):
    with TraceWriter(tmp_path / "run" / "trace") as writer:
        writer.write_pages(
            [
                {
                    "page": 0, "group": 0, "kind": 0, "slot": 0, "part": 0, "bytes": 64,
                    "module_path": "head", "layer": -1, "expert": -1, "set": -1,
                }
            ]
        )  # fmt: skip
        writer.need(0, 1, 0, 0, 0, 0, 0, 0, 0, 5, 8)
    with pytest.raises(PredictorError, match="no expert sets"):
        read_visits(tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("steps", "got"),
    [([0, 0], "2, 0 and 0 from 1 "), ([0, 1, 2, 3, 4, 5, 5, 5, 5], "8, 6 and 0 from 6 ")],
)
def test_too_few_steps_are_refused_with_how_many_are_needed(
    kind, steps, got, tmp_path, dependent_visits, write_run
):
    visits = dependent_visits(passes=len(steps), num_sets=2, members=6)
    visits = replace(visits, step=np.repeat(steps, 2))
    with pytest.raises(PredictorError, match=f"run: expected .*got {got}steps; .*at least 20"):
        train_predictor([write_run(tmp_path / "run", visits)], kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_sets", [1, 4])
def test_twenty_steps_are_enough(num_sets, tmp_path, dependent_visits, write_run):
    run = write_run(tmp_path / "run", dependent_visits(passes=20, num_sets=num_sets))
    card = train_predictor([run], "sklearn", tmp_path / "out")
    assert card["held_out"]["sklearn"]["pairs"] > 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pages.arrow", "expected the page table"),
        ("manifest.json", "expected a JSON object"),
        ("rank00000/need-000001.arrows", "bytes that it had when it was closed"),
        ("rank00000/step-000001.arrows", "bytes that it had when it was closed"),
    ],
)
def test_a_cut_file_is_named(name, told, tmp_path, random_visits, write_run):
    run = write_run(tmp_path / "run", random_visits(passes=20))
    file = run / "trace" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(TraceError, match=f"{name}: .*{told}"):
        read_visits(run)


def test_a_lost_page_table_is_named(tmp_path, random_visits, write_run):
    run = write_run(tmp_path / "run", random_visits(passes=20))
    (run / "trace" / "pages.arrow").unlink()
    with pytest.raises(PredictorError, match=r"pages\.arrow: expected the page table"):
        read_visits(run)


def test_an_unknown_kind_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="got 'forest'"):
        train_predictor([tmp_path / "missing"], "forest", tmp_path / "out")


def test_measures_equal_a_plain_loop(uneven_visits):
    visits = uneven_visits(passes=12)
    scores = np.random.default_rng(0).random((len(visits), 3, 8)).astype(np.float32)
    scores[:, ~visits.structure.member_mask()] = 0
    losses, briers, recalls = [], [], []
    for row in range(len(visits)):
        for index, size in enumerate(visits.structure.members):
            later = np.flatnonzero(visits.set_index[row + 1 :] == index)
            if not len(later):
                continue
            used = visits.used[row + 1 + later[0], :size]
            p = scores[row, index, :size].clip(1e-3, 1 - 1e-3)
            losses.append(-np.log(np.where(used, p, 1 - p)).mean())
            briers.append(((scores[row, index, :size] - used) ** 2).mean())
            best = np.argsort(-scores[row, index, :size])[: int(np.ceil(1.25 * used.sum()))]
            recalls.append(used[best].sum() / used.sum() if used.any() else 1.0)
    result = judge_scores(scores, visits)
    assert result["pairs"] == len(losses)
    assert result["log_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert result["brier"] == pytest.approx(np.mean(briers), abs=1e-5)
    assert result["recall"] == pytest.approx(np.mean(recalls), abs=1e-5)


def test_scores_drawn_as_they_say_are_calibrated(random_visits):
    visits = random_visits(passes=300)
    share = visits.used.reshape(300, 4, 16).mean(axis=0)
    scores = np.repeat(share[None].astype(np.float32), len(visits), axis=0)
    assert judge_scores(scores, visits)["calibration"]["expected_error"] < 0.01
    assert judge_scores(1 - scores, visits)["calibration"]["expected_error"] > 0.1


def test_the_quality_table_has_a_line_for_each_scorer(random_visits):
    visits = random_visits(passes=40)
    quality = compare_quality(visits, split_by_time(visits))
    lines = quality_table(quality).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["popularity", "replay"]
    assert all(word in " ".join(lines[4:]) for word in ("log-loss", "recall", *HORIZONS))
