"""The life of a unit around forward and backward: a table of state x event -> (state, command).

[Note: checkpoint and hooks] With non-reentrant activation checkpointing the order of events is:
forward, end of forward, backward, forward again (recompute), gradients. The end of forward may
never come in recompute (it stops as soon as it has what it needs), and a checkpoint around several
units recomputes all of them before the first of them begins its backward. So pins are states, not
counts: a recompute that ends releases only what a recompute took, and what was left pinned is
released when the unit's backward is done.

The unit whose backward asked for a recompute of several gives its parameters up meanwhile: its own
recompute, the last of them, takes them again before its backward goes on.
"""

from __future__ import annotations

from enum import Enum, auto


class UnitState(Enum):
    """What is pinned in each state."""

    IDLE = auto()  # nothing
    FORWARD = auto()  # parameters
    RECOMPUTE = auto()  # parameters, in a forward inside backward
    BACKWARD = auto()  # parameters; gradients from the first one on
    SUSPENDED = auto()  # no parameters: its backward waits while other units are recomputed


class Event(Enum):
    PRE_FORWARD = auto()
    POST_FORWARD = auto()
    PRE_RECOMPUTE = auto()
    POST_RECOMPUTE = auto()
    PRE_BACKWARD = auto()
    SUSPEND = auto()  # another unit is about to be recomputed
    BACKWARD_DONE = auto()
    RESET = auto()  # an exception ended a pass


class Command(Enum):
    NOTHING = auto()
    ACQUIRE = auto()
    RELEASE = auto()


_IDLE, _FORWARD = UnitState.IDLE, UnitState.FORWARD
_RECOMPUTE, _BACKWARD = UnitState.RECOMPUTE, UnitState.BACKWARD
_SUSPENDED = UnitState.SUSPENDED
_NOTHING, _ACQUIRE, _RELEASE = Command.NOTHING, Command.ACQUIRE, Command.RELEASE

TRANSITIONS: dict[tuple[UnitState, Event], tuple[UnitState, Command]] = {
    (_IDLE, Event.PRE_FORWARD): (_FORWARD, _ACQUIRE),
    (_FORWARD, Event.POST_FORWARD): (_IDLE, _RELEASE),
    (_IDLE, Event.PRE_RECOMPUTE): (_RECOMPUTE, _ACQUIRE),
    (_RECOMPUTE, Event.PRE_RECOMPUTE): (_RECOMPUTE, _NOTHING),
    (_RECOMPUTE, Event.POST_RECOMPUTE): (_IDLE, _RELEASE),
    (_RECOMPUTE, Event.PRE_BACKWARD): (_BACKWARD, _NOTHING),
    (_RECOMPUTE, Event.BACKWARD_DONE): (_IDLE, _RELEASE),
    (_IDLE, Event.PRE_BACKWARD): (_BACKWARD, _ACQUIRE),
    (_BACKWARD, Event.PRE_BACKWARD): (_BACKWARD, _NOTHING),
    (_BACKWARD, Event.PRE_RECOMPUTE): (_BACKWARD, _NOTHING),
    (_BACKWARD, Event.POST_RECOMPUTE): (_BACKWARD, _NOTHING),
    (_BACKWARD, Event.SUSPEND): (_SUSPENDED, _RELEASE),
    (_BACKWARD, Event.BACKWARD_DONE): (_IDLE, _RELEASE),
    (_SUSPENDED, Event.PRE_RECOMPUTE): (_BACKWARD, _ACQUIRE),
    (_SUSPENDED, Event.PRE_BACKWARD): (_BACKWARD, _ACQUIRE),
    (_SUSPENDED, Event.SUSPEND): (_SUSPENDED, _NOTHING),
    (_SUSPENDED, Event.BACKWARD_DONE): (_IDLE, _NOTHING),
    (_IDLE, Event.POST_RECOMPUTE): (_IDLE, _NOTHING),  # its backward was done first
    (_IDLE, Event.BACKWARD_DONE): (_IDLE, _NOTHING),
    (_IDLE, Event.RESET): (_IDLE, _NOTHING),
    (_FORWARD, Event.RESET): (_IDLE, _RELEASE),
    (_RECOMPUTE, Event.RESET): (_IDLE, _RELEASE),
    (_BACKWARD, Event.RESET): (_IDLE, _RELEASE),
    (_SUSPENDED, Event.RESET): (_IDLE, _NOTHING),
}


def transition(state: UnitState, event: Event) -> tuple[UnitState, Command]:
    """The next state and what to do.

    Raises:
        RuntimeError: the event cannot happen in this state.
    """
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise RuntimeError(
            f"{event.name} in state {state.name}: a module was called inside itself, or a backward "
            "ran inside its own forward; neither is supported on a paged model"
        )
    return found
