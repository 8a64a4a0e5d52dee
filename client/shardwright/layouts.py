"""Layouts from the writer, turned into schedules once and kept for the saves to come.

`stream` feeds a save's `LayoutWait` with what the writer sends; the staging side waits on it. With
a structure that was saved before nobody waits. Decides no offset: that is the writer's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from shardwright.stage import LayoutError, Schedule, build_schedule, layout_digest
from shardwright_proto.v1 import writer_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.attach import Session

_SCHEDULES_MAX: Final = 8
_TOKENS_MAX: Final = 16


class Schedules:
    """The schedules of the latest structures, and which sessions gave each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, int], Schedule] = OrderedDict()
        self._tokens: dict[tuple[bytes, int], set[str]] = {}

    def find(self, plan_digest: bytes, window_bytes: int) -> Schedule | None:
        """Return the schedule of a structure that was saved before."""
        key = (plan_digest, window_bytes)
        with self._lock:
            schedule = self._known.get(key)
            if schedule is not None:
                self._known.move_to_end(key)
            return schedule

    def is_confirmed(self, plan_digest: bytes, window_bytes: int, token: str) -> bool:
        """Tell whether this very session's server gave the layout: another may lay out anew."""
        with self._lock:
            return token in self._tokens.get((plan_digest, window_bytes), ())

    def keep(self, plan_digest: bytes, window_bytes: int, token: str, schedule: Schedule) -> None:
        """Remember what a session's server gave; the oldest goes."""
        key = (plan_digest, window_bytes)
        with self._lock:
            same = self._known.get(key) is schedule
            tokens = self._tokens[key] if same else set()
            if len(tokens) >= _TOKENS_MAX:
                tokens.clear()
            tokens.add(token)
            self._known[key], self._tokens[key] = schedule, tokens
            self._known.move_to_end(key)
            while len(self._known) > _SCHEDULES_MAX:
                oldest, _ = self._known.popitem(last=False)
                del self._tokens[oldest]


_schedules = Schedules()


class LayoutWait:
    """One save's schedule: there at once, or as soon as the writer has sent the layout."""

    def __init__(self, plan_digest: bytes, nbytes: Sequence[int], session: Session) -> None:
        self._plan_digest = plan_digest
        self._nbytes = nbytes
        self._window_bytes = session.window_bytes
        self._changed = threading.Condition()
        self._parts: list[bytes] = []
        self._known = _schedules.find(plan_digest, session.window_bytes)
        # With a dead session the trainer does not wait for the next server: most likely it lays
        # out as the last one did, and `add` compares. A live one is asked first.
        trusted = self.is_confirmed(session) or not session.alive
        self.schedule = self._known if trusted else None

    def is_confirmed(self, session: Session) -> bool:
        """Tell whether this session's server need not send the layout again."""
        return _schedules.is_confirmed(self._plan_digest, self._window_bytes, session.token)

    def restart(self) -> None:
        """A new stream begins: what the broken one had sent so far is void."""
        self._parts = []

    def add(self, chunk: wire.LayoutChunk, session: Session) -> bool:
        """Take a piece; True when the layout is whole, and as expected. Raises LayoutError."""
        self._parts.append(chunk.data)
        if not chunk.last:
            return False
        layout = wire.Layout.FromString(b"".join(self._parts))
        schedule = self.schedule or self._known
        digest = layout_digest(layout.offsets, layout.files)
        if schedule is None or schedule.layout_digest != digest:
            schedule = build_schedule(
                layout.offsets, layout.files, self._nbytes, self._window_bytes
            )
        _schedules.keep(self._plan_digest, self._window_bytes, session.token, schedule)
        if self.schedule is not None and self.schedule is not schedule:
            # Bytes already lie where the earlier writer wanted them. The next save is right.
            raise LayoutError("another version of the writer came back, with another layout")
        with self._changed:
            self.schedule = schedule
            self._changed.notify_all()
        return True

    def wait(self, timeout_s: float) -> Schedule | None:
        """Return the schedule, waiting at most timeout_s; None when it is not there, or on wake."""
        with self._changed:
            if self.schedule is None:
                self._changed.wait(timeout_s)
            return self.schedule

    def wake(self) -> None:
        """The save has ended: whoever waits shall look again."""
        with self._changed:
            self._changed.notify_all()
