"""The largest micro-batch within a fixed memory: odc and DeepSpeed's ZeRO-3.

    DS_ENV/bin/python benchmarks/peers/zero3_batch.py [--memory 600MB] [--folder DIR]

Every try is a process of its own that builds the model and takes two steps of one micro-batch. It
fits where its peak resident size (`VmHWM`), less what was resident after imports, stays within the
memory. The largest that fits is found by doubling, then by halving the interval. Peaks do not
depend on what else the machine does, so this needs no quiet one.

Beside the largest, the table has what a contender takes at a micro-batch of one and what each
sequence adds: the factor at any other memory follows from these two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from zero3_contenders import BATCHES
from zero3_ranks import Contender, Work, make_step

from odc.sizes import parse_size
from odc.train.bench_ranks import ask, ranks_of

STEPS = 2
QUIET = {"PYTHONWARNINGS": "ignore"}
MOST = 512
MB = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="600MB", help="beyond what imports take")
    parser.add_argument("--only", default="", help="contenders whose name contains one of these")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "zero3")
    parser.add_argument("--json", type=Path, help="where every try goes")
    args = parser.parse_args()
    limit, everything = parse_size(args.memory), {}
    print(f"within {limit / MB:.0f} MB beyond imports, sequences of {Work().sequence} tokens\n")
    print("| | largest micro-batch | peak MB there | at one | a sequence more | step s | loss |")
    print("|---|---|---|---|---|---|---|")
    for contender in BATCHES:
        if any(text in contender.name for text in args.only.split(",")):
            tried = search(contender, Work(layers=args.layers), args.folder, limit)
            print(row(contender, tried, limit), flush=True)
            everything[contender.name] = tried
    if args.json is not None:
        args.json.write_text(json.dumps(everything), encoding="utf-8")
    return 0


def search(contender: Contender, work: Work, folder: Path, limit: int) -> dict[int, Any]:
    """What was tried: micro-batch to the last answer, or the error."""
    tried: dict[int, Any] = {}

    def fits(batch: int) -> bool:
        tried[batch] = attempt(contender, work, folder, batch)
        return tried[batch].get("beyond_bytes", limit + 1) <= limit

    if not fits(1):
        return tried
    good, bad = 1, 2
    while bad <= MOST and fits(bad):
        good, bad = bad, bad * 2
    while bad - good > max(good // 32, 1):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return tried


def attempt(contender: Contender, work: Work, folder: Path, batch: int) -> dict[str, Any]:
    """Two steps of a micro-batch in a process of their own."""
    work = Work(layers=work.layers, batch=batch)
    folder.mkdir(parents=True, exist_ok=True)
    make = partial(make_step, contender, work, str(folder))
    try:
        with ranks_of(make, 1, QUIET | contender.env) as pipes:
            for _ in range(STEPS):
                answer = ask(pipes)[0]
    except RuntimeError as error:
        return {"error": str(error)}
    answer["beyond_bytes"] = answer["peak_bytes"] - answer["imported_bytes"]
    return answer


def row(contender: Contender, tried: dict[int, Any], limit: int) -> str:
    """A line of the table."""
    peaks = {b: t["beyond_bytes"] for b, t in sorted(tried.items()) if "error" not in t}
    inside = [batch for batch, peak in peaks.items() if peak <= limit]
    if 1 not in peaks:
        return f"| {contender.name} | failed: {tried[1]['error']} | | | | | |"
    if not inside:
        return f"| {contender.name} | none | | {peaks[1] / MB:.0f} | | | |"
    best, last = max(inside), max(peaks)
    slope = (peaks[last] - peaks[1]) / max(last - 1, 1)
    return (
        f"| {contender.name} | {best} | {peaks[best] / MB:.0f} | {peaks[1] / MB:.0f} | "
        f"{slope / MB:.1f} | {tried[best]['wall_s']:.2f} | {tried[best]['loss']:.3f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
