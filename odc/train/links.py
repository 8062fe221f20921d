"""How fast pages move on this machine: measured with the runtime's own parts, and remembered.

    links = measure_links(folder)
    remember(links)
    load_links(folder)  # in another command, on another day: the default link model

Frames are filled from a home in host memory and from one on disk (`O_DIRECT`), and written back, in
the slices that the engines move; each direction alone, then both at once, as they run in training.
What a page costs beside its bytes is measured too: the hand-over to a worker, and moving frames.
"""

import ctypes
import datetime
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc.errors import ConfigError
from odc.memory.engines.base import SLICE_BYTES, CommandKind, TierSpeed
from odc.memory.engines.threads import ThreadEngine
from odc.memory.events import Kind, Tier
from odc.memory.frames import FRAME_BYTES, AddressRange, FramePool, make_pool
from odc.memory.home import DiskHome, Home, HostHome, default_folder
from odc.memory.machine import gather, nearest_folder
from odc.memory.pages import Page
from odc.memory.replay import Link
from odc.train.files import atomic_path, user_cache_dir
from odc.train.run_dir import machine

FORMAT = "odc-links/1"
SLICES = (8 << 20, 16 << 20, 32 << 20)
_SPAN_BYTES = {Tier.HOST: 512 << 20, Tier.DISK: 1 << 30}  # beyond what caches hold
_FRAMES_BYTES = 64 << 20  # for each way; beyond what caches hold
_PASS_S = 0.15  # a repeat lasts at least this long
_REPEATS = 5
_KINDS = ("load", "store")
Say = Callable[[str], None]


@dataclass(frozen=True)
class TierLink:
    """The way to one tier, in bytes/s.

    Attributes:
        load, store: one direction alone, in slices of `SLICE_BYTES`.
        load_both, store_both: while the other direction runs.
        latency_ns: of a load of 4 KiB by itself.
        by_slice: (slice bytes, load, store), each direction alone.
    """

    load: float
    store: float
    load_both: float
    store_both: float
    latency_ns: int
    by_slice: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Links:
    """What was measured on one machine, with one folder as the disk.

    Attributes:
        folder: of the disk home.
        measured: when, ISO.
        host, disk: the tiers.
        frame_map_ns, frame_unmap_ns: of a frame in a page of 8 frames.
        handover_ns: from submit to done for a command that moves no bytes.
        together: load rates of host and disk while both load.
    """

    folder: str
    measured: str
    host: TierLink
    disk: TierLink
    frame_map_ns: int
    frame_unmap_ns: int
    handover_ns: int
    together: tuple[float, float]

    def speeds(self) -> dict[Tier, TierSpeed]:
        """Both directions busy, as they are in training."""
        return {
            tier: TierSpeed(found.load_both, found.store_both, found.latency_ns + self.handover_ns)
            for tier, found in ((Tier.HOST, self.host), (Tier.DISK, self.disk))
        }

    def link(self, home: str) -> Link:
        """The link model of a home of one tier; of `host+disk` its slower one, the disk."""
        speed = self.speeds()[Tier.HOST if home == "host" else Tier.DISK]
        moves = (self.frame_map_ns + self.frame_unmap_ns) // 2
        return Link(speed.bandwidth_in, speed.bandwidth_out, speed.latency_ns, moves)


def measure_links(folder: str | os.PathLike[str] | None = None, say: Say = print) -> Links:
    """Measures for about ten seconds.

    Args:
        folder: Of the disk home; the system's folder for temporary files where not given.
        say: Told what is measured next.

    Raises:
        ConfigError: The folder cannot be written, or memory or disk have too little room.
    """
    target = default_folder(folder)
    found: dict[Tier, TierLink] = {}
    with _bench(nearest_folder(target)) as bench:
        for tier in (Tier.HOST, Tier.DISK):
            say(f"{tier.name.lower()}: loads and stores of 8, 16 and 32 MiB, alone and together")
            found[tier] = bench.tier(tier)
        say("host and disk at once, moving frames, hand-over to a worker")
        together = bench.together()
        moves = bench.frame_moves()
        handover = bench.handover_ns()
    return Links(
        folder=str(target.resolve()),
        measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host=found[Tier.HOST],
        disk=found[Tier.DISK],
        frame_map_ns=moves[0],
        frame_unmap_ns=moves[1],
        handover_ns=handover,
        together=together,
    )


