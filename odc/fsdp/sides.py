"""Small trainable parts beside frozen ones (adapters, biases): groups that lie together.

A decoder layer's adapter is a few hundred KiB with gradient and moments, and a page is at least one
frame of 2 MiB: a group for each layer would waste most of its frame, one for each matrix far more.
So the small parts of neighbouring layers share a group as long as its whole state fits one frame;
each of those layers pins it. What lies beside frozen experts belongs to the layer around them: it
is loaded with the layer, and the experts remain a set of single groups whose order is free.

An adapter that has a name is a group of its own, which rests while another adapter is active.
"""

from __future__ import annotations

from dataclasses import dataclass

from odc.fsdp.lora import Factor
from odc.fsdp.wrap import Place, Unit, num_bytes_of
from odc.memory.frames import FRAME_BYTES

Key = tuple[str, bool]


@dataclass(slots=True)
class Side:
    """Parameters that become one group.

    Attributes:
        adapter: name of the adapter, empty for parts that are none.
        trainable: whether they have gradients.
        hosts: units that pin the group; the first owns it.
        places: the parameters.
    """

    adapter: str
    trainable: bool
    hosts: list[Unit]
    places: list[Place]

    @property
    def name(self) -> str:
        """For messages and traces."""
        first, last = self.hosts[0].fqn or "(root)", self.hosts[-1].fqn
        span = first if len(self.hosts) == 1 else f"{first} to {last}"
        return f"{span} (adapter {self.adapter})" if self.adapter else span


def split(unit: Unit, train: bool) -> tuple[dict[bool, list[Place]], dict[Key, list[Place]]]:
    """A unit's own places: those that are its groups, by trainable, and those beside them.

    Args:
        unit: the unit.
        train: whether there is an optimizer.
    """
    trains = [p for p in unit.owned if train and p.parameter.requires_grad]
    chosen = {id(p) for p in trains}
    tied = {id(alias.parameter) for alias in unit.aliases}
    frozen = [p for p in unit.owned if id(p) not in chosen]
    small = sum(map(num_bytes_of, trains)) < sum(map(num_bytes_of, frozen))
    own: dict[bool, list[Place]] = {True: [], False: []}
    beside: dict[Key, list[Place]] = {}
    for place in unit.owned:
        trainable = id(place) in chosen
        adapter = place.module.adapter if isinstance(place.module, Factor) else ""
        if (adapter or (trainable and small)) and id(place.parameter) not in tied:
            beside.setdefault((adapter, trainable), []).append(place)
        else:
            own[trainable].append(place)
    return own, beside


def find_sides(units: list[Unit], train: bool, num_moments: int) -> list[Side]:
    """The groups that lie beside the units' own, in the order of the units."""
    sides: list[Side] = []
    latest: dict[object, Side] = {}
    for unit in units:
        in_set = unit.expert >= 0
        host = unit.parents[0] if in_set else unit
        around = tuple(id(p) for p in host.parents)
        for key, places in split(unit, train)[1].items():
            side = latest.get((key, in_set, around))
            if side is not None and _fits(side, host, places, num_moments):
                side.places += places
                if side.hosts[-1] is not host:
                    side.hosts.append(host)
                continue
            side = latest[key, in_set, around] = Side(*key, [host], list(places))
            sides.append(side)
    return sides


def _fits(side: Side, host: Unit, places: list[Place], num_moments: int) -> bool:
    """Whether a host's places may join a side."""
    last = side.hosts[-1]
    if last is host:
        return True
    if not (last.layer >= 0 and host.layer >= 0) or not _are_whole([*side.places, *places]):
        return False
    copies = 2 + num_moments if side.trainable else 1
    return copies * sum(map(num_bytes_of, [*side.places, *places])) <= FRAME_BYTES


def _are_whole(places: list[Place]) -> bool:
    """Whether the modules have no parameters but these: they are given their values at once."""
    own = {id(p.parameter) for p in places}
    return all(
        parameter is None or id(parameter) in own
        for module in {id(p.module): p.module for p in places}.values()
        for parameter in module._parameters.values()
    )
