"""`odc fit` beside what runs take: predicted and measured peak and tokens/s of six configurations.

    python benchmarks/fit.py [--steps N] [--only NAME,...]

Each configuration is predicted, then trained in a process of its own (after a warm-up of a few
seconds), one after the other. The device is this machine's memory; with a home in host memory the
link is a copy. Results go to `benchmarks/results/fit-DATE.md`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

from odc.memory.ledger import resident_bytes
from odc.memory.machine import gather
from odc.train.compose import prepare_process
from odc.train.config import Config, load_config
from odc.train.fit.accounts import Target
from odc.train.fit.answer import Answer, judge
from odc.train.fit.choice import choice_of
from odc.train.fit.model import model_of_config
from odc.train.fit.rates import Told, find_rates
from odc.train.fit.report import verified
from odc.train.fit.verify import Measured, run_steps
from odc.train.run_dir import machine

RESULTS = Path(__file__).parent / "results"
DENSE = {
    "model.hidden_size": 512,
    "model.num_layers": 8,
    "model.num_heads": 8,
    "data.vocab_size": 4096,
    "train.seq_len": 128,
    "train.micro_batch": 2,
}
MOE = {
    "model.hidden_size": 256,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_experts": 16,
    "model.expert_size": 768,
    "data.vocab_size": 2048,
    "train.seq_len": 128,
    "train.micro_batch": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "dense, host, tight": DENSE | {"memory.page_budget": "96MB"},
    "dense, host, loose": DENSE | {"memory.page_budget": "320MB", "train.accumulate": 2},
    "dense, disk": DENSE | {"memory.page_budget": "160MB", "memory.home": "disk"},
    "dense, updated at home": DENSE | {"memory.page_budget": "96MB", "optimizer.where": "home"},
    "mixture of experts, host, tight": MOE | {"memory.page_budget": "96MB"},
    "adapters over a frozen base": DENSE
    | {"memory.page_budget": "48MB", "adapter.kind": "lora", "adapter.rank": 8},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    rows = []
    for name, keys in CASES.items():
        if args.only and not any(part in name for part in args.only.split(",")):
            continue
        rows.append((name, *run(keys, args.steps)))
        print(line(*rows[-1]), flush=True)
    path = RESULTS / f"fit-{datetime.date.today():%Y-%m-%d}.md"
    path.write_text(page(rows), encoding="utf-8")
    print(path)
    return 0


def run(keys: dict[str, Any], steps: int) -> tuple[Answer, Measured]:
    """Predicts a configuration, then measures it."""
    config, _ = load_config(None, keys)
    answer = predict(config)
    assert answer.prediction is not None, answer.line
    with tempfile.TemporaryDirectory(prefix="odc-fit-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
        return answer, run_steps(str(path), (), steps, step_s=answer.prediction.step_s)


def predict(config: Config) -> Answer:
    """What `odc fit CONFIG` answers, rates measured anew."""
    prepare_process(config)
    threads = config.train.num_threads
    rates = find_rates(Told(), lambda text: None, threads)
    here = gather(Path(tempfile.gettempdir()))
    target = Target(here.free_bytes, here, base=resident_bytes()[0], shared=True)
    model = model_of_config(config.model, config.data.vocab_size)
    return judge(model, choice_of(config), target, rates, threads)


def line(name: str, answer: Answer, measured: Measured) -> str:
    """A row of the table."""
    found = verified(answer, measured)
    device, speed = found["device_peak"], found["tokens_s"]
    process = found["process_peak"]
    made = answer.prediction
    assert made is not None
    mib = 1 << 20
    return (
        f"| {name} | {device['predicted'] / mib:.0f} | {device['measured'] / mib:.0f} "
        f"| {device['deviation']:+.1%} | {process['predicted'] / mib:.0f} "
        f"| {process['measured'] / mib:.0f} | {process['deviation']:+.1%} "
        f"| {speed['predicted']:.0f} | {speed['measured']:.0f} | {speed['deviation']:+.1%} "
        f"| {made.bound_tokens_s:.0f} | {made.bytes_in / mib:.0f} / {measured.bytes_in / mib:.0f} |"
    )


def page(rows: list[tuple[str, Answer, Measured]]) -> str:
    """The results as a page."""
    facts = machine()
    head = (
        "# Predicted and measured: `odc fit`\n\n"
        f"`python benchmarks/fit.py`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, "
        f"{facts['cpu']}, {facts['cores']} cores. Peaks in MiB: of the device (pages and "
        "all beside them) and of the process with its home; tokens/s; deviation is "
        "predicted over measured less one. Bytes in: MiB a step, predicted / measured.\n\n"
        "| configuration | device | measured | | process | measured | | tokens/s | measured | "
        "| bound | in |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(line(*row) for row in rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
