"""`odc export`: a run's newest checkpoint as a folder that transformers loads."""

import argparse
from pathlib import Path
from typing import Any

from odc.cli.exits import UsageError
from odc.cli.generate import POLICY

_DTYPES = ("float32", "bfloat16", "float16")

_EPILOG = """\
examples:
  odc export runs/tuned models/tuned
  odc export runs/tuned models/tuned --dtype bfloat16 --max-shard-size 2GB
"""


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "export",
        help="write a trained Hugging Face model as transformers does",
        description="Writes the newest checkpoint of a run with model.path as a folder that "
        "transformers loads: weights by the names of the model's authors, configuration, "
        "tokenizer. It streams under the run's own page budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty folder")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the files; default: as trained")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights in FOLDER")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the folder; returns the exit code."""
    import torch

    from odc.train import checkpoint
    from odc.train.compose import make_memory, make_model, prepare_process
    from odc.train.config import load_config
    from odc.train.pretrained import save_pretrained

    source = checkpoint.find(args.run_dir)
    config, _ = load_config(args.run_dir / "config.yaml", POLICY)
    if config.model.path is None:
        raise UsageError(
            f"{args.run_dir}: its model is no Hugging Face model, which nothing else could load; "
            "odc generate and --from read its checkpoints"
        )
    if config.adapter.kind != "none":
        raise UsageError(
            f"{args.run_dir}: trained an adapter, and its base as it was is in "
            f"{config.model.path}; the adapter is {args.run_dir / 'adapter'}, in the format that "
            "peft loads beside that base"
        )
    prepare_process(config)
    memory = make_memory(config)
    try:
        model, optimizer = make_model(config, 0, memory)
        checkpoint.load(source, model, optimizer, checkpoint.identity_in(source, model))
        save_pretrained(
            model,
            args.folder,
            max_shard_size=args.max_shard_size,
            dtype=None if args.dtype is None else getattr(torch, args.dtype),
            overwrite=args.overwrite,
        )
    finally:
        memory.close()
    print(f"{args.folder}: the model of {source}")
    return 0
