"""A client without shardwright: the wire by hand, so that tests can also speak it wrongly."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Any

import grpc

from shardwright_proto import limits
from shardwright_proto.control import receive_message, send_message
from shardwright_proto.v1 import writer_pb2 as wire
from shardwright_proto.v1.writer_pb2_grpc import WriterStub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 30.0


class RawClient:
    """One handshake connection and its gRPC channel."""

    def __init__(self, socket_path: str, **overrides: Any) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(socket_path)
        self.segments: list[tuple[int, mmap.mmap]] = []
        self._sequence = 0
        attach: dict[str, Any] = {
            "wire": limits.WIRE_VERSION,
            "client_id": secrets.token_hex(16),
            "pid": os.getpid(),
            "job": "raw",
            "local_world_size": 1,
            "want_bytes": 16 << 20,
            "transport": "shared",
            "held": [],
        } | overrides
        self.attached = self.request("attach", **attach)
        if self.attached["ok"]:
            self.window_bytes = self.attached["window_bytes"]
            self._receive_segments()
            self.channel = grpc.insecure_channel(self.attached["grpc"])
            self.stub = WriterStub(self.channel)

    def request(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        send_message(self.sock, {"op": op, "seq": self._sequence, **fields}, fds)
        received = receive_message(self.sock)
        assert received is not None, "the writer closed the handshake connection"
        return received[0]

    def _receive_segments(self) -> None:
        while True:
            received = receive_message(self.sock)
            assert received is not None
            message, fds = received
            if message["push"] == "lease":
                return
            self.segments.append((message["first_slot"], mmap.mmap(fds[0], message["bytes"])))
            os.close(fds[0])

    def target(self, folder: Path, target_id: str = "t") -> dict[str, Any]:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self.request("target", (fd,), target_id=target_id, path=str(folder))
        finally:
            os.close(fd)

    def put(self, slot: int, offset: int, data: bytes) -> None:
        """Copy data into a slot."""
        for first_slot, memory in self.segments:
            index = slot - first_slot
            if 0 <= index < len(memory) // self.window_bytes:
                start = index * self.window_bytes + offset
                memory[start : start + len(data)] = data

    def open_stream(self) -> RawStream:
        return RawStream(self)

    def close(self) -> None:
        self.channel.close()
        self.sock.close()


class RawStream:
    """One Save RPC, a message at a time."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self._requests: queue.SimpleQueue[wire.SaveRequest | None] = queue.SimpleQueue()
        metadata = ((limits.TOKEN_METADATA_KEY, str(client.attached["token"])),)
        self.replies = client.stub.Save(iter(self._requests.get, None), metadata=metadata)

    def send(self, **kind: Any) -> None:
        self._requests.put(wire.SaveRequest(**kind))

    def half_close(self) -> None:
        self._requests.put(None)

    def receive(self, *kinds: str) -> Any:
        """Return the next message, which must be of one of kinds; Progress is passed over."""
        for reply in self.replies:
            kind = reply.WhichOneof("kind")
            if kind == "progress" and "progress" not in kinds:
                continue
            assert kind in kinds, f"expected {kinds}, got {reply}"
            return getattr(reply, kind)
        raise AssertionError(f"the stream ended before {kinds}")

    def all(self) -> Iterator[tuple[str, Any]]:
        for reply in self.replies:
            kind = str(reply.WhichOneof("kind"))
            yield kind, getattr(reply, kind)


def plan_of(tensors: dict[str, bytes], **fields: Any) -> bytes:
    """Return a serialised plan of one-dimensional uint8 tensors."""
    values: dict[str, Any] = {
        "format": "torch",
        "names": list(tensors),
        "dtype_table": ["uint8"],
        "dtypes": bytes(len(tensors)),
        "nbytes": [len(data) for data in tensors.values()],
        "ndims": bytes([1]) * len(tensors),
        "dims": [len(data) for data in tensors.values()],
    } | fields
    return wire.SavePlan(**values).SerializeToString()


def open_message(plan: bytes, skeleton: bytes, **fields: Any) -> wire.Open:
    values: dict[str, Any] = {
        "save_id": secrets.token_hex(16),
        "target_id": "t",
        "file_name": "out.pt",
        "plan_digest": hashlib.sha256(plan).digest(),
        "world_size": 1,
        "umask": 0o022,
        "skeleton_bytes": len(skeleton),
    } | fields
    return wire.Open(**values)


def start_save(
    stream: RawStream, tensors: dict[str, bytes], skeleton: bytes, **fields: Any
) -> list[int]:
    """Send Open, plan and skeleton; return the offset of every tensor in its one file."""
    plan = plan_of(tensors)
    stream.send(open=open_message(plan, skeleton, **fields))
    stream.receive("need_plan")
    stream.send(plan_chunk=wire.PlanChunk(data=plan, last=True))
    data = b""
    while True:
        chunk = stream.receive("layout_chunk")
        data += chunk.data
        if chunk.last:
            break
    layout = wire.Layout.FromString(data)
    stream.send(skeleton_chunk=wire.SkeletonChunk(data=skeleton, last=True))
    stream.receive("opened")
    return list(struct.unpack(f"<{len(tensors)}Q", layout.offsets))


def stage(client: RawClient, tensors: dict[str, bytes], offsets: list[int]) -> list[int]:
    """Copy every tensor to its place, window k in slot k; return the windows."""
    window_bytes = client.window_bytes
    windows: set[int] = set()
    for data, offset in zip(tensors.values(), offsets, strict=True):
        at = 0
        while at < len(data):
            window, inside = divmod(offset + at, window_bytes)
            count = min(len(data) - at, window_bytes - inside)
            client.put(window, inside, data[at : at + count])
            windows.add(window)
            at += count
    return sorted(windows)
