"""The page table: which bytes exist, how they are cut into pages, and where each page is.

A *range* is one (group, kind, slot): a group's parameters, its gradient, or one optimizer moment.
It is cut into pages of at most ``page_size``, each a run of whole frames. A group whose whole
state fits one frame is *compact*: its kinds share one page. A group of a few KiB is *pinned*.

A range may lie at home in another form than on the device (``coded.py``): then a page has fewer
bytes at home; they are what transfers move and what is counted, frames are taken for the others.

Flags that hooks read one at a time live in bytearrays (``is_absent``: neither resident nor on its
way; ``is_evictable``: resident and not pinned; ``is_dirty``); ``evictable`` and the others are the
same bytes as numpy arrays, for whoever looks at all pages at once.
The table is bookkeeping on integers: it moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from odc.memory.events import Kind
from odc.memory.frames import FRAME_BYTES, frames_for

PINNED_BYTES = 64 * 1024
BLOCK_BYTES = 4096  # what direct I/O is aligned to
StoredBytes = Callable[[int, int], int]  # bytes at home of the bytes of a range from, to


def whole_blocks(num_bytes: int) -> int:
    """``num_bytes`` rounded up to blocks of direct I/O."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class PageState(IntEnum):
    HOME = 0  # no frames; the home's copy is the only one (or none exists: an unborn gradient)
    LOADING = 1  # frames booked, load or map submitted and not known to be done
    RESIDENT = 2  # frames hold the only valid copy, or one equal to the home's
    EVICTING = 3  # the way out is submitted; frames are booked by whoever waits for them


_HOME, _LOADING, _RESIDENT, _EVICTING = PageState  # looking up a member's name is slow


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        num_bytes, num_frames: on the device; one that never leaves its home has no frames.
        offset: its place in the home.
        home_bytes: what it takes there, and what crosses the link; as on the device if not given.
    """

    page: int
    group: int
    kind: Kind
    slot: int
    part: int
    num_bytes: int
    num_frames: int
    address: int
    offset: int
    home_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.home_bytes:
            object.__setattr__(self, "home_bytes", self.num_bytes)

    @property
    def home_share(self) -> float:
        """Bytes that cross the link for each byte on the device."""
        return self.home_bytes / self.num_bytes if self.num_bytes else 1.0

    @property
    def room_bytes(self) -> int:
        """What is set aside for it in the home: its frames, or whole blocks if it is coded."""
        if self.home_bytes == self.num_bytes:
            return frames_for(self.num_bytes) * FRAME_BYTES
        return whole_blocks(self.home_bytes)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What memory knows of a group.

    Attributes:
        name: for messages.
        num_bytes: bytes of its parameters, and so of its gradient and of each moment.
        num_moments: optimizer moments; 0 for a frozen group.
        has_gradient: False for a frozen group.
        layer, expert, set_index: place in the model; -1 where there is none.
        at_home: it is updated at home: its moments have no frames and never leave.
        moment_scale: bytes of a moment at home, in bytes of the parameters (2 for moments of
            float32 beside parameters of bfloat16).
    """

    name: str
    num_bytes: int
    num_moments: int
    has_gradient: bool
    layer: int = -1
    expert: int = -1
    set_index: int = -1
    at_home: bool = False
    moment_scale: int = 1

    @property
    def state_bytes(self) -> int:
        """Bytes of all kinds, where they are of one size."""
        return self.num_bytes * (1 + self.num_moments + int(self.has_gradient))

    @property
    def compact(self) -> bool:
        return self.state_bytes <= FRAME_BYTES and not self.at_home

    @property
    def pinned(self) -> bool:
        return self.state_bytes <= PINNED_BYTES and not self.at_home


