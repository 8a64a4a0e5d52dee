"""Attached to the writer: one handshake connection and one arena per process and endpoint.

`api` and `stream` get sessions from a `Connection`; it attaches on first use, takes in arena
segments as the writer makes them, and attaches anew, offering its segments, when the connection
broke. Starts no save and never decides that one has failed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardwright.arena import Arena, private_arena
from shardwright.errors import SaveFailedError, WriterUnavailableError
from shardwright.handshake import Handshake
from shardwright.segments import CannotMapError, SegmentReceiver
from shardwright_proto.limits import (
    BLOCK_BYTES,
    CONTROL_FDS_MAX,
    MESSAGE_BYTES_MAX,
    WINDOW_BYTES_MAX,
    WIRE_VERSION,
)

if TYPE_CHECKING:
    import grpc

    from shardwright.config import Config
    from shardwright_proto.control import Message

_log = logging.getLogger("shardwright")
_EVERYTHING: Final = 1 << 62
_TRANSIENT: Final = ("SHUTTING_DOWN",)


@dataclass(frozen=True, slots=True)
class Session:
    """One attach: what a save needs to talk to the server that answered it."""

    handshake: Handshake
    token: str
    address: str
    window_bytes: int
    arena: Arena

    @property
    def alive(self) -> bool:
        """False once the server (or the whole writer) is gone."""
        return not self.handshake.ended.is_set()


class Connection:
    """This process's place at one writer. Thread-safe; shared by all saves."""

    def __init__(self, path: str, transport: str, config: Config) -> None:
        self.path = path
        self.transport = transport
        self.unreachable_since_s: float | None = None
        """Since when nobody has listened at the socket; None while somebody does."""
        self._config = config
        self._client_id = secrets.token_hex(16)
        self._attaching = threading.Lock()
        self._channel_lock = threading.Lock()
        self._session: Session | None = None
        self._segments = SegmentReceiver()
        self._asked_bytes = 0
        self._connect_error = ""
        self._channel: grpc.Channel | None = None
        self._channel_address = ""

    # --- sessions ---------------------------------------------------------------------------

    def session(self, want_bytes: int, timeout_s: float, *, patient: bool = False) -> Session:
        """Return the last session, dead or alive (its arena is good either way), or attach.

        Raises WriterUnavailableError; when nobody listens, at once unless patient.
        """
        session = self._session
        lost = session is None or session.arena.retired
        if lost or (not session.alive and self.unreachable_since_s is not None):  # type: ignore[union-attr]  # None is lost
            return self._attach(want_bytes, time.monotonic() + timeout_s, patient=patient)
        assert session is not None
        return session

    def live_session(self, deadline_s: float) -> Session:
        """Return a session that is alive, attaching anew until the deadline."""
        session = self._session
        if session is not None and session.alive and not session.arena.retired:
            return session
        return self._attach(self._asked_bytes, deadline_s, patient=True)

    def invalidate(self, session: Session) -> None:
        """The server does not take this session (any more): the next save attaches anew."""
        session.handshake.close()
        session.handshake.ended.set()

    def reserve(self, session: Session, want_bytes: int) -> None:
        """Ask for a larger arena when this object wants more than any before it.

        A writer without more memory refuses: the save then flows through what there is.
        """
        if self.transport != "shared" or want_bytes <= self._asked_bytes:
            return
        self._asked_bytes = want_bytes
        fields = {"want_bytes": want_bytes, "local_world_size": self._config.local_world_size}
        self._segments.expect_more()
        try:
            session.handshake.request("grow", self._config.request_timeout_s, fields)
        except SaveFailedError as error:
            self._segments.expect_no_more()
            _log.info("the arena does not grow: %s", error)

    def wait_lease(self, session: Session, timeout_s: float) -> bool:
        """Wait until the arena has all its segments."""
        if self.transport == "inline":
            return True
        return self._segments.wait_complete(session.handshake, timeout_s)

    def channel(self, session: Session) -> grpc.Channel:
        """Return the gRPC channel to a session's server."""
        with self._channel_lock:
            old = None
            if self._channel is None or self._channel_address != session.address:
                old, self._channel = self._channel, _open_channel(session.address)
                self._channel_address = session.address
            channel = self._channel
        if old is not None:
            old.close()
        return channel

    def wait_ready(self, session: Session, timeout_s: float) -> None:
        """Open the gRPC channel now. Raises WriterUnavailableError."""
        import grpc

        try:
            grpc.channel_ready_future(self.channel(session)).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            raise WriterUnavailableError(
                f"no gRPC at {session.address} within {timeout_s:.1f} s",
                hint="look at the writer's log",
            ) from None

    def close(self) -> None:
        """Leave the writer: at exit, when nothing is left to say."""
        if self._session is not None:
            self._session.handshake.close()
        with self._channel_lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def abandon_in_child(self) -> None:
        """Close what a forked child has inherited. Takes no lock: its holder is not here."""
        if self._session is not None:
            self._session.handshake.close_in_child()
            self._session.arena.close_fds()

    # --- attaching --------------------------------------------------------------------------

    def _attach(self, want_bytes: int, deadline_s: float, *, patient: bool) -> Session:
        # Who already tries may be patient: an impatient caller takes its failures as its own.
        gone = not patient and self.unreachable_since_s is not None
        left_s = 0.0 if gone else max(0.0, deadline_s - time.monotonic())
        if not self._attaching.acquire(timeout=left_s):
            raise WriterUnavailableError(
                f"no writer answers at {self.path}: {self._connect_error or 'still attaching'}",
                hint="start `writer serve`, or name its socket in SHARDWRIGHT_ENDPOINT",
            )
        try:
            session = self._session
            if session is not None and session.alive and not session.arena.retired:
                return session
            arena = session.arena if session is not None and not session.arena.retired else None
            while True:
                handshake = self._connect(deadline_s, patient=patient)
                try:
                    session = self._introduce(handshake, arena, want_bytes, deadline_s)
                except CannotMapError as error:
                    handshake.close()
                    self._fall_back_to_inline(error)
                except BaseException:
                    handshake.close()
                    raise
                else:
                    self._session = session
                    return session
        finally:
            self._attaching.release()

    def _connect(self, deadline_s: float, *, patient: bool) -> Handshake:
        pause_s = self._config.retry_min_s
        while (handshake := self._try_connect(deadline_s)) is None:
            if not patient or time.monotonic() + pause_s > deadline_s:
                raise WriterUnavailableError(
                    f"no writer listens at {self.path}: {self._connect_error}",
                    hint="start `writer serve`, or name its socket in SHARDWRIGHT_ENDPOINT",
                )
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, self._config.retry_max_s)
        return handshake

    def _try_connect(self, deadline_s: float) -> Handshake | None:
        try:
            left_s = max(0.05, deadline_s - time.monotonic())
            handshake = Handshake(self.path, left_s, self._segments)
        except OSError as error:
            self._connect_error = error.strerror or str(error)
            if self.unreachable_since_s is None:
                self.unreachable_since_s = time.monotonic()
            return None
        self.unreachable_since_s = None
        return handshake

    def _introduce(
        self, handshake: Handshake, arena: Arena | None, want_bytes: int, deadline_s: float
    ) -> Session:
        """Attach on a new connection, with the arena of the last one if there is one."""
        self._segments.reset()
        try:
            answer = handshake.request(
                "attach", deadline_s - time.monotonic(), self._who_we_are(arena, want_bytes)
            )
            session = self._session_of(handshake, answer, arena)
            if arena is not None and self.transport == "shared":
                self._offer(session, answer)
        except SaveFailedError as error:
            if arena is not None and error.reason not in _TRANSIENT:
                # This writer cannot take our memory over: start anew, with another name.
                arena.retire()
                self._client_id = secrets.token_hex(16)
            raise WriterUnavailableError(error.message, hint=error.hint) from None
        self._asked_bytes = max(self._asked_bytes, want_bytes or _EVERYTHING)
        self._segments.expect(handshake, session.arena)
        if self.transport == "shared":
            timeout_s = self._config.request_timeout_s
            self._segments.wait_first(handshake, session.arena, timeout_s)
        return session

    def _who_we_are(self, arena: Arena | None, want_bytes: int) -> dict[str, object]:
        config = self._config
        shared = self.transport == "shared"
        if arena is not None and want_bytes:
            want_bytes = max(want_bytes, arena.bytes_total)  # a new writer must have room for it
        return {
            "wire": WIRE_VERSION,
            "client_id": self._client_id,
            "pid": os.getpid(),
            "start_time": int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]),
            "host": socket.gethostname(),
            "job": config.job,
            "local_rank": config.local_rank,
            "local_world_size": config.local_world_size,
            "want_bytes": want_bytes if shared else config.inline_buffer_bytes,
            "transport": self.transport,
            "window_bytes": arena.window_bytes if arena is not None else 0,
            "held": [s.segment_id for s in arena.segments] if arena is not None and shared else [],
        }

    def _session_of(self, handshake: Handshake, answer: Message, arena: Arena | None) -> Session:
        try:
            window_bytes, lease_bytes = int(answer["window_bytes"]), int(answer["lease_bytes"])
            address, token = str(answer["grpc"]), str(answer["token"])
        except (KeyError, TypeError, ValueError) as error:
            raise WriterUnavailableError(f"{self.path}: attach answer lacks {error}") from None
        if not BLOCK_BYTES <= window_bytes <= WINDOW_BYTES_MAX or window_bytes % BLOCK_BYTES:
            raise WriterUnavailableError(f"{self.path}: windows of {window_bytes} bytes")
        if arena is not None and arena.window_bytes != window_bytes:
            raise SaveFailedError("BUSY", f"the writer's windows have {window_bytes} bytes now")
        if arena is None:
            arena = Arena(window_bytes)
            if self.transport == "inline":
                buffer_bytes = min(self._config.inline_buffer_bytes, lease_bytes)
                arena = private_arena(window_bytes, max(2, buffer_bytes // window_bytes))
        if address.startswith("/"):
            address = f"unix:{address}"
        return Session(handshake, token, address, window_bytes, arena)

    def _offer(self, session: Session, answer: Message) -> None:
        """Give the segments this writer does not know: supervisor and server were both lost."""
        known = set(answer.get("known") or ())
        missing = [s for s in session.arena.segments if s.segment_id not in known]
        for start in range(0, len(missing), CONTROL_FDS_MAX):
            batch = missing[start : start + CONTROL_FDS_MAX]
            session.handshake.request(
                "offer",
                self._config.request_timeout_s,
                {
                    "segments": [
                        {"segment_id": s.segment_id, "bytes": s.size, "first_slot": s.first_slot}
                        for s in batch
                    ]
                },
                [segment.fd for segment in batch],
            )

    # --- the other road -----------------------------------------------------------------------

    def _fall_back_to_inline(self, error: Exception) -> None:
        _log.warning(
            "the writer's shared memory cannot be mapped (%s);"
            " bytes go inline from now on, which is slower",
            error,
        )
        self.transport = "inline"
        self._client_id = secrets.token_hex(16)


def _open_channel(address: str) -> grpc.Channel:
    import grpc

    return grpc.insecure_channel(
        address,
        options=[
            ("grpc.enable_http_proxy", 0),  # http_proxy must not capture a unix socket
            ("grpc.enable_retries", 0),  # a broken stream is resumed, by stream.py
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ],
    )


_connections_lock = threading.Lock()
_connections: dict[tuple[str, str], Connection] = {}
_abandoned: list[object] = []


def connect(path: str, transport: str, config: Config) -> Connection:
    """Return this process's connection to the writer at `path`; attaches nothing yet."""
    with _connections_lock:
        return _connections.setdefault((path, transport), Connection(path, transport, config))


def close_all() -> None:
    """Leave every writer: at exit."""
    with _connections_lock:
        connections = list(_connections.values())
        _connections.clear()
    for connection in connections:
        connection.close()


def forget_in_child() -> None:
    """In a forked child: close what was inherited, and start from nothing when used anew."""
    global _connections, _connections_lock
    for connection in _connections.values():
        connection.abandon_in_child()
    # Kept for ever: the destructors of gRPC's channels expect threads that are not here.
    _abandoned.append(_connections)
    _connections, _connections_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=forget_in_child)
