"""`odc fit`: does a model fit, how fast will it be, and with which settings?"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.cli.exits import BAD_INPUT, UsageError
from odc.cli.machine_options import add_machine, machine_of, told_of

if TYPE_CHECKING:
    from odc.train.config import Config
    from odc.train.fit.answer import Answer
    from odc.train.fit.model import ModelShape

_EPILOG = """\
examples:
  odc fit models/Meta-Llama-3-8B --device 24GB --host 64GB --disk 1TB --link 25GB/s --flops 100T
  odc fit --shapes model.csv.gz --config config.json --device 24GB --host 64GB --method lora
  odc fit config.yaml                    the settings of a configuration, on this machine
  odc fit config.yaml --search --device 1GB
  odc fit config.yaml --verify           and a few real steps beside the prediction

MODEL is a folder with a config.json (its weights are not read), or a configuration of odc. Of a
folder, and with --search, the best settings are looked for and printed as a config.yaml.
What is not told is measured on this machine: compute with layers of this shape, links as `odc
doctor --measure-links` remembers them.

exit codes: 0 it fits, 2 it does not, or the input must change.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "fit",
        usage="odc fit (MODEL_FOLDER | --shapes FILE --config JSON | CONFIG.yaml) [options]",
        help="say what fits this device, how fast it will be, and the best settings",
        description="Says from shapes alone whether a model fits, how fast it is, what is best.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="MODEL, KEY=VALUE", help="folder or config, and overrides")
    add("--shapes", type=Path, metavar="FILE", help="CSV (or .csv.gz) with name,shape,dtype")
    add("--config", type=Path, metavar="JSON", help="config.json that goes with --shapes")
    add("--method", choices=("full", "lora"), help="default: full")
    add("--rank", type=int, default=16, metavar="N", help="of adapters; default: 16")
    add("--dtype", choices=("bf16", "fp32"), help="of compute; default: bf16 where it is there")
    add("--seq", type=int, metavar="N", help="tokens of a sequence; default: 2048")
    add("--micro-batch", type=int, metavar="N", help="sequences; default: searched for")
    add("--accumulate", type=int, metavar="N", help="micro-batches; default: searched for")
    add("--search", action="store_true", help="look for better settings than the configuration's")
    add("--json", action="store_true", help="print everything as JSON")
    add(
        "--verify",
        nargs="?",
        type=int,
        const=6,
        metavar="STEPS",
        help="run real steps of the configuration and compare",
    )
    add_machine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answers and prints; returns the exit code."""
    from odc.train.fit.report import format_answer, settings_yaml

    config, model = _model(args)
    answer = _answer(args, config, model, search=args.search)
    text = settings_yaml(answer) if answer.fits and not answer.asked else None
    found = answer.as_json() | ({} if text is None else {"config_yaml": text})
    if args.verify is not None:
        found["verified"] = _verify(args, answer, config)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(format_answer(answer, text))
        if args.verify is not None:
            from odc.train.fit.report import format_verified

            print("\n" + "\n".join(format_verified(found["verified"])))
    return 0 if answer.fits else BAD_INPUT


def judge_config(args: argparse.Namespace, config: "Config") -> int:
    """Prints what a configuration needs and how fast it is; returns the exit code."""
    from odc.train.fit.report import format_answer

    answer = _answer(args, config, model_of_run(config), search=False)
    print(json.dumps(answer.as_json(), indent=1) if args.json else format_answer(answer))
    return 0 if answer.fits else BAD_INPUT


def _answer(
    args: argparse.Namespace, config: "Config | None", model: "ModelShape", *, search: bool
) -> "Answer":
    from odc.train.fit.answer import find_answer, judge
    from odc.train.fit.choice import choice_of
    from odc.train.fit.rates import find_rates

    target = machine_of(args, config)
    threads = 1 if config is None else config.train.num_threads
    told = told_of(args, config)
    rates = find_rates(told, _say, threads)
    if config is not None and not search:
        from odc.train.compose import check_where

        check_where(config)
        return judge(model, choice_of(config), target, rates, threads)
    return find_answer(model, _fixed(args, config), target, rates, threads)


def _fixed(args: argparse.Namespace, config: "Config | None") -> Any:
    from odc.train.fit.search import Fixed

    default = "bfloat16" if config is None else config.train.dtype
    dtype = {"bf16": "bfloat16", "fp32": "float32", None: default}[args.dtype]
    for option, value in (("--seq", args.seq), ("--micro-batch", args.micro_batch)):
        if value is not None and value < 1:
            raise UsageError(f"{option}: got {value}; allowed: whole numbers from 1")
    seq = args.seq or (2048 if config is None else config.train.seq_len)
    return Fixed(
        seq_len=seq,
        dtype=dtype,
        rank=args.rank if args.method == "lora" else None,
        micro_batch=args.micro_batch,
        accumulate=args.accumulate,
    )


def _model(args: argparse.Namespace) -> "tuple[Config | None, ModelShape]":
    """The configuration, if one was given, and the model."""
    from odc.train.fit.hf import model_of_folder, model_of_hf

    overrides = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word]
    if args.config is not None:
        if names:
            raise UsageError(f"--config and {names[0]!r} both name a model; keep one")
        return None, model_of_hf(args.config, args.shapes)
    if args.shapes is not None:
        raise UsageError("--shapes: needs the model's config.json as well (--config JSON)")
    if len(names) != 1:
        raise UsageError("name one model: a folder, a configuration, or --shapes with --config")
    if Path(names[0]).is_dir():
        if overrides:
            raise UsageError(f"{overrides[0]}: a folder takes no overrides; give a config.yaml")
        return None, model_of_folder(Path(names[0]))
    from odc.cli.train import config_path, packaged_configs
    from odc.train.config import load_config

    if not Path(names[0]).is_file() and names[0] not in packaged_configs():
        raise UsageError(
            f"{names[0]}: no such file or folder; give a folder with a config.json (nothing is "
            f"downloaded), a config.yaml, or one of {', '.join(packaged_configs())}"
        )
    config, _ = load_config(config_path(names[0]), overrides)
    return config, model_of_run(config)


def model_of_run(config: "Config") -> "ModelShape":
    """The model that a configuration trains."""
    from odc.train.fit.hf import model_of_folder
    from odc.train.fit.model import model_of_config

    if config.model.path is not None:
        return model_of_folder(Path(config.model.path))
    return model_of_config(config.model, config.data.vocab_size)


def _verify(args: argparse.Namespace, answer: "Answer", config: "Config | None") -> dict[str, Any]:
    from odc.train.fit.report import settings_yaml, verified
    from odc.train.fit.verify import run_steps

    if not answer.fits or answer.prediction is None:
        raise UsageError("--verify: nothing fits that could be run")
    if answer.target.context:
        raise UsageError("--verify: runs on this machine; leave --host and --flops out")
    words = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word]
    count = args.verify, answer.prediction.step_s
    if answer.asked:
        from odc.cli.train import config_path

        return verified(answer, run_steps(str(config_path(names[0])), words, *count))
    with tempfile.TemporaryDirectory(prefix="odc-fit-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(settings_yaml(answer), encoding="utf-8")
        return verified(answer, run_steps(str(path), (), *count))


def _say(text: str) -> None:
    print(f"odc: measuring {text}", file=sys.stderr, flush=True)
