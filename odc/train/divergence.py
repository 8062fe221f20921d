"""Tells a run whose numbers are no longer finite where it stands and what to change."""

from odc.errors import DivergedError
from odc.train import checkpoint
from odc.train.config import Config
from odc.train.run_dir import RunDir


def diverged(what: str, config: Config, run_dir: RunDir) -> DivergedError:
    """Returns the error that ends a run.

    Args:
        what: What is not finite, and after or in which step.
        config: The run's; what its optimizer could do with is named.
        run_dir: The run's folder, with the losses and checkpoints so far.
    """
    finite = [m for m in run_dir.read_metrics() if m["loss"] is not None]
    last = f"{finite[-1]['loss']:.4g} in step {finite[-1]['step']}" if finite else "none"
    chosen = config.optimizer
    clip = "" if chosen.max_grad_norm is None else f", now {chosen.max_grad_norm:g}"
    return DivergedError(
        f"{what}, expected a finite number; last finite loss: {last}. Use a lower optimizer.lr "
        f"(now {chosen.lr:g}), more optimizer.warmup_steps (now {chosen.warmup_steps}), or clip "
        f"with optimizer.max_grad_norm (1.0 is usual{clip}); {_way_back(run_dir)}"
    )


def _way_back(run_dir: RunDir) -> str:
    saved = checkpoint.latest(run_dir.checkpoints)
    if saved is None:
        return "there is no checkpoint to go on from (checkpoint.every sets them)"
    return f"with that, go on from the last checkpoint: --from {saved}"
