"""A recorded order: the visits of a context, as the union of its passes.

An entry that a pass skips (a dropped layer, the branch not taken) stays and becomes less likely,
one that is new is put in behind its predecessor. Nothing is ever cleared. On a visit that was not
expected the place is looked up again: among the places where the visit is known, the one whose
predecessors match the last visits best, near ahead first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from odc.memory.events import FORWARD_PHASES, Kind, Phase
from odc.memory.stations import Stations, Visit, visit_key

FORWARD = frozenset(int(p) for p in FORWARD_PHASES)
MIRRORED = frozenset((int(Phase.BACKWARD), int(Phase.RECOMPUTE)))
CERTAIN = 0.95  # entries that are skipped less often count as certain
_LEAST_RATE = 0.05  # how fast chances follow once many passes were seen
_FOLLOW_RATE = 0.05  # how fast old followers fade
_REACH = 16  # entries for which chances follow from where the pass is
_FORGOTTEN = 0.01  # an entry less likely than this is dropped from its order
_SMOOTH = 0.3  # weight of the last pass in durations
_OUTLIER, _OUTLIER_NS = 3.0, 1e6  # a visit that takes longer than so many times the usual is cut
_MOVED = 0.1  # durations that change by more than this share are compiled anew
SUFFIX = 4  # visits that are compared to find a place again


@dataclass(slots=True, eq=False)
class Entry:
    """A visit of a recorded order.

    Attributes:
        station, phase, kinds, creates, writes, drops, goes, at_ns, held_ns, span: as in ``Visit``.
        dur_ns: compute until the next visit, smoothed over passes.
        chance: share of passes that made it, the recent ones counting more.
        used, order: members of the last visit of a set.
        followers: how often, of late, which entry came next.
    """

    station: int
    phase: int
    kinds: int
    dur_ns: float
    chance: float = 1.0
    creates: int = 0
    writes: int = 0
    at_ns: list[float] = field(default_factory=lambda: [0.0] * len(Kind))
    held_ns: float = 0.0
    span: int = 0
    drops: int = 0
    goes: int = 0
    used: np.ndarray | None = None
    order: list[int] = field(default_factory=list)

    followers: dict[Entry, float] = field(default_factory=dict)

    @property
    def key(self) -> int:
        return visit_key(self.station, self.phase)

    def followed_by(self, entry: Entry) -> None:
        """Another visit was followed by one of ``entry``."""
        for other in self.followers:
            self.followers[other] *= 1.0 - _FOLLOW_RATE
        self.followers[entry] = self.followers.get(entry, 0.0) + 1.0

    @property
    def dies(self) -> bool:
        """Whether what the entry makes fresh dies or goes home in it."""
        return bool(self.creates) and not self.creates & ~(self.drops | self.goes)

    def take(self, visit: Visit) -> None:
        """How the entry was visited this time."""
        self.creates, self.writes, self.drops = visit.creates, visit.writes, visit.drops
        self.goes = visit.goes
        self.span = visit.span
        share = _SMOOTH if self.held_ns or any(self.at_ns) else 1.0
        self.held_ns += share * (visit.held_ns - self.held_ns)
        for kind, at_ns in enumerate(visit.at_ns):
            self.at_ns[kind] += share * (at_ns - self.at_ns[kind])


class RecordedOrder:
    """The entries of a context, and what is worked out from them once.

    Attributes:
        entries: in order.
        passes: passes recorded.
        compiled: how often the rest was worked out.
        is_certain: every pass needs the same pages, and no sets are among them.
        writes: passes change pages.
        is_forward: passes are forwards and no more.
        keys: of the entries (``visit_key``).
        start_ns: compute from the beginning of the pass to each entry.
        total_ns: compute of a pass.
        longest_ns: the most compute between two visits.
        uses: for each entry of a single group, its pages; () for a set.
        at: for each page, the entries of single groups that need its content, ascending.
        held_at: for each page, those and the ones that make it fresh.
        goes_at: for each page, the entries of single groups in which it leaves for an update.
        mirror: for each backward entry, the forward entry it mirrors; -1 for none.
        of_station: entries of each set's station, ascending.
        fresh: frames that each entry makes fresh; of a set, one member at a time.
        makes_fresh: some entry does.
        lasting_fresh, dying_fresh: before each entry, the frames that entries make fresh and that
            outlive their visit, and the number of those whose do not.
        most_dying: the most frames of the latter.
    """

    def __init__(self, stations: Stations) -> None:
        self.stations = stations
        self.entries: list[Entry] = []
        self.passes = 0
        self.compiled = 0
        self.is_certain = False
        self.writes = False
        self.is_forward = False
        self.longest_ns = 0.0
        self._has_times = True
        self._chances: list[float] = []
        self.fresh: list[int] = []
        self.makes_fresh = False
        self.lasting_fresh: list[int] = [0]
        self.dying_fresh: list[int] = [0]
        self.most_dying = 0
        self.start_ns: list[float] = []
        self.total_ns = 0.0
        self.uses: list[tuple[int, ...]] = []
        self.at: list[list[int]] = [[] for _ in stations.table.pages]
        self.held_at: list[list[int]] = self.at
        self.goes_at: dict[int, list[int]] = {}
        self.mirror: list[int] = []
        self.of_station: dict[int, list[int]] = {}
        self._places: dict[int, list[int]] = {}
        self.keys: list[int] = []
        self._place_of: dict[Entry, int] = {}

    def record(self, live: list[Visit]) -> bool:
        """Take in a pass; returns whether entries or their times changed."""
        self.passes += 1
        rate = max(1.0 / self.passes, _LEAST_RATE)
        same = len(live) == len(self.entries) and all(
            visit.place == place for place, visit in enumerate(live)
        )
        grown = self._merge(live, rate) if not same else False
        for place, visit in enumerate(live):
            entry = self.entries[place if same else visit.place]
            entry.chance += rate * (1.0 - entry.chance)
            if self._has_times:
                dur_ns = min(visit.dur_ns, _OUTLIER * entry.dur_ns + _OUTLIER_NS)
                entry.dur_ns += _SMOOTH * (dur_ns - entry.dur_ns)
            else:
                entry.dur_ns, entry.held_ns, entry.at_ns = visit.dur_ns, 0.0, [0.0] * len(Kind)
            moved = visit.goes != entry.goes
            entry.take(visit)
            if visit.kinds | entry.kinds != entry.kinds or moved:
                entry.kinds |= visit.kinds
                grown = True
            if visit.used is not None:
                entry.used, entry.order = visit.used, visit.order
        self._has_times = True
        if self.passes > 1 and not (same and self.is_certain):
            visited = [self.entries[place if same else v.place] for place, v in enumerate(live)]
            for entry, following in pairwise(visited):
                entry.followed_by(following)
        if not grown and not self._has_moved():
            return False
        self._compile()
        return True

    def copy(self) -> RecordedOrder:
        """The same entries for passes of another shape, whose times are those of its first."""
        made = RecordedOrder(self.stations)
        made.passes = self.passes
        made.entries = [replace(e, at_ns=e.at_ns[:], followers={}) for e in self.entries]
        made._has_times = False
        made._compile()
        return made

    def reach(self, position: int) -> list[float]:
        """P(visited in this pass) of the entries behind ``position``, as far as that tells."""
        last = min(position + 1 + _REACH, len(self.entries))
        chances = [0.0] * (last - position)
        chances[0] = 1.0
        for place in range(position, last - 1):
            followers = self.entries[place].followers
            total = sum(followers.values())
            share = chances[place - position]
            if not share:
                continue
            if not total:  # nothing is known: the next in order
                chances[place - position + 1] += share
                continue
            for entry, weight in followers.items():
                there = self._place_of[entry] - position
                if place - position < there < len(chances):
                    chances[there] += share * weight / total
        return chances[1:]

    def _has_moved(self) -> bool:
        """Whether durations or chances are no longer those that were compiled."""
        total = sum(e.dur_ns for e in self.entries)
        if abs(total - self.total_ns) > _MOVED * self.total_ns:
            return True
        pairs = zip(self.entries, self._chances, strict=True)
        return any(abs(entry.chance - chance) > _MOVED for entry, chance in pairs)

    def _merge(self, live: list[Visit], rate: float) -> bool:
        """The union of the order and a pass, in the order of the pass where they differ.

        Places of the visits are set anew; returns whether entries came, went or moved.
        """
        seen = {v.place for v in live if v.place >= 0}
        behind: dict[int, list[Entry]] = {}  # entry that was visited -> those skipped after it
        last = -1
        for place, entry in enumerate(self.entries):
            if place in seen:
                last = place
                continue
            entry.chance -= rate * entry.chance
            if entry.chance >= _FORGOTTEN:
                behind.setdefault(last, []).append(entry)
        made = list(behind.get(-1, []))
        done: set[int] = set()
        for visit in live:
            place = visit.place
            known = place >= 0 and place not in done
            entry = self.entries[place] if known else _entry(visit)
            visit.place = len(made)
            made.append(entry)
            if known:
                done.add(place)
                made += behind.get(place, [])
        changed = [id(e) for e in made] != [id(e) for e in self.entries]
        self.entries = made
        return changed

    def _compile(self) -> None:
        entries, stations = self.entries, self.stations
        self.compiled += 1
        self.keys = [e.key for e in entries]
        self._place_of = {entry: place for place, entry in enumerate(entries)}
        for entry in entries:
            gone = [other for other in entry.followers if other not in self._place_of]
            for other in gone:
                del entry.followers[other]
        self._chances = [e.chance for e in entries]
        self.longest_ns = max((e.dur_ns for e in entries), default=0.0)
        self.start_ns, self.total_ns = [], 0.0
        self.uses, self.mirror = [], []
        self.at = [[] for _ in stations.table.pages]
        self.held_at = [[] for _ in stations.table.pages]
        self.of_station, self._places = {}, {}
        self.goes_at = {}
        forward: dict[int, int] = {}
        for place, entry in enumerate(entries):
            self.start_ns.append(self.total_ns)
            self.total_ns += entry.dur_ns
            self._places.setdefault(self.keys[place], []).append(place)
            mirrors = forward.get(entry.station, -1) if entry.phase in MIRRORED else -1
            self.mirror.append(mirrors)
            if entry.phase in FORWARD:
                forward[entry.station] = place
            if stations.stations[entry.station].set_index >= 0:
                self.of_station.setdefault(entry.station, []).append(place)
                self.uses.append(())
                continue
            pages = stations.member_pages(entry.station, entry.kinds)
            self.uses.append(pages)
            for page in pages:
                self.at[page].append(place)
            for page in stations.member_pages(entry.station, entry.kinds | entry.creates):
                self.held_at[page].append(place)
            for page in stations.member_pages(entry.station, entry.goes) if entry.goes else ():
                self.goes_at.setdefault(page, []).append(place)
        self.is_certain = not self.of_station and min(self._chances, default=0.0) >= CERTAIN
        self.writes = any(entry.writes for entry in entries)
        self.is_forward = all(entry.phase in FORWARD for entry in entries)
        self._sum_fresh()

    def _sum_fresh(self) -> None:
        """Running sums of the frames that entries make fresh."""
        self.lasting_fresh, self.dying_fresh, self.most_dying = [0], [0], 0
        self.fresh = [self._frames_of(entry) for entry in self.entries]
        self.makes_fresh = any(self.fresh)
        for frames, entry in zip(self.fresh, self.entries, strict=True):
            dies = bool(frames and entry.dies)
            self.lasting_fresh.append(self.lasting_fresh[-1] + (0 if dies else frames))
            self.dying_fresh.append(self.dying_fresh[-1] + dies)
            self.most_dying = max(self.most_dying, frames if dies else 0)

    def _frames_of(self, entry: Entry) -> int:
        if not entry.creates:
            return 0
        pages = self.stations.member_pages(entry.station, entry.creates)
        return sum(self.stations.table.frames[page] for page in pages)

    def frames_to_create(self, place: int) -> int:
        """Frames of what an entry makes fresh; of a set, of one member at a time."""
        return self.fresh[place] if 0 <= place < len(self.fresh) else 0

    def is_at(self, place: int, key: int) -> bool:
        return 0 <= place < len(self.keys) and self.keys[place] == key

    def find(self, key: int, after: int, last_keys: list[int]) -> int:
        """The place of a visit that was not expected, -1 if the order does not know it.

        Args:
            key: of the visit.
            after: the place of the visit before it.
            last_keys: keys of the visits before it, the latest last.
        """
        best, best_rank = -1, (0, 0, 0)
        for place in self._places.get(key, []):
            match = 0
            while match < min(SUFFIX, len(last_keys)) and self.is_at(
                place - 1 - match, last_keys[-1 - match]
            ):
                match += 1
            rank = (match, int(place > after), -abs(place - after))
            if best < 0 or rank > best_rank:
                best, best_rank = place, rank
        return best


def _entry(visit: Visit) -> Entry:
    return Entry(visit.station, visit.phase, visit.kinds, visit.dur_ns, 0.0)
