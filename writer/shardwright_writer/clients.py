"""The ranks attached to this node's writer: who they are, their arena, their target folders.

Fed by `handshake` (attach, offer, grow, target) and `recovery`; `service` finds a client by its
token; `saves` is told when one dies. Knows nothing of saves but their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright_proto.limits import WINDOW_BYTES_MAX, WINDOW_BYTES_MIN
from shardwright_writer.arena import ArenaBudget, Lease, Segment, adopt_segment, create_segment
from shardwright_writer.names import Owner, process_start_time
from shardwright_writer.refusal import Reason, Refusal
from shardwright_writer.storage.posix import PosixFolder, check_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from shardwright_writer.fdstore import FdStore

_TARGETS_MAX = 64
_CLIENT_ID = re.compile(r"[0-9a-f]{32}")
INLINE_WINDOW_BYTES = 4 << 20
INLINE_LEASE_BYTES = 64 << 20


@dataclass(slots=True)
class Client:
    """One trainer process. `lease` is None until its first attach is done."""

    client_id: str
    uid: int
    gid: int
    owner: Owner
    job: str
    local_rank: int
    inline: bool
    lease: Lease
    token: str = ""
    connected: bool = False
    dead: bool = False
    saves: int = 0
    targets: OrderedDict[str, PosixFolder] = field(default_factory=OrderedDict)
    pidfd: int = -1
    slot_freed: asyncio.Event = field(default_factory=asyncio.Event)

    def describe(self) -> str:
        """Name the client in messages."""
        return f"rank {self.local_rank} (pid {self.owner.pid}, uid {self.uid})"

    def meta(self) -> dict[str, Any]:
        """What a new server needs to know of this client."""
        return {
            "client_id": self.client_id,
            "uid": self.uid,
            "gid": self.gid,
            "pid": self.owner.pid,
            "start_time": self.owner.start_time,
            "job": self.job,
            "local_rank": self.local_rank,
            "inline": self.inline,
            "lease_bytes": self.lease.lease_bytes,
            "window_bytes": self.lease.window_bytes,
        }


class Clients:
    """All clients, by id and by token; lives on the event loop."""

    def __init__(
        self,
        budget: ArenaBudget,
        fds: FdStore,
        pool: Executor,
        roots: Sequence[str],
        reattach_timeout_s: float,
    ) -> None:
        self.budget = budget
        self.by_id: dict[str, Client] = {}
        self.on_lost: Callable[[Client], None] = lambda client: None
        self._by_token: dict[str, Client] = {}
        self._fds = fds
        self._pool = pool
        self._roots = roots
        self._grace_s = reattach_timeout_s

    def by_token(self, token: str) -> Client:
        """Return the client that a gRPC call speaks for. Raises Refusal."""
        client = self._by_token.get(token)
        if client is None:
            raise Refusal(
                Reason.PERMISSION, "unknown token", "attach over the handshake socket first"
            )
        return client

    def is_attached(self, client: Client) -> bool:
        """Tell whether the client's lease is still its own."""
        return self.by_id.get(client.client_id) is client

    def attach(self, request: dict[str, Any], uid: int, gid: int, pid: int) -> Client:
        """Make or find the client of an attach request and give it a fresh token."""
        client_id = _text(request, "client_id", 32)
        if not _CLIENT_ID.fullmatch(client_id):  # it becomes part of keys that recovery parses
            raise Refusal(Reason.BAD_REQUEST, "client_id must be 32 lower-case hex digits")
        client = self.by_id.get(client_id)
        if client is not None and client.uid != uid:
            raise Refusal(Reason.PERMISSION, "this client id belongs to another user")
        if client is None:
            client = self._new_client(client_id, request, uid, gid, pid)
        self._by_token.pop(client.token, None)
        client.token = secrets.token_hex(16)
        self._by_token[client.token] = client
        client.connected = True
        return client

    def _new_client(
        self, client_id: str, request: dict[str, Any], uid: int, gid: int, pid: int
    ) -> Client:
        inline = request.get("transport") == "inline"
        window = _number(request, "window_bytes", WINDOW_BYTES_MAX)
        if window and (window < WINDOW_BYTES_MIN or window & (window - 1)):
            raise Refusal(
                Reason.BAD_REQUEST, f"window_bytes {window} is not a power of two in range"
            )
        want = _number(request, "want_bytes", 1 << 62)
        ranks = max(1, _number(request, "local_world_size", 1 << 16))
        owner = Owner(pid, process_start_time(pid))
        self._release_predecessors(owner, inline)
        if inline:
            want = min(want or INLINE_LEASE_BYTES, INLINE_LEASE_BYTES)
            granted, window = self.budget.grant(want, ranks, window, INLINE_WINDOW_BYTES)
        else:
            granted, window = self.budget.grant(want, ranks, window)
        client = Client(
            client_id=client_id,
            uid=uid,
            gid=gid,
            owner=owner,
            job=_text(request, "job", 256),
            local_rank=_number(request, "local_rank", 1 << 20),
            inline=inline,
            lease=Lease(granted, window),
        )
        self.by_id[client_id] = client
        self._remember(client)
        self._watch(client)
        return client

    def adopt(self, meta: dict[str, Any], segments: list[tuple[int, int, int, int]]) -> Client:
        """Rebuild a client of an earlier server; segments: (segment_id, first_slot, bytes, fd)."""
        lease = Lease(int(meta["lease_bytes"]), int(meta["window_bytes"]))
        lease.segments = [adopt_segment(*segment) for segment in segments]
        self.budget.bytes_leased += lease.lease_bytes
        client = Client(
            client_id=meta["client_id"],
            uid=int(meta["uid"]),
            gid=int(meta["gid"]),
            owner=Owner(int(meta["pid"]), int(meta["start_time"])),
            job=meta["job"],
            local_rank=int(meta["local_rank"]),
            inline=bool(meta["inline"]),
            lease=lease,
        )
        self.by_id[client.client_id] = client
        self._watch(client)
        self.disconnected(client)
        return client

    async def populate(self, client: Client, push: Callable[[Segment], None]) -> None:
        """Create what the lease still lacks, a segment at a time, calling push as each is ready."""
        loop = asyncio.get_running_loop()
        for segment_id, first_slot, size in client.lease.plan_segments():
            segment = await loop.run_in_executor(
                self._pool, create_segment, segment_id, first_slot, size
            )
            lost = not self.is_attached(client)
            known = any(have.first_slot == first_slot for have in client.lease.segments)
            if lost or known:  # it died meanwhile, or attached again and got this one already
                os.close(segment.fd)
                return
            self._keep(client, segment)
            push(segment)

    def offer(self, client: Client, request: dict[str, Any], fds: list[int]) -> None:
        """Take over segments that an earlier writer made and the client still holds."""
        offered = request.get("segments")
        if not isinstance(offered, list) or len(offered) != len(fds):
            raise Refusal(Reason.BAD_REQUEST, "offer: one fd per segment")
        held = sum(segment.size for segment in client.lease.segments)
        total = held + sum(_number(item, "bytes", 1 << 50) for item in offered)
        window = client.lease.window_bytes
        if total > client.lease.lease_bytes:
            raise Refusal(
                Reason.BUSY,
                f"the offered arena of {total} bytes is larger than this writer's lease",
                "start the writer with the --memory-budget it had",
            )
        next_slot = held // window
        for item, fd in zip(offered, fds, strict=True):
            size, first = _number(item, "bytes", 1 << 50), _number(item, "first_slot", 1 << 40)
            if first != next_slot or size % window:
                raise Refusal(Reason.BAD_REQUEST, "offered segments do not fit the window size")
            next_slot += size // window
            segment = adopt_segment(_number(item, "segment_id", 1 << 20), first, size, os.dup(fd))
            self._keep(client, segment)

    def grow(self, client: Client, request: dict[str, Any]) -> None:
        """Enlarge the lease towards want_bytes as far as the budget goes."""
        want = _number(request, "want_bytes", 1 << 62)
        ranks = max(1, _number(request, "local_world_size", 1 << 16))
        lease = client.lease
        if not client.inline:
            more = self.budget.extend(lease.lease_bytes, want, ranks, lease.window_bytes)
            lease.lease_bytes += more
            self._remember(client)

    def target(self, client: Client, request: dict[str, Any], fds: list[int]) -> None:
        """Take a target folder. Raises Refusal when it lies outside the roots."""
        if len(fds) != 1:
            raise Refusal(Reason.BAD_REQUEST, "target: exactly one folder fd")
        path = check_inside(fds[0], self._roots)
        folder = PosixFolder(os.dup(fds[0]), path, client.uid, client.gid)
        old = client.targets.pop(target_id := _text(request, "target_id", 64), None)
        client.targets[target_id] = folder
        if old is None and len(client.targets) > _TARGETS_MAX:
            _, old = client.targets.popitem(last=False)
        if old is not None:
            old.close()

    def disconnected(self, client: Client) -> None:
        """The handshake connection ended: without a pidfd that is all we learn of a death."""
        client.connected = False
        loop = asyncio.get_running_loop()
        loop.call_later(self._grace_s, self._release_if_gone, client)
        if client.pidfd < 0:
            loop.call_later(self._grace_s, self._lost_if_gone, client)

    def save_ended(self, client: Client) -> None:
        """One save fewer needs this client's arena."""
        client.saves -= 1
        if client.dead:
            self._release(client)

    def _watch(self, client: Client) -> None:
        if client.owner.pid <= 0 or not client.owner.is_alive():
            if client.owner.pid > 0:
                asyncio.get_running_loop().call_soon(self._lost, client)
            return
        try:
            client.pidfd = os.pidfd_open(client.owner.pid)
        except OSError:
            asyncio.get_running_loop().call_soon(self._lost, client)
            return
        asyncio.get_running_loop().add_reader(client.pidfd, self._lost, client)

    def _lost_if_gone(self, client: Client) -> None:
        if not client.connected:
            self._lost(client)

    def _lost(self, client: Client) -> None:
        if client.dead:
            return
        client.dead = True
        self._close_pidfd(client)
        self.on_lost(client)
        self._release(client)

    def _release_if_gone(self, client: Client) -> None:
        # A process that lives still maps its arena: the memory is taken, whoever speaks for it.
        if not client.connected and client.pidfd < 0:
            self._release(client)

    def _release_predecessors(self, owner: Owner, inline: bool) -> None:
        """Free what this very process attached under another id: it has let go of that arena."""
        for other in list(self.by_id.values()):
            same = other.owner == owner and owner.pid > 0 and other.inline == inline
            if same and not other.connected:
                self._release(other)

    def _release(self, client: Client) -> None:
        """Free everything of a client that is gone and has no save under way."""
        if client.saves > 0 or self.by_id.get(client.client_id) is not client:
            return
        del self.by_id[client.client_id]
        self._by_token.pop(client.token, None)
        self._close_pidfd(client)
        self.budget.give_back(client.lease.lease_bytes)
        for segment in client.lease.segments:
            self._fds.drop(_segment_key(client, segment))
            os.close(segment.fd)
        client.lease.segments.clear()
        self._fds.drop(f"client/{client.client_id}")
        for folder in client.targets.values():
            folder.close()
        client.targets.clear()

    def _close_pidfd(self, client: Client) -> None:
        if client.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1

    def _keep(self, client: Client, segment: Segment) -> None:
        client.lease.segments.append(segment)
        client.slot_freed.set()
        self._fds.store(_segment_key(client, segment), segment.fd)

    def _remember(self, client: Client) -> None:
        fd = os.memfd_create("shardwright-client", os.MFD_CLOEXEC)
        os.write(fd, json.dumps(client.meta()).encode())
        self._fds.store(f"client/{client.client_id}", fd)
        os.close(fd)


def _segment_key(client: Client, segment: Segment) -> str:
    return f"segment/{client.client_id}/{segment.segment_id}/{segment.first_slot}/{segment.size}"


def _text(request: dict[str, Any], name: str, length_max: int) -> str:
    value = request.get(name, "")
    if not isinstance(value, str) or len(value) > length_max:
        raise Refusal(Reason.BAD_REQUEST, f"{name} must be a string of at most {length_max}")
    return value


def _number(request: Any, name: str, value_max: int) -> int:
    value = request.get(name, 0) if isinstance(request, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= value_max:
        raise Refusal(Reason.BAD_REQUEST, f"{name} must be an integer from 0 to {value_max}")
    return value


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, ignoring those that fail."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
