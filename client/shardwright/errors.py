"""Everything the client raises on purpose, in one tree.

    ShardwrightError
    ├── UnsupportedObjectError   the object (or an argument) cannot be saved; nothing was sent
    ├── WriterUnavailableError   no writer answers; nothing was sent
    ├── SaveFailedError          the writer, or the road to it, gave this save up
    ├── SaveTimeoutError         a deadline passed; the save may still be under way
    └── SaveCancelledError       somebody called cancel()

Imported by every module of the client and by users. Each error says what failed, where, what was
lost and what to do; `str()` puts the four together. Decides nothing: `on_error` is the handle's.
"""

from __future__ import annotations


class ShardwrightError(Exception):
    """A save went wrong.

    message: what failed. where: the rank, save, path or tensor. lost: what no longer exists
    because of it. hint: what to do. Arguments stay positional in `args`, so that the error
    survives pickling between processes.
    """

    def __init__(self, message: str, where: str = "", lost: str = "", hint: str = "") -> None:
        super().__init__(message, where, lost, hint)
        self.message = message
        self.where = where
        self.lost = lost
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return ". ".join(part.rstrip(".") for part in (text, self.lost, self.hint) if part)


class UnsupportedObjectError(ShardwrightError):
    """The object cannot be saved in this format. `names` are the keys (or tensors) to look at."""

    def __init__(self, message: str, names: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, "", "Nothing was written", hint)
        self.args = (message, names, hint)
        self.names = names


class WriterUnavailableError(ShardwrightError):
    """No writer answers at the endpoint, or it refused to attach."""


class SaveFailedError(ShardwrightError):
    """The save failed for good. `reason` is a name of the wire's Reason without REASON_."""

    def __init__(
        self, reason: str, message: str, hint: str = "", where: str = "", lost: str = ""
    ) -> None:
        super().__init__(message, where, lost, hint)
        self.args = (reason, message, hint, where, lost)
        self.reason = reason

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.reason}]"


class SaveTimeoutError(ShardwrightError):
    """A deadline of the caller, or of the client's own liveness check, passed."""


class SaveCancelledError(ShardwrightError):
    """The save was cancelled before it was captured; the target is as it was."""
