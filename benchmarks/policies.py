"""The measured table of policies: the demo's model, steps after its profile, a fixed page budget.

    python benchmarks/policies.py [--seeds 3] [--steps 60] [--repeats 1] [--out FILE]

For each seed: a profile run, both predictors trained on it, then every policy over the same steps
from the profile's last checkpoint, the order of policies turned by one each round. Every run is
traced, and the virtual clock predicts each run's stall from its own needs and *another* run's
compute times. Writes a Markdown page to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc.memory.replay import Link, Workload, oracle_factory, simulate
from odc.train.compose import predictor_factory
from odc.train.config import load_config
from odc.train.demo import CONFIG
from odc.train.policies import EVICTIONS, prefetch_factory
from odc.train.run_dir import RunDir, machine
from odc.train.tasks import make_task
from odc.train.trainer import INTERRUPTED, train
from predictor.train import train_predictor
from profiler.analysis import set_use, set_visits
from profiler.reader import TraceReader

SETTLING = 10  # steps of a run that do not count: recorded orders and popularity form
POLICIES = (
    "lru+none",
    "lru+next_k",
    "lru+replay",
    "cost_aware+popularity",
    "cost_aware+sklearn",
    "cost_aware+lstm",
    "belady+oracle",
    "cost_aware+oracle",
)


@dataclass
class Row:
    """One run of one policy: means over the counted steps, and what the virtual clock said."""

    policy: str
    seed: int
    repeat: int
    step_s: float
    stall_s: float
    misses: float
    bytes_in: float
    bytes_out: float
    loss: float
    predicted_stall_s: float = 0.0


def settings(policy: str, root: Path) -> list[str]:
    """Configuration overrides of a policy."""
    eviction, prefetch = policy.split("+")
    words = [f"memory.evict_strategy={eviction}"]
    if prefetch in ("sklearn", "lstm"):
        return [
            *words,
            f"memory.predictor={prefetch}",
            f"memory.predictor_path={root / 'predictors' / prefetch}",
        ]
    words.append(f"memory.prefetch={prefetch}")
    if prefetch == "oracle":
        words.append(f"memory.oracle_trace={root / '0-lru+none'}")
    return words


def run(words: list[str], run_dir: Path, start: Path | None, tasks: dict[int, Any]) -> None:
    """One training run."""
    config, _ = load_config(CONFIG, words)
    seed = config.train.seed
    if seed not in tasks:
        tasks[seed] = make_task(config)
    shutil.rmtree(run_dir, ignore_errors=True)
    outcome = train(config, run_dir, start_from=start, task=tasks[seed])
    if outcome.status == INTERRUPTED:
        raise KeyboardInterrupt
    gc.collect()


def read_row(run_dir: Path, policy: str, seed: int, repeat: int) -> Row:
    """The means of a run's counted steps."""
    steps = RunDir(run_dir).read_metrics()[SETTLING:]

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps)

    return Row(
        policy,
        seed,
        repeat,
        mean("step_s"),
        mean("stall_s"),
        mean("misses"),
        mean("bytes_in"),
        mean("bytes_out"),
        steps[-1]["loss"],
    )


def predict(root: Path, name: str, other: str, policy: str, link: float, budget: int) -> float:
    """Stall seconds a step that the virtual clock gives to run ``name``'s needs."""
    reader = TraceReader(root / name)
    own = Workload.from_trace(reader.need(), reader.pages)
    source = TraceReader(root / other)
    workload = own.with_compute_of(Workload.from_trace(source.need(), source.pages))
    eviction, prefetch = policy.split("+")
    if prefetch == "oracle":
        factory = oracle_factory(workload)
    elif prefetch in ("sklearn", "lstm"):
        factory = predictor_factory(root / "predictors" / prefetch)
    else:
        factory = prefetch_factory(prefetch)
    result = simulate(
        workload,
        budget_bytes=budget,
        link=Link(link),
        eviction=EVICTIONS[eviction](),
        prefetch=factory,
    ).after(own.steps[SETTLING])
    return result.stall_s / len(result.steps)


def routing(run_dir: Path) -> str:
    """How many experts a step touches, and how evenly."""
    reader = TraceReader(run_dir)
    visits = set_visits(reader.need(), reader.pages)
    steps, place = np.unique(visits.step, return_inverse=True)
    touched = np.bincount(place, visits.used.sum(axis=1)) / visits.groups.size
    entropy = set_use(visits).entropy
    return (
        f"a step touches {touched.mean():.0%} of the experts ({touched.min():.0%}-"
        f"{touched.max():.0%}); popularity entropy of a layer is at least {entropy.min():.1%}"
    )


