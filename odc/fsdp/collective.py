"""Collectives of a group: gather its full parameters, reduce its gradients.

At world size 1 the slice that a rank owns is the whole group, so both are nothing; hooks call them
all the same, so that there is one hook system.
"""

from __future__ import annotations

from typing import Protocol

from odc.fsdp.group import ParamGroup
from odc.memory.events import Phase


class Collective(Protocol):
    """What hooks ask of the ranks that share a group."""

    def unshard(self, group: ParamGroup) -> None:
        """Make the group's full parameters available; its slice is resident."""

    def reshard(self, group: ParamGroup, phase: Phase) -> None:
        """Give the full parameters up again after ``phase``, keep the slice."""

    def reduce_gradients(self, group: ParamGroup) -> None:
        """Reduce the group's complete gradients to this rank's slice."""


class NullCollective:
    """World size 1."""

    def unshard(self, group: ParamGroup) -> None:
        """The slice is the whole group."""

    def reshard(self, group: ParamGroup, phase: Phase) -> None:
        """Nothing was gathered."""

    def reduce_gradients(self, group: ParamGroup) -> None:
        """There is nobody to reduce with."""
