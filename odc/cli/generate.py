"""`odc generate`: text from a run's newest checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Any

from odc.cli.exits import UsageError

_EPILOG = """\
examples:
  odc generate runs/first --prompt "def parse("
  odc generate runs/first --prompt "import" --temperature 0.8 --top-k 50 --seed 1
"""

# A run's own policy may need what is not there any more (a trace, a predictor).
POLICY = {
    "memory.predictor": "none",
    "memory.predictor_path": None,
    "memory.oracle_trace": None,
    "memory.prefetch": "popularity",
    "memory.evict_strategy": "cost_aware",
}


def add_parser(commands: Any) -> None:
    """Adds the command's arguments."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        description="Continues a prompt with the newest checkpoint of a run, under the run's own "
        "page budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N")
    parser.add_argument("--temperature", type=float, help="draw tokens; without it: greedy")
    parser.add_argument("--top-k", type=int, help="draw from the K most probable tokens")
    parser.add_argument("--top-p", type=float, help="draw from the most probable share P")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the text as it comes; returns the exit code."""
    import torch

    from odc.train import checkpoint
    from odc.train.adapters import identity_of
    from odc.train.compose import make_memory, make_model, prepare_process
    from odc.train.config import load_config
    from odc.train.generate import stream
    from odc.train.tasks import make_task

    sampling = _sampling(args)
    source = checkpoint.find(args.run_dir)
    config, _ = load_config(args.run_dir / "config.yaml", POLICY)
    prepare_process(config)
    task = make_task(config)
    memory = make_memory(config)
    try:
        model, optimizer = make_model(config, task.vocab_size, memory, fresh=False)
        adapter = identity_of(model, config.adapter)
        identity = checkpoint.Identity.of(model, config.model, task.corpus_hash, adapter)
        checkpoint.load(source, model, optimizer, identity)
        ids = task.tokenizer.encode(args.prompt) or [task.tokenizer.end_of_text]
        new: list[int] = []
        shown = ""
        stop = task.tokenizer.end_of_text
        tokens = torch.tensor([ids])
        for token in stream(model, tokens, args.max_new_tokens, sampling=sampling, stop_token=stop):
            new.append(int(token))
            text = task.tokenizer.decode([*ids, *new])
            # The last character may be half of one: the rest comes with the next token.
            if not text.endswith("\ufffd"):
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
    finally:
        memory.close()
    print()
    return 0


def _sampling(args: argparse.Namespace) -> Any:
    from odc.train.generate import Sampling

    if args.temperature is None and args.top_k is None and args.top_p is None:
        return None
    temperature = 1.0 if args.temperature is None else args.temperature
    try:
        return Sampling(temperature=temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
