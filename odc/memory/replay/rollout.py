"""Policies for a model of any size that do not know which pages a pass will use.

``Player`` plays passes by a ``Rule``: while something computes and the line is free, the first
page ahead that is likely enough is loaded over the page whose expected use is farthest, if that is
farther. ``Rollout`` improves on a rule: whatever could be begun is tried out on the same drawn
futures, each played on by the rule, and what took least time is done (D. P. Bertsekas and D. A.
Castanon, Rollout algorithms for stochastic scheduling problems, 1999). Both look at nothing that
a pager could not know, but for the true chances. What they reach can be reached, so the best policy
is no slower than they are; for tiny models ``online.least_expected`` is that policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from odc.memory.replay.online import NOTHING, Model

Draw = Sequence[int]  # pages that a pass uses, in the order of its forward


_SLACK = 0.02  # of the computation: a rule that waits for less is good enough


@dataclass(frozen=True)
class Rule:
    """How uncertain uses count.

    Attributes:
        worth: least chance at which a page is loaded ahead.
        doubt: a use at distance d with chance c counts as d / c ** doubt away.
        margin: a victim's use must be so many times as far off as that of what is loaded.
        lead: an uncertain use nearer than so many loads is not loaded for ahead.
    """

    worth: float = 0.3
    doubt: float = 1.0
    margin: float = 1.0
    lead: float = 0.0


RULES = tuple(
    Rule(*values) for values in product((0.0, 0.5), (0.25, 1.0, 2.0), (1.0, 1.5), (0.0, 0.5, 1.0))
)


class Player:
    """A device and a pass on it, under a rule.

    Attributes:
        place: of the use that runs; -1 before the first.
        forward: it is one of the forward.
        used: pages that the pass has used or, in backward, will use again, in order.
        here: pages that are there.
        coming: page that is being loaded until ``arrives``, -1 for none.
        now: time.
    """

    def __init__(self, model: Model, rule: Rule) -> None:
        self.model, self.rule = model, rule
        self.place, self.forward, self.used = -1, True, list[int]()
        self.here, self.coming, self.arrives, self.now = set[int](), -1, 0.0, 0.0
        self.chance = [0.0] * model.num_pages
        self.place_of = [0] * model.num_pages
        self.before = [0.0]  # expected uses in the places before each
        for at, place in enumerate(model.places):
            for page, chance in place:
                if page >= 0:
                    self.chance[page], self.place_of[page] = chance, at
            share = sum(chance for page, chance in place if page >= 0)
            self.before.append(self.before[-1] + share)
        self.doubt: list[float] = [max(c, 1e-3) ** -rule.doubt for c in self.chance]
        self.ahead = sorted(range(model.num_pages), key=lambda p: (self.place_of[p], p))

    def copy(self) -> Player:
        """The same device, to be played on apart from this one."""
        other = object.__new__(Player)
        other.__dict__.update(self.__dict__)
        other.used, other.here = self.used[:], self.here.copy()
        return other

    def draw(self, rng: random.Random, after: int = -1) -> list[int]:
        """What a pass uses in the places behind ``after``, drawn anew."""
        drawn = []
        for place in self.model.places[after + 1 :]:
            pages, chances = zip(*place, strict=True)
            drawn.append(pages[0] if len(pages) == 1 else rng.choices(pages, chances)[0])
        return [page for page in drawn if page != NOTHING]

    # -- what is expected ------------------------------------------------------------------------

    def _far(self, page: int) -> float:
        """How far off a page's use counts as, in computations."""
        before, place = self.before, self.place_of[page]
        if not self.forward:
            if page in self.used[:-1]:
                return float(len(self.used) - 1 - self.used.index(page))
            return (len(self.used) + before[place]) * self.doubt[page]
        turn = before[-1] - before[self.place + 1]  # uses until the forward ends
        if page in self.used:
            return 2.0 * turn + len(self.used) - self.used.index(page)
        if place > self.place:
            return (before[place] - before[self.place + 1] + 1.0) * self.doubt[page]
        return (2.0 * turn + len(self.used) + before[place]) * self.doubt[page]

    def _farthest(self, pinned: int) -> tuple[float, int]:
        """The page that goes first, and how far off its use is; -1 for a free frame."""
        if len(self.here) < self.model.capacity:
            return float("inf"), -1
        found = [(self._far(page), page) for page in self.here if page != pinned]
        return max(found) if found else (-1.0, -1)

    def _wanted(self) -> Iterator[tuple[int, float]]:
        """Pages that will or may be used, soonest first, and the chance."""
        if self.forward:
            for page in self.ahead:
                far = self.before[self.place_of[page]] - self.before[self.place + 1]
                late = far < self.rule.lead * self.model.load and self.chance[page] < 1.0
                if self.place_of[page] > self.place and not late:
                    yield page, self.chance[page]
            yield from ((page, 1.0) for page in reversed(self.used))
        else:
            yield from ((page, 1.0) for page in reversed(self.used[:-1]))
        yield from ((page, self.chance[page]) for page in self.ahead)

    def loads(self) -> Iterator[tuple[int, int]]:
        """Loads that the rule could begin now, its first choice first: page, victim or -1."""
        distance, victim = self._farthest(self.used[-1] if self.used else -1)
        if distance < 0.0:
            return
        seen = {self.coming}
        for page, chance in self._wanted():
            if page in self.here or page in seen or chance < self.rule.worth:
                continue
            seen.add(page)
            if victim < 0 or self._far(page) * self.rule.margin < distance:
                yield page, victim

    def choose(self, end: float, rest: Draw, later: int) -> tuple[int, int] | None:
        """What to begin to load, if anything, while a use computes until ``end``."""
        return next(self.loads(), None)

    # -- time ------------------------------------------------------------------------------------

    def begin_load(self, page: int, victim: int) -> None:
        self.here.discard(victim)
        self.coming, self.arrives = page, max(self.now, self.arrives) + self.model.load

    def _arrive(self) -> None:
        self.here.add(self.coming)
        self.coming = -1

    def _wait_for(self, page: int) -> None:
        """A use begins as soon as its page is there."""
        while page not in self.here:
            if self.coming < 0:
                self.begin_load(page, self._farthest(-1)[1])
            self.now = max(self.now, self.arrives)
            self._arrive()

    def compute(self, end: float, rest: Draw, later: int) -> None:
        """A use computes until ``end``; loads begin as the rule has it."""
        while True:
            if self.coming >= 0:
                if self.arrives > end:
                    break
                self._arrive()
            self.arrives = max(self.arrives, self.now)
            chosen = self.choose(end, rest, later) if self.arrives < end else None
            if chosen is None:
                break
            self.begin_load(*chosen)
        self.now = end

    def play(self, passes: Sequence[Draw]) -> float:
        """Play whole passes; returns the time."""
        for number, drawn in enumerate(passes):
            self.place, self.forward = -1, True
            self.go_on(drawn, len(passes) - 1 - number)
        return self.now

    def go_on(self, drawn: Draw, later: int) -> None:
        """The rest of a pass whose last use has computed; ``drawn`` is left of its forward."""
        for at, page in enumerate(drawn if self.forward else ()):
            self.place = self.place_of[page]
            self.used.append(page)
            self._wait_for(page)
            self.compute(self.now + 1.0, drawn[at + 1 :], later)
        if self.forward:
            self.forward = False
        elif self.used:
            self.used.pop()
        while self.used:
            self._wait_for(self.used[-1])
            self.compute(self.now + 1.0, (), later)
            self.used.pop()


