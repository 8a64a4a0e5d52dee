"""The gRPC edge: wire messages in, calls on saves; emissions out as wire messages.

The only module of the writer that speaks gRPC. One `SaveStream` per RPC; a save outlives its
streams. Bytes never pass through here except inline chunks, which are copied to a slot and
checked on a pool thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import numpy as np

from shardwright_proto import limits
from shardwright_proto.inline import InlineBytes, decode_chunk
from shardwright_proto.v1 import writer_pb2 as wire
from shardwright_writer import formats
from shardwright_writer.inline import InlineRoad
from shardwright_writer.journal import WindowState
from shardwright_writer.plan_codec import parse_plan, parse_spec
from shardwright_writer.refusal import Reason, Refusal, bug
from shardwright_writer.save import Save
from shardwright_writer.saves import Structure
from shardwright_writer.session import State
from shardwright_writer.spec import Acked, Captured, Committed, Emission

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from shardwright_writer.clients import Client, Clients
    from shardwright_writer.saves import Saves

    Request: TypeAlias = wire.SaveRequest | InlineBytes
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)

_ACKS_PER_MESSAGE = 4096


class WriterService:
    """Serve shardwright.v1.Writer for the ranks of one node."""

    def __init__(self, clients: Clients, saves: Saves, status: Callable[[str], str]) -> None:
        self._clients = clients
        self._saves = saves
        self._status = status

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a grpc.aio server serves: the generated handlers, but for inline chunks."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Save": grpc.stream_stream_rpc_method_handler(
                self.Save,
                request_deserializer=_decode_request,
                response_serializer=wire.SaveReply.SerializeToString,
            ),
            "Status": grpc.unary_unary_rpc_method_handler(
                self.Status,
                request_deserializer=wire.StatusRequest.FromString,
                response_serializer=wire.StatusReply.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler("shardwright.v1.Writer", methods)

    async def Save(self, request_iterator: AsyncIterator[Request], context: Context) -> None:
        try:
            client = self._clients.by_token(_token(context))
        except Refusal as refusal:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refusal))
        await SaveStream(client, self._saves, context).run(request_iterator)

    async def Status(self, request: wire.StatusRequest, context: Context) -> wire.StatusReply:
        try:
            return wire.StatusReply(json=self._status(_token(context)))
        except Refusal as refusal:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refusal))


class SaveStream:
    """One RPC: a reader task takes requests, `run` sends replies."""

    def __init__(self, client: Client, saves: Saves, context: Context) -> None:
        self._client = client
        self._saves = saves
        self._context = context
        self._outgoing: asyncio.Queue[wire.SaveReply] = asyncio.Queue()
        self._save: Save | None = None
        self._structure: Structure | None = None
        self._claimed: list[tuple[int, int, int]] = []
        self._skeleton = bytearray()
        self._skeleton_bytes = 0
        self._inline = InlineRoad(client, saves.inline_pool)
        self._loop = asyncio.get_running_loop()

    async def run(self, requests: AsyncIterator[Request]) -> None:
        """Serve until the save ends or the stream breaks."""
        reader = self._loop.create_task(self._read(requests))
        try:
            while True:
                try:
                    reply = await asyncio.wait_for(self._outgoing.get(), limits.PROGRESS_PERIOD_S)
                except asyncio.TimeoutError:
                    reply = self._progress()
                await self._context.write(reply)
                if reply.WhichOneof("kind") in ("committed", "failed"):
                    return
        finally:
            reader.cancel()
            self._inline.close()
            if self._save is not None and self._save.outbox == self._emit:
                self._saves.detached(self._save)

    # --- requests -------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        try:
            await self._dispatch_all(requests)
        except Refusal as refusal:
            self._fail(refusal)
        except (grpc.RpcError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 -- logged, and the end of this save only
            _log.exception("bug while serving %s", self._client.describe())
            self._fail(bug(error))

    def _fail(self, refusal: Refusal) -> None:
        if self._save is not None:
            self._save.fail(refusal)
        else:
            self._emit(refusal)

    async def _dispatch_all(self, requests: AsyncIterator[Request]) -> None:
        first = await anext(requests, None)
        if first is None:
            return
        if isinstance(first, InlineBytes) or first.WhichOneof("kind") != "open":
            raise Refusal(Reason.BAD_REQUEST, "the first message of a stream must be Open")
        if not await self._open(first.open, requests):
            return
        async for request in requests:
            assert self._save is not None
            if isinstance(request, InlineBytes):
                await self._inline.put(self._save, request)
                continue
            await self._inline.settle()
            kind = request.WhichOneof("kind")
            if kind == "window_ready":
                ready = request.window_ready
                self._save.window_received(ready.file, ready.window, ready.slot, ready.generation)
            elif kind == "skeleton_chunk":
                await self._skeleton_chunk(self._save, request.skeleton_chunk)
            elif kind == "finish":
                self._save.finish()
            elif kind == "cancel":
                reason = request.cancel.reason[:1000]
                raise Refusal(Reason.CANCELLED, f"cancelled by the client: {reason}")
            else:
                raise Refusal(Reason.BAD_REQUEST, f"unexpected {kind}")

    async def _open(self, message: wire.Open, requests: AsyncIterator[Request]) -> bool:
        """Find or make the save; False when it has ended already."""
        spec = parse_spec(message, self._client.owner)
        live = self._saves.find(spec.save_id, self._client)
        ended = self._saves.ended_result(spec.save_id, self._client)
        if message.resume and live is not None:
            return await self._resume(live, message)
        if message.resume and ended is not None:
            self._emit(ended)
            return False
        if live is not None or ended is not None:
            raise Refusal(Reason.BAD_REQUEST, f"save {spec.save_id} was opened before")
        self._saves.admit(self._client)
        folder = self._client.targets.get(message.target_id)
        if folder is None:
            raise Refusal(
                Reason.BAD_REQUEST, "unknown target folder: pass it in the handshake first"
            )
        structure = self._structure = await self._find_structure(message, requests)
        if not message.layout_known:
            self._send_layout(structure)
        folder = folder.duplicate()
        save = self._save = Save(
            spec, self._client, folder, structure.plan, structure.layout, self._saves
        )
        self._saves.add(save, folder.key())
        self._attach(save)
        self._skeleton_bytes = message.skeleton_bytes
        self._claimed = [(item.file, item.window, item.crc32) for item in message.durable]
        if not self._claimed:
            self._send_opened(save, resumed=False)
        if self._skeleton_bytes == 0:
            await self._begin(save)
        return True

    async def _resume(self, save: Save, message: wire.Open) -> bool:
        self._structure = self._saves.structure(message.plan_digest)
        self._skeleton_bytes = message.skeleton_bytes
        if not message.layout_known:
            layout = save.layout
            self._send_layout(Structure(b"", save.plan, layout))
        self._attach(save)
        self._send_opened(save, resumed=True)
        if save.result is not None:
            self._emit(save.result)
        elif save.state in (State.CAPTURED, State.COMMITTING):
            self._emit(Captured())
        return True

    async def _find_structure(
        self, message: wire.Open, requests: AsyncIterator[Request]
    ) -> Structure:
        found = self._saves.structure(message.plan_digest)
        if found is not None:
            return found
        self._outgoing.put_nowait(wire.SaveReply(need_plan=wire.NeedPlan()))
        data = bytearray()
        async for request in requests:
            if isinstance(request, InlineBytes):
                raise Refusal(Reason.BAD_REQUEST, "expected PlanChunk after NeedPlan")
            if request.WhichOneof("kind") == "cancel":
                raise Refusal(Reason.CANCELLED, "cancelled by the client")
            if request.WhichOneof("kind") != "plan_chunk":
                raise Refusal(Reason.BAD_REQUEST, "expected PlanChunk after NeedPlan")
            data += request.plan_chunk.data
            if len(data) > limits.PLAN_BYTES_MAX:
                raise Refusal(Reason.BAD_REQUEST, "plan is too large")
            if request.plan_chunk.last:
                break
        structure = await self._loop.run_in_executor(
            self._saves.admin_pool, _build_structure, bytes(data), message.plan_digest
        )
        self._saves.remember(message.plan_digest, structure)
        return structure

    async def _skeleton_chunk(self, save: Save, chunk: wire.SkeletonChunk) -> None:
        if save.state is not State.OPENED:
            return  # an empty last chunk after skeleton_bytes = 0, or sent again after a resume
        self._skeleton += chunk.data
        if len(self._skeleton) > self._skeleton_bytes:
            raise Refusal(Reason.BAD_REQUEST, "more skeleton than Open announced")
        if chunk.last:
            if len(self._skeleton) != self._skeleton_bytes:
                raise Refusal(Reason.BAD_REQUEST, "less skeleton than Open announced")
            await self._begin(save)

    async def _begin(self, save: Save) -> None:
        if self._structure is None:
            raise Refusal(Reason.UNKNOWN_SAVE, "the plan is gone", "open the save anew")
        await save.receive_skeleton(
            self._structure.plan_bytes, bytes(self._skeleton), self._claimed
        )
        self._skeleton.clear()
        if self._claimed:
            self._send_opened(save, resumed=True)

    # --- replies --------------------------------------------------------------------------

    def _attach(self, save: Save) -> None:
        self._save = save
        save.outbox = self._emit
        self._saves.attached(save)

    def _emit(self, emission: Emission) -> None:
        for reply in _replies(emission):
            self._outgoing.put_nowait(reply)

    def _send_layout(self, structure: Structure) -> None:
        layout = structure.layout
        message = wire.Layout(
            offsets=layout.offset_of_shard.astype("<u8").tobytes(),
            files=layout.file_of_shard.astype("<u4").tobytes() if layout.file_count > 1 else b"",
            file_count=layout.file_count,
        )
        data = message.SerializeToString()
        for at in range(0, max(len(data), 1), limits.CHUNK_BYTES):
            chunk = wire.LayoutChunk(
                data=data[at : at + limits.CHUNK_BYTES], last=at + limits.CHUNK_BYTES >= len(data)
            )
            self._outgoing.put_nowait(wire.SaveReply(layout_chunk=chunk))

    def _send_opened(self, save: Save, *, resumed: bool) -> None:
        opened = wire.Opened(window_bytes=save.window_bytes, resumed=resumed)
        opened.have_skeleton = save.state is not State.OPENED
        opened.captured = save.state in (State.CAPTURED, State.COMMITTING, State.COMMITTED)
        if save.journal is not None and save.table is not None:
            for state, refs in (
                (WindowState.DURABLE, opened.durable),
                (WindowState.RECEIVED, opened.received),
            ):
                for row in np.flatnonzero(save.journal.states == state):
                    file, window = save.table.place(int(row))
                    refs.add(file=file, window=window)
        self._outgoing.put_nowait(wire.SaveReply(opened=opened))

    def _progress(self) -> wire.SaveReply:
        save = self._save
        if save is None:
            return wire.SaveReply(progress=wire.Progress(stage="opening"))
        durable = save.pipeline.bytes_durable if save.pipeline is not None else 0
        return wire.SaveReply(
            progress=wire.Progress(
                bytes_received=save.bytes_received,
                bytes_durable=durable,
                bytes_total=save.bytes_total,
                stage=save.stage,
            )
        )


def _replies(emission: Emission) -> list[wire.SaveReply]:
    match emission:
        case Acked(windows):
            return [
                wire.SaveReply(
                    acks=wire.Acks(
                        durable=[
                            wire.DurableWindow(file=file, window=window, crc32=crc)
                            for file, window, crc in windows[at : at + _ACKS_PER_MESSAGE]
                        ]
                    )
                )
                for at in range(0, len(windows), _ACKS_PER_MESSAGE)
            ]
        case Captured():
            return [wire.SaveReply(captured=wire.Captured())]
        case Committed(size, files, seconds):
            return [
                wire.SaveReply(committed=wire.Committed(bytes=size, files=files, seconds=seconds))
            ]
        case Refusal():
            reason = wire.Reason.Value(f"REASON_{emission.reason.name}")
            failed = wire.Failed(reason=reason, message=emission.message, hint=emission.hint)
            return [wire.SaveReply(failed=failed)]


def _build_structure(data: bytes, digest: bytes) -> Structure:
    if hashlib.sha256(data).digest() != digest:
        raise Refusal(Reason.CORRUPT, "the plan does not match its digest")
    plan = parse_plan(data)
    return Structure(data, plan, formats.get_format(plan.format).layout(plan))


def _decode_request(message: bytes) -> Request:
    return decode_chunk(message) or wire.SaveRequest.FromString(message)


def _token(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == limits.TOKEN_METADATA_KEY:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""
