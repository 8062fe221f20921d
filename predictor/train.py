"""From run directories to a predictor directory: read, split, fit, judge, save.

Only `need` and the page table are read. What the manager did is not, or a predictor would learn to
repeat the manager's past choices.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from predictor.card import make_card, trace_record
from predictor.features import (
    HELD_OUT,
    TRAIN,
    VALIDATION,
    Structure,
    Visits,
    join_runs,
    next_visits,
    split_by_time,
)
from predictor.io import PredictorError
from predictor.model import Advance, predictor_class
from predictor.quality import compare_quality
from profiler.analysis import Table, set_visits
from profiler.merge import num_rows
from profiler.reader import TraceReader
from profiler.schema import Phase

PHASES = (Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION)
ENOUGH_STEPS = 20  # 15 % of them are three passes, which give examples of one set, too
NEED_COLUMNS = ("seq", "step", "micro", "phase", "group", "kind", "op", "tokens")


def train_predictor(
    run_dirs: Sequence[str | os.PathLike[str]],
    kind: str,
    out_dir: str | os.PathLike[str],
    seed: int = 0,
    steps: Collection[int] | None = None,
    held_out_runs: Sequence[str | os.PathLike[str]] = (),
) -> dict[str, Any]:
    """Trains a predictor on the traces of runs of one model and saves it with its model card.

    The latest 15 % of each run's steps are held out for the card, the 15 % before them stop the
    training. With `held_out_runs` the runs named there are held out in whole instead.

    Args:
        run_dirs: run directories with a `trace` folder.
        kind: "lstm" or "sklearn".
        out_dir: the predictor directory to write.
        seed: of the training; the same seed and traces give the same weights.
        steps: train and judge on these steps only, e.g. `range(0, 200)`; None takes all.
        held_out_runs: runs to judge on and not to learn from.

    Returns:
        The model card, and `out_dir` with the path written.

    Raises:
        ValueError: unknown kind; no run; runs of different models; no visits of sets in the traces,
            or too few.
        profiler.errors.TraceError: a trace is missing or damaged.
    """
    make = predictor_class(kind)
    directories = [Path(d) for d in (*run_dirs, *held_out_runs)]
    runs = [read_visits(directory, steps) for directory in directories]
    visits = join_runs(runs)
    part = split_by_time(visits, held_out=0.0 if held_out_runs else 0.15)
    part[visits.run >= len(run_dirs)] = HELD_OUT
    check_enough(directories, visits, part)
    predictor = make(visits.structure)
    began = time.perf_counter()
    with show_progress(f"training {kind}") as advance:
        report = predictor.fit(visits, part, seed=seed, advance=advance)
    fit_seconds = time.perf_counter() - began
    quality = compare_quality(visits, part, [predictor])
    traces = [trace_record(d, v) for d, v in zip(directories, runs, strict=True)]
    card = make_card(predictor, visits, part, report, quality, traces, seed, fit_seconds)
    path = predictor.save(out_dir, card)
    return {**card, "out_dir": str(path)}


def read_visits(
    run_dir: str | os.PathLike[str], steps: Collection[int] | None = None, rank: int = 0
) -> Visits:
    """The forward, evaluation and generation visits of one rank of a run, in order.

    Raises:
        PredictorError: the trace has no visits of sets.
        profiler.errors.TraceError: the trace is missing or damaged.
    """
    reader = TraceReader(Path(run_dir))
    reader.check()
    if not num_rows(reader.pages):
        raise PredictorError(
            f"{reader.trace_dir / 'pages.arrow'}: expected the page table of the model, found "
            "none; restore the file from a copy, or record a run with odc profile"
        )
    need = reader.need(steps, rank=rank, columns=NEED_COLUMNS)
    visits = visits_from_tables(need, reader.pages)
    if not len(visits):
        raise PredictorError(
            f"{run_dir} has no forward visits of expert sets (steps: {steps}); a predictor learns "
            "from runs of a mixture-of-experts model profiled at every step (odc profile)"
            + "".join(f"; {problem}" for problem in reader.problems)
        )
    return visits


def check_enough(directories: Sequence[Path], visits: Visits, part: np.ndarray) -> None:
    """Refuses runs that leave nothing to learn from, to stop at or to judge on.

    Raises:
        PredictorError: says how many steps and examples came, and how many are needed.
    """
    following = next_visits(visits)
    inside = (following >= 0) & (part[following] == part[:, None])
    whole, some = inside.all(axis=1), inside.any(axis=1)
    learn, stop, judge = (
        int((rows & (part == which)).sum())
        for which, rows in ((TRAIN, whole), (VALIDATION, whole), (HELD_OUT, some))
    )
    if learn >= 2 and stop >= 2 and judge >= 1:
        return
    steps = len(np.unique(np.stack([visits.run, visits.step]), axis=1).T)
    raise PredictorError(
        f"{', '.join(map(str, directories))}: expected at least 2 examples to learn from, 2 to "
        f"stop the training and 1 to judge it, got {learn}, {stop} and {judge} from {steps} steps; "
        f"record a run of at least {ENOUGH_STEPS} steps (odc profile ... "
        f"train.steps={ENOUGH_STEPS}), some hundred for a good predictor"
    )


def visits_from_tables(need: Table, pages: Table) -> Visits:
    """Visits from the columns of `need` and of the page table."""
    by_phase = [set_visits(need, pages, phases=(phase,)) for phase in PHASES]
    phase = np.concatenate([np.full(len(v), p) for p, v in zip(PHASES, by_phase, strict=True)])
    order = np.argsort(np.concatenate([v.seq for v in by_phase]), kind="stable")

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(v, name) for v in by_phase])[order]

    return Visits(
        structure=structure_from_pages(pages),
        run=np.zeros(len(order), dtype=np.int64),
        step=column("step").astype(np.int64),
        phase=phase[order].astype(np.int64),
        set_index=column("set").astype(np.int64),
        tokens=column("tokens").astype(np.int64),
        used=column("used"),
    )


def structure_from_pages(pages: Table) -> Structure:
    """The sets of a page table, members in the order of their expert.

    Raises:
        PredictorError: the model has no sets.
    """
    in_set = np.flatnonzero(pages["set"] >= 0)
    if not len(in_set):
        raise PredictorError(
            "the page table has no expert sets; a predictor serves mixture-of-experts models, for "
            "others choose prefetch: replay"
        )
    members: dict[int, dict[int, tuple[int, int]]] = {}
    for row in in_set.tolist():
        layer, expert = int(pages["layer"][row]), int(pages["expert"][row])
        members.setdefault(int(pages["set"][row]), {})[expert] = (layer, expert)
    return Structure(
        tuple(tuple(experts[e] for e in sorted(experts)) for _, experts in sorted(members.items()))
    )


@contextmanager
def show_progress(title: str) -> Iterator[Advance]:
    """A progress bar on stderr, nothing where that is no terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share: progress.update(task, completed=share)
