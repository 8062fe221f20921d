"""Claims about the commands: what they print, what they refuse and with which exit code."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from odc.cli.main import main

TINY = [
    "data.vocab_size=400",
    "train.steps=12",
    "train.seq_len=24",
    "train.micro_batch=2",
    "train.eval_every=null",
    "model.num_layers=2",
    "model.num_experts=6",
    "memory.page_budget=12MB",
    "checkpoint.every=6",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """Arguments of a run of two seconds."""
    folder = tmp_path_factory.mktemp("corpus")
    source = Path(argparse.__file__)
    (folder / source.name).write_bytes(source.read_bytes())
    cache = tmp_path_factory.mktemp("cache")
    return ["tiny-moe", f"data.corpus={folder}", f"data.cache_dir={cache}", *TINY]


@pytest.fixture(scope="module")
def profiled(tiny, tmp_path_factory) -> Path:
    """A run with every step traced."""
    run_dir = tmp_path_factory.mktemp("runs") / "profile"
    assert main(["profile", *tiny, "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture(scope="module")
def predictor(profiled, tmp_path_factory) -> Path:
    """A predictor for the profiled model."""
    path = tmp_path_factory.mktemp("predictors") / "sklearn"
    assert main(["predictor", "train", str(profiled), "--model", "sklearn", "-o", str(path)]) == 0
    return path


def errors(capsys) -> list[str]:
    """Lines of stderr that report an error."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("odc: ")]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from odc.cli.main import make_parser; make_parser().format_help(); "
        "heavy = {'torch', 'numpy', 'pyarrow', 'sklearn', 'dash'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "command",
    [["train"], ["profile"], ["predictor", "train"], ["predictor", "eval"], ["dashboard"]]
    + [["report"], ["generate"], ["simulate"], ["bench", "paging"], ["doctor"]]
    + [["bench"], ["predictor"]],
)
def test_every_command_explains_itself_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "example" in told and f"odc {' '.join(command)} " in told


