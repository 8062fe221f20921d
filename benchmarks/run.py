"""Costs of the parts, each measured by its own script -> benchmarks/results/costs-DATE.md.

    python benchmarks/run.py

Frames, transfer engine, tracer, predictor and the pager's hooks; every script interleaves its
variants and repeats nine times, and says what its figures mean.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

from odc.train.run_dir import machine

HERE = Path(__file__).parent
SCRIPTS = ("frames.py", "engine.py", "tracer.py", "predictor_cost.py", "hooks.py")


def main() -> int:
    today = datetime.date.today().isoformat()
    out = HERE / "results" / f"costs-{today}.md"
    parts = [f"# Costs, {today}", "", json.dumps(machine()), ""]
    failed = []
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        done = subprocess.run(
            [sys.executable, str(HERE / script)], capture_output=True, text=True, check=False
        )
        print(done.stdout, flush=True)
        if done.returncode:
            failed.append(script)
            print(done.stderr, file=sys.stderr)
        parts += [f"## `benchmarks/{script}`", "", "```", done.stdout.rstrip(), "```", ""]
    out.write_text("\n".join(parts), encoding="utf-8")
    print(out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
