"""What supervisor and server say to each other, and the server's side of it.

Both are connected by a unix SOCK_SEQPACKET pair. Standard library alone: the supervisor imports
this. Descriptors that must outlive a server (arenas, journals, target folders) are copied to the
supervisor under a key, and come back in the order they were stored:

    supervisor -> server   restore {key} + fd, one for every stored descriptor
                           start   {generation, crashes}, after the last restore
                           client  {uid, gid, pid} + fd, an accepted connection, once ready
    server -> supervisor   store   {key} + fd
                           drop    {key}
                           ready   {}
                           stopping {}

A packet that is in the socket survives its sender's death: what `store` has sent is kept even if
the server is killed in the next instruction. It restarts nothing and knows no save.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from shardwright_proto.control import Message, receive_message, send_message
from shardwright_writer.config import Config

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

STORED_MAX: Final = 65_536
"""More stored descriptors than this is a leak in the server."""

_EVENTS_MAX: Final = 256


def store_message(key: str) -> Message:
    """Keep the descriptor beside this message under key, in place of an earlier one."""
    return {"cmd": "store", "key": key}


def drop_message(key: str) -> Message:
    """Close what is kept under key."""
    return {"cmd": "drop", "key": key}


def restore_message(key: str) -> Message:
    """Beside this message: what an earlier server stored under key."""
    return {"cmd": "restore", "key": key}


def start_message(generation: int, crashes: int) -> Message:
    """Everything was restored. Generations count servers from 1; crashes, those that died."""
    return {"cmd": "start", "generation": generation, "crashes": crashes}


def client_message(uid: int, gid: int, pid: int) -> Message:
    """Beside this message: an accepted connection of an allowed user."""
    return {"cmd": "client", "uid": uid, "gid": gid, "pid": pid}


def try_send(sock: socket.socket, message: Message, fd: int | None) -> bool:
    """Send now, or return False when the peer must read first.

    A peer that is gone counts as sent: both sides learn of each other's death by other means,
    and there is nobody left to tell.
    """
    try:
        send_message(sock, message, [] if fd is None else [fd])
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:  # too many descriptors in flight: as good as full
            raise
        return False
    return True


@dataclass(frozen=True, slots=True)
class Restored:
    """A descriptor that an earlier server stored. The receiver closes it."""

    key: str
    fd: int


@dataclass(frozen=True, slots=True)
class Start:
    """The last Restored has come."""

    generation: int
    crashes: int


@dataclass(frozen=True, slots=True)
class Client:
    """A connection to the handshake socket. The receiver closes it."""

    fd: int
    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class SupervisorGone:
    """The supervisor has died: nobody keeps descriptors or accepts clients any more."""


Event: TypeAlias = Restored | Start | Client | SupervisorGone


class FdStore:
    """The server's end. Any thread may call its methods, a signal handler may not.

    None waits but `flush`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent: deque[tuple[Message, int | None]] = deque()

    def fileno(self) -> int:
        """Return the descriptor to poll: readable means `receive` has something."""
        return self._sock.fileno()

    def store(self, key: str, fd: int) -> bool:
        """Give the supervisor a copy of fd; the caller may close its own at once.

        True: the copy is beyond our death. False: the socket is full, and the copy waits here
        for the next call of any method; `flush` before relying on it.
        """
        return self._send(store_message(key), os.dup(fd))

    def drop(self, key: str) -> bool:
        """Let the supervisor close its copy. Returns as `store` does."""
        return self._send(drop_message(key), None)

    def ready(self) -> bool:
        """Say that clients may come now. Returns as `store` does."""
        return self._send({"cmd": "ready"}, None)

    def stopping(self) -> bool:
        """Say that the coming exit is meant. Returns as `store` does."""
        return self._send({"cmd": "stopping"}, None)

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._unsent)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is with the supervisor; False if timeout_s was not enough."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            with self._lock:
                self._send_waiting()
                if not self._unsent:
                    return True
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            poll.poll(remaining_s * 1000)

    def receive(self) -> list[Event]:
        """Return what has come, never waiting. Raises ControlProtocolError for nonsense."""
        with self._lock:
            self._send_waiting()
        events: list[Event] = []
        while len(events) < _EVENTS_MAX:
            try:
                received = receive_message(self._sock)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionResetError:
                received = None
            if received is None:
                events.append(SupervisorGone())
                break
            events.append(_event(*received))
        return events

    def _send(self, message: Message, fd: int | None) -> bool:
        with self._lock:
            self._unsent.append((message, fd))
            self._send_waiting()
            return not self._unsent

    def _send_waiting(self) -> None:
        while self._unsent:
            message, fd = self._unsent[0]
            if not try_send(self._sock, message, fd):
                return
            self._unsent.popleft()
            if fd is not None:
                os.close(fd)


def _event(message: Message, fds: list[int]) -> Event:
    match message, fds:
        case {"cmd": "restore", "key": str(key)}, [fd]:
            return Restored(key, fd)
        case {"cmd": "start", "generation": int(generation), "crashes": int(crashes)}, []:
            return Start(generation, crashes)
        case {"cmd": "client", "uid": int(uid), "gid": int(gid), "pid": int(pid)}, [fd]:
            return Client(fd, uid, gid, pid)
    raise AssertionError(f"our own supervisor sent {message} with {len(fds)} descriptors")


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a server process gets from the supervisor that started it."""

    config: Config
    control_fd: int  # the server's end of the pair; wrap it in a socket for FdStore
    lock_fd: int  # keep it open: while it is, no second writer can start
    supervisor_pid: int  # the parent; 1 in a container whose first process it is


def server_arguments(inheritance: Inheritance) -> list[str]:
    """Return the server's command line arguments; the descriptors must be inheritable."""
    return [
        *("--control-fd", str(inheritance.control_fd)),
        *("--lock-fd", str(inheritance.lock_fd)),
        *("--supervisor-pid", str(inheritance.supervisor_pid)),
        *("--config", inheritance.config.to_json()),
    ]


def read_server_arguments(arguments: Sequence[str]) -> Inheritance:
    """Return what `server_arguments` said, the descriptors made close-on-exec again."""
    parser = argparse.ArgumentParser(description="Started by the supervisor, never by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args(arguments)
    for fd in (options.control_fd, options.lock_fd):
        os.set_inheritable(fd, False)
    return Inheritance(
        Config.from_json(options.config),
        options.control_fd,
        options.lock_fd,
        options.supervisor_pid,
    )
