"""Arena segments as the writer pushes them: mapped on the reader thread, waited for by others.

`attach` has one `SegmentReceiver` per connection and points it at the handshake and the arena of
the latest attach. Asks for nothing and gives nothing back.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from shardwright.arena import map_segment
from shardwright.errors import WriterUnavailableError

if TYPE_CHECKING:
    from shardwright.arena import Arena
    from shardwright.handshake import Handshake
    from shardwright_proto.control import Message

_log = logging.getLogger("shardwright")


class CannotMapError(Exception):
    """The first segment of a new arena cannot be mapped in this process."""


class SegmentReceiver:
    """Takes pushes in. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: tuple[Handshake, Arena] | None = None
        self._early: list[tuple[Handshake, Message, list[int]]] = []
        self._map_error: Exception | None = None
        self._complete = False
        self._message = ""

    def reset(self) -> None:
        """An attach begins: its pushes may come before we know the arena they belong to."""
        with self._changed:
            self._expected, self._map_error, self._complete = None, None, False

    def expect(self, handshake: Handshake, arena: Arena) -> None:
        """Let pushes of `handshake` into `arena`, those that were early first."""
        with self._changed:
            self._expected = (handshake, arena)
            early, self._early = self._early, []
            for push in early:
                self._take(*push)

    def expect_more(self) -> None:
        """The arena is to grow: it is not complete any more."""
        with self._changed:
            self._complete = False

    def expect_no_more(self) -> None:
        """The arena does not grow after all."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def wait_first(self, handshake: Handshake, arena: Arena, timeout_s: float) -> None:
        """Wait for the first slot. Raises CannotMapError or WriterUnavailableError."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    arena.slot_count
                    or self._map_error is not None
                    or self._complete
                    or handshake.ended.is_set()
                ),
                timeout_s,
            )
            if arena.slot_count:
                return
            if self._map_error is not None:
                raise CannotMapError(str(self._map_error))
            what = self._message or f"no segment came within {timeout_s:g} s"
            if handshake.ended.is_set():
                what = "it ended the connection"
            raise WriterUnavailableError(
                f"the writer gave no shared memory: {what}",
                hint="look at `writer status`; perhaps raise its --memory-budget",
            )

    def wait_complete(self, handshake: Handshake, timeout_s: float) -> bool:
        """Wait until every segment is there; False when the time is up or the writer gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete or handshake.ended.is_set(), timeout_s)
            return self._complete

    def on_push(self, handshake: Handshake, message: Message, fds: list[int]) -> None:
        """Take a push, and its descriptors: on the handshake's reader thread."""
        with self._changed:
            if self._expected is None:
                self._early.append((handshake, message, fds))
            else:
                self._take(handshake, message, fds)

    def wake(self) -> None:
        """The handshake ended: whoever waits shall look again."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, handshake: Handshake, message: Message, fds: list[int]) -> None:
        assert self._expected is not None
        expected, arena = self._expected
        if handshake is expected and message["push"] == "segment" and len(fds) == 1:
            fd = fds.pop()
            try:
                _add_segment(arena, message, fd)
            except (OSError, KeyError, TypeError, ValueError) as error:
                os.close(fd)
                self._map_error = error
                if arena.slot_count:
                    _log.warning("an arena segment is not used: %s", error)
        elif handshake is expected and message["push"] == "lease":
            self._complete = bool(message.get("complete"))
            self._message = str(message.get("message", ""))
        for fd in fds:
            os.close(fd)
        self._changed.notify_all()


def _add_segment(arena: Arena, message: Message, fd: int) -> None:
    segment_id = int(message["segment_id"])
    if arena.retired or any(known.segment_id == segment_id for known in arena.segments):
        os.close(fd)
        return
    arena.add(map_segment(segment_id, int(message["first_slot"]), int(message["bytes"]), fd))
