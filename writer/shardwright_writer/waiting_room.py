"""Clients between accept and the server: checked, then held until a server takes them.

Used by the supervisor alone, so a client that comes while a server restarts waits for an answer
and needs no retry loop. Standard library alone. It reads nothing that a client sends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
from collections import deque
from typing import TYPE_CHECKING, Final

from shardwright_writer.fdstore import client_message, try_send
from shardwright_writer.listener import Peer, is_allowed, peer_of, refuse

if TYPE_CHECKING:
    import socket

    from shardwright_writer.config import Config

CLIENTS_MAX: Final = 1024

logger = logging.getLogger(__name__)


class WaitingRoom:
    """Accepted connections in the order they came, at most CLIENTS_MAX."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clients: deque[tuple[socket.socket, Peer]] = deque()
        self._spare_fd = _open_spare()

    def __len__(self) -> int:
        return len(self._clients)

    def accept(self, listener: socket.socket) -> None:
        """Take one connection from the listener, which has one: let it wait, or refuse it."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
            self._refuse_without_descriptors(listener)
            return
        peer = peer_of(connection)
        if not is_allowed(self._config, peer):
            logger.warning("refused uid %d gid %d (pid %d)", peer.uid, peer.gid, peer.pid)
            refuse(
                connection,
                "PERMISSION",
                f"uid {peer.uid} (gid {peer.gid}) may not use the writer at {self._config.socket}",
                f"start the writer with --allow-uid {peer.uid}, or run the trainer as its user",
            )
            return
        if len(self._clients) >= CLIENTS_MAX:
            self._forget_gone()
        if len(self._clients) >= CLIENTS_MAX:
            refuse(
                connection,
                "BUSY",
                f"{len(self._clients)} clients wait for the writer's server already",
                "try again later; the writer's log tells why its server is away",
            )
            return
        self._clients.append((connection, peer))

    def forward(self, server: socket.socket) -> bool:
        """Pass on as many as the server's socket has room for; tell whether none is left."""
        while self._clients:
            connection, peer = self._clients[0]
            message = client_message(peer.uid, peer.gid, peer.pid)
            if not try_send(server, message, connection.fileno()):
                return False
            self._clients.popleft()
            connection.close()
        return True

    def close(self) -> None:
        """Send everybody home."""
        for connection, _ in self._clients:
            refuse(connection, "SHUTTING_DOWN", "the writer has ended", "start it again")
        self._clients.clear()
        if self._spare_fd is not None:
            os.close(self._spare_fd)

    def _forget_gone(self) -> None:
        """Make room: clients that gave up waiting still take a place."""
        poll = select.poll()
        for connection, _ in self._clients:
            poll.register(connection, 0)
        gone = {fd for fd, events in poll.poll(0) if events & (select.POLLHUP | select.POLLERR)}
        for connection, _ in self._clients:
            if connection.fileno() in gone:
                connection.close()
        self._clients = deque(client for client in self._clients if client[0].fileno() != -1)

    def _refuse_without_descriptors(self, listener: socket.socket) -> None:
        """Use the spare descriptor to tell the client why; else it would be offered for ever."""
        if self._spare_fd is not None:
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            logger.error("out of file descriptors: refused a client")
            refuse(
                connection,
                "BUSY",
                "the writer's supervisor is out of file descriptors",
                "raise the writer's limit (ulimit -Hn, LimitNOFILE=)",
            )
        self._spare_fd = _open_spare()


def _open_spare() -> int | None:
    with contextlib.suppress(OSError):
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    return None
