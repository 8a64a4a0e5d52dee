"""The writer's one error tree: every way a save or a request can end badly.

    Refusal                 carries a reason, what happened and what to do
     └ StorageRefusal       made from an OSError, with the file it happened to

Raised anywhere in the writer, turned into `Failed` messages by `service` alone. Nothing here
logs: who catches a refusal reports it.
"""

from __future__ import annotations

import errno
from enum import Enum


class Reason(Enum):
    """Why; the names are those of the wire's Reason without the REASON_ prefix."""

    BAD_REQUEST = 1
    UNSUPPORTED = 2
    NO_SPACE = 3
    IO_ERROR = 4
    PERMISSION = 5
    CANCELLED = 6
    CLIENT_LOST = 7
    SHUTTING_DOWN = 8
    BUSY = 9
    INTERNAL = 10
    CORRUPT = 11
    UNKNOWN_SAVE = 12


class Refusal(Exception):
    """A save or a request that will not be done."""

    def __init__(self, reason: Reason, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class StorageRefusal(Refusal):
    """An OSError on one file of a save."""

    def __init__(self, error: OSError, doing: str, name: str) -> None:
        reason, hint = _OF_ERRNO.get(error.errno or 0, (Reason.IO_ERROR, "check the storage"))
        code = errno.errorcode.get(error.errno or 0, "?")
        super().__init__(reason, f"{doing} {name!r}: {error.strerror} [{code}]", hint)


_OF_ERRNO: dict[int, tuple[Reason, str]] = {
    errno.ENOSPC: (Reason.NO_SPACE, "free space on the target file system and save again"),
    errno.EDQUOT: (Reason.NO_SPACE, "raise the quota or free space, and save again"),
    errno.EFBIG: (Reason.NO_SPACE, "the file system or a limit (ulimit -f) forbids this size"),
    errno.EACCES: (Reason.PERMISSION, "the trainer's user may not write in this folder"),
    errno.EPERM: (Reason.PERMISSION, "the trainer's user may not write in this folder"),
    errno.EROFS: (Reason.PERMISSION, "the file system is read-only"),
    errno.ESTALE: (Reason.IO_ERROR, "the network file system lost the folder; save again"),
}


def bug(error: Exception) -> Refusal:
    """Return the refusal for an exception that nobody should have seen."""
    return Refusal(
        Reason.INTERNAL,
        f"bug in the writer: {type(error).__name__}: {error}",
        "please report it with the server's log; the previous checkpoint is untouched",
    )
