"""The save's table of states."""

from __future__ import annotations

import itertools

import pytest

from shardwright_writer.session import (
    TERMINAL,
    TRANSITIONS,
    Event,
    IllegalTransitionError,
    State,
    step,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_either_in_the_table_or_refused(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert step(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransitionError):
            step(state, event)


def test_terminal_states_are_those_without_a_way_out() -> None:
    assert {state for state in State if not TRANSITIONS[state]} == TERMINAL


def test_every_living_state_can_fail() -> None:
    assert all(Event.FAIL in TRANSITIONS[state] for state in State if state not in TERMINAL)