def measure_disk(
    folder: str | os.PathLike[str] | None = None, span_bytes: int = 256 << 20, seconds: float = 0.1
) -> tuple[float, float]:
    """A look at a disk: (read, write) bytes/s in slices of `SLICE_BYTES`, one after the other.

    Args:
        folder: Where to; the system's folder for temporary files where not given.
        span_bytes: Size of the file.
        seconds: For each direction; writing the file comes on top.

    Raises:
        ConfigError: The folder cannot be written, or memory or disk have too little room.
    """
    target = nearest_folder(default_folder(folder))
    with _bench(target, tiers=(Tier.DISK,), span=span_bytes) as bench:
        bench.fill(Tier.DISK)
        rates = [bench.rate(Tier.DISK, kind, SLICE_BYTES, seconds) for kind in _KINDS]
    return rates[0], rates[1]


class _Bench:
    """Frames and homes to move between, and clocks."""

    def __init__(self, homes: dict[Tier, Home], spans: dict[Tier, int], pool: FramePool) -> None:
        self.homes, self.spans, self.pool = homes, spans, pool
        # In and out of each tier have frames of their own.
        self.ranges = {
            (tier, kind): AddressRange(_FRAMES_BYTES) for tier in homes for kind in _KINDS
        }
        values = np.random.default_rng(0).integers(0, 256, _FRAMES_BYTES, np.uint8)
        for memory in self.ranges.values():
            pool.map(memory.address, memory.num_bytes // FRAME_BYTES)
            ctypes.memmove(memory.address, values.ctypes.data, _FRAMES_BYTES)

    def rate(self, tier: Tier, kind: str, slice_bytes: int, at_least_s: float = _PASS_S) -> float:
        """Bytes a second of one direction."""
        begin = time.perf_counter()
        moved = self._run(tier, kind, slice_bytes, lambda: time.perf_counter() - begin < at_least_s)
        return moved / (time.perf_counter() - begin)

    def _run(self, tier: Tier, kind: str, slice_bytes: int, go_on: Callable[[], bool]) -> int:
        call = getattr(self.homes[tier], kind)
        frames = self.ranges[tier, kind].address
        half = self.spans[tier] // 2
        start = 0 if kind == "load" else half  # so that both directions do not meet
        moved = 0
        while moved == 0 or go_on():
            call(0, start + moved % half, frames + moved % _FRAMES_BYTES, slice_bytes)
            moved += slice_bytes
        return moved

    def rates_at_once(self, ways: list[tuple[Tier, str]]) -> list[float]:
        """Bytes a second of each way while all of them run."""
        ready = threading.Barrier(len(ways))
        rates = [0.0] * len(ways)

        def work(number: int) -> None:
            ready.wait()
            rates[number] = self.rate(*ways[number], SLICE_BYTES)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(ways))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return rates

    def tier(self, tier: Tier) -> TierLink:
        samples: dict[tuple[str, int], list[float]] = {}
        both: list[list[float]] = []
        self.fill(tier)
        for _ in range(_REPEATS):
            for size in SLICES:
                for kind in _KINDS:
                    samples.setdefault((kind, size), []).append(self.rate(tier, kind, size))
            both.append(self.rates_at_once([(tier, "load"), (tier, "store")]))
        middle = {key: statistics.median(values) for key, values in samples.items()}
        load_both, store_both = (statistics.median(column) for column in zip(*both, strict=True))
        return TierLink(
            load=middle["load", SLICE_BYTES],
            store=middle["store", SLICE_BYTES],
            load_both=load_both,
            store_both=store_both,
            latency_ns=self._latency_ns(tier),
            by_slice=tuple((s, middle["load", s], middle["store", s]) for s in SLICES),
        )

    def fill(self, tier: Tier) -> None:
        """Write what loads will read: a file that was never written is not read from the disk."""
        address = self.ranges[tier, "store"].address
        for offset in range(0, self.spans[tier] // 2, SLICES[-1]):
            self.homes[tier].store(0, offset, address, SLICES[-1])

    def _latency_ns(self, tier: Tier) -> int:
        times = []
        for number in range(64):
            offset = number * 4096 * 997 % (self.spans[tier] // 2) // 4096 * 4096
            begin = time.perf_counter_ns()
            self.homes[tier].load(0, offset, self.ranges[tier, "load"].address, 4096)
            times.append(time.perf_counter_ns() - begin)
        return int(statistics.median(times))

    def together(self) -> tuple[float, float]:
        """Rates of loads from both tiers at once."""
        rows = [
            self.rates_at_once([(Tier.HOST, "load"), (Tier.DISK, "load")]) for _ in range(_REPEATS)
        ]
        host, disk = (statistics.median(column) for column in zip(*rows, strict=True))
        return host, disk

    def frame_moves(self) -> tuple[int, int]:
        """ns to map and to unmap a frame, in pages of eight."""
        count = 8
        memory = AddressRange(count * FRAME_BYTES)
        times: tuple[list[int], list[int]] = ([], [])
        for _ in range(100):
            begin = time.perf_counter_ns()
            self.pool.map(memory.address, count)
            middle = time.perf_counter_ns()
            self.pool.unmap(memory.address)
            times[0].append(middle - begin)
            times[1].append(time.perf_counter_ns() - middle)
        mapped, unmapped = (int(statistics.median(t)) // count for t in times)
        return mapped, unmapped

    def handover_ns(self) -> int:
        """ns from submit to done for a load of no bytes."""
        memory = AddressRange(FRAME_BYTES)
        engine = ThreadEngine(self.pool, self.homes[Tier.HOST])
        page = Page(0, 0, Kind.PARAMETER, 0, 0, 0, 1, memory.address, 0)
        times = []
        try:
            for _ in range(100):
                begin = time.perf_counter_ns()
                engine.wait(engine.submit(CommandKind.LOAD, page))
                times.append(time.perf_counter_ns() - begin)
                engine.wait(engine.submit(CommandKind.RELEASE, page))
        finally:
            engine.close()
        return int(statistics.median(times))


@contextmanager
def _bench(
    folder: Path, tiers: tuple[Tier, ...] = (Tier.HOST, Tier.DISK), span: int | None = None
) -> Iterator[_Bench]:
    found = gather(folder)
    assert found.folder is not None, "it was asked for"
    room = {Tier.HOST: found.free_bytes // 4, Tier.DISK: found.folder.free_bytes // 4}
    spans = {}
    for tier in tiers:
        fits = min(span or _SPAN_BYTES[tier], room[tier]) // (2 * SLICES[-1]) * (2 * SLICES[-1])
        if not fits:
            where = "memory" if tier == Tier.HOST else str(folder)
            raise ConfigError(
                f"{where}: a quarter of what is free is less than {2 * SLICES[-1]} bytes, too "
                "little to measure with; free some, or name another folder (--home-dir)"
            )
        spans[tier] = fits
    pool = make_pool(len(tiers) * len(_KINDS) * _FRAMES_BYTES // FRAME_BYTES + 8)
    homes: dict[Tier, Home] = {}
    bench = None
    try:
        for tier in tiers:
            made = HostHome(spans[tier]) if tier == Tier.HOST else DiskHome(spans[tier], folder)
            homes[tier] = made
        bench = _Bench(homes, spans, pool)
        yield bench
    finally:
        for home in homes.values():
            home.close()
        pool.close()
        del bench


# -- remembering -----------------------------------------------------------------------------------


def links_path() -> Path:
    """The file that measured links are kept in."""
    return user_cache_dir() / "links.json"


def machine_key(folder: str | os.PathLike[str] | None = None) -> str:
    """What a measurement belongs to: this machine, and the folder of the disk home."""
    facts = machine()
    memory_gib = facts["memory_bytes"] >> 30
    name = f"{os.uname().nodename}, {facts['cpu']}, {facts['cores']} cores, {memory_gib} GiB"
    return f"{name}: {default_folder(folder).resolve()}"


def remember(links: Links) -> Path:
    """Keeps a measurement in the user's cache, instead of an older one; returns the file.

    Raises:
        ConfigError: It cannot be written.
    """
    path = links_path()
    kept = _read(path)
    kept[machine_key(links.folder)] = asdict(links)
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT, "links": kept}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
        ) from error
    return path


def load_links(folder: str | os.PathLike[str] | None = None) -> Links | None:
    """What was measured on this machine with this folder, or None: `odc doctor --measure-links`.

    A file that is damaged or of another version counts as none.
    """
    kept = _read(links_path()).get(machine_key(folder))
    if not isinstance(kept, dict):
        return None
    try:
        tiers = {name: _tier_link(kept[name]) for name in ("host", "disk")}
        host, disk = kept["together"]
        return Links(**kept | tiers | {"together": (host, disk)})
    except (TypeError, KeyError, ValueError):
        return None


def _tier_link(values: dict[str, Any]) -> TierLink:
    rows = tuple((size, load, store) for size, load, store in values["by_slice"])
    made = TierLink(**values | {"by_slice": rows})
    if not all(rate > 0 for rate in (made.load, made.store, made.load_both, made.store_both)):
        raise ValueError("a rate is not above zero")
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}
    links = content.get("links")
    return links if isinstance(links, dict) else {}