class Rollout(Player):
    """A rule, improved by trying out what could be begun.

    Args:
        model: what passes may use.
        rule: that is improved.
        samples: futures on which each choice is tried.
        choices: loads that are tried, beside none.
        seed: of the futures.
    """

    def __init__(
        self, model: Model, rule: Rule, samples: int = 8, choices: int = 3, seed: int = 0
    ) -> None:
        super().__init__(model, rule)
        self.samples, self.choices = samples, choices
        self.random = random.Random(seed)

    def choose(self, end: float, rest: Draw, later: int) -> tuple[int, int] | None:
        tried: list[tuple[int, int] | None] = list(islice(self.loads(), self.choices))
        if not tried:
            return None
        tried.append(None)
        futures = []
        for _ in range(self.samples):
            left = self.draw(self.random, self.place) if self.forward else []
            futures.append((left, [self.draw(self.random)] if later else []))
        times = [sum(self._try(one, end, *future) for future in futures) for one in tried]
        return tried[times.index(min(times))]

    def _try(
        self, chosen: tuple[int, int] | None, end: float, left: Draw, after: Sequence[Draw]
    ) -> float:
        """Time of a future in which ``chosen`` is begun now; none: not before the next use."""
        other = self.copy()
        if chosen is None:
            other.now = end
        else:
            other.begin_load(*chosen)
            other.compute(end, (), 0)
        other.go_on(left, 0)
        return other.play(after)


def best_rule(model: Model, passes: int = 24, seed: int = 0) -> Rule:
    """The rule that is fastest on the same drawn passes."""
    rng = random.Random(seed)
    drawn = [Player(model, Rule()).draw(rng) for _ in range(passes)]
    times = [Player(model, rule).play(drawn) for rule in RULES]
    return RULES[times.index(min(times))]


def reached(model: Model, passes: Sequence[Draw], seed: int = 0) -> float:
    """The least time that a policy needs for passes without knowing what they use.

    It is the best rule's, found on other draws, or its rollout's.

    Args:
        model: with the true chances.
        passes: what is drawn; shown to the policies use by use.
        seed: of the other draws, and of the futures that rollouts try.

    Returns:
        Units of computation, from an empty device.
    """
    rule = best_rule(model, seed=seed)
    times = [Player(model, rule).play(passes)]
    if times[0] > (1.0 + _SLACK) * 2 * sum(len(drawn) for drawn in passes):
        times.append(Rollout(model, rule, seed=seed).play(passes))
    return min(times)
