"""The handshake socket's messages: one JSON object per packet, file descriptors beside it.

Used by the client, the supervisor and the server; standard library only. The socket is a
unix SOCK_SEQPACKET one, so a packet arrives whole, with its descriptors, or not at all.

Requests carry "op" and "seq"; the answer carries the same "seq" and "ok". An answer with
ok = false has "reason" (a Reason name without REASON_), "message" and "hint". The writer
also sends packets without "seq", named by "push".

    attach   {op, seq, wire, client_id, pid, start_time, host, job, local_rank,
              local_world_size, want_bytes, transport: "shared"|"inline", window_bytes: 0|n,
              held: [segment_id, ...]}
          -> {seq, ok, token, grpc, generation, writer_id, window_bytes, lease_bytes,
              known: [segment_id, ...]}
             window_bytes is asked for on a re-attach (0: the writer chooses). `known` are the
             held segments that this writer still maps; the client offers the others.
    offer    {op, seq, segments: [{segment_id, bytes, first_slot}]} + one memfd each -> {seq, ok}
    grow     {op, seq, want_bytes} -> {seq, ok, lease_bytes}
    target   {op, seq, target_id, path} + one folder fd -> {seq, ok}
    status   {op, seq} -> {seq, ok, token, grpc}     (no lease; for `writer status`)

    push "segment"  {push, segment_id, bytes, first_slot} + one sealed memfd, when populated
    push "lease"    {push, lease_bytes, complete: true}, once all segments were pushed

Slots: a segment holds bytes // window_bytes slots, numbered from first_slot.
"""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from shardwright_proto.limits import CONTROL_BYTES_MAX, CONTROL_FDS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = dict[str, Any]


class ControlProtocolError(Exception):
    """The peer sent something that is not a handshake message."""


def send_message(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message with copies of fds. Raises OSError; BlockingIOError when sock is full."""
    data = json.dumps(message, separators=(",", ":")).encode()
    assert len(data) <= CONTROL_BYTES_MAX and len(fds) <= CONTROL_FDS_MAX
    socket.send_fds(sock, [data], list(fds))


def receive_message(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one message and its descriptors (close-on-exec, the caller's to close).

    Returns None at end of stream. Raises ControlProtocolError for anything that is not one
    JSON object; the descriptors that came with it are closed.
    """
    data, fds, flags, _ = socket.recv_fds(sock, CONTROL_BYTES_MAX, CONTROL_FDS_MAX)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ControlProtocolError("handshake message was cut: too long, or too many fds")
        if not data:
            if fds:
                raise ControlProtocolError("descriptors without a message")
            return None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ControlProtocolError(f"handshake message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ControlProtocolError("handshake message is not a JSON object")
        for fd in fds:
            os.set_inheritable(fd, False)
    except ControlProtocolError:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def ask(path: str, op: str, timeout_s: float) -> Message | None:
    """Connect to the handshake socket, ask one thing, and return the answer.

    None: the writer hung up. Raises TimeoutError, another OSError (nobody listens), or
    ControlProtocolError. Descriptors that came with the answer are closed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        sock.connect(path)
        send_message(sock, {"op": op, "seq": 1})
        received = receive_message(sock)
    if received is None:
        return None
    answer, fds = received
    for fd in fds:
        os.close(fd)
    return answer
