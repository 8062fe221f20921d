"""`odc doctor`: is this machine set up for training with odc, and what would make it faster?

Gathers what `findings.py` and `network.py` judge, and measures what the kernel does not tell: how
many frames are huge pages, how fast the disk is, and on demand every link (`links.py`).
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odc.errors import OdcError
from odc.memory.frames import FRAME_BYTES, FramePool, frames_can_move
from odc.memory.home import default_folder
from odc.memory.machine import gather
from odc.sizes import format_bytes
from odc.train import findings
from odc.train.findings import Finding, Level, advice, ok
from odc.train.links import Links, load_links, measure_disk, measure_links, remember
from odc.train.network import network, network_cards, read_rings

_ROOT = Path("/")
_PROBE_FRAMES = 16
Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Attributes:
        findings: In order of subject.
        links: Measured now or before; `None` where they never were.
        measured_now: Whether it was now.
    """

    findings: list[Finding]
    links: Links | None
    measured_now: bool

    @property
    def has_problem(self) -> bool:
        """Whether training cannot work."""
        return any(found.level == Level.PROBLEM for found in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as JSON values."""
        return {
            "findings": [asdict(f) | {"level": f.level.value} for f in self.findings],
            "links": None if self.links is None else asdict(self.links),
            "has_problem": self.has_problem,
        }


def examine(
    folder: str | os.PathLike[str] | None = None,
    *,
    measure: bool = False,
    say: Say = lambda text: None,
) -> Report:
    """Looks at everything; a second, or half a minute with `measure`.

    Args:
        folder: Of the disk home; the system's folder for temporary files where not given.
        measure: Measure all links, and remember them for other commands.
        say: Told what takes long.
    """
    target = default_folder(folder)
    links, refused = load_links(target), ""
    if measure:
        try:
            links = measure_links(target, say)
            remember(links)
        except (OdcError, OSError) as error:
            refused = str(error)
    found = [*_examine(target, say), _links_finding(links, measure, refused, folder)]
    return Report(found, links, measure and not refused)


def _examine(target: Path, say: Say) -> Iterator[Finding]:
    machine = gather(target)
    yield from findings.memory(machine)
    say("frames and disk")
    can_move = frames_can_move()
    yield from findings.huge_pages(_ROOT, huge_share() if can_move else None)
    yield from findings.frames(_ROOT, can_move)
    yield from findings.limits(machine)
    rates, refused = None, ""
    try:
        rates = measure_disk(target)
    except (OdcError, OSError) as error:
        refused = str(error)
    yield findings.disk(machine, rates, refused)
    allowed = len(os.sched_getaffinity(0))
    yield from findings.processors(_ROOT, allowed, os.environ.get("OMP_NUM_THREADS"))
    say("PyTorch")
    yield from findings.torch_and_cuda(*_find_torch())
    yield from network(_ROOT, os.environ, read_rings(network_cards()))


def huge_share(num_frames: int = _PROBE_FRAMES) -> float:
    """Share of a fresh pool of frames that the kernel made huge pages."""
    pool = FramePool(num_frames)
    try:
        base, num_bytes = pool.arena
        smaps = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace")
        return min(huge_bytes(smaps, base, num_bytes) / (num_frames * FRAME_BYTES), 1.0)
    finally:
        pool.close()


def huge_bytes(smaps: str, base: int, num_bytes: int) -> int:
    """Bytes of huge pages in the mappings that touch a range of addresses, from `smaps`."""
    inside, total = False, 0
    for line in smaps.splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) < base + num_bytes and base < int(head[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


def _find_torch() -> tuple[str | None, list[str], str]:
    try:
        import torch
    except ImportError as error:
        return None, [], str(error)
    devices = []
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return str(torch.__version__), devices, ""


def _links_finding(
    links: Links | None, measured: bool, refused: str, folder: str | os.PathLike[str] | None
) -> Finding:
    how = "odc doctor --measure-links" + (f" --home-dir {folder}" if folder is not None else "")
    if refused:
        return advice("links", f"could not be measured: {refused}", _WHY_LINKS, how)
    if links is None:
        what = "never measured on this machine with this folder"
        return advice("links", what, _WHY_LINKS, how)
    if measured:
        return ok("links", "measured now")
    rates = ", ".join(
        f"{name} {tier.load / 1e9:.2f} in, {tier.store / 1e9:.2f} out"
        for name, tier in (("host", links.host), ("disk", links.disk))
    )
    return ok("links", f"measured {links.measured}; GB/s: {rates}")


_WHY_LINKS = "recorded runs that loaded nothing are simulated with the speeds measured here"


# -- in words --------------------------------------------------------------------------------------


def format_report(report: Report) -> str:
    """Returns the report as text, and measured links as a table."""
    width = max(len(found.subject) for found in report.findings)
    lines = []
    for found in report.findings:
        lines.append(f"{found.level.value:<8} {found.subject:<{width}}  {found.what}")
        if found.why:
            lines.append(f"{'':<8} {'':<{width}}  why: {found.why}")
        if found.how:
            label = "may" if found.level == Level.OK else "set"
            lines.append(f"{'':<8} {'':<{width}}  {label}: {found.how}")
    if report.links is not None and report.measured_now:
        lines += ["", *format_links(report.links)]
    counts = {level: sum(f.level == level for f in report.findings) for level in Level}
    lines += ["", ", ".join(f"{n} {level.value}" for level, n in counts.items())]
    return "\n".join(lines)


def format_links(links: Links) -> list[str]:
    """Returns measured links as a table."""
    lines = [f"{'GB/s, slices of':<22}{'8 MiB':>15}{'16 MiB':>15}{'32 MiB':>15}{'both ways':>15}"]
    for name, tier in (("host", links.host), ("disk", links.disk)):
        for column, kind in ((1, "load"), (2, "store")):
            rates = [row[column] / 1e9 for row in tier.by_slice]
            rates.append((tier.load_both if kind == "load" else tier.store_both) / 1e9)
            cells = "".join(f"{rate:>15.2f}" for rate in rates)
            lines.append(f"{name + ' ' + kind:<22}{cells}")
    host, disk = (rate / 1e9 for rate in links.together)
    return [
        *lines,
        f"loads from both tiers at once: host {host:.2f}, disk {disk:.2f} GB/s",
        f"latency of 4 KiB: host {links.host.latency_ns / 1e3:.0f} us, "
        f"disk {links.disk.latency_ns / 1e3:.0f} us; hand-over {links.handover_ns / 1e3:.0f} us",
        f"a frame of {format_bytes(FRAME_BYTES)}, in pages of 8: map "
        f"{links.frame_map_ns / 1e3:.1f} us, unmap {links.frame_unmap_ns / 1e3:.1f} us",
    ]


def to_json(report: Report) -> str:
    """Returns the report as JSON text."""
    return json.dumps(report.as_json(), indent=1)
