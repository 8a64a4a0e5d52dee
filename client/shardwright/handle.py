"""What the caller holds of a save: its state, its progress, its error.

`api` makes one per save, `stream` moves it, users and `lifecycle` wait on it. The states are a
table. It starts nothing, and it alone knows what `on_error` means for somebody who waits.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from shardwright import lifecycle
from shardwright.errors import SaveFailedError, SaveTimeoutError, ShardwrightError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("shardwright")
_SLICE_S: Final = 1.0


class State(Enum):
    """Where a save stands, as its caller sees it."""

    STAGING = auto()  # async_save has not returned: the bytes are being copied
    SENDING = auto()  # the tensors may change; the writer does not have everything yet
    CAPTURED = auto()  # the writer has everything: it commits even if this process dies
    COMMITTED = auto()  # durable, and visible under its name
    FAILED = auto()
    CANCELLED = auto()


class Event(Enum):
    """What can happen to it."""

    STAGED = auto()
    CAPTURED = auto()
    COMMITTED = auto()
    FAILED = auto()
    CANCELLED = auto()
    WRITTEN_HERE = auto()  # by the trainer itself (on_error="local")


_ENDS: Final = {Event.FAILED: State.FAILED, Event.CANCELLED: State.CANCELLED}
TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.STAGING: {Event.STAGED: State.SENDING, **_ENDS},
    # COMMITTED without CAPTURED: that message was lost with a server, this one was not.
    State.SENDING: {Event.CAPTURED: State.CAPTURED, Event.COMMITTED: State.COMMITTED, **_ENDS},
    State.CAPTURED: {Event.COMMITTED: State.COMMITTED, **_ENDS},
    State.COMMITTED: {},
    State.FAILED: {Event.WRITTEN_HERE: State.COMMITTED},
    State.CANCELLED: {},
}
_TERMINAL: Final = frozenset({State.COMMITTED, State.FAILED, State.CANCELLED})
_CAPTURED: Final = frozenset({State.CAPTURED, State.COMMITTED})


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """A snapshot. rate: durable bytes a second so far; eta: seconds left, None when unknown."""

    stage: str
    bytes_total: int
    bytes_staged: int
    bytes_received: int
    bytes_durable: int
    rate: float
    eta: float | None


class PendingSave:
    """One save under way. Thread-safe; attributes may be read at any time."""

    def __init__(self, path: str, save_id: str, on_error: str, rank: int) -> None:
        self.path: Final = path
        self.save_id: Final = save_id
        self.on_error: Final = on_error
        self.transport: str | None = None
        """The road the bytes took: "shared", "inline", "local"; None before that is known."""
        self.error: ShardwrightError | None = None
        # A path that is not UTF-8 would end up as an error of whoever writes the log.
        self._shown_path = path.encode(errors="backslashreplace").decode()
        self._where = f"rank {rank}, save {save_id[:8]} of {self._shown_path}"
        self._condition = threading.Condition()
        self._state = State.STAGING
        self.was_captured = False
        self._on_cancel: Callable[[], None] | None = None
        self._started_s = time.monotonic()
        self._heard_s = self._started_s
        self._writer_stage = ""
        self._bytes_total = 0
        self._bytes_staged = 0
        self._bytes_received = 0
        self._bytes_durable = 0

    def __repr__(self) -> str:
        return f"<PendingSave {self.save_id[:8]} of {self.path!r}: {self._state.name.lower()}>"

    # --- for users --------------------------------------------------------------------------

    def captured(self, timeout_s: float | None = None) -> bool:
        """Wait until the writer has everything: it then commits even if this process dies.

        Return True when that is so; False when the save failed or the time is up. With
        on_error="raise" the error is raised instead, SaveTimeoutError for the time.
        """
        return self._wait_for(_CAPTURED, "the writer to have everything", timeout_s)

    def committed(self, timeout_s: float | None = None) -> bool:
        """Wait until the checkpoint is durable and visible. Returns and raises as captured."""
        return self._wait_for(
            frozenset({State.COMMITTED}), "the checkpoint to be committed", timeout_s
        )

    def done(self) -> bool:
        """Tell whether the save has ended: committed, failed or cancelled."""
        return self._state in _TERMINAL

    def cancel(self) -> bool:
        """Ask the writer to drop this save; False when it has ended already.

        Returns at once. The save ends as cancelled, or as committed where that was faster.
        """
        with lifecycle.guard():
            if self.done() or self._on_cancel is None:
                return False
            self._on_cancel()
            return True

    @property
    def progress(self) -> SaveProgress:
        """How far the save is. Takes no lock, so it may be asked anywhere."""
        durable, total = self._bytes_durable, self._bytes_total
        elapsed_s = max(time.monotonic() - self._started_s, 1e-6)
        rate = durable / elapsed_s
        eta = None
        if self._state is State.COMMITTED:
            eta = 0.0
        elif durable and self._state not in _TERMINAL:
            eta = (total - durable) / rate
        return SaveProgress(
            self._stage(), total, self._bytes_staged, self._bytes_received, durable, rate, eta
        )

    # --- for api, stream and lifecycle -------------------------------------------------------

    @property
    def is_captured(self) -> bool:
        """Tell whether the save can finish without this process."""
        return self._state in _CAPTURED

    @property
    def figures(self) -> tuple[object, ...]:
        """What changes as long as the save moves."""
        staged, received = self._bytes_staged, self._bytes_received
        return self._state, staged, received, self._bytes_durable, self._writer_stage

    def apply(self, event: Event, error: ShardwrightError | None = None) -> bool:
        """Move to the next state; False when the event comes too late to count."""
        with self._condition:
            next_state = TRANSITIONS[self._state].get(event)
            if next_state is None:
                return False
            if error is not None:
                error.where = error.where or self._where
            self.error = error
            self._state = next_state
            self.was_captured = self.was_captured or next_state is State.CAPTURED
            if next_state in _TERMINAL:
                self._on_cancel = None
            self._condition.notify_all()
        if next_state in _TERMINAL:
            lifecycle.discard(self)
        if error is not None and event is Event.FAILED and self.on_error != "raise":
            _log.error("save of %s failed, training goes on: %s", self._shown_path, error)
        return True

    def on_cancel(self, action: Callable[[], None]) -> None:
        """Say what `cancel` does."""
        self._on_cancel = action

    def count(
        self,
        *,
        total: int | None = None,
        staged: int = 0,
        received: int | None = None,
        durable: int | None = None,
        stage: str | None = None,
    ) -> None:
        """Update the figures. staged is added; what the writer says only grows."""
        if total is not None:
            self._bytes_total = total
        self._bytes_staged += staged
        if received is not None:
            self._bytes_received = max(self._bytes_received, received)
        if durable is not None:
            self._bytes_durable = max(self._bytes_durable, durable)
        if stage is not None:
            self._writer_stage = stage
            self._heard_s = time.monotonic()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait for the end, whatever it is; False when the time is up. Raises nothing."""
        return self._wait(_TERMINAL, timeout_s)

    def reraise(self) -> None:
        """Raise the error of a save that failed, if on_error asks for that."""
        if self.error is not None and self.on_error == "raise":
            raise self.error

    def fail_in_child(self) -> None:
        """In a forked child: nothing here will ever move this save, so nobody may wait for it."""
        self._condition = threading.Condition()
        if self._state not in _TERMINAL:
            self._state = State.FAILED
            self.error = SaveFailedError(
                "CLIENT_LOST",
                "this save belongs to the process that forked this one",
                hint="wait for it there",
                where=self._where,
            )

    def _wait_for(self, wanted: frozenset[State], what: str, timeout_s: float | None) -> bool:
        started_s = time.monotonic()
        self._wait(wanted | _TERMINAL, timeout_s)
        if self._state in wanted:
            return True
        self.reraise()
        if self.on_error == "raise":
            waited_s = time.monotonic() - started_s
            quiet_s = time.monotonic() - self._heard_s
            raise SaveTimeoutError(
                f"waited {waited_s:.1f} s for {what}; the save is {self._stage()!r},"
                f" the writer was last heard {quiet_s:.1f} s ago",
                where=self._where,
                hint="the save goes on; wait again, or cancel it",
            )
        return False

    def _wait(self, states: frozenset[State], timeout_s: float | None) -> bool:
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with lifecycle.guard(), self._condition:
            # In slices: after a SIGTERM no wait may last longer than the exit's own.
            while self._state not in states:
                left_s = min(deadline_s, lifecycle.deadline_s()) - time.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(min(left_s, _SLICE_S))
        return True

    def _stage(self) -> str:
        if self._state is State.SENDING and self._writer_stage:
            return self._writer_stage
        if self._state is State.CAPTURED:
            return self._writer_stage or "writing"
        return self._state.name.lower()
