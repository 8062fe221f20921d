"""The table of a unit's life: every state and event is defined or an error, and pins balance."""

import itertools
import random

import pytest

from odc.fsdp.lifecycle import TRANSITIONS, Command, Event, UnitState, transition

PINNED = {UnitState.FORWARD, UnitState.RECOMPUTE, UnitState.BACKWARD}


@pytest.mark.parametrize("state, event", list(itertools.product(UnitState, Event)))
def test_every_event_in_every_state_is_defined_or_an_error(state, event):
    if (state, event) in TRANSITIONS:
        assert transition(state, event) == TRANSITIONS[state, event]
    else:
        with pytest.raises(RuntimeError, match=f"{event.name} in state {state.name}"):
            transition(state, event)


@pytest.mark.parametrize("state, event", TRANSITIONS)
def test_a_command_says_exactly_how_the_pins_change(state, event):
    after, command = TRANSITIONS[state, event]
    expected = {
        (False, True): Command.ACQUIRE,
        (True, False): Command.RELEASE,
        (False, False): Command.NOTHING,
        (True, True): Command.NOTHING,
    }
    assert command == expected[state in PINNED, after in PINNED]


def test_a_reset_and_the_end_of_backward_leave_nothing_pinned():
    for state in UnitState:
        assert transition(state, Event.RESET)[0] == UnitState.IDLE
        if state != UnitState.FORWARD:
            assert transition(state, Event.BACKWARD_DONE)[0] == UnitState.IDLE


@pytest.mark.parametrize("seed", range(50))
def test_pins_stay_balanced_whatever_happens(seed):
    chooser = random.Random(seed)
    state, pins = UnitState.IDLE, 0
    for _ in range(200):
        try:
            state, command = transition(state, chooser.choice(list(Event)))
        except RuntimeError:
            continue
        pins += {Command.ACQUIRE: 1, Command.RELEASE: -1, Command.NOTHING: 0}[command]
        assert pins == (state in PINNED)


@pytest.mark.parametrize(
    "events",
    [
        "PRE_FORWARD POST_FORWARD PRE_BACKWARD BACKWARD_DONE",
        # checkpoint(block): the end of its recompute may come or not
        "PRE_FORWARD POST_FORWARD PRE_BACKWARD PRE_RECOMPUTE BACKWARD_DONE",
        "PRE_FORWARD POST_FORWARD PRE_BACKWARD PRE_RECOMPUTE POST_RECOMPUTE BACKWARD_DONE",
        # a checkpoint around several: the first is recomputed before its backward
        "PRE_FORWARD POST_FORWARD PRE_RECOMPUTE POST_RECOMPUTE PRE_BACKWARD BACKWARD_DONE",
        # and the last one waits meanwhile
        "PRE_FORWARD POST_FORWARD PRE_BACKWARD SUSPEND PRE_RECOMPUTE BACKWARD_DONE",
        # an expert that is recomputed, stopped early, and never gets a gradient
        "PRE_FORWARD POST_FORWARD PRE_RECOMPUTE BACKWARD_DONE",
        # called twice in one forward
        "PRE_FORWARD POST_FORWARD PRE_FORWARD POST_FORWARD "
        "PRE_BACKWARD BACKWARD_DONE PRE_BACKWARD BACKWARD_DONE",
    ],
)
def test_the_known_lives_end_idle(events):
    state = UnitState.IDLE
    for name in events.split():
        state, _ = transition(state, Event[name])
    assert state == UnitState.IDLE
