"""The optimizer at home: what runs on an engine's thread when a group is updated there.

The gradient of a group was stored, its parameters were given up; moments (and, beside parameters of
bfloat16, masters in float32) never leave the home. In host memory the kernel works on them in
place. Pages on disk are read into a staging buffer, updated and written back.

Everything that a loop may change before the update runs (the learning rate, step counters, the
clip coefficient) is taken when it is submitted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from odc.errors import OdcError, PageIOError
from odc.fsdp.adamw import Chunk, Settings, update
from odc.fsdp.group import ParamGroup
from odc.memory.events import Kind
from odc.memory.home_range import StagedPages, Staging
from odc.memory.manager import MemoryManager
from odc.memory.pages import Page, PageTable

_PARAMETER, _GRADIENT, _MOMENTS = 0, 1, 2  # places; masters are the last of the moments


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters of a group that are updated alike.

    Attributes:
        settings: of all of them.
        steps: by index in the group, () float32, the number of the step.
    """

    settings: Settings
    steps: dict[int, torch.Tensor]


class HomeUpdates:
    """Makes the updates of a manager's groups.

    Args:
        manager: sealed.
    """

    def __init__(self, manager: MemoryManager) -> None:
        self._manager = manager
        self._staging: Staging | None = None
        self._parts: dict[tuple[int, int], _Part] = {}

    def make(
        self, group: ParamGroup, part: int, jobs: Sequence[Job], coefficient: torch.Tensor | None
    ) -> Callable[[], None] | None:
        """What updates a part of a group; None if none of its gradients lies there.

        Args:
            group: updated at home.
            part: of its ranges.
            jobs: what is updated, and how.
            coefficient: of clipping, None for none.
        """
        inside = set(group.indices(part))
        jobs = [j for j in jobs if inside.intersection(j.steps)]
        if not jobs:
            return None
        written = part in group.written
        group.written.discard(part)
        work = self._part(group, part)
        return lambda: work.run(jobs, coefficient, written)

    def _part(self, group: ParamGroup, part: int) -> _Part:
        found = self._parts.get((group.group, part))
        if found is None:
            home, table = self._manager.home, self._manager.table
            assert home is not None, "the manager is sealed"
            if self._staging is None:
                self._staging = Staging(_place_bytes(table))
            pages = StagedPages(home, self._staging, _pages(table, group.group, part))
            found = self._parts[group.group, part] = _Part(group, part, pages)
        return found


class _Part:
    """One part of a group's ranges at home; addresses do not change, so views are made once."""

    def __init__(self, group: ParamGroup, part: int, pages: StagedPages) -> None:
        self._name = group.spec.name
        self._pages = pages
        self._chunks = {c.index: c for c in _chunks(group, part, pages.addresses)}
        moments = range(_MOMENTS, _MOMENTS + group.spec.num_moments)
        self._has_masters = any(c.master is not None for c in self._chunks.values())
        self._writes = (_PARAMETER, *moments)

    def run(self, jobs: Sequence[Job], coefficient: torch.Tensor | None, written: bool) -> None:
        """Update; on a thread of the engine.

        Raises:
            PageIOError: the home could not be read or written, or the kernel failed.
        """
        page = self._pages.pages[_PARAMETER]
        assert page is not None, "every part has parameters"
        try:
            self._pages.read((_GRADIENT, *self._writes))
            self._update(jobs, coefficient, written and self._has_masters)
            self._pages.write(self._writes)
        except OdcError:
            raise
        except Exception as error:
            raise PageIOError(
                f"the update of {self._name} at home failed: {error!r}", page=page.page
            ) from error

    @torch.no_grad()
    def _update(self, jobs: Sequence[Job], coefficient: torch.Tensor | None, written: bool) -> None:
        if written:
            for chunk in self._chunks.values():
                chunk.take_written()
        for job in jobs:
            mine = [i for i in job.steps if i in self._chunks]
            chunks = [self._chunks[i] for i in mine]
            update(chunks, [job.steps[i] for i in mine], job.settings, coefficient)


def _pages(table: PageTable, group: int, part: int) -> list[Page | None]:
    """The pages of a part, by place."""
    kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.MOMENT)
    return [table.pages[p] for kind in kinds for p in table.of_part(group, kind, part)]


def _place_bytes(table: PageTable) -> list[int]:
    """The largest page at each place, over all groups that are updated at home."""
    sizes: list[int] = []
    for group, spec in enumerate(table.groups):
        for part in range(table.parts(group)) if spec.at_home else ():
            for place, page in enumerate(_pages(table, group, part)):
                assert page is not None
                if place == len(sizes):
                    sizes.append(0)
                sizes[place] = max(sizes[place], page.num_bytes)
    return sizes


def _chunks(group: ParamGroup, part: int, addresses: Sequence[int]) -> list[Chunk]:
    """Views of a part at home."""
    start = part * group.manager.table.page_size
    found = []
    for index, low, high in group.cuts(part):
        slot = group.slots[index]
        numel = (high - low) // slot.dtype.itemsize
        at = low - start

        def moment(
            place: int, at: int = at, numel: int = numel, index: int = index
        ) -> torch.Tensor:
            base = addresses[_MOMENTS + place]
            return _tensor(base + at * group.spec.moment_scale, numel, group.moment_dtype(index))

        found.append(
            Chunk(
                index,
                _tensor(addresses[_PARAMETER] + at, numel, slot.dtype),
                _tensor(addresses[_GRADIENT] + at, numel, slot.dtype),
                (moment(0), moment(1)),
                moment(2) if group.has_master(index) else None,
            )
        )
    return found


def _tensor(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """(numel,) over memory that lives as long as the home."""
    buffer = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)
