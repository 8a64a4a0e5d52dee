"""A writer in pure Python for the client's tests: both sockets, no speed, and every bad habit.

Run in a thread of the test (`FakeWriter`), or as a process that can be killed
(`python fake_writer.py SOCKET FOLDER [--discard]`). It lays shards out in its own way, with gaps
and in another order than the plan's, so that a client that assumes anything is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
import zlib
from array import array
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from shardwright_proto.control import receive_message, send_message
from shardwright_proto.limits import CHUNK_BYTES, TOKEN_METADATA_KEY
from shardwright_proto.v1 import writer_pb2 as wire
from shardwright_proto.v1 import writer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Hook = Callable[["Save | None", wire.SaveRequest], "str | None"]

GAP_BYTE = 0xEE
"""What the writer puts between shards; the client never may."""


@dataclasses.dataclass
class Segment:
    """One memfd of a client's arena."""

    segment_id: int
    first_slot: int
    size: int
    fd: int
    memory: mmap.mmap


@dataclasses.dataclass
class Client:
    """What an attach made."""

    client_id: str
    transport: str
    lease_bytes: int
    window_bytes: int
    request: dict[str, Any]
    segments: list[Segment] = dataclasses.field(default_factory=list)
    targets: dict[str, int] = dataclasses.field(default_factory=dict)
    slot_users: dict[int, tuple[str, int, int]] = dataclasses.field(default_factory=dict)

    def slot(self, index: int) -> memoryview:
        for segment in self.segments:
            at = (index - segment.first_slot) * self.window_bytes
            if 0 <= at < segment.size:
                return memoryview(segment.memory)[at : at + self.window_bytes]
        raise KeyError(index)


@dataclasses.dataclass
class Save:
    """One save's bytes, as far as they have come."""

    save_id: str
    client: Client
    open: wire.Open
    plan: wire.SavePlan
    offsets: list[int]
    files: list[int]
    file_bytes: list[int]
    images: list[bytearray]
    expected: set[tuple[int, int]]
    folder_fd: int
    skeleton: bytes | None = None
    received: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    durable: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    slots: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    bytes_received: int = 0
    captured: bool = False
    verdict: wire.SaveReply | None = None
    windows_seen: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    stream: Stream | None = None  # the one that speaks for it now


