"""Which parameters become a group, and where each group is updated."""

from __future__ import annotations

from odc.errors import ConfigError
from odc.fsdp.adamw import measure_update_rate
from odc.fsdp.blocks import BlockFormat
from odc.fsdp.group import GroupLayout
from odc.fsdp.optimizer import NUM_MOMENTS
from odc.fsdp.sides import find_sides, split
from odc.fsdp.wrap import Unit
from odc.memory.frames import FRAME_BYTES, frames_for
from odc.memory.manager import MemoryManager
from odc.memory.update_place import PLACES, TrainedGroup


def check_where(where: str, master_weights: bool, optimizer: type | None) -> None:
    """Refuse a place of updates that does not exist, or that has no masters.

    Raises:
        ValueError: ``where`` is none of ``PLACES``.
        ConfigError: masters without updates at home.
    """
    if where not in PLACES:
        raise ValueError(f"where must be {', '.join(PLACES[:-1])} or {PLACES[-1]}, got {where!r}")
    if master_weights and (where != "home" or optimizer is None):
        raise ConfigError(
            f"master_weights=True with where={where!r}: values in float32 live at home and are "
            "updated there; use where='home'"
        )


def lay_out_groups(
    units: list[Unit], train: bool, frozen_format: BlockFormat | None
) -> list[GroupLayout]:
    """What becomes a group: a unit's trainable parameters, its frozen ones, and small ones beside.

    The first of a unit's groups stands for it where it is a member of a set.

    Args:
        units: of the model.
        train: whether anything is trained.
        frozen_format: how matrices of units lie at home that are not trained; None: as they are.
    """
    layouts = []
    sides = find_sides(units, train, NUM_MOMENTS)
    for unit in units:
        own = [(t, places) for t, places in split(unit, train)[0].items() if places]
        for number, (trainable, places) in enumerate(own):
            layout = GroupLayout(unit, places, trainable, frozen_format=frozen_format)
            layout.in_set = number == 0
            layouts.append(layout)
        for side in sides:
            if side.hosts[0] is unit:
                layout = GroupLayout(unit, side.places, side.trainable, in_set=False)
                layout.name, layout.adapter = side.name, side.adapter
                layout.guests = side.hosts[1:]
                layouts.append(layout)
    return layouts


def choose_home(
    memory: MemoryManager, layouts: list[GroupLayout], where: str, master_weights: bool
) -> None:
    """Set which groups are updated at home.

    Raises:
        ConfigError: updates at home were asked for where everything is on the device.
    """
    if where == "device":
        return
    if where == "home" and memory.unlimited:
        raise ConfigError(
            "where='home' needs a budget (total_mem or page_budget): without one "
            "everything is on the device and nothing has to move; use where='auto'"
        )
    trained = [layout for layout in layouts if layout.trainable]
    homes = [True] * len(trained)
    if where == "auto":
        sizes = [TrainedGroup(x.num_bytes, NUM_MOMENTS * x.num_bytes) for x in trained]
        rest = sum(frames_for(x.num_bytes) * FRAME_BYTES for x in layouts if not x.trainable)
        homes = memory.choose_home(sizes, measure_update_rate, rest)
    for layout, at_home in zip(trained, homes, strict=True):
        layout.at_home, layout.masters = at_home, master_weights
