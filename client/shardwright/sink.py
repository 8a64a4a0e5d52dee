"""The staging side of a save: what the caller's thread may wait for, and for how long.

`stage.stage` gets its slots here and leaves its windows here; `stream` is the other side. Waits
for the layout of a new structure and for free slots, nothing else; copies and sends nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shardwright import lifecycle
from shardwright.errors import SaveCancelledError, SaveTimeoutError, ShardwrightError
from shardwright.handle import Event

if TYPE_CHECKING:
    from shardwright.arena import Slot
    from shardwright.handle import PendingSave
    from shardwright.stage import Schedule, Window
    from shardwright.stream import SaveStream

_SLICE_S: Final = 1.0


class StagingSink:
    """A `stage.WindowSink` for one save."""

    def __init__(self, stream: SaveStream, handle: PendingSave, slot_timeout_s: float) -> None:
        self._stream = stream
        self._ledger = stream.ledger
        self._handle = handle
        self._slot_timeout_s = slot_timeout_s

    def wait_schedule(self) -> Schedule:
        """Return where the bytes go. Raises ShardwrightError when the save has ended."""
        while not self._ledger.stopped:
            schedule = self._stream.layout.wait(_SLICE_S)
            if schedule is not None:
                return schedule
            self._lose_patience()
        raise self._verdict()

    def wait_slot(self) -> Slot:
        """Return a free slot, as soon as the writer has released one."""
        started_s = time.monotonic()
        while not self._ledger.stopped:
            slot = self._ledger.acquire(_SLICE_S)
            if slot is not None:
                return slot
            waited_s = time.monotonic() - started_s
            if waited_s > self._slot_timeout_s:
                self._abort(f"the writer released no arena slot for {waited_s:.0f} s")
            self._lose_patience()
        raise self._verdict()

    def window_staged(self, window: Window, slot: Slot) -> None:
        """A window is whole in its slot: it goes out, now or when the stream is open (again)."""
        if not self._ledger.put(window, slot):
            raise self._verdict()
        self._handle.count(staged=window.nbytes)

    def slot_unused(self, slot: Slot) -> None:
        """Take back a slot that was never sent."""
        self._ledger.arena.release(slot)

    def staging_done(self) -> None:
        """Every window has been staged."""
        self._handle.apply(Event.STAGED)
        self._ledger.finish()

    def _lose_patience(self) -> None:
        """Called once a second while the caller waits."""
        self._stream.give_up_if_nobody_listens()
        if time.monotonic() > lifecycle.deadline_s():
            self._abort("SIGTERM came, and its time is up")

    def _abort(self, what: str) -> None:
        if not self._ledger.stopped:
            self._stream.abort(
                SaveTimeoutError(
                    f"{what} ({self._stream.describe_writer()})",
                    hint="check the storage with `writer status`",
                )
            )

    def _verdict(self) -> ShardwrightError:
        return self._handle.error or SaveCancelledError("the save was cancelled")
