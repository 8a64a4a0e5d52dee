"""One connection to the writer's handshake socket: requests with answers, and what is pushed.

`attach` makes one per attach and decides what to say; packets are those of
`shardwright_proto.control`. Knows nothing of arenas or saves, and never reconnects.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

from shardwright.errors import SaveFailedError, WriterUnavailableError
from shardwright_proto.control import ControlProtocolError, Message, receive_message, send_message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POLL_S = 5.0


class PushListener(Protocol):
    """Who hears of pushes, on the connection's reader thread."""

    def on_push(self, handshake: Handshake, message: Message, fds: list[int]) -> None:
        """Take a pushed message, and own its descriptors."""

    def wake(self) -> None:
        """The connection has ended: `ended` is set."""


class Handshake:
    """A live connection. Requests may come from any thread; one reader thread answers them."""

    def __init__(
        self,
        path: str,
        timeout_s: float,
        listener: PushListener,
    ) -> None:
        """Connect. Raises OSError: ECONNREFUSED and ENOENT when nobody listens at path."""
        self.ended = threading.Event()
        self._path = path
        self._listener = listener
        self._sequence = itertools.count(1)
        self._send_lock = threading.Lock()
        self._answers_lock = threading.Condition()
        self._answers: dict[int, Message | None] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._socket.settimeout(_POLL_S)
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._read, name="shardwright-handshake", daemon=True).start()

    def request(
        self,
        op: str,
        timeout_s: float,
        fields: Mapping[str, object],
        fds: Sequence[int] = (),
    ) -> Message:
        """Send a request and return its answer.

        Raises SaveFailedError when the writer refuses, WriterUnavailableError when the connection
        ends or no answer comes in time.
        """
        sequence = next(self._sequence)
        started_s = time.monotonic()
        with self._answers_lock:
            self._answers[sequence] = None
        try:
            self._send({"op": op, "seq": sequence, **fields}, fds)
            with self._answers_lock:
                self._answers_lock.wait_for(
                    lambda: self._answers[sequence] is not None or self.ended.is_set(), timeout_s
                )
                answer = self._answers[sequence]
        finally:
            with self._answers_lock:
                del self._answers[sequence]
        if answer is None:
            waited_s = time.monotonic() - started_s
            what = "ended the connection" if self.ended.is_set() else "did not answer"
            raise WriterUnavailableError(
                f"the writer at {self._path} {what}: waited {waited_s:.1f} s for {op!r}",
                hint="look at `writer status` and the writer's log",
            )
        if answer.get("ok") is not True:
            raise SaveFailedError(
                str(answer.get("reason", "INTERNAL")),
                f"the writer at {self._path} refused {op!r}: {answer.get('message', '')}",
                hint=str(answer.get("hint", "")),
            )
        return answer

    def close(self) -> None:
        """End the connection; the reader thread ends too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close the inherited socket in a forked child, without a word to the writer."""
        self.ended.set()
        self._socket.close()

    def _send(self, message: Message, fds: Sequence[int]) -> None:
        try:
            with self._send_lock:
                send_message(self._socket, message, fds)
        except OSError as error:
            self.close()
            raise WriterUnavailableError(
                f"cannot send {message['op']!r} to the writer at {self._path}: {error}"
            ) from None

    def _read(self) -> None:
        try:
            while True:
                try:
                    received = receive_message(self._socket)
                except TimeoutError:
                    continue  # silence is no news here: a live save is watched on its own stream
                if received is None:
                    return
                self._take(*received)
        except (OSError, ControlProtocolError):
            return  # what ended shows in `ended`; who was waiting says what for
        finally:
            with self._answers_lock:
                self.ended.set()
                self._answers_lock.notify_all()
            self._listener.wake()
            self._socket.close()

    def _take(self, message: Message, fds: list[int]) -> None:
        if "push" in message:
            self._listener.on_push(self, message, fds)
            return
        for fd in fds:
            os.close(fd)
        with self._answers_lock:
            if message.get("seq") in self._answers:
                self._answers[message["seq"]] = message
                self._answers_lock.notify_all()
