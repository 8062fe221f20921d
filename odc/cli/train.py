"""`odc train`: train as a configuration says."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.cli.exits import INTERRUPT, UsageError
from odc.cli.machine_options import MACHINE, add_machine

if TYPE_CHECKING:
    from odc.train.config import Config
    from odc.train.ranks import Ranks

CONFIGS = Path(__file__).parent.parent / "train" / "configs"

_EPILOG = """\
examples:
  odc train tiny-moe
  odc train config.yaml train.steps=500 memory.page_budget=400MB --run-dir runs/first
  odc train config.yaml --dry-run --device 24GB --host 64GB --link 25GB/s --flops 100T
  odc train config.yaml --run-dir runs/first --resume
  odc train config.yaml memory.evict_strategy=lru memory.prefetch=none --from runs/first
  torchrun --nproc-per-node 2 -m odc train tiny-dense memory.page_budget=null

CONFIG is a file, or the name of a configuration that comes with odc: {names}.
KEY=VALUE (section.key=value, the value as in YAML) overrides the file. `odc train --keys` lists
all keys with default and meaning.
Ctrl-C ends the run after its current step, with a checkpoint if checkpoint.every is set, and tells
the command that goes on.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "train",
        usage="odc train [CONFIG] [KEY=VALUE ...] [options]",
        help="train as a configuration says",
        description="Trains as a configuration says and writes a run directory.",
        epilog=_EPILOG.format(names=", ".join(packaged_configs())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration and say what it needs and how fast it is; train nothing",
    )
    add_machine(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `odc train` and `odc profile` share."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG, KEY=VALUE",
        help="file or name (left out: that of the run to resume), and overrides",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="default: runs/CONFIG-TIMESTAMP"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the run directory (default: the newest run)",
    )
    parser.add_argument(
        "--from",
        dest="start_from",
        type=Path,
        metavar="RUN",
        help="begin a new run at a run's newest checkpoint, or at a checkpoint's folder",
    )
    parser.add_argument("--json", action="store_true", help="print summary.json on stdout")
    parser.add_argument(
        "--keys", action="store_true", help="list all keys: default, meaning, what is allowed"
    )


def run(args: argparse.Namespace) -> int:
    """Trains, or says what training would take; returns the exit code."""
    if args.dry_run:
        return _dry_run(args)
    told = [name for name in MACHINE if getattr(args, name) is not None]
    if told:
        raise UsageError(f"--{told[0].replace('_', '-')}: tells --dry-run about a machine; add it")
    return train_with(args, ())


def _dry_run(args: argparse.Namespace) -> int:
    """Loads and checks the configuration, and judges it by shapes alone."""
    from odc.cli.fit import judge_config

    name, overrides = _sort_out(args)
    path = args.run_dir / "config.yaml" if name is None else config_path(name)
    config = _load(path, tuple(overrides), tell=True).freeze()
    return judge_config(args, config)


def train_with(args: argparse.Namespace, presets: tuple[str, ...]) -> int:
    """Trains with presets, over which the user's own overrides win."""
    if args.keys:
        from odc.train.config import list_keys

        print(list_keys())
        return 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from odc.train.ranks import joined

        with joined() as ranks:
            return _train(args, presets, ranks)
    from odc.train.ranks import Ranks

    return _train(args, presets, Ranks())


def _train(args: argparse.Namespace, presets: tuple[str, ...], ranks: "Ranks") -> int:
    # What all ranks find wrong alike is told once; where they write, rank 0 says.
    config, run_dir = ranks.together(lambda: _read_arguments(args, presets, ranks))[ranks.rank]
    run_dir = ranks.on_root(lambda: run_dir)
    from odc.train.trainer import INTERRUPTED, train

    try:
        outcome = train(config, run_dir, resume=args.resume, start_from=args.start_from)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_how_to_go_on(run_dir, ranks.size)) from error
    if not ranks.is_root:
        return INTERRUPT if outcome.status == INTERRUPTED else 0
    if args.json:
        print(json.dumps({"run_dir": str(outcome.run_dir), **outcome.summary}, indent=1))
    else:
        print(_describe(outcome.run_dir, outcome.summary))
    if outcome.status != INTERRUPTED:
        return 0
    sys.stdout.flush()
    print(f"odc: {_how_to_go_on(run_dir, ranks.size)}", file=sys.stderr)
    return INTERRUPT


