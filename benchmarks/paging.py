"""The scheduler against what no scheduler could beat, on the virtual clock.

    python benchmarks/paging.py [-o FILE.md] [--workload W1,W2,...] [--moves 300]

For every workload, budget share C and link ratio r (see `odc simulate --help`): elapsed time of the
default policy and of LRU with the next four pages, over the window bound and over the best offline
schedule that a search found. Measured steps start from an emptied device, after the warm-up.

W4 is judged visit by visit too: the first pass of each visit to a context against the best schedule
found from the residency it found. W5 is also held against policies that do not know which layers a
pass will use, as the pager does not; the best schedule does. A last table has the pager told by
``model.hint``, when a pass begins, what that pass will use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from odc.memory.replay import budget_for, link_for, synthetic
from odc.memory.replay.first_passes import FirstPass, first_passes
from odc.memory.replay.online import Model, places_of, used_groups
from odc.memory.replay.rollout import reached
from odc.memory.replay.simulate import virtual_drive
from odc.memory.replay.synthetic import Shape, find
from odc.train.policies import make_policy
from odc.train.run_dir import machine
from odc.train.simulation import (
    Case,
    Setting,
    SimRow,
    find_floors,
    made_case,
    make_setting,
    run_policy,
)

WORKLOADS = "W1,W1a,W1r,W2,W2s,W3,W4,W5p10,W5p20,W5p30,W5b"
SHARES = (0.25, 0.5, 0.75)
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0)
_STEPS_FOR_CHANCES = 300
UNKNOWN = """\
W5 beside policies that do not know which layers a pass will use (`odc.memory.replay.rollout`, with
the true chances): elapsed over theirs (bold), over the best schedule found, which knows, and
theirs over that (in brackets)."""
TOLD = """\
W5 where each pass is told when it begins which layers it will use (`model.hint`), elapsed over the
best schedule found, which knows them of all passes:"""
FIRST_PASSES = "First passes of visits to a context in W4, over the best found from there:"
OURS, BASE = "cost_aware+popularity", "lru+next_k"


Rows = dict[tuple[str, float, float], SimRow]  # of the default policy, by workload, C and r


def table(names: list[str], moves: int, rows: Rows) -> Iterator[str]:
    """Rows, one a workload and a share; the columns are the link ratios. Fills ``rows``."""
    heads = " | ".join(f"r {r:g}" for r in RATIOS)
    yield f"| workload, C | {heads} |"
    yield "|---" * (len(RATIOS) + 1) + "|"
    for name in names:
        case = made_case(name, seed=0, warm_up=None, steps=None)
        for share in SHARES:
            cells = []
            for r in RATIOS:
                setting = make_setting(case, budget=share, r=r)
                floors = find_floors(case, setting, moves=moves, seed=0, lp=False)
                ours = rows[name, share, r] = run_policy(case, setting, OURS, floors)
                base = run_policy(case, setting, BASE, floors)
                best = ours.best_found_s or float("nan")
                cells.append(
                    f"**{ours.elapsed_s / best:.3f}** {ours.elapsed_s / ours.window_bound_s:.3f} "
                    f"({base.elapsed_s / best:.2f})"
                )
            yield f"| {name} {share:g} | {' | '.join(cells)} |"


def unknown_table(rows: Rows) -> Iterator[str]:
    """The same for W5, beside what policies reach that do not know the draws."""
    yield f"| workload, C | {' | '.join(f'r {r:g}' for r in RATIOS)} |"
    yield "|---" * (len(RATIOS) + 1) + "|"
    for name in sorted({name for name, _, _ in rows if name.startswith("W5")}):
        case = made_case(name, seed=0, warm_up=None, steps=None)
        places = places_of(synthetic(name, steps=_STEPS_FOR_CHANCES))
        drawn = used_groups(case.measured)
        for share in SHARES:
            cells = []
            for r in RATIOS:
                row = rows[name, share, r]
                pages = row.budget_bytes // Shape().page_bytes
                unit_s = row.compute_s / (2 * sum(len(used) for used in drawn))
                online_s = reached(Model(places, pages, r), drawn) * unit_s
                best = row.best_found_s or float("nan")
                cells.append(
                    f"**{row.elapsed_s / online_s:.3f}** {row.elapsed_s / best:.3f} "
                    f"({online_s / best:.3f})"
                )
            yield f"| {name} {share:g} | {' | '.join(cells)} |"


def told_table(rows: Rows) -> Iterator[str]:
    """The same for W5, where what a pass will use is told when it begins."""
    yield f"| workload, C | {' | '.join(f'r {r:g}' for r in RATIOS)} |"
    yield "|---" * (len(RATIOS) + 1) + "|"
    for name in sorted({name for name, _, _ in rows if name.startswith("W5")}):
        case = made_case(name, seed=0, warm_up=None, steps=None)
        for share in SHARES:
            found = [
                told_s(case, make_setting(case, budget=share, r=r))
                / (rows[name, share, r].best_found_s or float("nan"))
                for r in RATIOS
            ]
            yield f"| {name} {share:g} | {' | '.join(f'{ratio:.3f}' for ratio in found)} |"


def told_s(case: Case, setting: Setting) -> float:
    """What the measured steps take with hints."""
    eviction, prefetch = make_policy(OURS, case.workload)
    drive = virtual_drive(
        case.workload,
        budget_bytes=setting.budget_bytes,
        link=setting.link,
        eviction=eviction,
        prefetch=prefetch,
    )
    pager, plain = drive.pager, drive.pager.begin_pass
    groups = range(len(pager.table.groups))
    coming = iter(used_groups(case.workload))

    def begin_pass(ctx: int, tokens: int = 0) -> None:
        plain(ctx, tokens)
        used = set(next(coming))
        pager.hint(groups, [float(group in used) for group in groups])

    pager.begin_pass = begin_pass  # type: ignore[method-assign]
    drive.run(case.first)
    drive.empty()
    return sum(p.elapsed_ns for p in drive.run().after(case.first).passes) / 1e9


def visits(share: float, r: float, moves: int) -> list[FirstPass]:
    """First passes of the visits of W4, each beside the best found from where it began."""
    workload = synthetic("W4")
    budget, link = budget_for(workload, share), link_for(workload, r)
    eviction, prefetch = make_policy(OURS, workload)
    drive = virtual_drive(
        workload, budget_bytes=budget, link=link, eviction=eviction, prefetch=prefetch
    )
    return first_passes(drive, link.bandwidth_in, find("W4").warm_up, moves)


def visit_table(moves: int) -> Iterator[str]:
    """How many first passes are how far from the best."""
    yield "| C, r | visits | mean | most | above 1.05 |"
    yield "|---|---|---|---|---|"
    for share in SHARES:
        for r in RATIOS:
            rows = visits(share, r, moves)
            ratios = [v.elapsed_s / v.best_found_s for v in rows]
            mean = sum(v.elapsed_s for v in rows) / sum(v.best_found_s for v in rows)
            above = sum(ratio > 1.05 for ratio in ratios)
            yield f"| {share:g}, {r:g} | {len(rows)} | {mean:.3f} | {max(ratios):.3f} | {above} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=WORKLOADS)
    parser.add_argument("--moves", type=int, default=300)
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        "# Paging against bounds, on the virtual clock",
        "",
        json.dumps(machine()),
        "",
        f"`python benchmarks/paging.py --workload {args.workload} --moves {args.moves}`. W1 to W5 "
        "are the workloads of `odc simulate --help`; C is the share of the state that fits, r the "
        "time to load a page over the compute of an access to one.",
        "",
        f"Elapsed of `{OURS}` over the best schedule found (bold), over the window bound, and of "
        f"`{BASE}` over the best found (in brackets).",
        "",
    ]
    rows: Rows = {}
    names = args.workload.split(",")
    parts = [table(names, args.moves, rows)]
    if any(name.startswith("W5") for name in names):
        parts += [iter(["", *UNKNOWN.splitlines(), ""]), unknown_table(rows)]
        parts += [iter(["", *TOLD.splitlines(), ""]), told_table(rows)]
    if "W4" in names:
        parts += [iter(["", FIRST_PASSES, ""]), visit_table(args.moves)]
    for part in parts:
        for line in part:
            print(line, flush=True)
            lines.append(line)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
