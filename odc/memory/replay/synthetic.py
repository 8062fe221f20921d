"""The workloads W1 to W5, made from a name, a seed and a shape.

A workload is what a computation of a known form needs: layers of one page a kind, run in the
phases, passes and contexts in which the runtime would run and number them. Even shapes show what
a policy does; uneven ones (``W1-uneven``: layers of 3 to 12 MiB, some of them in two pages, times
that follow the bytes with noise, batches of half to one and a half times the tokens) keep it from
being tuned to equal pages.

Compute of a layer, relative to its forward on all tokens: forward and recompute 1; backward 1 where
it is frozen (the gradient of the input alone), 2 where it is trained; update 0.25. A pass on
fewer tokens takes less in proportion, down to a tenth.

Contexts are the runtime's (odc/fsdp/runtime.py): 2 x micro-step with a gradient, 1 without; a
second model's are 3. A workload of fewer steps is a prefix of one with more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from odc.errors import ConfigError
from odc.memory.events import Kind, Op, Phase
from odc.memory.frames import FRAME_BYTES
from odc.memory.pages import GroupSpec, PageTable
from odc.memory.replay.workload import Bundle, Columns, RecordedVisit, Workload

TOKENS = 1024
UNEVEN = "-uneven"
_UPDATE = 0.25  # of a layer's forward
_LEAST_SCALE = 0.1  # of a pass on all tokens
_BLOCK = 4096  # page sizes are multiples
_P, _G, _M = Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a workload is.

    Attributes:
        layers: of each model.
        layer_bytes: of a layer's parameters, and so of its gradient and of each moment; the
            middle one where sizes are uneven.
        page_bytes: upper limit of a page.
        compute_ns: forward of a layer on ``TOKENS`` tokens.
        uneven: sizes and times differ.
        seed: of everything that is drawn.
    """

    layers: int = 24
    layer_bytes: int = 4 * FRAME_BYTES
    page_bytes: int = 4 * FRAME_BYTES
    compute_ns: int = 10_000_000
    uneven: bool = False
    seed: int = 0

    def rng(self, purpose: int) -> np.random.Generator:
        """A stream of its own for each purpose, so that none moves another."""
        return np.random.default_rng([self.seed, purpose])


_SIZES, _TIMES, _BATCHES, _MASKS = range(4)  # purposes


