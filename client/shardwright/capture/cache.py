"""Structures that were captured before, so that the next capture of one costs a comparison.

An entry holds what was derived from a structure (columns, records, plan, pickle) and no tensor,
storage or object of the user's but immutable leaves. The few most recent are kept. Used by both
formats' captures, which decide what may be reused; this module only remembers.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Generic, TypeVar

ENTRIES_MAX: Final = 8

Entry = TypeVar("Entry")


class StructureCache(Generic[Entry]):
    """The most recent entries by structure. Any thread may use it."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._lock = threading.Lock()
        self._entries_max = entries_max
        self._entries: list[tuple[Any, Entry]] = []

    def find(self, key: Any) -> Entry | None:
        """Return what was kept for an equal key, and count it as used."""
        with self._lock:
            for place, (known, entry) in enumerate(self._entries):
                if known == key:
                    self._entries.insert(0, self._entries.pop(place))
                    return entry
        return None

    def keep(self, key: Any, entry: Entry) -> None:
        """Keep an entry, in the place of one with an equal key or of the oldest."""
        with self._lock:
            others = [pair for pair in self._entries if pair[0] != key]
            self._entries = [(key, entry), *others][: self._entries_max]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