@dataclass(slots=True)
class PageTable:
    """All groups and pages of a model, and the state of each page."""

    page_size: int
    groups: list[GroupSpec] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    home_bytes: int = 0  # of parameters and moments
    gradient_bytes: int = 0  # of gradients, behind them in the home
    # page ids by (group, kind): all parts, and all moments
    by_kind: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    by_part: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    is_compact: list[bool] = field(default_factory=list)  # by group
    state: list[PageState] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    is_evictable: bytearray = field(default_factory=bytearray)
    is_absent: bytearray = field(default_factory=bytearray)
    is_dirty: bytearray = field(default_factory=bytearray)
    load_weight: list[float] = field(default_factory=list)  # cost of a load per byte, relative
    left: list[int] = field(
        default_factory=list
    )  # on their way out, or not loaded; a plan clears it
    home_shares: list[float] = field(default_factory=list)  # bytes at home for each on the device
    num_frames: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    evictable: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    absent: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    dirty: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    is_resident: bytearray = field(default_factory=bytearray)
    resident: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    def add_group(
        self,
        spec: GroupSpec,
        addresses: dict[tuple[int, int], int],
        stored: StoredBytes | None = None,
    ) -> int:
        """Add a group whose ranges lie at ``addresses[kind, slot]`` (compact: only kind 0).

        Args:
            spec: the group.
            addresses: of its ranges.
            stored: of a group of parameters alone that are coded at home: what they take there.
        """
        assert stored is None or spec.state_bytes == spec.num_bytes, f"{spec.name}: more is coded"
        group = len(self.groups)
        self.groups.append(spec)
        if spec.compact:
            ids = self._add_range(group, Kind.PARAMETER, 0, spec.state_bytes, addresses, stored)
            for kind in Kind:
                self.by_kind[group, kind] = ids
            return group
        self.by_kind[group, Kind.PARAMETER] = self._add_range(
            group, Kind.PARAMETER, 0, spec.num_bytes, addresses, stored
        )
        self.by_kind[group, Kind.GRADIENT] = (
            self._add_range(group, Kind.GRADIENT, 0, spec.num_bytes, addresses)
            if spec.has_gradient
            else ()
        )
        moments: tuple[int, ...] = ()
        for slot in range(spec.num_moments):
            size = spec.num_bytes * spec.moment_scale
            moments += self._add_range(group, Kind.MOMENT, slot, size, addresses)
        self.by_kind[group, Kind.MOMENT] = moments
        return group

    def _add_range(
        self,
        group: int,
        kind: Kind,
        slot: int,
        num_bytes: int,
        addresses: dict[tuple[int, int], int],
        stored: StoredBytes | None = None,
    ) -> tuple[int, ...]:
        ids = []
        frames_per_page = max(self.page_size // FRAME_BYTES, 1)
        stays = kind == Kind.MOMENT and self.groups[group].at_home
        if stays:  # its parts are those of the parameters
            frames_per_page *= self.groups[group].moment_scale
        total = frames_for(num_bytes)
        for part, first in enumerate(range(0, total, frames_per_page)):
            frames = min(frames_per_page, total - first)
            start = first * FRAME_BYTES
            size = min(num_bytes - start, frames * FRAME_BYTES)
            offset = self.gradient_bytes if kind == Kind.GRADIENT else self.home_bytes
            page = len(self.pages)
            address = addresses.get((kind, slot), 0) + start
            at_home = stored(start, start + size) if stored is not None else 0
            size = whole_blocks(size)  # so that direct I/O takes it as it is
            held = 0 if stays else frames
            made = Page(page, group, kind, slot, part, size, held, address, offset, at_home)
            if kind == Kind.GRADIENT:
                self.gradient_bytes += made.room_bytes
            else:
                self.home_bytes += made.room_bytes
            self.pages.append(made)
            ids.append(page)
        return tuple(ids)

    @staticmethod
    def of_trace(pages: dict[str, np.ndarray]) -> PageTable:
        """The sealed table of a recorded run, from the columns of its ``pages.arrow``.

        A compact group shows pages of kind parameter only; they stand for its other kinds too.
        """
        table = PageTable(page_size=1 << 62)
        order = np.argsort(pages["page"], kind="stable")
        columns = {name: values[order] for name, values in pages.items()}
        num_groups = int(columns["group"].max()) + 1 if len(order) else 0
        rows_of: list[list[int]] = [[] for _ in range(num_groups)]
        for row, group in enumerate(columns["group"]):
            rows_of[int(group)].append(row)
            size = int(columns["bytes"][row])
            at_home = int(columns["home_bytes"][row]) if "home_bytes" in columns else 0
            made = Page(
                int(columns["page"][row]),
                int(group),
                Kind(int(columns["kind"][row])),
                int(columns["slot"][row]),
                int(columns["part"][row]),
                size,
                frames_for(size),
                0,
                0,
                at_home,
            )
            table.pages.append(made)
        for group, rows in enumerate(rows_of):
            table.groups.append(_traced_spec(columns, rows))
            for kind in Kind:
                own = tuple(table.pages[r].page for r in rows if table.pages[r].kind == kind)
                table.by_kind[group, kind] = own or table.by_kind.get((group, 0), ())
        table.seal()
        return table

    def seal(self) -> None:
        """No more groups: make the arrays."""
        n = len(self.pages)
        self.pages = [
            replace(p, offset=p.offset + self.home_bytes) if p.kind == Kind.GRADIENT else p
            for p in self.pages
        ]
        self.state = [PageState.HOME] * n
        self.pins = [0] * n
        self.is_compact = [spec.compact for spec in self.groups]
        self.frames = [p.num_frames for p in self.pages]
        self.load_weight = [1.0] * n
        self.home_shares = [p.home_share for p in self.pages]
        self.num_frames = np.array(self.frames, np.int32)
        self.is_evictable, self.is_dirty = bytearray(n), bytearray(n)
        self.is_absent = bytearray(b"\1" * n)
        self.evictable = np.frombuffer(self.is_evictable, bool)
        self.absent = np.frombuffer(self.is_absent, bool)
        self.dirty = np.frombuffer(self.is_dirty, bool)
        self.is_resident = bytearray(n)
        self.resident = np.frombuffer(self.is_resident, bool)

    def set_state(self, page: int, state: PageState) -> None:
        """Note where a page is; the arrays follow."""
        if state == _EVICTING or (state == _HOME and self.state[page] == _LOADING):
            self.left.append(page)
        self.state[page] = state
        self.is_absent[page] = state in (_HOME, _EVICTING)
        self.is_resident[page] = state == _RESIDENT

    def of(self, group: int, kind: int) -> tuple[int, ...]:
        """Page ids of a group's kind, all parts and moments."""
        return self.by_kind[group, kind]

    def parts(self, group: int) -> int:
        """Number of parts in which a group's optimizer walks through its pages."""
        return len(self.by_kind[group, Kind.PARAMETER])

    def of_part(self, group: int, kind: int, part: int) -> list[int]:
        """Page ids of one part (a moment has one page a slot)."""
        found = self.by_part.get((group, kind, part))
        if found is None:
            own = [p for p in self.by_kind[group, kind] if self.pages[p].part == part]
            found = self.by_part[group, kind, part] = own
        return found

    def span_of(self, page: Page) -> tuple[int, int]:
        """(begin, end) of a page in its range, in bytes, without what fills its last block."""
        spec = self.groups[page.group]
        begin = page.part * self.page_size
        end = begin + page.num_frames * FRAME_BYTES
        return begin, min(end, spec.state_bytes if spec.compact else spec.num_bytes)

    def frames_of(self, ids: Iterable[int]) -> int:
        return sum(self.pages[p].num_frames for p in set(ids))

    def smallest_budget(self, held: dict[int, list[int]] | None = None) -> tuple[int, int]:
        """(frames, group) of the least budget that can train the model, and who needs it.

        A group needs its parameters and its gradient together with what is ``held`` while it
        runs (the parameters and gradients of enclosing and tied groups), or its gradient with one
        page each of parameters and moments. Pinned groups are there all the time.
        """
        pinned = [g for g, spec in enumerate(self.groups) if spec.pinned]
        always = [p for g in pinned for p in self.of(g, Kind.PARAMETER)]
        worst, owner = self.frames_of(always), pinned[0] if pinned else -1
        for group in range(len(self.groups)):
            others = [
                p
                for other in (held or {}).get(group, [])
                for kind in (Kind.PARAMETER, Kind.GRADIENT)
                for p in self.of(other, kind)
            ]
            gradient = self.of(group, Kind.GRADIENT)
            compute = self.frames_of([*always, *others, *self.of(group, Kind.PARAMETER), *gradient])
            part = self.of_part(group, Kind.PARAMETER, 0) + self.of_part(group, Kind.MOMENT, 0)
            update = self.frames_of([*always, *others, *part, *gradient])
            if max(compute, update) > worst:
                worst, owner = max(compute, update), group
        return worst, owner


def _traced_spec(columns: dict[str, np.ndarray], rows: list[int]) -> GroupSpec:
    kinds = columns["kind"][rows]
    parameter = [r for r, k in zip(rows, kinds, strict=True) if k == Kind.PARAMETER]
    slots = {int(columns["slot"][r]) for r, k in zip(rows, kinds, strict=True) if k == Kind.MOMENT}
    first = rows[0]
    spec = GroupSpec(
        str(columns["module_path"][first]),
        int(columns["bytes"][parameter].sum()),
        len(slots),
        bool((kinds == Kind.GRADIENT).any()),
        int(columns["layer"][first]),
        int(columns["expert"][first]),
        int(columns["set"][first]),
    )
    # A small group with pages of its own for gradients was updated at home.
    return replace(spec, at_home=True) if spec.has_gradient and spec.compact else spec
