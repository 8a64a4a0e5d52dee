"""Which windows of a save the client still holds, and which are durable. Thread-safe.

The trainer's thread puts staged windows in, the save's thread (`stream`) opens and shuts the way
out and takes acknowledgements. A slot goes back to the arena when the writer says that its bytes
are durable, or that it is done with the save. Knows no wire but the outbox.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from shardwright import outbox

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwright.arena import Arena, Slot
    from shardwright.stage import Window

Key = tuple[int, int]  # file, window

_HEAD_START: Final = 8
_STAGED_PER_SENT: Final = 32
"""While windows are staged most of them wait here. A message costs two threads several turns at
the GIL, which staging needs after every copy, and the writer's work on it takes from the same
cores and memory: sent one by one as they are staged, they made the trainer's stall 1.9 times the
copy's (2 GiB, 2 cores, real writer); so it is 1.15, and the checkpoint durable 5 % later. The
others follow when staging is done, or as soon as it waits for a slot."""


class Ledger:
    """The windows of one save."""

    def __init__(self, arena: Arena, *, inline: bool) -> None:
        self.arena = arena
        self.stopped = False
        self.staged = False
        self.durable: dict[Key, int] = {}
        self.bytes_durable = 0
        self._inline = inline
        self._lock = threading.Lock()
        self._held: dict[Key, tuple[Window, Slot]] = {}
        self._unsent: deque[Key] = deque()
        self._starving = False
        self._put_count = 0
        self._sent_count = 0
        self._out: outbox.Outbox | None = None

    @property
    def holds_slots(self) -> bool:
        """Tell whether any slot is still the save's."""
        return bool(self._held)

    # --- the staging side -----------------------------------------------------------------------

    def acquire(self, timeout_s: float) -> Slot | None:
        """Return a free slot; None when the save was stopped or the time is up."""
        slot = self.arena.acquire(self, 0)
        if slot is None:
            with self._lock:
                self._starving = True  # what nobody has sent nobody acknowledges
                self._send_due()
            slot = self.arena.acquire(self, timeout_s)
            self._starving = slot is None
        return slot

    def put(self, window: Window, slot: Slot) -> bool:
        """Take a filled slot, to be sent when it is time; False when the save was stopped."""
        with self._lock:
            if not self.stopped:
                self._held[window.file, window.window] = (window, slot)
                self._unsent.append((window.file, window.window))
                self._put_count += 1
                self._send_due()
                return True
        self.arena.release(slot)
        return False

    def finish(self) -> None:
        """Every window has been put."""
        with self._lock:
            self.staged = True
            self._send_due()
            if self._out is not None:
                self._out.put(outbox.finish())

    # --- the writer's side ----------------------------------------------------------------------

    def lost(self, durable: set[Key]) -> int:
        """Count the windows whose slots are gone though the writer does not have them."""
        return len(self.durable.keys() - durable)

    def open(
        self, box: outbox.Outbox, durable: set[Key], received: set[Key], *, captured: bool
    ) -> None:
        """The writer takes windows: send what it lacks, and from now on what is put."""
        with self._lock:
            for key in durable & self._held.keys():
                self._release(key, 0)
            self._out = box
            self._unsent = deque(key for key in self._held if key not in received)
            self._sent_count = self._put_count - len(self._unsent)
            self._send_due()
            if self.staged and not captured:
                box.put(outbox.finish())

    def shut(self) -> None:
        """The stream broke: windows wait here until it is open again."""
        with self._lock:
            self._out = None

    def acknowledge(self, acks: Iterable[tuple[Key, int]]) -> None:
        """Windows are durable: their slots are free again."""
        with self._lock:
            for key, crc32 in acks:
                if key in self._held:
                    self._release(key, crc32)

    def stop(self) -> None:
        """The staging side shall give up: what waits for slots gets none."""
        self.stopped = True
        self.arena.interrupt(self)

    def release_all(self) -> None:
        """The writer does not touch any slot of this save any more."""
        with self._lock:
            held, self._held = self._held, {}
            self._unsent.clear()
        for _, slot in held.values():
            self.arena.release(slot)

    def _send_due(self) -> None:
        """Send windows in order until as many have been as should be by now."""
        count = self._put_count
        if not (self.staged or self._starving or self._inline):
            count = _HEAD_START + count // _STAGED_PER_SENT
        while self._out is not None and self._unsent and self._sent_count < count:
            window, slot = self._held[self._unsent.popleft()]
            self._sent_count += 1
            if self._inline:
                self._out.put(outbox.inline_chunks(window, slot))
            else:
                self._out.put(outbox.window_ready(window, slot))

    def _release(self, key: Key, crc32: int) -> None:
        window, slot = self._held.pop(key)
        self.durable[key] = crc32
        self.bytes_durable += window.nbytes
        self.arena.release(slot)
