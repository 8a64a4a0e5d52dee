"""The storage interface: everything the writer does to a file system, and nothing else.

Used by `pipeline`, `commit` and `sweep`; implemented by `posix`. Names are single path
components inside one open folder: no path is ever resolved after the handshake. Every method
blocks and runs in a worker thread; every failure is a StorageRefusal that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class FileStat:
    """What commit and sweep want to know of a name."""

    inode: int
    size: int
    mtime_s: float
    is_regular: bool


class WritableFile(Protocol):
    """An open file of a save, held under an exclusive lock until closed."""

    name: str
    inode: int

    def write_at(self, buffer: memoryview, offset: int) -> None:
        """Write all of buffer (4 KiB-aligned memory, length and offset) at offset."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Fill buffer from offset; return the bytes read, fewer only at end of file."""

    def sync_data(self) -> None:
        """On return every byte written before the call survives a power cut."""

    def finish(self, size: int) -> None:
        """Cut the padding: the file is size bytes; on return it is durable, size included."""

    def close(self) -> None:
        """Release the file and its lock. Never raises: durability was settled by a sync."""


class Folder(Protocol):
    """A target folder, opened by the client and passed as an fd."""

    path: str

    def create(self, name: str, mode: int) -> WritableFile:
        """Make a new file, owned as if the client had made it; fails if the name exists."""

    def reopen(self, name: str) -> WritableFile:
        """Open a temporary file of an earlier server, to go on with it."""

    def rename(self, source: str, target: str) -> None:
        """Atomically make target mean source's file."""

    def remove(self, name: str) -> None:
        """Remove name; a name that is gone already is no error."""

    def sync(self) -> None:
        """On return every create, rename and remove before the call survives a power cut."""

    def names(self) -> Sequence[str]:
        """All names in the folder."""

    def stat(self, name: str) -> FileStat | None:
        """Facts of name (a symlink itself, not its target), or None when there is none."""

    def read(self, name: str, bytes_max: int) -> bytes | None:
        """The content of a small regular file, or None when there is none or it is larger."""

    def is_locked(self, name: str) -> bool:
        """Tell whether a live writer holds the file's lock."""

    def free_bytes(self) -> int:
        """Space left for an unprivileged writer."""
