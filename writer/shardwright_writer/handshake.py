"""The server's end of handshake connections: attach, arena segments, target folders.

The supervisor accepted the connection and vouches for its uid; packets are those of
`shardwright_proto.control`. One object per connection, on the event loop. Decides nothing about
leases or roots: that is `clients`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from shardwright_proto.control import ControlProtocolError, receive_message, send_message
from shardwright_proto.limits import WIRE_VERSION
from shardwright_writer.clients import Client, Clients, close_all
from shardwright_writer.refusal import Reason, Refusal

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from shardwright_writer.arena import Segment


class Handshake:
    """One client's connection, from accept to its end."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: tuple[int, int, int],
        clients: Clients,
        facts: dict[str, Any],
        status_token: Callable[[], str],
    ) -> None:
        self._sock = sock
        self._uid, self._gid, self._pid = credentials
        self._clients = clients
        self._facts = facts
        self._status_token = status_token
        self._client: Client | None = None
        self._held: set[int] = set()  # segments that the client has
        self._offering: set[int] = set()  # of those, the ones this writer lacks
        self._loop = asyncio.get_running_loop()
        self._populating: asyncio.Task[None] | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        try:
            received = receive_message(self._sock)
        except BlockingIOError:
            return
        except (ControlProtocolError, OSError):
            received = None
        if received is None:
            self._close()
            return
        request, fds = received
        try:
            self._answer(request, self._handle(request, fds))
        except Refusal as refusal:
            self._refuse(request, refusal)
        finally:
            close_all(fds)

    def _handle(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        match request.get("op"):
            case "attach":
                return self._attach(request)
            case "status":
                return {"token": self._status_token(), **self._facts}
            case "offer":
                client = self._attached()
                self._clients.offer(client, request, fds)
                have = {segment.segment_id for segment in client.lease.segments}
                self._held |= have
                if have >= self._offering:  # large arenas come in several packets
                    self._populate(client)
                return {}
            case "grow":
                client = self._attached()
                self._clients.grow(client, request)
                self._populate(client)
                return {"lease_bytes": client.lease.lease_bytes}
            case "target":
                self._clients.target(self._attached(), request, fds)
                return {}
        raise Refusal(Reason.BAD_REQUEST, f"unknown handshake request {request.get('op')!r}")

    def _attach(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("wire") != WIRE_VERSION:
            raise Refusal(
                Reason.BAD_REQUEST,
                f"client speaks wire version {request.get('wire')!r}, this writer {WIRE_VERSION}",
                "install the same shardwright on both sides",
            )
        held = request.get("held", [])
        if not isinstance(held, list) or not all(isinstance(item, int) for item in held):
            raise Refusal(Reason.BAD_REQUEST, "held must be a list of segment ids")
        client = self._client = self._clients.attach(request, self._uid, self._gid, self._pid)
        have = {segment.segment_id for segment in client.lease.segments}
        self._held = set(held) & have
        self._offering = set(held) - have
        if not self._offering:
            self._populate(client)
        # else: the client offers what an earlier writer made, and the rest follows then.
        return {
            **self._facts,
            "token": client.token,
            "window_bytes": client.lease.window_bytes,
            "lease_bytes": client.lease.lease_bytes,
            "known": sorted(self._held),
        }

    def _populate(self, client: Client) -> None:
        """Send the segments that the client lacks, and make those that the lease lacks."""
        # After the answer to the request that led here: the client expects that first.
        if self._populating is None or self._populating.done():
            self._populating = self._loop.create_task(self._push_segments(client))

    async def _push_segments(self, client: Client) -> None:
        try:
            for segment in client.lease.segments:
                if segment.segment_id not in self._held:
                    self._push(client, segment)
            while self._clients.is_attached(client) and client.lease.plan_segments():
                await self._clients.populate(client, lambda segment: self._push(client, segment))
        except Refusal as refusal:
            self._send(
                {
                    "push": "lease",
                    "complete": True,
                    "lease_bytes": self._segment_bytes(client),
                    "message": str(refusal),
                }
            )
            return
        self._send({"push": "lease", "complete": True, "lease_bytes": self._segment_bytes(client)})

    @staticmethod
    def _segment_bytes(client: Client) -> int:
        return sum(segment.size for segment in client.lease.segments)

    def _push(self, client: Client, segment: Segment) -> None:
        self._held.add(segment.segment_id)
        if not client.inline:
            message = {
                "push": "segment",
                "segment_id": segment.segment_id,
                "bytes": segment.size,
                "first_slot": segment.first_slot,
            }
            self._send(message, [segment.fd])

    def _attached(self) -> Client:
        if self._client is None:
            raise Refusal(Reason.BAD_REQUEST, "attach first")
        return self._client

    def _answer(self, request: dict[str, Any], facts: dict[str, Any]) -> None:
        self._send({"seq": request.get("seq"), "ok": True, **facts})

    def _refuse(self, request: dict[str, Any], refusal: Refusal) -> None:
        self._send(
            {
                "seq": request.get("seq"),
                "ok": False,
                "reason": refusal.reason.name,
                "message": refusal.message,
                "hint": refusal.hint,
            }
        )

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            send_message(self._sock, message, fds or [])
        except OSError:
            # Gone, or it does not read what it asked for: either way it must attach anew.
            self._close()

    def _close(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._client is not None:
            self._clients.disconnected(self._client)