def test_tokens_are_not_ignored_where_sizes_are_measured(capsys):
    assert main(["bench", "fsdp", "--sizes", "8", "--tokens", "16"]) == 2
    assert "--tokens has no effect with --sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.yaml"], "config nowhere.yaml: no such file; give a config.yaml, or one of"),
        (["tiny-moe", "train.stps=3"], "train.stps: unknown key; did you mean train.steps?"),
        (
            ["tiny-moe", "memory.page_budget=40 parsecs"],
            "memory.page_budget: '40 parsecs' is no si",
        ),
        (["tiny-moe", "data.corpus=/no/such/text"], "/no/such/text does not exist"),
        (
            ["tiny-moe", "memory.page_budget=2MB"],
            "memory.page_budget: 2.00 MiB for pages",
        ),
        (["tiny-moe", "--from", "/no/such/run"], "/no/such/run: holds no complete checkpoint"),
        (["tiny-moe", "tiny-dense"], "tiny-dense: expected KEY=VALUE"),
        ([], "CONFIG is missing"),
        (["tiny-moe", "memory.predictor=lstm"], "memory.predictor_path: missing"),
        (["tiny-moe", "--resume", "--from", "x", "--run-dir", "y"], "--from begins a new run"),
    ],
)
def test_bad_input_is_told_in_a_line_and_ends_with_2(
    arguments, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    lines = errors(capsys)
    assert len(lines) == 1 and told in lines[0]
    assert not (tmp_path / "runs").exists()


def test_all_problems_of_a_configuration_are_told_at_once(capsys):
    assert main(["train", "tiny-moe", "train.stps=3", "memory.home=tape"]) == 2
    assert len(errors(capsys)) == 2


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("ODC_DEBUG", "1")
    with pytest.raises(ValueError, match="no such file"):
        main(["train", "nowhere.yaml"])


@pytest.mark.parametrize("command", ["train", "profile"])
def test_keys_lists_every_key_and_needs_no_configuration(command, capsys):
    assert main([command, "--keys"]) == 0
    assert "page_budget: null" in capsys.readouterr().out


def test_train_prints_its_summary_as_json(tiny, tmp_path, capsys):
    run_dir = tmp_path / "run"
    # Options may stand anywhere between CONFIG and overrides.
    arguments = ["train", "--run-dir", str(run_dir), tiny[0], "--json", *tiny[1:], "train.steps=2"]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert summary["run_dir"] == str(run_dir)


def test_train_ends_with_the_figures_that_the_dashboard_shows(profiled):
    from dashboard import units
    from dashboard.catalog import RunCatalog
    from dashboard.compare import run_row
    from dashboard.data import RunData
    from odc.cli.train import _describe

    told = _describe(profiled, json.loads((profiled / "summary.json").read_text()))
    row = run_row(RunData(RunCatalog(profiled).runs()[0]))
    assert f"means of a step: {row.mean_step_s:.3f} s, {row.stall_s:.3f} s of it stalled" in told
    assert f"{units.size(row.bytes_in)} in, {units.size(row.bytes_out)} out" in told


def test_a_run_with_experts_is_simulated_and_no_policy_beats_its_bound(profiled, capsys):
    """Experts may run in another order than recorded: the bound holds for any."""
    words = ["--budget", "50%", "--r", "2", "--warm-up", "6", "--steps", "4", "--moves", "5"]
    assert main(["simulate", str(profiled), *words, "--no-lp", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"lru+none", "cost_aware+popularity", "cost_aware+oracle"} <= {r["policy"] for r in rows}
    for row in rows:
        assert row["window_bound_s"] <= row["elapsed_s"] * (1 + 1e-6)
        assert row["steps"] == 4 and row["r"] == 2


def test_runs_have_a_name_of_their_own_and_resume_finds_the_newest(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["train", *tiny, "train.steps=1", "checkpoint.every=1"]) == 0
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and all(run.name.startswith("tiny-moe-2") for run in runs)
    assert main(["train", *tiny, "train.steps=2", "checkpoint.every=1", "--resume"]) == 0
    assert str(runs[-1].relative_to(tmp_path)) in capsys.readouterr().out.splitlines()[-2]
    assert [len((run / "metrics.jsonl").read_text().splitlines()) for run in runs] == [1, 2]
    # A run that is there is not written over; its own configuration is enough to go on.
    assert main(["train", *tiny, "--run-dir", str(runs[0])]) == 2
    assert main(["train", "--resume", "--run-dir", str(runs[0]), "train.steps=3"]) == 0


def test_a_profile_traces_every_step_whatever_the_file_says(profiled):
    from profiler import TraceReader

    reader = TraceReader(profiled)
    assert sorted(set(reader.need()["step"].tolist())) == list(range(12))
    assert "trace_interval: 1\n" in (profiled / "config.yaml").read_text()


def test_a_predictor_drives_a_new_run_from_the_profiles_checkpoint(
    tiny, profiled, predictor, tmp_path, capsys
):
    arguments = [
        *(*tiny, "train.steps=15", "memory.predictor=sklearn"),
        *(f"memory.predictor_path={predictor}", "--from", str(profiled)),
        *("--run-dir", str(tmp_path / "run"), "--json"),
    ]
    assert main(["train", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["policy"], summary["first_step"]) == ("cost_aware+sklearn", 12)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["model.num_experts=4"], "was made for a model with 2 sets of 6 experts"),
        (["model.num_experts=null"], "this model has no expert sets"),
    ],
)
def test_a_predictor_for_another_model_is_refused(tiny, predictor, tmp_path, capsys, keys, told):
    run_dir = tmp_path / "run"
    named = ["memory.predictor=sklearn", f"memory.predictor_path={predictor}"]
    assert main(["train", *tiny, *named, *keys, "--run-dir", str(run_dir)]) == 2
    assert told in errors(capsys)[0]
    assert not run_dir.exists()


def test_a_predictor_of_another_kind_is_refused(tiny, predictor, tmp_path, capsys):
    named = ["memory.predictor=lstm", f"memory.predictor_path={predictor}"]
    assert main(["train", *tiny, *named, "--run-dir", str(tmp_path / "run")]) == 2
    assert "memory.predictor: got 'lstm'" in errors(capsys)[0]


