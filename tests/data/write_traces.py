"""Writes the traces beside this file: each workload as a run would have recorded it.

    python -m tests.data.write_traces

The bytes differ from run to run (clocks stand in the files), the rows do not:
tests/memory/test_synthetic.py compares them with the generators.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from odc.memory.replay import Workload, link_for, synthetic
from odc.memory.replay.synthetic import find
from profiler.writer import TraceWriter

HERE = Path(__file__).parent
NAMES = ("W1", "W1a", "W1r", "W2", "W2s", "W2-uneven", "W3", "W4", "W5p20", "W5b")
# What an event file was written for, and is read again: the others would be empty.
_KEPT = "need"


def need_rows(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Rows of ``need``; the computation behind the last of them is lost, as in a run."""
    now = waiting = workload.lead_ns
    for seq, visit in enumerate(workload.visits):
        for bundle in visit.bundles:
            for kind, op, compute_ns in bundle.rows:
                now += compute_ns
                yield (
                    seq,
                    now,
                    visit.step,
                    visit.micro,
                    int(visit.phase),
                    visit.ctx,
                    bundle.group,
                    int(kind),
                    int(op),
                    waiting + compute_ns,
                    visit.tokens,
                )
                waiting = 0
            waiting = bundle.after_ns
            now += waiting


def write(workload: Workload, run_dir: Path) -> None:
    """Write a run directory that holds a trace and nothing else."""
    memory = {"link_bandwidth": round(link_for(workload, 1.0).bandwidth_in)}
    pages = workload.pages
    with TraceWriter(run_dir / "trace", manifest={"memory": memory}) as writer:
        writer.write_pages(
            dict(zip(pages, (v.item() if hasattr(v, "item") else v for v in row), strict=True))
            for row in zip(*pages.values(), strict=True)
        )
        for row in need_rows(workload):
            writer.need(*row)
    manifest = json.loads(writer.manifest_path.read_text())
    kept = [s for s in manifest["segments"] if f"/{_KEPT}-" in s["file"]]
    for segment in manifest["segments"]:
        if segment not in kept:
            path = run_dir / "trace" / segment["file"]
            path.unlink()
            path.with_suffix(".json").unlink()
    writer.manifest_path.write_text(json.dumps(manifest | {"segments": kept}, indent=1))


def main() -> None:
    """Write all of them anew."""
    for name in NAMES:
        run_dir = HERE / name
        shutil.rmtree(run_dir, ignore_errors=True)
        write(synthetic(name), run_dir)
        size = sum(p.stat().st_size for p in run_dir.rglob("*") if p.is_file())
        print(f"{name}: {find(name).about}, {size} bytes")


if __name__ == "__main__":
    main()
