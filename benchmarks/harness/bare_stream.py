"""A bare gRPC byte stream: the yardstick of the inline road.

The server is a process of its own, of the kind that the writer is (grpc.aio, a unix socket, the
default message limit), and drops what it gets. The client is of the kind that shardwright's is
(a blocking stub fed by an iterator). Messages are `bytes` without protobuf, made before the clock
starts, so nothing but gRPC itself is measured.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from harness.state import map_memory
from shardwright_proto.limits import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from harness.state import StateSpec

METHOD = "/shardwright.benchmark.Bare/Drop"
MESSAGES_MAX = 16
"""So many different messages are made and sent in turn: more than any cache holds."""
READY_S_MAX = 30.0
OPTIONS = [("grpc.enable_http_proxy", 0)]


async def drop(requests: AsyncIterator[bytes], context: object) -> bytes:
    """Count the bytes and forget them."""
    total = 0
    async for message in requests:
        total += len(message)
    return total.to_bytes(8, "little")


async def serve(socket_path: str) -> None:
    """Serve until standard input closes."""
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(drop)
    service, _, method = METHOD.removeprefix("/").partition("/")
    generic = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def messages(spec: StateSpec) -> tuple[Iterator[bytes], int]:
    """As many bytes as the state has, in messages of the size that the client sends."""
    memory = memoryview(map_memory(spec))
    distinct = [
        bytes(memory[start : start + CHUNK_BYTES])
        for start in range(0, min(len(memory), MESSAGES_MAX * CHUNK_BYTES), CHUNK_BYTES)
        if start + CHUNK_BYTES <= len(memory)
    ]
    count = len(memory) // CHUNK_BYTES
    return (distinct[index % len(distinct)] for index in range(count)), count * CHUNK_BYTES


def measure(spec: StateSpec, folder: str) -> dict[str, float]:
    """Send the state once to a fresh server. The socket lies in /tmp: its path must be short."""
    with tempfile.TemporaryDirectory(prefix="stall-") as run:
        socket_path = os.path.join(run, "bare.sock")
        server = subprocess.Popen(
            [sys.executable, "-m", "harness.bare_stream", socket_path], stdin=subprocess.PIPE
        )
        try:
            with grpc.insecure_channel(f"unix:{socket_path}", options=OPTIONS) as channel:
                grpc.channel_ready_future(channel).result(READY_S_MAX)
                call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(METHOD)
                requests, bytes_total = messages(spec)
                start_s = time.perf_counter()
                reply = call(requests)
                taken_s = time.perf_counter() - start_s
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
    if int.from_bytes(reply, "little") != bytes_total:
        raise RuntimeError("the bare stream lost bytes")
    return {"seconds": taken_s, "bytes": bytes_total}


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
