"""Makes tests/data/fluid_bounds.json: bounds and best-found schedules of 24 equal pages.

    python -m tests.memory.replay.fluid_fixtures

Some minutes on one core: the linear program takes most of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from odc.memory.frames import FRAME_BYTES
from odc.memory.replay import best_found, fluid_bound, window_bound
from odc.memory.replay.accesses import Accesses
from tests.memory.replay.runs import bandwidth, passes

PATH = Path(__file__).parents[2] / "data" / "fluid_bounds.json"
NUM_PAGES = 24
REPEATS = {"forward": 8, "palindrome": 4, "dirty": 4, "optimizer": 3}
SHARES = (0.25, 0.5, 0.75)
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class Fixture:
    """One run, one capacity, one link; times in s.

    ``share``: capacity over all pages; ``ratio``: a page's transfer over an access' computation.
    """

    kind: str
    share: float
    ratio: float
    half_duplex: bool
    compute_s: float
    window_s: float
    fluid_s: float
    best_found_s: float

    @property
    def accesses(self) -> Accesses:
        return passes(self.kind, NUM_PAGES, REPEATS[self.kind])

    @property
    def capacity(self) -> int:
        return int(NUM_PAGES * self.share)

    @property
    def rate(self) -> float:
        return bandwidth(self.ratio)


def made(kind: str, share: float, ratio: float, half_duplex: bool) -> Fixture:
    bare = Fixture(kind, share, ratio, half_duplex, 0.0, 0.0, 0.0, 0.0)
    run, frames, rate = bare.accesses, bare.capacity, bare.rate
    return Fixture(
        kind,
        share,
        ratio,
        half_duplex,
        run.compute_s,
        window_bound(run, frames * FRAME_BYTES, rate, rate, half_duplex).elapsed_s,
        fluid_bound(run, frames, rate, rate, half_duplex).elapsed_s,
        best_found(run, frames, rate, rate, half_duplex).elapsed_s,
    )


def fixtures() -> Iterator[Fixture]:
    for kind in REPEATS:
        for share in SHARES:
            for ratio in RATIOS:
                yield made(kind, share, ratio, False)
    for kind in ("dirty", "optimizer"):
        for share in SHARES:
            for ratio in (1.0, 2.0):
                yield made(kind, share, ratio, True)


def stored() -> list[Fixture]:
    return [Fixture(**row) for row in json.loads(PATH.read_text())["fixtures"]]


def main() -> None:
    rows = []
    for fixture in fixtures():
        row = asdict(fixture)
        rows.append({k: round(v, 12) if isinstance(v, float) else v for k, v in row.items()})
        print(json.dumps(rows[-1]), flush=True)
    text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    command = "python -m tests.memory.replay.fluid_fixtures"
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(f'{{"command": "{command}", "fixtures": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
