"""The exceptions that odc raises on purpose.

Each one also inherits from the built-in class that fits its cause: `ValueError` where the caller's
input must change, `RuntimeError` where the moment or the machine is at fault. Code that knows
nothing of odc can therefore still catch them by their built-in kind.
"""

from pathlib import Path


class OdcError(Exception):
    """Base of every error that odc raises on purpose."""


class ConfigError(OdcError, ValueError):
    """A configuration value is missing, misspelt or not allowed.

    Attributes:
        problems: One message for each wrong field; all of them are shown together.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(OdcError, ValueError):
    """The training text cannot be read, or there is too little of it."""


class BudgetError(OdcError, ValueError):
    """Something does not fit the memory it was given."""


class PageIOError(OdcError, RuntimeError):
    """A page could not be read from, or written to, its home.

    Attributes:
        page: Number of the page, as in the trace's `pages.arrow`.
        path: File that the page lives in; `None` where its home is host memory.
    """

    def __init__(self, message: str, *, page: int, path: str | Path | None = None) -> None:
        self.page = page
        self.path = None if path is None else Path(path)
        where = "" if path is None else f" in {path}"
        super().__init__(f"page {page}{where}: {message}")


class PagedGradientError(OdcError, RuntimeError):
    """`p.grad` of a paged parameter was used where it does not hold the right values."""


class AbsentParameterError(OdcError, RuntimeError):
    """The values of a paged parameter were read while it was not pinned on the device."""


class CheckpointError(OdcError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another model."""


class DivergedError(OdcError, RuntimeError):
    """The loss, or what a checkpoint would hold, is NaN or infinite."""


class PredictorMismatchError(OdcError, ValueError):
    """A predictor was trained for another model than the one that runs."""


class RankLostError(OdcError, RuntimeError):
    """A collective of a sharded model failed because a rank is gone or does not answer.

    Attributes:
        rank: Its global rank; `None` where the library does not tell.
        group: The group of parameters that was gathered or reduced.
        step: The training pass, counted from 0, in which it happened.
    """

    def __init__(self, reason: str, *, rank: int | None, group: str, step: int) -> None:
        self.rank, self.group, self.step = rank, group, step
        super().__init__(f"step {step}, parameters of {group}: {reason}")


class PlanError(OdcError, ValueError):
    """A written plan says of itself what does not hold."""


class RaggedShardBoundaryError(PlanError):
    """A rank boundary cuts a block, or a tensor lies outside its buffer or on another one.

    Attributes:
        fqn: The parameter.
        rank: The rank before the boundary, or the one where the tensor starts.
        offset: Where the tensor starts, in elements of its buffer.
        nearest: The nearest legal start, `None` where there is none.
    """

    def __init__(
        self, message: str, *, fqn: str, rank: int, offset: int, nearest: int | None
    ) -> None:
        self.fqn, self.rank, self.offset, self.nearest = fqn, rank, offset, nearest
        super().__init__(f"{fqn}: rank {rank}, offset {offset}: {message}")


class QuantizationError(OdcError, ValueError):
    """Values that cannot be stored in the 8 or 4 bits that were asked for."""


class DBufferAlignmentError(RaggedShardBoundaryError):
    """A start or a slice boundary is not aligned."""
