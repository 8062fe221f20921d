"""Contexts: which one follows, and which shape a pass has in its own.

Which context comes next is a Markov model of variable order over the contexts that ran: the
longest past that was seen before says what followed it.

Passes without a backward differ in shape within a context: an evaluation on whole batches, a
prompt, tokens one by one. They need the same pages in the same order, at another pace and with
other passes behind them; so each shape is followed as a context of its own.
"""

from __future__ import annotations

from collections import Counter

_PASSES_AHEAD = 8  # passes of a chain
_CONTEXTS_BACK = 6  # contexts that tell which one comes next
_ALIKE = 3.0  # passes whose tokens differ by more than this factor have another shape
_MOST_SHAPES = 4  # of a context
_SHAPE = 1 << 20  # between the numbers of a context's shapes
_SMOOTH = 0.3  # weight of the last pass in the tokens of a shape


def base_of(ctx: int) -> int:
    """The context that a context is a shape of."""
    return ctx if ctx < 0 else ctx % _SHAPE


class Shapes:
    """Tells the shapes of contexts apart, by the tokens of their passes."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[float]] = {}  # context -> typical tokens of its shapes

    def of(self, ctx: int, tokens: int, has_shapes: bool) -> int:
        """The number under which a pass is followed: its context's own, if it has one shape.

        Args:
            ctx: its context.
            tokens: of its batch, 0 if unknown.
            has_shapes: its context is known to have no backward.
        """
        if tokens <= 0 or ctx < 0:
            return ctx
        known = self._tokens.setdefault(ctx, [])
        if not known:
            known.append(float(tokens))
            return ctx
        ratios = [max(tokens / t, t / tokens) for t in known]
        nearest = min(range(len(known)), key=ratios.__getitem__)
        if has_shapes and ratios[nearest] > _ALIKE and len(known) < _MOST_SHAPES:
            known.append(float(tokens))
            nearest = len(known) - 1
        else:
            known[nearest] += _SMOOTH * (tokens - known[nearest])
        return ctx + nearest * _SHAPE if has_shapes else ctx


class Followers:
    """Which context follows.

    Attributes:
        past: the contexts that ran, the one that runs last.
    """

    def __init__(self) -> None:
        self.past: list[int] = []
        self._seen: dict[tuple[int, ...], Counter[int]] = {}

    def begin(self, ctx: int) -> None:
        """A pass begins."""
        self.past = [*self.past[-_CONTEXTS_BACK + 1 :], ctx]

    def learn(self) -> None:
        """A pass has ended: the past before it led to its context."""
        past, ended = self.past[:-1], self.past[-1]
        for length in range(1, len(past) + 1):
            self._seen.setdefault(tuple(past[-length:]), Counter())[ended] += 1

    def chain(self) -> tuple[int, ...]:
        """The contexts that are likely to follow."""
        past, chain = list(self.past), []
        for _ in range(_PASSES_AHEAD):
            seen = self._after(past)
            ctx = seen.most_common(1)[0][0] if seen else past[-1]
            chain.append(ctx)
            past = [*past[-_CONTEXTS_BACK + 1 :], ctx]
        return tuple(chain)

    def chances(self) -> dict[int, float]:
        """P(a context is the next): as often as it was, and once something else, told by less."""
        found: dict[int, float] = {}
        told: Counter[int] = Counter()
        left = 1.0
        for length in range(len(self.past), 0, -1):
            seen = self._seen.get(tuple(self.past[-length:]))
            if not seen:
                continue
            more = seen - told
            told = seen
            left /= more.total() + 1.0
            for ctx, count in more.items():
                found[ctx] = found.get(ctx, 0.0) + left * count
        return found

    def _after(self, past: list[int]) -> Counter[int] | None:
        """What followed the longest part of a past that was seen."""
        for length in range(len(past), 0, -1):
            seen = self._seen.get(tuple(past[-length:]))
            if seen:
                return seen
        return None
