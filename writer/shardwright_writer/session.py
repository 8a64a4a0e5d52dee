"""The life of one rank's save, as a table: no I/O, no clock, no gRPC.

`save` moves through it; a pair that is not in the table is a bug or a client that broke the
protocol. Nothing else knows which event may follow which.
"""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """Where a save stands."""

    OPENED = auto()  # plan known, skeleton not here yet
    RECEIVING = auto()  # windows arrive
    CAPTURED = auto()  # everything is here; the trainer may die
    COMMITTING = auto()  # all data durable, names are being published
    COMMITTED = auto()
    FAILED = auto()


class Event(Enum):
    """What can happen to it."""

    SKELETON_COMPLETE = auto()
    FINISH = auto()
    DATA_DURABLE = auto()
    PUBLISHED = auto()
    FAIL = auto()


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.OPENED: {Event.SKELETON_COMPLETE: State.RECEIVING, Event.FAIL: State.FAILED},
    State.RECEIVING: {Event.FINISH: State.CAPTURED, Event.FAIL: State.FAILED},
    State.CAPTURED: {Event.DATA_DURABLE: State.COMMITTING, Event.FAIL: State.FAILED},
    State.COMMITTING: {Event.PUBLISHED: State.COMMITTED, Event.FAIL: State.FAILED},
    State.COMMITTED: {},
    State.FAILED: {},
}

TERMINAL = frozenset({State.COMMITTED, State.FAILED})


class IllegalTransitionError(Exception):
    """The event cannot happen in this state."""


def step(state: State, event: Event) -> State:
    """Return the state that follows, or raise IllegalTransitionError."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(f"{event.name} while {state.name}") from None
