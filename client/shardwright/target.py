"""Where a checkpoint goes: a folder held open, and a name in it.

`api` makes one at the call, before anything is staged; the folder's descriptor travels to the
writer, so both mean the same folder whatever their mounts. Writes nothing but missing folders.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from shardwright.errors import SaveFailedError
from shardwright_proto.limits import FILE_NAME_BYTES_MAX

StrOrBytesPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Target:
    """A folder's descriptor (closed by `close`, or in a forked child) and a file name in it."""

    def __init__(self, path: StrOrBytesPath) -> None:
        """Resolve path, make its missing folders, open its folder. Raises SaveFailedError."""
        self.path = absolute(path)
        self.folder, self.file_name = os.path.split(self.path)
        self.umask = current_umask()
        _check_name(self.path, self.file_name)
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _refused(
                f"cannot open the folder {self.folder}: {error.strerror}", "PERMISSION"
            ) from None
        _open_targets.add(self)
        try:
            found = os.stat(self.file_name, dir_fd=self.fd)
        except OSError:
            return  # not there, or a link to nowhere: the commit's rename puts a file there
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise _refused(f"{self.path} exists and is not a regular file", "BAD_REQUEST")

    def close(self) -> None:
        """Let go of the folder. May be called twice, from any thread."""
        with _lock:
            fd, self.fd = self.fd, -1
            _open_targets.discard(self)
        if fd >= 0:
            os.close(fd)


def absolute(path: StrOrBytesPath) -> str:
    """Return the absolute path that a caller means, links in it unresolved."""
    return os.path.abspath(os.fsdecode(path))


def current_umask() -> int:
    """Return this process's umask without changing it: os.umask would, for all threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077  # before Linux 4.7: the careful choice


def _check_name(path: str, name: str) -> None:
    if not name:
        raise _refused(f"{path} names no file", "BAD_REQUEST")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise _refused(f"{path!r}: the file's name is not valid UTF-8", "BAD_REQUEST") from None
    if length > FILE_NAME_BYTES_MAX:
        raise _refused(
            f"{path}: a file name has at most {FILE_NAME_BYTES_MAX} bytes, not {length}",
            "BAD_REQUEST",
        )


def _refused(message: str, reason: str) -> SaveFailedError:
    message = message.encode(errors="backslashreplace").decode()  # it goes into logs
    return SaveFailedError(reason, message, hint="Choose another path", lost="Nothing was written")


_lock = threading.Lock()
_open_targets: set[Target] = set()


def _close_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for target in list(_open_targets):
        target.close()


os.register_at_fork(after_in_child=_close_in_child)
