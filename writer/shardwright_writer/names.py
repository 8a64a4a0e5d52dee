"""Temporary names: whose they are, and which of them a crash left behind.

A temporary file is `.<save_id>.<owner>.<n>.swtmp` in the target folder; the owner is the trainer
(host, boot, pid, start time), so that any later writer can tell a live save from a dead one.
Used by `save` (makes them) and `recovery` (sweeps them). Touches no file of another shape.
"""

from __future__ import annotations

import hashlib
import re
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright_writer.storage.base import Folder

_FOREIGN_AGE_S = 24 * 3600.0
"""How old another host's unlocked leftover must be: its locks may not reach this host."""

_PATTERN = re.compile(
    r"\.(?P<save>[0-9a-f]{32})\.(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})"
    r"-(?P<pid>\d+)-(?P<start>\d+)\.(?P<n>\d+|m)\.swtmp"
)


@dataclass(frozen=True, slots=True)
class Owner:
    """A trainer process: pid and start_time as this host's /proc shows them; pid 0: not visible."""

    pid: int
    start_time: int

    def tag(self) -> str:
        """Return the owner as part of a file name."""
        return f"{_digest(socket.gethostname())}-{_digest(_boot_id())}-{self.pid}-{self.start_time}"

    def is_alive(self) -> bool:
        """Tell whether this very process still runs (a reused pid has another start time)."""
        return self.pid > 0 and process_start_time(self.pid) == self.start_time


def temporary_name(save_id: str, owner: Owner, part: int | str) -> str:
    """Return the name of a save's temporary file: part is the file's index, "m" the manifest."""
    return f".{save_id}.{owner.tag()}.{part}.swtmp"


def belongs_to(name: str, save_id: str) -> bool:
    """Tell whether name is a temporary file of this save."""
    found = _PATTERN.fullmatch(name)
    return found is not None and found["save"] == save_id


def leftovers(folder: Folder, live_saves: frozenset[str]) -> list[str]:
    """Return the temporary files in folder that no live save, here or elsewhere, will want."""
    return [
        name
        for name in folder.names()
        if name.endswith(".swtmp")
        and (found := _PATTERN.fullmatch(name))
        and found["save"] not in live_saves
        and _is_dead(folder, name, found)
    ]


def process_start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since boot (proc(5), field 22), or 0."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rsplit(")", 1)[1].split()[19])


def _is_dead(folder: Folder, name: str, found: re.Match[str]) -> bool:
    stat = folder.stat(name)
    if stat is None or not stat.is_regular or folder.is_locked(name):
        return False
    owner = Owner(int(found["pid"]), int(found["start"]))
    if found["host"] != _digest(socket.gethostname()) or owner.pid == 0:
        return time.time() - stat.mtime_s > _FOREIGN_AGE_S
    # This host: another boot, or a process that is gone, comes for nothing any more.
    return found["boot"] != _digest(_boot_id()) or not owner.is_alive()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
