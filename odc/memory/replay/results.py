"""What a run of a workload took: by training step, and by pass."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass, from its begin to the next one's.

    Attributes:
        step, micro, ctx, tokens: of its first visit.
        first: the pass before it, if any, ran in another context.
        elapsed_ns: by the clock.
        compute_ns: spent computing.
        waited_ns: spent waiting for transfers, as the pager counts it.
        bytes_in, bytes_out: moved or submitted meanwhile.
        misses: loads that nobody had asked for before they were needed.
    """

    step: int
    micro: int
    ctx: int
    tokens: int
    first: bool
    elapsed_ns: int
    compute_ns: int
    waited_ns: int
    bytes_in: int
    bytes_out: int
    misses: int

    @property
    def stall_ns(self) -> int:
        """All time that was not computing; in a measured run the pager's own time as well."""
        return self.elapsed_ns - self.compute_ns


@dataclass(slots=True)
class SimResult:
    """One entry a training step, in order of ``steps``; times in ns, sizes in bytes.

    A step ends with its last forward, backward or update. ``passes`` holds every pass, those of an
    evaluation behind a step too.
    """

    steps: list[int] = field(default_factory=list)
    compute_ns: list[int] = field(default_factory=list)
    stall_ns: list[int] = field(default_factory=list)
    bytes_in: list[int] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    accesses: list[int] = field(default_factory=list)
    passes: list[PassResult] = field(default_factory=list)

    def after(self, step: int) -> SimResult:
        """Only the steps, and the passes of steps, from ``step`` on."""
        keep = [i for i, s in enumerate(self.steps) if s >= step]
        kept = SimResult(passes=[p for p in self.passes if p.step >= step])
        for name in (
            "steps",
            "compute_ns",
            "stall_ns",
            "bytes_in",
            "bytes_out",
            "misses",
            "accesses",
        ):
            values = getattr(self, name)
            setattr(kept, name, [values[i] for i in keep])
        return kept

    @property
    def stall_s(self) -> float:
        return sum(self.stall_ns) / 1e9

    @property
    def compute_s(self) -> float:
        return sum(self.compute_ns) / 1e9
