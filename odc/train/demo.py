"""The main job in one command: profile, learn, judge, train on, show.

A mixture of experts is trained on text that is on every machine, with every step traced. Both
predictors learn from the trace and are judged on steps they have not seen, by running those steps
again through the scheduler on a virtual clock. Then training goes on from the profile's last
checkpoint, over steps that no predictor has seen, under three policies: the same model, the same
steps, the same losses; only what waits differs. The last table is measured, not simulated.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc.sizes import format_bytes
from odc.train.config import Config, load_config
from odc.train.policy_table import compare_policies, format_table
from odc.train.run_dir import RunDir
from odc.train.tasks import Pretrain, make_task
from odc.train.trainer import INTERRUPTED, train

CONFIG = Path(__file__).parent / "configs" / "demo.yaml"
KINDS = ("lstm", "sklearn")
_SETTLING_STEPS = 10  # of each run: recorded orders and popularity form


@dataclass(frozen=True)
class Measured:
    """A policy's measured means over the same steps, in seconds and bytes a step."""

    policy: str
    step_s: float
    stall_s: float
    bytes_in: float
    bytes_out: float
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured and wrote."""

    rows: list[Measured]
    chosen: str
    report: Path


def run_demo(
    root: Path,
    overrides: Sequence[str] = (),
    *,
    continue_steps: int = 60,
    say: Callable[[str], None] = print,
) -> DemoResult:
    """Runs the whole job into ``root``.

    Args:
        root: folder of the runs, new or empty; what was done stays when Ctrl-C ends it.
        overrides: ``section.key=value`` on top of the demo's configuration.
        continue_steps: steps that each policy trains on.
        say: receives what to show.
    """
    config = _config(overrides, [])
    task = make_task(config)
    steps = config.train.steps
    say(f"[1/5] profile: {steps} steps with every access traced -> {root / 'profile'}")
    _train(_config(overrides, [f"checkpoint.every={steps}"]), root / "profile", task)
    say("[2/5] train two predictors from the trace")
    models = [_train_predictor(root, kind, say) for kind in KINDS]
    say("[3/5] judge them on held-out steps, replayed through the scheduler on a virtual clock")
    table = compare_policies(root / "profile", models)
    say(format_table(table))
    (root / "evaluation.json").write_text(json.dumps(table.as_json(), indent=2), encoding="utf-8")
    learned = {r.policy.split("+")[1]: r.step_s for r in table.rows if r.policy.endswith(KINDS)}
    chosen = min(learned, key=lambda kind: learned[kind])
    say(f"[4/5] train on for {continue_steps} steps under three policies; chosen: {chosen}")
    rows = _continue(root, overrides, steps + continue_steps, chosen, task, say)
    say(_format(rows))
    say("[5/5] write the report")
    report = _write_report(root)
    return DemoResult(rows, chosen, report)


def _config(overrides: Sequence[str], more: Sequence[str]) -> Config:
    config, _ = load_config(CONFIG, [*overrides, *more])
    return config


def _train(config: Config, run_dir: Path, task: Pretrain, start_from: Path | None = None) -> None:
    outcome = train(config, run_dir, start_from=start_from, task=task)
    if outcome.status == INTERRUPTED:
        raise KeyboardInterrupt
    gc.collect()  # a model is full of cycles, and holds its frames until they are found


def _train_predictor(root: Path, kind: str, say: Callable[[str], None]) -> Path:
    from predictor.train import train_predictor

    out = root / "predictors" / kind
    card = train_predictor([root / "profile"], kind, out)
    held_out = card["held_out"]
    say(
        f"  {kind}: held-out log-loss {held_out[kind]['log_loss']:.3f} "
        f"(popularity {held_out['popularity']['log_loss']:.3f}), recall "
        f"{held_out[kind]['recall']:.3f} (popularity {held_out['popularity']['recall']:.3f})"
    )
    return out


def _continue(
    root: Path,
    overrides: Sequence[str],
    last: int,
    chosen: str,
    task: Pretrain,
    say: Callable[[str], None],
) -> list[Measured]:
    policies = {
        "lru+none": ["memory.evict_strategy=lru", "memory.prefetch=none"],
        "cost_aware+popularity": ["memory.prefetch=popularity"],
        f"cost_aware+{chosen}": [
            f"memory.predictor={chosen}",
            f"memory.predictor_path={root / 'predictors' / chosen}",
        ],
    }
    rows = []
    for policy, settings in policies.items():
        say(f"  {policy}")
        config = _config(overrides, [*settings, f"train.steps={last}"])
        _train(config, root / policy, task, root / "profile")
        rows.append(measure(root / policy, policy))
    losses = {(r.first_loss, r.last_loss) for r in rows}
    assert len(losses) == 1, f"policies changed the losses: {losses}"
    return rows


def measure(run_dir: Path, policy: str) -> Measured:
    """Means of a run's steps, without the first ones."""
    steps: list[dict[str, Any]] = RunDir(run_dir).read_metrics()
    counted = steps[min(_SETTLING_STEPS, len(steps) - 1) :]

    def mean(name: str) -> float:
        return float(np.mean([step[name] for step in counted]))

    return Measured(
        policy,
        mean("step_s"),
        mean("stall_s"),
        mean("bytes_in"),
        mean("bytes_out"),
        steps[0]["loss"],
        steps[-1]["loss"],
    )


def _format(rows: list[Measured]) -> str:
    base = rows[0]
    lines = [
        "",
        "measured, means of a step (before: the first row; after: the last)",
        f"{'policy':<24}{'step s':>10}{'stall s':>10}{'in':>10}{'out':>10}{'stall':>10}{'step':>8}",
    ]
    lines += [
        f"{row.policy:<24}{row.step_s:>10.3f}{row.stall_s:>10.3f}"
        f"{format_bytes(round(row.bytes_in)):>10}{format_bytes(round(row.bytes_out)):>10}"
        f"{row.stall_s / base.stall_s:>9.0%} {row.step_s / base.step_s:>7.0%}"
        for row in rows
    ]
    compute = [row.step_s - row.stall_s for row in rows]
    lines.append(
        f"computing alone took {min(compute):.3f} to {max(compute):.3f} s a step: transfers beside "
        "it and other work on this machine slow it down; steps that differ by less are alike"
    )
    lines.append(
        f"losses are the same to the last bit: {base.first_loss:.6f} ... {base.last_loss:.6f}"
    )
    return "\n".join(lines)


def _write_report(root: Path) -> Path:
    from dashboard.report import write_report

    report = root / "report.html"
    write_report(root, report)
    return report