class _Maker:
    """Groups, and visits in order of time."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.specs: list[GroupSpec] = []
        self.forward_ns: list[int] = []
        self.visits: list[RecordedVisit] = []
        self._sizes, self._times = shape.rng(_SIZES), shape.rng(_TIMES)
        self._batches = shape.rng(_BATCHES)
        self._step = self._micro = self._ctx = 0
        self._tokens = TOKENS
        self._scale = 1.0
        self._begins = False

    def layer(self, name: str, trained: bool) -> int:
        """Add a layer; returns its group."""
        num_bytes, times = self.shape.layer_bytes, 1.0
        if self.shape.uneven:
            quarter = num_bytes // 4
            num_bytes = int(
                quarter * self._sizes.integers(2, 7) - self._sizes.integers(0, quarter // 2)
            )
            num_bytes = -(-num_bytes // _BLOCK) * _BLOCK
            times = num_bytes / self.shape.layer_bytes * float(self._times.lognormal(0.0, 0.3))
        moments = 2 if trained else 0
        number = len(self.specs)
        self.specs.append(GroupSpec(name, num_bytes, moments, trained, layer=number))
        self.forward_ns.append(round(self.shape.compute_ns * times))
        return number

    def layers(self, prefix: str, trained: bool) -> list[int]:
        return [self.layer(f"{prefix}.{i}", trained) for i in range(self.shape.layers)]

    # -- passes ----------------------------------------------------------------------------------

    def begin(self, step: int, ctx: int, micro: int = 0, tokens: int = TOKENS) -> None:
        """The next visit begins a pass."""
        if self.shape.uneven:
            tokens = max(round(tokens * float(self._batches.uniform(0.5, 1.5))), 1)
        self._step, self._micro, self._ctx, self._tokens = step, micro, ctx, tokens
        self._scale = max(tokens / TOKENS, _LEAST_SCALE)
        self._begins = True

    def forward(self, groups: list[int], phase: Phase = Phase.FORWARD) -> None:
        for group in groups:
            self._read(group, phase, 1.0)

    def backward(self, groups: list[int]) -> None:
        """Backward through frozen layers."""
        for group in reversed(groups):
            self._read(group, Phase.BACKWARD, 1.0)

    def recomputing_backward(self, groups: list[int], segment: int) -> None:
        """Backward through frozen layers of which only every segment's input was kept.

        A gradient reaches the last layer of a segment, which gives its parameters up until all
        layers of the segment were recomputed, itself last; then its backward goes on.
        """
        starts = range(0, len(groups), segment)
        for start in reversed(starts):
            inside = groups[start : start + segment]
            self._read(inside[-1], Phase.BACKWARD, 0.0)
            for group in inside[:-1]:
                self._read(group, Phase.RECOMPUTE, 1.0)
            self._read(inside[-1], Phase.RECOMPUTE, 2.0)
            self.backward(inside[:-1])

    def training_backward(self, groups: list[int], updates: bool) -> None:
        """Backward through trained layers; each is updated at once, or its gradient is kept."""
        for group in reversed(groups):
            rows = [(_P, Op.READ, 0), (_G, Op.CREATE, self._ns(group, 2.0))]
            if updates:
                rows += [(_P, Op.WRITE, 0), (_M, Op.WRITE, 0)]
                rows.append((_G, Op.DROP, self._ns(group, _UPDATE)))
            self._add(Phase.BACKWARD, Bundle(group, rows))

    def optimizer(self, groups: list[int]) -> None:
        for group in groups:
            rows = [(_G, Op.READ, 0), (_P, Op.WRITE, 0), (_M, Op.WRITE, 0)]
            rows.append((_G, Op.DROP, self._ns(group, _UPDATE)))
            self._add(Phase.OPTIMIZER, Bundle(group, rows))

    def _read(self, group: int, phase: Phase, times: float) -> None:
        self._add(phase, Bundle(group, [(_P, Op.READ, 0)], self._ns(group, times)))

    def _ns(self, group: int, times: float) -> int:
        """Updates cost the same for any batch; all else goes with the tokens."""
        scale = 1.0 if times == _UPDATE else self._scale
        return round(self.forward_ns[group] * times * scale)

    def _add(self, phase: Phase, bundle: Bundle) -> None:
        self.visits.append(
            RecordedVisit(
                self._step, self._micro, phase, self._ctx, self._tokens, [bundle], self._begins
            )
        )
        self._begins = False

    # -- the end ---------------------------------------------------------------------------------

    def workload(self) -> Workload:
        """What was added so far, its pages cut by the page table that a run would have."""
        table = PageTable(self.shape.page_bytes)
        for spec in self.specs:
            table.add_group(spec, {})
        table.seal()
        return Workload(page_columns(table), self.visits, [])


def page_columns(table: PageTable) -> Columns:
    """Columns of ``pages.arrow`` of a sealed page table."""
    pages, groups = table.pages, [table.groups[p.group] for p in table.pages]
    return {
        "page": np.array([p.page for p in pages], np.int32),
        "group": np.array([p.group for p in pages], np.int32),
        "kind": np.array([p.kind for p in pages], np.uint8),
        "slot": np.array([p.slot for p in pages], np.uint8),
        "part": np.array([p.part for p in pages], np.int16),
        "bytes": np.array([p.num_bytes for p in pages], np.int64),
        "module_path": np.array([g.name for g in groups], object),
        "layer": np.array([g.layer for g in groups], np.int16),
        "expert": np.array([g.expert for g in groups], np.int16),
        "set": np.array([g.set_index for g in groups], np.int32),
        "home_bytes": np.array([p.home_bytes for p in pages], np.int64),
    }


def _clean(shape: Shape, steps: int, accumulate: int = 1, segment: int = 0) -> Workload:
    maker = _Maker(shape)
    groups = maker.layers("layers", trained=False)
    for step in range(steps):
        for micro in range(accumulate):
            maker.begin(step, 2 * micro, micro)
            maker.forward(groups)
            if segment:
                maker.recomputing_backward(groups, segment)
            else:
                maker.backward(groups)
    return maker.workload()


def _trained(shape: Shape, steps: int, in_backward: bool) -> Workload:
    maker = _Maker(shape)
    groups = maker.layers("layers", trained=True)
    for step in range(steps):
        maker.begin(step, 0)
        maker.forward(groups)
        maker.training_backward(groups, updates=in_backward)
        if not in_backward:
            maker.optimizer(groups)
    return maker.workload()


def _forward_only(shape: Shape, steps: int) -> Workload:
    maker = _Maker(shape)
    groups = maker.layers("layers", trained=False)
    for step in range(steps):
        maker.begin(step, 1)
        maker.forward(groups, Phase.EVALUATION)
    return maker.workload()


# T a training step, D the same after a pass of the reference; behind it E evaluation passes, or G
# tokens generated, the prompt's pass first.
_MIX = (
    *("T", "T E3", "D", "D G12", "T", "D E2", "T G20", "D"),
    *("T", "D", "T E3", "D G8", "D", "T", "T G16", "D E1", "T", "D", "D G10", "T E2"),
)
_PROMPT_TOKENS, _TOKENS_A_PASS = 256, 4  # of generation: the prompt, and one token of each row


def _mix(shape: Shape, steps: int) -> Workload:
    maker = _Maker(shape)
    policy = maker.layers("policy.layers", trained=True)
    reference = maker.layers("reference.layers", trained=False)
    for step in range(steps):
        kind, _, after = _MIX[step % len(_MIX)].partition(" ")
        if kind == "D":
            maker.begin(step, 3)
            maker.forward(reference, Phase.EVALUATION)
        maker.begin(step, 0)
        maker.forward(policy)
        maker.training_backward(policy, updates=True)
        for number in range(int(after[1:] or 0)):
            tokens = TOKENS
            if after.startswith("G"):
                tokens = _TOKENS_A_PASS if number else _PROMPT_TOKENS
            maker.begin(step, 1, tokens=tokens)
            maker.forward(policy, Phase.EVALUATION)
    return maker.workload()


def _layer_drop(shape: Shape, steps: int, rate: float) -> Workload:
    maker = _Maker(shape)
    groups = maker.layers("layers", trained=False)
    masks = shape.rng(_MASKS)
    for step in range(steps):
        kept = [
            g for g, drawn in zip(groups, masks.random(len(groups)), strict=True) if drawn > rate
        ]
        maker.begin(step, 0)
        maker.forward(kept or groups[:1])
        maker.backward(kept or groups[:1])
    return maker.workload()


_ALTERNATIVES = 3


def _branches(shape: Shape, steps: int) -> Workload:
    """Every third place of the model is one of three layers, drawn anew in each step."""
    maker = _Maker(shape)
    places = [
        [maker.layer(f"layers.{place}.{branch}", trained=False) for branch in range(_ALTERNATIVES)]
        if place % 3 == 2
        else [maker.layer(f"layers.{place}", trained=False)]
        for place in range(shape.layers)
    ]
    drawn = shape.rng(_MASKS)
    for step in range(steps):
        choice = drawn.integers(0, _ALTERNATIVES, len(places))
        chosen = [p[int(c) % len(p)] for p, c in zip(places, choice, strict=True)]
        maker.begin(step, 0)
        maker.forward(chosen)
        maker.backward(chosen)
    return maker.workload()


@dataclass(frozen=True, slots=True)
class Synthetic:
    """One of the workloads.

    Attributes:
        about: what computes like this, in a line.
        make: the workload of a shape and a number of steps.
        warm_up: steps after which every context was seen and policies know what they can know.
        measured: steps behind them that count.
        layers: of each of its models, where no shape says otherwise.
    """

    about: str
    make: Callable[[Shape, int], Workload]
    warm_up: int = 4
    measured: int = 6
    layers: int = 24


WORKLOADS: dict[str, Synthetic] = {
    "W1": Synthetic("forward and backward through frozen layers", _clean),
    "W1a": Synthetic(
        "W1 with four micro-steps a step", lambda shape, steps: _clean(shape, steps, accumulate=4)
    ),
    "W1r": Synthetic(
        "W1 with every four layers recomputed in backward",
        lambda shape, steps: _clean(shape, steps, segment=4),
    ),
    "W2": Synthetic(
        "training, each layer updated in backward",
        lambda shape, steps: _trained(shape, steps, True),
    ),
    "W2s": Synthetic(
        "training, all layers updated in the optimizer's step",
        lambda shape, steps: _trained(shape, steps, False),
    ),
    "W3": Synthetic("forward passes only: evaluation, a frozen reference", _forward_only),
    "W4": Synthetic(
        "training, evaluation, generation and a frozen reference model in turn", _mix, 8, 12, 12
    ),
    "W5p10": Synthetic(
        "W1 with layers dropped at 10 %", lambda shape, steps: _layer_drop(shape, steps, 0.1), 8, 8
    ),
    "W5p20": Synthetic(
        "W1 with layers dropped at 20 %", lambda shape, steps: _layer_drop(shape, steps, 0.2), 8, 8
    ),
    "W5p30": Synthetic(
        "W1 with layers dropped at 30 %", lambda shape, steps: _layer_drop(shape, steps, 0.3), 8, 8
    ),
    "W5b": Synthetic("W1 with random branches: one layer of three", _branches, 8, 8),
}


def find(name: str) -> Synthetic:
    """The workload of a name, with or without ``-uneven``.

    Raises:
        ConfigError: there is none of this name; lists them.
    """
    found = WORKLOADS.get(name.removesuffix(UNEVEN))
    if found is None:
        raise ConfigError(
            f"workload: got {name!r}; allowed: {', '.join(WORKLOADS)}, each also with {UNEVEN}; "
            f"W5 and W5{UNEVEN} stand for all that begin with W5"
        )
    return found


def expand(name: str) -> list[str]:
    """The names that ``name`` stands for: itself, or a family such as ``W5`` or ``W5-uneven``.

    Raises:
        ConfigError: there is none of this name.
    """
    base = name.removesuffix(UNEVEN)
    suffix = name[len(base) :]
    family = [n for n in WORKLOADS if re.match(r"W\d+", n)[0] == base]  # type: ignore[index]
    if base in WORKLOADS or not family:
        find(name)
        return [name]
    return [n + suffix for n in family]


def synthetic(
    name: str, *, seed: int = 0, steps: int | None = None, shape: Shape | None = None
) -> Workload:
    """Make a workload.

    Args:
        name: one of ``WORKLOADS``, with ``-uneven`` behind it or without.
        seed: of sizes, times, masks and branches.
        steps: training steps, or passes of ``W3``; its warm-up and measured ones if not given.
        shape: its size; seed, unevenness and, where not given, layers are set from the name.

    Raises:
        ConfigError: there is no workload of this name.
    """
    chosen = find(name)
    made = replace(shape or Shape(layers=chosen.layers), seed=seed, uneven=name.endswith(UNEVEN))
    return chosen.make(made, chosen.warm_up + chosen.measured if steps is None else steps)
