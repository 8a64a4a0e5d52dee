"""What a save says on one stream: messages in order, long things in chunks.

`stream` puts, gRPC's own thread takes; chunks are cut only as they are taken, so that nothing
piles up. Decides nothing and remembers nothing: a new stream has a new outbox.
"""

from __future__ import annotations

import ctypes
import importlib
import queue
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from shardwright_proto.inline import InlineBytes, encode_chunk
from shardwright_proto.limits import CHUNK_BYTES
from shardwright_proto.v1 import writer_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import grpc

    from shardwright.arena import Slot
    from shardwright.stage import Window

    Message: TypeAlias = wire.SaveRequest | bytes


_DURABLE_MAX: Final = 200_000
"""More entries would not fit one message; such a save then needs its writer's journal."""


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What Open says of a save."""

    save_id: str
    file_name: str
    plan_digest: bytes
    skeleton_bytes: int
    umask: int
    step: int
    rank: int
    world_size: int
    job_id: str


class Outbox:
    """A queue of messages, or of iterables that make them when their turn comes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[wire.SaveRequest | Iterable[Message] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False

    def put(self, item: wire.SaveRequest | Iterable[Message]) -> None:
        """Send after everything that was put before."""
        self._queue.put(item)

    def close(self) -> None:
        """Nothing is sent any more: lets gRPC's thread go."""
        self._closed = True
        self._queue.put(None)

    def messages(self) -> Iterator[Message]:
        """Yield what was put, until closed."""
        while (item := self._queue.get()) is not None and not self._closed:
            if isinstance(item, wire.SaveRequest):
                yield item
                continue
            for message in item:
                if self._closed:
                    return
                yield message


def opening(facts: SaveFacts, *, resume: bool, layout_known: bool) -> wire.Open:
    """Return the message that opens a save."""
    return wire.Open(
        save_id=facts.save_id,
        target_id=facts.save_id,
        file_name=facts.file_name,
        plan_digest=facts.plan_digest,
        rank=facts.rank,
        world_size=facts.world_size,
        step=facts.step,
        umask=facts.umask,
        skeleton_bytes=facts.skeleton_bytes,
        resume=resume,
        layout_known=layout_known,
        job_id=facts.job_id,
    )


def add_durable(
    message: wire.Open, durable: Mapping[tuple[int, int], int], temporary_names: Sequence[str]
) -> None:
    """Name what the last writer acknowledged, for one that has lost its journal."""
    if len(durable) <= _DURABLE_MAX:
        message.durable.extend(
            wire.DurableWindow(file=file, window=window, crc32=crc32)
            for (file, window), crc32 in durable.items()
        )
        message.temporary_names.extend(temporary_names)


def finish() -> wire.SaveRequest:
    """Say that every window has been sent."""
    return wire.SaveRequest(finish=wire.Finish())


def cancel() -> wire.SaveRequest:
    """Ask the writer to drop the save."""
    return wire.SaveRequest(cancel=wire.Cancel(reason="cancelled by the trainer"))


def plan_chunks(plan: bytes) -> Iterator[wire.SaveRequest]:
    """Cut a serialised SavePlan into messages."""
    for data, last in _cut(plan):
        yield wire.SaveRequest(plan_chunk=wire.PlanChunk(data=data, last=last))


def skeleton_chunks(skeleton: bytes) -> Iterator[wire.SaveRequest]:
    """Cut a skeleton into messages; an empty one is one empty message."""
    for data, last in _cut(skeleton):
        yield wire.SaveRequest(skeleton_chunk=wire.SkeletonChunk(data=data, last=last))


def window_ready(window: Window, slot: Slot) -> wire.SaveRequest:
    """Say that a window lies in a shared slot."""
    return wire.SaveRequest(
        window_ready=wire.WindowReady(
            file=window.file, window=window.window, slot=slot.index, generation=slot.generation
        )
    )


def inline_chunks(window: Window, slot: Slot) -> Iterator[bytes]:
    """Cut a window that lies in a private slot into messages, from its first shard byte on.

    They come serialised: a slot's bytes are copied once, into the message.
    """
    for offset in range(window.begin, window.end, CHUNK_BYTES):
        stop = min(offset + CHUNK_BYTES, window.end)
        memory = (ctypes.c_char * (stop - offset)).from_address(slot.address + offset)
        data = memoryview(memory).cast("B")
        yield encode_chunk(
            InlineBytes(
                file=window.file,
                window=window.window,
                offset=offset,
                data=data,
                crc32=_crc32(data),
                last=stop == window.end,
            )
        )


def save_method(
    channel: grpc.Channel,
) -> grpc.StreamStreamMultiCallable[Message, wire.SaveReply]:
    """Return Writer.Save as the generated stub has it, but for messages that come serialised."""
    return channel.stream_stream(
        "/shardwright.v1.Writer/Save",
        request_serializer=_serialise,
        response_deserializer=wire.SaveReply.FromString,
    )


def _serialise(message: Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _cut(data: bytes) -> Iterator[tuple[bytes, bool]]:
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        stop = start + CHUNK_BYTES
        yield data[start:stop], stop >= len(data)


def _fastest_crc32() -> Callable[[memoryview], int]:
    """Return isal's or zlib-ng's CRC-32, ten times zlib's speed, where it is installed."""
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            found: Callable[[memoryview], int] = importlib.import_module(module).crc32
        except ImportError:
            continue
        return found
    return zlib.crc32


_crc32 = _fastest_crc32()
