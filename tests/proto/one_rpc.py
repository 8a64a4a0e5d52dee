"""Import the generated code and carry one save's messages over a real stream.

Run by `make test-protobuf` under the oldest and the newest protobuf and grpcio that
pyproject.toml allows, and by the test-suite under the installed ones. Needs nothing else.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from concurrent import futures
from typing import TYPE_CHECKING

import grpc

from shardwright_proto.v1 import writer_pb2 as wire
from shardwright_proto.v1.writer_pb2_grpc import (
    WriterServicer,
    WriterStub,
    add_WriterServicer_to_server,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class Echo(WriterServicer):
    """Answers every request with what a save would."""

    def Save(
        self,
        request_iterator: Iterator[wire.SaveRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[wire.SaveReply]:
        for request in request_iterator:
            match request.WhichOneof("kind"):
                case "open":
                    assert request.open.durable[0].crc32 == 0xFFFFFFFF
                    yield wire.SaveReply(opened=wire.Opened(window_bytes=1 << 20))
                case "inline_chunk":
                    window = wire.DurableWindow(crc32=request.inline_chunk.crc32)
                    yield wire.SaveReply(acks=wire.Acks(durable=[window]))
                case "finish":
                    token = str(dict(context.invocation_metadata())["shardwright-token"])
                    yield wire.SaveReply(committed=wire.Committed(files=[token], bytes=1 << 40))

    def Status(
        self, request: wire.StatusRequest, context: grpc.ServicerContext
    ) -> wire.StatusReply:
        return wire.StatusReply(json="{}")


def requests() -> Iterator[wire.SaveRequest]:
    durable = [wire.DurableWindow(file=1, window=2, crc32=0xFFFFFFFF)]
    yield wire.SaveRequest(open=wire.Open(save_id="0" * 32, durable=durable))
    yield wire.SaveRequest(inline_chunk=wire.InlineChunk(data=bytes(1 << 20), crc32=7))
    yield wire.SaveRequest(finish=wire.Finish())


def main() -> str:
    """Return which versions carried the stream."""
    plan = wire.SavePlan(format="torch", nbytes=[1, 1 << 50], dims=[3], metadata={"a": "b"})
    assert wire.SavePlan.FromString(plan.SerializeToString()) == plan
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_WriterServicer_to_server(Echo(), server)
    with tempfile.TemporaryDirectory() as folder:
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        with grpc.insecure_channel(f"unix:{folder}/s") as channel:
            stub = WriterStub(channel)
            metadata = (("shardwright-token", "secret"),)
            replies = list(stub.Save(requests(), metadata=metadata, timeout=30))
            status = stub.Status(wire.StatusRequest(), timeout=30)
        server.stop(None).wait()
    kinds = [reply.WhichOneof("kind") for reply in replies]
    assert kinds == ["opened", "acks", "committed"], kinds
    assert replies[1].acks.durable[0].crc32 == 7
    assert replies[2].committed.files == ["secret"] and replies[2].committed.bytes == 1 << 40
    assert status.json == "{}"
    versions = {name: importlib.metadata.version(name) for name in ("protobuf", "grpcio")}
    return (
        f"one save's stream carried by protobuf {versions['protobuf']}, grpcio {versions['grpcio']}"
    )


if __name__ == "__main__":
    print(main())
    sys.exit(0)