class FakeWriter:
    """The whole writer: `start`, `stop`; see the attributes for what it can be told to do."""

    def __init__(
        self,
        folder: str,
        *,
        window_bytes: int = 1 << 16,
        lease_bytes: int = 16 << 16,
        file_count: int = 1,
        discard: bool = False,
        align: int = 1,
    ) -> None:
        self.folder = folder
        self.socket_path = f"{folder}/writer.sock"
        self.window_bytes = window_bytes
        self.lease_bytes = lease_bytes
        self.segment_bytes = 4 * window_bytes
        self.file_count = file_count
        self.discard = discard
        self.align = align
        self.refuse: dict[str, tuple[str, str, str]] = {}  # op -> reason, message, hint
        self.fail_open: tuple[str, str, str] | None = None
        self.seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        self.layout_seed = 1
        self.hold_acks = threading.Event()  # while set nothing becomes durable
        self.silent = threading.Event()  # while set no reply is sent at all
        self.hook: Callable[[Save | None, wire.SaveRequest], str | None] = lambda save, request: (
            None
        )
        self.generation = 0
        self.clients: dict[str, Client] = {}
        self.saves: dict[str, Save] = {}
        self.structures: dict[bytes, wire.SavePlan] = {}
        self.opens: list[wire.Open] = []
        self.attaches: list[dict[str, Any]] = []
        self.offers: list[list[int]] = []
        self._token_of: dict[str, str] = {}
        self._connections: list[socket.socket] = []
        self._up = threading.Event()
        self._listener: socket.socket | None = None
        self._server: grpc.Server | None = None
        self._address = ""
        self.lock = threading.RLock()

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> FakeWriter:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.socket_path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        self.start_server()
        return self

    def start_server(self) -> None:
        """A new server under the same supervisor: another address, other tokens."""
        self.generation += 1
        self._address = f"{self.folder}/grpc.{self.generation}.sock"
        pool = futures.ThreadPoolExecutor(32)
        self._server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        writer_pb2_grpc.add_WriterServicer_to_server(Service(self), self._server)
        assert self._server.add_insecure_port(f"unix:{self._address}")
        self._server.start()
        self._up.set()

    def kill_server(self, *, forget: bool = False) -> None:
        """The server dies; the supervisor keeps accepting. forget: its fd store is gone too."""
        self._up.clear()
        with self.lock:
            connections, self._connections = self._connections, []
            self._token_of.clear()
            if forget:
                self.forget()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        assert self._server is not None
        self._server.stop(None).wait(5)

    def _up_again_after_death(self) -> None:
        """Start the next server once the last one, killed by a hook, is quite dead."""
        server = self._server
        assert server is not None
        server.wait_for_termination(10)
        self.start_server()

    def forget(self) -> None:
        with self.lock:
            self.clients.clear()
            self.saves.clear()
            self.structures.clear()

    def stop(self) -> None:
        self.silent.clear()
        self.hold_acks.clear()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self.socket_path)
        self._up.set()
        self.kill_server()

    # --- handshake --------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            self._up.wait()
            with self.lock:
                self._connections.append(connection)
            client: Client | None = None
            while True:
                try:
                    received = receive_message(connection)
                except OSError:
                    return
                if received is None:
                    return
                request, fds = received
                try:
                    client = self._answer(connection, client, request, fds)
                except OSError:
                    return

    def _answer(
        self,
        connection: socket.socket,
        client: Client | None,
        request: dict[str, Any],
        fds: list[int],
    ) -> Client | None:
        op, answer = request["op"], {"seq": request["seq"], "ok": True}
        if op in self.refuse:
            reason, message, hint = self.refuse[op]
            answer.update(ok=False, reason=reason, message=message, hint=hint)
            send_message(connection, answer)
            for fd in fds:
                os.close(fd)
            return client
        if op == "attach":
            client = self._attach(request, answer)
        assert client is not None
        if op == "offer":
            self.offers.append([item["segment_id"] for item in request["segments"]])
            for item, fd in zip(request["segments"], fds, strict=True):
                memory = mmap.mmap(fd, item["bytes"])
                client.segments.append(
                    Segment(item["segment_id"], item["first_slot"], item["bytes"], fd, memory)
                )
        elif op == "grow":
            client.lease_bytes = max(
                client.lease_bytes, min(request["want_bytes"], self.lease_bytes)
            )
            answer["lease_bytes"] = client.lease_bytes
        elif op == "target":
            client.targets[request["target_id"]] = fds[0]
        send_message(connection, answer)
        held = set(answer.get("known", [])) if op == "attach" else None
        if op in ("attach", "grow", "offer") and not (
            op == "attach" and request["held"] and not held
        ):
            self._push(connection, client, held)
        return client

    def _attach(self, request: dict[str, Any], answer: dict[str, Any]) -> Client:
        with self.lock:
            self.attaches.append(request)
            client = self.clients.get(request["client_id"])
            if client is None:
                want = request["want_bytes"] or self.lease_bytes
                lease = min(self.lease_bytes, -(-want // self.window_bytes) * self.window_bytes)
                window = request["window_bytes"] or self.window_bytes
                client = Client(request["client_id"], request["transport"], lease, window, request)
                self.clients[client.client_id] = client
            token = os.urandom(8).hex()
            self._token_of[token] = client.client_id
        have = {segment.segment_id for segment in client.segments}
        answer.update(
            token=token,
            grpc=f"unix:{self._address}",
            generation=self.generation,
            writer_id=f"fake-{os.getpid()}",
            window_bytes=client.window_bytes,
            lease_bytes=client.lease_bytes,
            known=sorted(have & set(request["held"])),
        )
        return client

    def _push(self, connection: socket.socket, client: Client, held: set[int] | None) -> None:
        if client.transport == "inline":
            return
        for segment in client.segments:
            if held is not None and segment.segment_id not in held:
                self._push_one(connection, segment)
        have = sum(segment.size for segment in client.segments)
        while have < client.lease_bytes:
            size = min(self.segment_bytes, client.lease_bytes - have)
            fd = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, self.seals)
            first_slot = have // client.window_bytes
            segment = Segment(len(client.segments), first_slot, size, fd, mmap.mmap(fd, size))
            client.segments.append(segment)
            self._push_one(connection, segment)
            have += size
        send_message(connection, {"push": "lease", "lease_bytes": have, "complete": True})

    @staticmethod
    def _push_one(connection: socket.socket, segment: Segment) -> None:
        message = {
            "push": "segment",
            "segment_id": segment.segment_id,
            "bytes": segment.size,
            "first_slot": segment.first_slot,
        }
        send_message(connection, message, [segment.fd])

    # --- saves ------------------------------------------------------------------------------------

    def client_of(self, token: str) -> Client | None:
        with self.lock:
            return self.clients.get(self._token_of.get(token, ""))

    def lay_out(self, plan: wire.SavePlan) -> tuple[list[int], list[int], list[int]]:
        """Shuffled shards, a few bytes between them, spread over the files."""
        count = len(plan.nbytes)
        order = list(range(count))
        dice = random.Random(self.layout_seed)
        if self.align == 1:
            dice.shuffle(order)
        offsets, files, ends = [0] * count, [0] * count, [100] * self.file_count
        for at, shard in enumerate(order):
            file = at * self.file_count // max(1, count)
            gap = dice.randrange(0, 9) if self.align == 1 else 100
            start = -(-(ends[file] + gap) // self.align) * self.align
            offsets[shard], files[shard] = start, file
            ends[file] = start + plan.nbytes[shard]
        return offsets, files, [end + 50 for end in ends]

    def new_save(self, client: Client, message: wire.Open, plan: wire.SavePlan) -> Save:
        offsets, files, sizes = self.lay_out(plan)
        window = client.window_bytes
        expected = set()
        for file, offset, nbytes in zip(files, offsets, plan.nbytes, strict=True):
            if nbytes:
                for index in range(offset // window, (offset + nbytes - 1) // window + 1):
                    expected.add((file, index))
        images = [] if self.discard else [bytearray([GAP_BYTE]) * size for size in sizes]
        folder = os.dup(client.targets[message.target_id])
        save = Save(
            message.save_id, client, message, plan, offsets, files, sizes, images, expected, folder
        )
        self.saves[save.save_id] = save
        return save

    def pieces(self, save: Save, key: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in file, offset in window, count) of a window's shard pieces, in order."""
        window = save.client.window_bytes
        start = key[1] * window
        for file, offset, nbytes in sorted(
            zip(save.files, save.offsets, save.plan.nbytes, strict=True)
        ):
            begin, end = max(offset, start), min(offset + nbytes, start + window)
            if file == key[0] and begin < end:
                yield begin, begin - start, end - begin

    def store(self, save: Save, key: tuple[int, int], data: memoryview) -> None:
        """Take a window's shard bytes, and nothing else of it."""
        crcs = bytearray()
        if not self.discard:
            for offset, at, count in self.pieces(save, key):
                piece = data[at : at + count]
                save.images[key[0]][offset : offset + count] = piece
                crcs += zlib.crc32(piece).to_bytes(4, "little")
        save.durable[key] = zlib.crc32(crcs)

    def publish(self, save: Save) -> list[str]:
        """Write the files, and what a test needs to look into them."""
        name = save.open.file_name
        if self.discard:
            return [name]
        names = [name if file == 0 else f"{name}.{file}" for file in range(self.file_count)]
        for final, image in zip(names, save.images, strict=True):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            fd = os.open(f".{final}.tmp", flags, 0o666 & ~save.open.umask, dir_fd=save.folder_fd)
            with open(fd, "wb") as file:
                file.write(image)
            os.rename(f".{final}.tmp", final, src_dir_fd=save.folder_fd, dst_dir_fd=save.folder_fd)
        return names


class Service(writer_pb2_grpc.WriterServicer):
    """The gRPC side."""

    def __init__(self, writer: FakeWriter) -> None:
        self._writer = writer

    def Save(
        self, request_iterator: Iterator[wire.SaveRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.SaveReply]:
        token = dict(context.invocation_metadata()).get(TOKEN_METADATA_KEY, "")
        client = self._writer.client_of(str(token))
        if client is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown token")
        assert client is not None
        stream = Stream(self._writer, client, context)
        threading.Thread(target=stream.read, args=(request_iterator,), daemon=True).start()
        return stream.replies()

    def Status(
        self, request: wire.StatusRequest, context: grpc.ServicerContext
    ) -> wire.StatusReply:
        return wire.StatusReply(json=json.dumps({}))


class Stream:
    """One RPC."""

    def __init__(self, writer: FakeWriter, client: Client, context: grpc.ServicerContext) -> None:
        self._writer = writer
        self._client = client
        self._context = context
        self._out: queue.SimpleQueue[wire.SaveReply | None] = queue.SimpleQueue()
        self._save: Save | None = None
        self._over = False
        self._waiting: list[tuple[int, int]] = []
        self._inline: dict[tuple[int, int], bytearray] = {}
        self._skeleton = bytearray()
        self._plan = bytearray()

    def replies(self) -> Iterator[wire.SaveReply]:
        while self._context.is_active():
            try:
                reply = self._out.get(timeout=0.05)
            except queue.Empty:
                if self._writer.silent.is_set():
                    continue
                self._make_durable()
                yield self._progress()
                continue
            if reply is None:
                return
            while self._writer.silent.is_set() and self._context.is_active():
                self._writer._up.wait(0.05)
                time.sleep(0.02)
            yield reply
            if reply.WhichOneof("kind") in ("committed", "failed"):
                return

    def read(self, requests: Iterator[wire.SaveRequest]) -> None:
        try:
            for request in requests:
                action = self._writer.hook(self._save, request)
                if action == "break":
                    self._out.put(None)
                    return
                if action == "die":
                    self._writer.kill_server()
                    return
                if action == "die and forget":
                    self._writer.kill_server(forget=True)
                    return
                if action == "fail":
                    self._fail("NO_SPACE", "the disk is full", "free some")
                    return
                self._take(request)
        except (grpc.RpcError, ValueError):
            return
        except Exception as error:
            self._fail("INTERNAL", f"bug in the fake: {error!r}")
            raise

    def _take(self, request: wire.SaveRequest) -> None:
        kind = request.WhichOneof("kind")
        with self._writer.lock:
            getattr(self, f"_on_{kind}")(getattr(request, str(kind)))

    def _on_open(self, message: wire.Open) -> None:
        writer = self._writer
        writer.opens.append(message)
        self._open = message
        if writer.fail_open is not None:
            self._fail(*writer.fail_open)
            return
        save = writer.saves.get(message.save_id)
        if message.resume and save is None:
            self._fail("UNKNOWN_SAVE", "never heard of it")
            return
        if save is not None:
            assert message.resume, "opened twice without resume"
            if save.verdict is not None:
                self._out.put(save.verdict)
                return
            self._begin(save, resumed=True)
            return
        plan = writer.structures.get(message.plan_digest)
        if plan is None:
            self._out.put(wire.SaveReply(need_plan=wire.NeedPlan()))
            return
        self._begin(writer.new_save(self._client, message, plan), resumed=False)

    def _on_plan_chunk(self, chunk: wire.PlanChunk) -> None:
        self._plan += chunk.data
        if chunk.last:
            data = bytes(self._plan)
            assert hashlib.sha256(data).digest() == self._open.plan_digest
            plan = wire.SavePlan.FromString(data)
            self._writer.structures[self._open.plan_digest] = plan
            self._begin(self._writer.new_save(self._client, self._open, plan), resumed=False)

    def _begin(self, save: Save, *, resumed: bool) -> None:
        self._save = save
        save.stream = self
        if not self._open.layout_known:
            layout = wire.Layout(
                offsets=array("Q", save.offsets).tobytes(),
                files=array("I", save.files).tobytes() if self._writer.file_count > 1 else b"",
                file_count=self._writer.file_count,
            ).SerializeToString()
            for at in range(0, max(1, len(layout)), CHUNK_BYTES):
                chunk = wire.LayoutChunk(
                    data=layout[at : at + CHUNK_BYTES], last=at + CHUNK_BYTES >= len(layout)
                )
                self._out.put(wire.SaveReply(layout_chunk=chunk))
        in_slots = sorted(save.received - save.durable.keys())
        opened = wire.Opened(
            window_bytes=self._client.window_bytes,
            resumed=resumed,
            durable=[wire.WindowRef(file=f, window=w) for f, w in save.durable],
            received=[
                wire.WindowRef(file=f, window=w) for f, w in save.received - save.durable.keys()
            ],
            have_skeleton=save.skeleton is not None,
            captured=save.captured,
            temporary_names=[f".{save.save_id}.0.swtmp"],
        )
        self._waiting = in_slots
        self._out.put(wire.SaveReply(opened=opened))
        if not self._open.skeleton_bytes:
            save.skeleton = b""

    def _on_skeleton_chunk(self, chunk: wire.SkeletonChunk) -> None:
        assert self._save is not None
        self._skeleton += chunk.data
        if chunk.last and self._save.skeleton is None:
            assert len(self._skeleton) == self._open.skeleton_bytes
            self._save.skeleton = bytes(self._skeleton)

    def _on_window_ready(self, ready: wire.WindowReady) -> None:
        key = (ready.file, ready.window)
        save, client = self._save, self._client
        assert save is not None and save.skeleton is not None, "window before the skeleton"
        save.windows_seen.append(key)
        assert key in save.expected, f"{key} holds no shard"
        if key in save.received:
            assert save.slots[key] == ready.slot
            return
        assert ready.slot not in client.slot_users, "slot is in use"
        client.slot_users[ready.slot] = (save.save_id, *key)
        save.slots[key] = ready.slot
        self._received(key)

    def _on_inline_chunk(self, chunk: wire.InlineChunk) -> None:
        key = (chunk.file, chunk.window)
        save = self._save
        assert save is not None and save.skeleton is not None, "window before the skeleton"
        assert zlib.crc32(chunk.data) == chunk.crc32
        if not self._writer.discard:
            window = self._inline.setdefault(key, bytearray(self._client.window_bytes))
            window[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        if chunk.last:
            save.windows_seen.append(key)
            assert key in save.expected
            if key not in save.received:
                self._received(key)

    def _received(self, key: tuple[int, int]) -> None:
        assert self._save is not None
        self._save.received.add(key)
        self._waiting.append(key)
        self._make_durable()

    def _make_durable(self) -> None:
        writer, save = self._writer, self._save
        with writer.lock:
            if save is None or writer.hold_acks.is_set() or save.verdict is not None:
                return
            if save.stream is not self or not self._context.is_active():
                return
            waiting, self._waiting = self._waiting, []
            done = []
            for key in waiting:
                if self._client.transport == "inline":
                    data = memoryview(self._inline.pop(key, bytearray()))
                else:
                    data = self._client.slot(save.slots[key])
                writer.store(save, key, data)
                self._client.slot_users.pop(save.slots.get(key, -1), None)
                done.append(wire.DurableWindow(file=key[0], window=key[1], crc32=save.durable[key]))
            if done:
                self._out.put(wire.SaveReply(acks=wire.Acks(durable=done)))
            if save.captured and save.durable.keys() >= save.expected:
                names = writer.publish(save)
                committed = wire.Committed(bytes=sum(save.file_bytes), files=names, seconds=0.1)
                save.verdict = wire.SaveReply(committed=committed)
                self._out.put(save.verdict)

    def _on_finish(self, _: wire.Finish) -> None:
        save = self._save
        assert save is not None
        missing = save.expected - save.received
        if missing:
            self._fail("BAD_REQUEST", f"Finish with {len(missing)} windows missing")
            return
        save.captured = True
        self._out.put(wire.SaveReply(captured=wire.Captured()))
        self._make_durable()

    def _on_cancel(self, _: wire.Cancel) -> None:
        self._fail("CANCELLED", "cancelled by the client")

    def _fail(self, reason: str, message: str, hint: str = "") -> None:
        failed = wire.Failed(
            reason=wire.Reason.Value(f"REASON_{reason}"), message=message, hint=hint
        )
        reply = wire.SaveReply(failed=failed)
        if self._save is not None:
            self._save.verdict = reply
            users = self._client.slot_users
            for slot in [slot for slot, user in users.items() if user[0] == self._save.save_id]:
                del users[slot]
        self._out.put(reply)

    def _progress(self) -> wire.SaveReply:
        save = self._save
        progress = wire.Progress(stage="receiving")
        if save is not None:
            progress.stage = "writing" if save.captured else "receiving"
            progress.bytes_total = sum(save.plan.nbytes)
        return wire.SaveReply(progress=progress)


def shard_bytes(save: Save) -> list[bytes]:
    """Return every shard as the writer put it into its files."""
    return [
        bytes(save.images[file][offset : offset + nbytes])
        for file, offset, nbytes in zip(save.files, save.offsets, save.plan.nbytes, strict=True)
    ]


def gaps_are_clean(save: Save) -> bool:
    """Tell whether every byte that belongs to no shard is still the writer's."""
    for file, image in enumerate(save.images):
        image = bytearray(image)
        for of, offset, nbytes in zip(save.files, save.offsets, save.plan.nbytes, strict=True):
            if of == file:
                image[offset : offset + nbytes] = bytes([GAP_BYTE]) * nbytes
        if image.count(GAP_BYTE) != len(image):
            return False
    return True


def main() -> None:
    """Serve until killed; dies with its parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--discard", action="store_true")
    parser.add_argument("--window-bytes", type=int, default=1 << 16)
    parser.add_argument("--lease-bytes", type=int, default=16 << 16)
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--segment-bytes", type=int, default=0)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{options.folder}/writer.sock")
    writer = FakeWriter(
        options.folder,
        window_bytes=options.window_bytes,
        lease_bytes=options.lease_bytes,
        discard=options.discard,
        align=options.align,
    )
    writer.segment_bytes = options.segment_bytes or writer.segment_bytes
    writer.generation = os.getpid()
    writer.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
