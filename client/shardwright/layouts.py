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

_SCHEDULES_MAX: Final = 8


class Schedules:
    """The schedules of the latest structures, and which writer has confirmed each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, int], Schedule] = OrderedDict()
        self._confirmed: dict[tuple[bytes, int], str] = {}

    def find(self, plan_digest: bytes, window_bytes: int) -> Schedule | None:
        """Return the schedule of a structure that was saved before."""
        key = (plan_digest, window_bytes)
        with self._lock:
            schedule = self._known.get(key)
            if schedule is not None:
                self._known.move_to_end(key)
            return schedule

    def is_confirmed(self, plan_digest: bytes, window_bytes: int, writer: str) -> bool:
        """Tell whether this very server process gave this layout: another may lay out anew."""
        with self._lock:
            return self._confirmed.get((plan_digest, window_bytes)) == writer

    def keep(self, plan_digest: bytes, window_bytes: int, writer: str, schedule: Schedule) -> None:
        """Remember what `writer` gave; the oldest goes."""
        key = (plan_digest, window_bytes)
        with self._lock:
            self._known[key] = schedule
            self._known.move_to_end(key)
            self._confirmed[key] = writer
            while len(self._known) > _SCHEDULES_MAX:
                oldest, _ = self._known.popitem(last=False)
                del self._confirmed[oldest]


_schedules = Schedules()


class LayoutWait:
    """One save's schedule: there at once, or as soon as the writer has sent the layout."""

    def __init__(self, plan_digest: bytes, nbytes: Sequence[int], window_bytes: int) -> None:
        self._plan_digest = plan_digest
        self._nbytes = nbytes
        self._window_bytes = window_bytes
        self._changed = threading.Condition()
        self._parts: list[bytes] = []
        self.schedule = _schedules.find(plan_digest, window_bytes)

    def is_confirmed(self, writer: str) -> bool:
        """Tell whether this server process need not send the layout again."""
        return _schedules.is_confirmed(self._plan_digest, self._window_bytes, writer)

    def restart(self) -> None:
        """A new stream begins: what the broken one had sent so far is void."""
        self._parts = []

    def add(self, chunk: wire.LayoutChunk, writer: str) -> bool:
        """Take a piece; True when the layout is whole, and as expected. Raises LayoutError."""
        self._parts.append(chunk.data)
        if not chunk.last:
            return False
        layout = wire.Layout.FromString(b"".join(self._parts))
        known = self.schedule
        if known is not None and known.layout_digest == layout_digest(layout.offsets, layout.files):
            _schedules.keep(self._plan_digest, self._window_bytes, writer, known)
            return True
        schedule = build_schedule(layout.offsets, layout.files, self._nbytes, self._window_bytes)
        _schedules.keep(self._plan_digest, self._window_bytes, writer, schedule)
        if known is not None:
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