def seed_rows(root: Path, seed: int, args: argparse.Namespace, tasks: dict[int, Any]) -> list[Row]:
    """All policies of one seed."""
    base = [f"train.seed={seed}", *args.words]
    config, _ = load_config(CONFIG, base)
    last = config.train.steps
    run([*base, f"checkpoint.every={last}"], root / "profile", None, tasks)
    for kind in ("sklearn", "lstm"):
        train_predictor([root / "profile"], kind, root / "predictors" / kind)
    rows = []
    for repeat in range(args.repeats):
        turn = repeat % len(POLICIES)
        order = POLICIES[turn:] + POLICIES[:turn] if repeat else POLICIES
        for policy in order:
            name = f"{repeat}-{policy}"
            words = [*base, *settings(policy, root), f"train.steps={last + args.steps}"]
            run(words, root / name, root / "profile", tasks)
            rows.append(read_row(root / name, policy, seed, repeat))
            print(rows[-1], flush=True)
    memory = config.memory
    for row in rows:
        other = "lru+none" if row.policy != "lru+none" else "cost_aware+popularity"
        row.predicted_stall_s = predict(
            root,
            f"{row.repeat}-{row.policy}",
            f"{row.repeat}-{other}",
            row.policy,
            float(memory.link_bandwidth or 1e12),
            int(memory.page_budget or 0),
        )
    return rows


def spread(values: list[float], digits: int = 3) -> str:
    """Median (least to most)."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _noise(values: list[float]) -> float:
    """Interquartile range over the median, of repeats of the same steps."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / middle)


def table(rows: list[Row]) -> list[str]:
    """The table as Markdown; ratios are taken within a seed and repeat."""
    base = {(r.seed, r.repeat): r for r in rows if r.policy == "lru+none"}
    lines = [
        "| policy | step s | stall s | misses | MiB in | MiB out | stall / lru+none | "
        "step / lru+none | predicted stall s | error / step | noise |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        own = [r for r in rows if r.policy == policy]
        stalls = [r.stall_s / base[r.seed, r.repeat].stall_s for r in own]
        steps = [r.step_s / base[r.seed, r.repeat].step_s for r in own]
        errors = [(r.predicted_stall_s - r.stall_s) / r.step_s for r in own]
        noise = max(
            _noise([r.step_s for r in own if r.seed == seed]) for seed in {r.seed for r in own}
        )
        lines.append(
            f"| `{policy}` | {spread([r.step_s for r in own])} "
            f"| {spread([r.stall_s for r in own])} "
            f"| {statistics.median(r.misses for r in own):.1f} "
            f"| {statistics.median(r.bytes_in for r in own) / 2**20:.0f} "
            f"| {statistics.median(r.bytes_out for r in own) / 2**20:.0f} "
            f"| {spread(stalls, 2)} | {spread(steps, 2)} "
            f"| {spread([r.predicted_stall_s for r in own])} | {spread(errors, 2)} | {noise:.1%} |"
        )
    return lines


def learned_against_popularity(rows: list[Row]) -> list[str]:
    """Each learned row against popularity, within a seed and repeat."""
    base = {(r.seed, r.repeat): r for r in rows if r.policy == "cost_aware+popularity"}
    lines = []
    for policy in ("cost_aware+sklearn", "cost_aware+lstm"):
        own = [r for r in rows if r.policy == policy]
        stalls = [r.stall_s / base[r.seed, r.repeat].stall_s for r in own]
        steps = [r.step_s / base[r.seed, r.repeat].step_s for r in own]
        lines.append(
            f"- `{policy}` against `cost_aware+popularity`: stall x {spread(stalls, 2)}, "
            f"step x {spread(steps, 3)}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="configuration overrides")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path("runs/policies"))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    tasks: dict[int, Any] = {}
    rows: list[Row] = []
    facts = []
    for seed in range(args.seeds):
        root = args.root / f"seed-{seed}"
        rows += seed_rows(root, seed, args, tasks)
        facts.append(f"- seed {seed}: {routing(root / '0-lru+none')}")
    today = datetime.date.today().isoformat()
    out = args.out or Path(__file__).parent / "results" / f"policies-{today}.md"
    config, _ = load_config(CONFIG, args.words)
    where = machine()
    text = [
        f"# Policies on the demo's model, {today}",
        "",
        f"`{' '.join(['python', 'benchmarks/policies.py', *sys.argv[1:]])}`; {json.dumps(where)}.",
        f"Budget {config.memory.page_budget} bytes, link {config.memory.link_bandwidth} bytes/s "
        f"each way (emulated), {args.steps} steps after a profile of {config.train.steps}, the "
        f"first {SETTLING} not counted. Median (least-most) over {args.seeds} seeds x "
        f"{args.repeats} repeats.",
        "",
        *table(rows),
        "",
        *learned_against_popularity(rows),
        *facts,
        "- predicted stall: the virtual clock, with compute times of another policy's run; error: "
        "predicted less measured stall, over the measured step; noise: interquartile range of the "
        "step over repeats of the same steps (0 where there is one repeat)",
        "",
    ]
    out.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