def _read_arguments(
    args: argparse.Namespace, presets: tuple[str, ...], ranks: "Ranks"
) -> tuple["Config", Path]:
    name, overrides = _sort_out(args)
    run_dir = _run_dir(args, name)
    path = run_dir / "config.yaml" if name is None else config_path(name)
    return _load(path, (*presets, *overrides), tell=ranks.is_root), run_dir


def _how_to_go_on(run_dir: Path, ranks: int) -> str:
    from odc.train.checkpoint import latest
    from odc.train.run_dir import resume_command

    saved = latest(run_dir / "checkpoints")
    if saved is None:
        return "nothing was saved, so that this run cannot go on; checkpoint.every=STEPS saves"
    return f"saved at {saved.name}; to go on: {resume_command(run_dir, ranks)}"


def packaged_configs() -> list[str]:
    """Returns the names of the configurations that come with odc."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def config_path(name: str) -> Path:
    """Returns the file that a CONFIG argument means.

    Raises:
        UsageError: There is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name in packaged_configs():
        return CONFIGS / f"{name}.yaml"
    what = "is a folder" if path.is_dir() else "no such file"
    raise UsageError(
        f"config {name}: {what}; give a config.yaml, or one of {', '.join(packaged_configs())}"
    )


def _sort_out(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Returns CONFIG, if there is one, and the overrides."""
    overrides = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word]
    if len(names) > 1:
        raise UsageError(f"{names[1]}: expected KEY=VALUE after the config {names[0]}")
    if not names and not (args.resume and args.run_dir is not None):
        raise UsageError(
            "CONFIG is missing: give a config.yaml or a name, or --resume with --run-dir"
        )
    return (names[0] if names else None), overrides


def _run_dir(args: argparse.Namespace, name: str | None) -> Path:
    if args.run_dir is not None:
        return args.run_dir  # type: ignore[no-any-return]
    from odc.train.run_dir import default_run_dir, newest_run_dir

    assert name is not None, "without CONFIG there is a run directory"
    stem = config_path(name).stem
    return newest_run_dir(stem) if args.resume else default_run_dir(stem)


def _load(path: Path, overrides: tuple[str, ...], tell: bool) -> "Config":
    from odc.train.config import load_config

    config, notices = load_config(path, overrides)
    for notice in notices if tell else ():
        print(f"odc: note: {notice}", file=sys.stderr)
    return config


def _describe(run_dir: Path, summary: dict[str, Any]) -> str:
    from odc.sizes import format_bytes

    count = max(summary["recorded_steps"], 1)
    mean = {name: total / count for name, total in summary["totals"].items()}
    loss = summary["final_loss"]
    head = (
        f"{run_dir}: {summary['status']} after {summary['steps']} steps, loss "
        f"{'-' if loss is None else format(loss, '.4f')}\n"
    )
    if "ranks" in summary:
        return (
            f"{head}{summary['ranks']} ranks: means of a step: {mean['step_s']:.3f} s, "
            f"{mean['comm_s']:.3f} s of it waiting for ranks, {format_bytes(mean['sent_bytes'])} "
            "sent by rank 0"
        )
    return (
        f"{head}{summary['policy']}: means of a step: {mean['step_s']:.3f} s, "
        f"{mean['stall_s']:.3f} s of it stalled, {format_bytes(mean['bytes_in'])} in, "
        f"{format_bytes(mean['bytes_out'])} out"
    )
