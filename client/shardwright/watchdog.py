"""One thread that looks at every live save twice a second.

gRPC's blocking reads and Python's locks know no silence: this finds saves whose writer says
nothing any more, or whose time is up. `stream` registers itself. Ends nothing by itself.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final, Protocol

_TICK_S: Final = 0.5


class Watched(Protocol):
    """A save in progress."""

    def check(self, now_s: float) -> bool:
        """Called every tick; must not block. False: there is nothing left to watch."""


class _Watchdog:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.watched: list[Watched] = []
        self.running = False

    def run(self) -> None:
        while True:
            with self.changed:
                if not self.watched:
                    self.running = False
                    return
                self.changed.wait(_TICK_S)
                watched = list(self.watched)
            now_s = time.monotonic()
            over = [one for one in watched if not one.check(now_s)]
            with self.changed:
                self.watched = [one for one in self.watched if one not in over]


_watchdog = _Watchdog()


def watch(save: Watched) -> None:
    """Look after `save` until its check returns False."""
    with _watchdog.changed:
        _watchdog.watched.append(save)
        if not _watchdog.running:
            _watchdog.running = True
            threading.Thread(target=_watchdog.run, name="shardwright-watchdog", daemon=True).start()


def _forget_in_child() -> None:
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_forget_in_child)
