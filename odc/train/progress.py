"""What a person sees of a run: a bar on a terminal, else a line now and then. All on stderr."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)
from rich.table import Column

from odc.sizes import format_bytes

_SMOOTHING = 0.2  # weight of the newest step in tokens/s


class Display:
    """Shows the steps of a run.

    Args:
        first_step: Step at which this process begins.
        num_steps: Steps of the whole run.
        log_every: Steps between two lines where there is no terminal.
        shown: Whether this process is the one that shows them.
    """

    def __init__(
        self, first_step: int, num_steps: int, log_every: int, *, shown: bool = True
    ) -> None:
        self._shown = shown
        self._num_steps = num_steps
        self._log_every = log_every
        self._rate: float | None = None
        self._stall_s = 0.0
        self._comm_s = 0.0
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                MofNCompleteColumn(
                    table_column=Column(no_wrap=True, min_width=2 * len(str(num_steps)) + 1)
                ),
                BarColumn(bar_width=8),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Shows a finished step, given as its line of `metrics.jsonl`."""
        rate = metrics["tokens"] / max(metrics["step_s"], 1e-9)
        self._rate = rate if self._rate is None else self._rate + _SMOOTHING * (rate - self._rate)
        self._stall_s += metrics["stall_s"]
        self._comm_s += metrics.get("comm_s", 0.0)
        done = metrics["step"] + 1
        text = self._text(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif done % self._log_every == 0 or done == self._num_steps or "eval_loss" in metrics:
            self.say(f"step {done}/{self._num_steps}  {text}")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def _text(self, metrics: Mapping[str, Any]) -> str:
        evaluated = f"  eval {metrics['eval_loss']:.4f}" if "eval_loss" in metrics else ""
        text = (
            f"epoch {metrics['epoch']}  loss {metrics['loss']:.4f}{evaluated}  "
            f"{self._rate:.0f} tok/s"
        )
        if "comm_s" in metrics:
            sent = format_bytes(metrics["sent_bytes"])
            return f"{text}  waited {self._comm_s:.1f} s for ranks  {sent} sent"
        moved = f"{format_bytes(metrics['bytes_in'])} in  {format_bytes(metrics['bytes_out'])} out"
        return f"{text}  stalled {self._stall_s:.1f} s  {moved}"


class Work:
    """A bar over pieces of work on a terminal; elsewhere nothing but what is said.

    Args:
        total: Number of pieces.
    """

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._begun = 0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, text: str) -> None:
        """Shows the piece that begins; the one before it is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._begun, description=text)
        self._begun += 1

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, markup=False)
