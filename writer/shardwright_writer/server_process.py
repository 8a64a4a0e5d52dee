"""One generation of the server as its supervisor sees it: a pid, a socket, what is yet to be sent.

Used by the supervisor alone. Standard library alone. It decides nothing: when to start, stop or
restart is the supervisor's.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright_writer.fdstore import (
    Inheritance,
    Start,
    restore_message,
    server_arguments,
    start_message,
    try_send,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwright_proto.control import Message
    from shardwright_writer.config import Config


@dataclass(slots=True)
class ServerProcess:
    """The running server process and our end of the pair."""

    pid: int
    generation: int
    sock: socket.socket
    outgoing: deque[tuple[Message, int | None]]  # descriptors here are ours to close
    started_s: float = field(default_factory=time.monotonic)
    ready: bool = False
    stopping: bool = False
    broken: bool = False  # nothing more is read from it: it is to be reaped
    reaped: bool = False  # its pid may be somebody else's by now

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still is a process of ours."""
        if not self.reaped:
            os.kill(self.pid, number)

    def send_outgoing(self) -> bool:
        """Send as much as there is room for; tell whether all of it is sent."""
        while self.outgoing:
            message, fd = self.outgoing[0]
            if not try_send(self.sock, message, fd):
                return False
            self.outgoing.popleft()
            if fd is not None:
                os.close(fd)
        return True

    def close(self) -> None:
        """Close the pair and what was not sent."""
        self.sock.close()
        _close_all(self.outgoing)


def spawn_server(
    command: Sequence[str], start: Start, *, config: Config, lock_fd: int, stored: Mapping[str, int]
) -> ServerProcess:
    """Start a server that gets copies of what is stored, then start. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    outgoing: deque[tuple[Message, int | None]] = deque()
    try:
        for key, fd in stored.items():
            outgoing.append((restore_message(key), os.dup(fd)))
        outgoing.append((start_message(start.generation, start.crashes), None))
        inheritance = Inheritance(config, theirs.fileno(), lock_fd, os.getpid())
        pid = _spawn([*command, *server_arguments(inheritance)], theirs.fileno(), lock_fd)
    except OSError:
        ours.close()
        _close_all(outgoing)
        raise
    finally:
        theirs.close()
    return ServerProcess(pid, start.generation, ours, outgoing)


def _spawn(arguments: list[str], *fds: int) -> int:
    """Exec a child that inherits fds and nothing else. One thread: no other child gets them."""
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        # setpgroup: a terminal's ^C reaches the supervisor alone, whose it is to forward.
        return os.posix_spawn(
            *(arguments[0], arguments, os.environ),
            setpgroup=0,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE,),
        )
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def _close_all(outgoing: deque[tuple[Message, int | None]]) -> None:
    for _, fd in outgoing:
        if fd is not None:
            os.close(fd)
