"""The writer's front door: the lock, the handshake socket, and who may come in.

Used by the supervisor alone, in this order: `take_lock`, `open_listener`, then `peer_of` and
`is_allowed` for every connection. Standard library alone. It reads nothing that a client sends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardwright_proto.control import send_message

if TYPE_CHECKING:
    from types import FrameType

    from shardwright_writer.config import Config

BACKLOG: Final = 1024

_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_SO_PEERGROUPS: Final = 59
_UCRED: Final = struct.Struct("iII")
_GROUPS_BYTES_MAX: Final = 1024  # the most that Python's getsockopt takes: 256 groups


class ListenerError(Exception):
    """The writer cannot take its socket; the message says what holds it and what to do."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected, as the kernel says."""

    uid: int
    gid: int
    pid: int
    groups: frozenset[int]


def take_lock(config: Config) -> int:
    """Return the flocked descriptor of the lock file, after waiting config.lock_timeout_s."""
    _make_parent(config)
    deadline = time.monotonic() + config.lock_timeout_s
    while True:
        try:
            fd = os.open(config.lock_path, _LOCK_FLAGS, 0o600)
        except OSError as error:
            raise ListenerError(f"cannot open {config.lock_path}: {error.strerror}") from None
        locked = _flock_within(fd, deadline - time.monotonic())
        if locked and _is_at(fd, config.lock_path):
            return fd
        holders = os.pread(fd, 256, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if not locked:
            raise ListenerError(
                f"{config.lock_path}: another writer ({holders or 'pid unknown'}) held this socket"
                f" for {config.lock_timeout_s:g} s: end it with SIGTERM,"
                " or serve at another --socket"
            )
        # Locked, but its last owner removed the file while we waited: the name is free again.


def name_holders(lock_fd: int, server_pid: int | None) -> None:
    """Write into the lock file who holds it, for the error of a writer that waits for it."""
    text = f"supervisor pid {os.getpid()}"
    if server_pid is not None:
        text += f", server pid {server_pid}"
    data = f"{text}\n".encode()
    os.pwrite(lock_fd, data, 0)
    os.ftruncate(lock_fd, len(data))


def open_listener(config: Config) -> socket.socket:
    """Make the runtime folder and listen at config.socket. The caller holds the lock."""
    _make_runtime_folder(config)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(config.socket).st_mode):
            raise ListenerError(
                f"{config.socket} exists and is no socket: remove it, or name another"
            )
        os.unlink(config.socket)  # a dead writer's: we hold its lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    previous_mask = os.umask(0o177)
    try:
        listener.bind(config.socket)
    except OSError as error:
        listener.close()
        raise ListenerError(f"cannot listen at {config.socket}: {error.strerror}") from None
    finally:
        os.umask(previous_mask)
    if config.open_to_others:
        # The kernel tells us who connects, and we decide: the mode must not.
        os.chmod(config.socket, 0o666)  # noqa: S103
    listener.setblocking(False)
    listener.listen(BACKLOG)
    return listener


def close_listener(config: Config, listener: socket.socket, *, keep_lock: bool) -> None:
    """Remove what `open_listener` and `take_lock` made. The caller still holds the lock.

    keep_lock: a server that cannot be ended holds the lock, and its name must keep others out.
    """
    listener.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(config.socket)
    with contextlib.suppress(OSError):  # not empty: somebody else put something there
        _remove_stale_sockets(config)
        os.rmdir(config.runtime_folder)
    if not keep_lock:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.lock_path)


def peer_of(connection: socket.socket) -> Peer:
    """Return who is at the other end."""
    pid, uid, gid = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    groups: frozenset[int] = frozenset({gid})
    with contextlib.suppress(OSError):  # an old kernel, or more groups than fit: the first one
        data = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
        groups |= frozenset(struct.unpack(f"{len(data) // 4}I", data))
    return Peer(uid=uid, gid=gid, pid=pid, groups=groups)


def is_allowed(config: Config, peer: Peer) -> bool:
    """Tell whether this peer may save: our own user, root, and those that the options name."""
    if peer.uid in {0, os.geteuid(), *config.allow_uids}:
        return True
    return not peer.groups.isdisjoint(config.allow_gids)


def refuse(connection: socket.socket, reason: str, message: str, hint: str) -> None:
    """Tell a client why it may not come in, and close its connection."""
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # it is gone, or has not read: nothing is owed to it
        send_message(
            connection, {"push": "refused", "reason": reason, "message": message, "hint": hint}
        )
        # What it has sent must be taken off, or the kernel resets the connection at close
        # and the client reads ECONNRESET in place of the reason.
        connection.shutdown(socket.SHUT_RDWR)
        while connection.recv(1):
            pass
    connection.close()


def _make_parent(config: Config) -> None:
    folder = os.path.dirname(config.socket)
    try:
        os.makedirs(folder, mode=0o755 if folder.startswith("/run/") else 0o700, exist_ok=True)
    except OSError as error:
        raise ListenerError(f"cannot make {folder} for the socket: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ListenerError(f"{folder} is not writable: serve at another --socket")


def _make_runtime_folder(config: Config) -> None:
    """Others must be able to pass through to the gRPC socket when they may connect at all."""
    folder = config.runtime_folder
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ListenerError(f"{folder} is not a folder of ours: name another --socket")
    os.chmod(folder, 0o711 if config.open_to_others else 0o700)
    _remove_stale_sockets(config)


def _remove_stale_sockets(config: Config) -> None:
    with os.scandir(config.runtime_folder) as entries:
        for entry in entries:
            if entry.name.startswith("grpc.") and entry.name.endswith(".sock"):
                os.unlink(entry.path)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class _AlarmError(Exception):
    pass


def _flock_within(fd: int, timeout_s: float) -> bool:
    """Wait for the lock; False if timeout_s was not enough. Main thread only.

    flock has no timeout of its own, so an alarm interrupts it.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    if timeout_s <= 0:
        return False

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _AlarmError

    previous = signal.signal(signal.SIGALRM, ring)
    # Repeated, should the first ring come just before the kernel is entered.
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except _AlarmError:
        return False
    else:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