def test_eval_compares_every_policy_on_held_out_steps(profiled, predictor, capsys):
    arguments = ["predictor", "eval", str(profiled), "--model", str(predictor), "--link", "500MB/s"]
    assert main([*arguments, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert (table["first_step"], table["num_steps"]) == (8, 4)
    rows = {row["policy"]: row for row in table["rows"]}
    assert list(rows) == [
        "lru+none",
        "lru+next_k",
        "lru+replay",
        "cost_aware+popularity",
        "cost_aware+markov",
        "cost_aware+sklearn",
        "auto+auto",
        "auto+auto(sklearn)",
        "belady+oracle",
    ]
    assert rows["belady+oracle"]["misses"] <= rows["lru+none"]["misses"]
    assert all(row["step_s"] >= row["stall_s"] >= 0 for row in rows.values())
    assert main([*arguments, "--budget", "14MB"]) == 0
    assert "belady+oracle" in capsys.readouterr().out


def test_eval_shows_what_the_run_measured_beside_the_simulated_row(profiled, capsys):
    arguments = ["predictor", "eval", str(profiled), "--link", "500MB/s"]
    assert main([*arguments, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    metrics = [json.loads(m) for m in (profiled / "metrics.jsonl").read_text().splitlines()][8:]
    for key in ("misses", "bytes_in", "bytes_out", "stall_s", "step_s"):
        mean = sum(m[key] for m in metrics) / len(metrics)
        assert table["measured"][key] == pytest.approx(mean)
    assert main([*arguments, "--budget", "14MB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "(measured)" in line)
    assert lines[at - 1].split()[0] == lines[at].split()[0] == "cost_aware+popularity"
    assert any("its own budget of 12.0 MiB" in line for line in lines[at + 1 :])


def test_eval_simulates_the_runs_own_policy_too(tiny, tmp_path, capsys):
    policy = ["memory.evict_strategy=cost_aware", "memory.prefetch=replay"]
    assert main(["profile", *tiny, *policy, "--run-dir", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["predictor", "eval", str(tmp_path / "run")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(words[0] == "cost_aware+replay" for words in lines) == 2


def test_eval_refuses_what_it_cannot_judge(profiled, predictor, tmp_path, capsys):
    assert main(["predictor", "eval", str(tmp_path)]) == 2
    assert "expected a trace" in errors(capsys)[0]
    assert main(["predictor", "eval", str(profiled), "--budget", "1MB"]) == 2
    assert main(["predictor", "eval", str(profiled), "--model", str(tmp_path)]) == 2
    assert "predictor.json" in errors(capsys)[-1]


def test_a_damaged_trace_is_refused(profiled, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(profiled / "trace", copy / "trace")
    segment = next((copy / "trace" / "rank00000").glob("need-*.arrows"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    command = ["predictor", "train", str(copy), "--model", "sklearn", "-o", str(tmp_path / "p")]
    assert main(command) == 2
    assert segment.name in errors(capsys)[0]
    assert not (tmp_path / "p").exists()


def test_generate_continues_a_prompt_repeatably(profiled, capsys):
    command = ["generate", str(profiled), "--prompt", "def ", "--max-new-tokens", "8"]
    assert main([*command, "--temperature", "1", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert main([*command, "--temperature", "1", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
    assert main([*command, "--top-p", "7"]) == 2


def test_dashboard_needs_a_folder_and_off_this_machine_a_token(profiled, capsys):
    assert main(["dashboard", "/no/such/folder"]) == 2
    assert "no such folder" in errors(capsys)[0]
    assert main(["dashboard", str(profiled), "--host", "0.0.0.0"]) == 2
    assert "token" in errors(capsys)[0]


def test_report_writes_one_file_and_names_what_it_cannot_use(profiled, tmp_path, capsys):
    assert main(["report", str(profiled), "-o", str(tmp_path / "run.html")]) == 0
    assert "<html" in (tmp_path / "run.html").read_text()[:1000].lower()
    assert main(["report", str(profiled)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(profiled / "report.html")
    (profiled / "report.html").unlink()
    assert main(["report", "/no/such/run", "-o", str(tmp_path / "none.html")]) == 2
    assert "/no/such/run: no such folder" in errors(capsys)[0]
    assert main(["report", str(profiled), "-o", str(tmp_path / "run.html" / "x.html")]) == 2
    assert not (tmp_path / "none.html").exists()
