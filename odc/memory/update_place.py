"""Where a group is updated: on the device, or at home, where its moments live.

On the device both moments of a group cross the link in and out once a step. At home they never
move: the gradient goes home, the update runs there beside the computation, and the parameters are
loaded when they are next needed, as they would have been anyway. So, under ``auto``:

* without a budget, or where parameters, gradients and moments all fit it: on the device, where
  nothing has to move;
* a group whose whole state fits one frame: on the device, in that frame;
* any other group at home, if its moments would take longer over the link than its update takes:

      moment bytes / link  >  parameter bytes / update rate  +  disk bytes / disk

  with what the update itself reads from disk (parameters, gradient, moments) as the last term,
  which is zero for a home in host memory. Loads and stores go at the same time, so that one
  direction counts; where the home is on disk the link is as fast as the slower of the two.

Pure, but for ``measure_rates``, which times copies and one small file.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odc.memory.frames import FRAME_BYTES, PROT_RW, fault_in, frames_for, map_anonymous, unmap
from odc.memory.home import DiskHome

PLACES = ("device", "home", "auto")
_PROBE_BYTES = 16 * 1024 * 1024
_PROBES = 3


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """What decides, in bytes/s.

    Attributes:
        link: between device and home, each way.
        update: parameters updated at home.
        disk: of the home's disk; None where moments live in host memory.
    """

    link: float
    update: float
    disk: float | None = None


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A trainable group.

    Attributes:
        parameter_bytes: of its parameters, and so of its gradient.
        moment_bytes: of both moments.
    """

    parameter_bytes: int
    moment_bytes: int

    @property
    def fits_a_frame(self) -> bool:
        """Whether parameters, gradient and moments fit one frame together."""
        return 2 * self.parameter_bytes + self.moment_bytes <= FRAME_BYTES

    @property
    def frame_bytes(self) -> int:
        """Of all its state on the device."""
        if self.fits_a_frame:
            return FRAME_BYTES
        moment = frames_for(self.moment_bytes // 2)
        return (2 * frames_for(self.parameter_bytes) + 2 * moment) * FRAME_BYTES

    def belongs_at_home(self, rates: UpdateRates) -> bool:
        """The rule for one group, under a budget that is too small for all."""
        if self.fits_a_frame:
            return False
        link, update_s = rates.link, self.parameter_bytes / rates.update
        if rates.disk is not None:
            link = min(link, rates.disk)
            update_s += (2 * self.parameter_bytes + self.moment_bytes) / rates.disk
        return self.moment_bytes / link > update_s


def choose_home(
    groups: Sequence[TrainedGroup],
    page_bytes: int | None,
    measure: Callable[[], UpdateRates],
    frozen_bytes: int = 0,
) -> list[bool]:
    """For each group, whether it is updated at home.

    Args:
        groups: all trainable groups.
        page_bytes: what pages get; None for no limit.
        measure: called where rates decide.
        frozen_bytes: frames of what is not trained.
    """
    total = frozen_bytes + sum(group.frame_bytes for group in groups)
    if page_bytes is None or total <= page_bytes:
        return [False] * len(groups)
    rates = measure()
    return [group.belongs_at_home(rates) for group in groups]


def link_bytes_per_parameter(
    where: str, update: str, itemsize: int = 4, moment_itemsize: int = 4
) -> tuple[int, int]:
    """(in, out) bytes over the link per parameter and step, where no page stays between uses.

    A step is one forward and one backward, each of which loads the parameters. What stays resident
    is saved from this; so it is the most that a step moves.

    Args:
        where: ``device`` or ``home``.
        update: ``backward`` or ``step``: then the gradient comes home, and on the device it and
            the parameters are loaded once more for the update.
        itemsize: bytes of a parameter and of its gradient.
        moment_itemsize: bytes of one of both moments.
    """
    if where == "home":
        return 2 * itemsize, itemsize
    moments = 2 * moment_itemsize
    if update == "backward":
        return 2 * itemsize + moments, itemsize + moments
    return 4 * itemsize + moments, 2 * itemsize + moments


def measure_rates(
    update_rate: float,
    link_bandwidth: float | None,
    on_disk: bool,
    folder: str | os.PathLike[str] | None,
) -> UpdateRates:
    """Rates of this machine.

    Args:
        update_rate: bytes/s of parameters, as measured by who has a kernel.
        link_bandwidth: of an emulated link; None: that of a copy in memory.
        on_disk: whether moments live on disk.
        folder: of the disk.
    """
    base = map_anonymous(2 * _PROBE_BYTES, PROT_RW)
    try:
        fault_in(base, 2 * _PROBE_BYTES)
        link = link_bandwidth or _rate(
            lambda: ctypes.memmove(base + _PROBE_BYTES, base, _PROBE_BYTES)
        )
        if not on_disk:
            return UpdateRates(link, update_rate)
        home = DiskHome(_PROBE_BYTES, folder)
        try:
            written = _rate(lambda: home.write(0, 0, base, _PROBE_BYTES))
            read = _rate(lambda: home.read(0, 0, base, _PROBE_BYTES))
        finally:
            home.close()
        return UpdateRates(link, update_rate, min(written, read))
    finally:
        unmap(base, 2 * _PROBE_BYTES)


def _rate(move: Callable[[], object]) -> float:
    """Bytes/s of the best of a few moves."""
    best = float("inf")
    for _ in range(_PROBES):
        start = time.perf_counter()
        move()
        best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / max(best, 1e-9)
