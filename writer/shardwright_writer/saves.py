"""All saves of this node: finding them, their order per path, and what is known of ended ones.

Used by `service` (open, resume), `recovery` (adopt) and `server` (drain, status). The policy of
one save is in `save`; here is only what several of them share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright_writer.refusal import Reason, Refusal
from shardwright_writer.session import TERMINAL, State
from shardwright_writer.spec import Committed

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from shardwright_writer.clients import Client, Clients
    from shardwright_writer.config import Config
    from shardwright_writer.fdstore import FdStore
    from shardwright_writer.formats.base import Plan, ShardLayout
    from shardwright_writer.save import Save

_log = logging.getLogger(__name__)

_STRUCTURES_MAX = 16
_RESULTS_MAX = 512
_SAVES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads by what they wait for, so that none waits for another kind's work."""

    io: Executor  # checksums and disk
    admin: Executor  # folders, layouts, publication, new arena segments
    inline: Executor  # inline chunks into slots: must go on while every io thread is in a write


@dataclass(frozen=True, slots=True)
class Structure:
    """A plan seen before: equal digests mean equal bytes and an equal layout."""

    plan_bytes: bytes
    plan: Plan
    layout: ShardLayout


class Saves:
    """The registry; implements SaveHost. Lives on the event loop."""

    def __init__(self, config: Config, clients: Clients, fds: FdStore, pools: Pools) -> None:
        self.config = config
        self.clients = clients
        self.fds = fds
        self.io_pool = pools.io
        self.admin_pool = pools.admin
        self.inline_pool = pools.inline
        self.live: dict[str, Save] = {}
        self.results: OrderedDict[str, tuple[str, Committed | Refusal]] = OrderedDict()
        self.draining = False
        self.committed_count = 0
        self.failed_count = 0
        self.bytes_committed = 0
        self._structures: OrderedDict[bytes, Structure] = OrderedDict()
        self._queues: dict[tuple[int, int, str], deque[Save]] = {}
        self._changed = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        clients.on_lost = self._client_lost

    # --- structures -----------------------------------------------------------------------

    def structure(self, digest: bytes) -> Structure | None:
        """Return the plan with this digest, if it is still remembered."""
        found = self._structures.get(digest)
        if found is not None:
            self._structures.move_to_end(digest)
        return found

    def remember(self, digest: bytes, structure: Structure) -> None:
        """Keep a plan for the saves to come."""
        self._structures[digest] = structure
        if len(self._structures) > _STRUCTURES_MAX:
            self._structures.popitem(last=False)

    # --- saves ----------------------------------------------------------------------------

    def admit(self, client: Client) -> None:
        """Raise Refusal when no save can be taken now."""
        if self.draining:
            raise Refusal(
                Reason.SHUTTING_DOWN,
                "the writer is stopping",
                "it takes saves again after a restart",
            )
        if len(self.live) >= _SAVES_MAX:
            raise Refusal(
                Reason.BUSY, f"{len(self.live)} saves are under way", "wait for some to end"
            )

    def add(self, save: Save, folder_key: tuple[int, int]) -> None:
        """A new (or adopted) save joins the queue of its path."""
        self.live[save.spec.save_id] = save
        key = (*folder_key, save.spec.file_name)
        self._queues.setdefault(key, deque()).append(save)
        save.path_key = key

    async def turn(self, save: Save) -> None:
        while save.state not in TERMINAL and self._queues[save.path_key][0] is not save:
            changed = self._changed
            await changed.wait()

    def is_alone(self, save: Save) -> bool:
        return len(self._queues[save.path_key]) == 1

    def live_ids(self) -> frozenset[str]:
        return frozenset(self.live)

    def ended(self, save: Save) -> None:
        save_id = save.spec.save_id
        self.live.pop(save_id, None)
        self._cancel_timer(save_id)
        queue = self._queues[save.path_key]
        queue.remove(save)
        if not queue:
            del self._queues[save.path_key]
        self._wake()
        assert save.result is not None
        self.results[save_id] = (save.client.client_id, save.result)
        if len(self.results) > _RESULTS_MAX:
            self.results.popitem(last=False)
        if isinstance(save.result, Committed):
            self.committed_count += 1
            self.bytes_committed += save.result.size
        else:
            self.failed_count += 1
        self.clients.save_ended(save.client)

    def find(self, save_id: str, client: Client) -> Save | None:
        """Return a live save of this client. Raises Refusal for somebody else's."""
        save = self.live.get(save_id)
        if save is not None and save.client is not client:
            raise Refusal(Reason.PERMISSION, "this save belongs to another client")
        return save

    def ended_result(self, save_id: str, client: Client) -> Committed | Refusal | None:
        """Return how a save of this client ended, as long as that is remembered."""
        found = self.results.get(save_id)
        return found[1] if found is not None and found[0] == client.client_id else None

    # --- clients that go away -------------------------------------------------------------

    def attached(self, save: Save) -> None:
        """A stream speaks for the save (again)."""
        self._cancel_timer(save.spec.save_id)

    def detached(self, save: Save) -> None:
        """The stream broke. A captured save needs none; another one waits for its client."""
        save.outbox = None
        save_id = save.spec.save_id
        if save.state in (State.OPENED, State.RECEIVING) and save_id in self.live:
            self._cancel_timer(save_id)
            self._timers[save_id] = asyncio.get_running_loop().call_later(
                self.config.reattach_timeout_s, self._not_reattached, save
            )

    def _not_reattached(self, save: Save) -> None:
        if save.outbox is None and save.state in (State.OPENED, State.RECEIVING):
            save.fail(
                Refusal(
                    Reason.CLIENT_LOST,
                    f"{save.client.describe()} did not come back within"
                    f" {self.config.reattach_timeout_s:.0f} s",
                    "the previous checkpoint is untouched",
                )
            )

    def _client_lost(self, client: Client) -> None:
        for save in list(self.live.values()):
            if save.client is client and save.state in (State.OPENED, State.RECEIVING):
                save.fail(
                    Refusal(
                        Reason.CLIENT_LOST,
                        f"{client.describe()} died before its state was captured",
                        "the previous checkpoint is untouched",
                    )
                )

    def _cancel_timer(self, save_id: str) -> None:
        timer = self._timers.pop(save_id, None)
        if timer is not None:
            timer.cancel()

    # --- the whole ------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Take no new saves and wait for the live ones; tell whether all ended in time."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.live:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return False
        return True

    def watch(self) -> None:
        """Once a second: unblock starved clients and give up on storage that does not answer."""
        now = time.monotonic()
        for save in list(self.live.values()):
            if save.state in TERMINAL:
                continue
            lease = save.client.lease
            if len(lease.users) * 4 >= lease.slot_count * 3:
                save.flush()
            if save.waits_for_storage() and now - save.moved_s > self.config.io_timeout_s:
                save.fail(
                    Refusal(
                        Reason.IO_ERROR,
                        f"storage below {save.folder.path} has not finished a write for"
                        f" {now - save.moved_s:.0f} s",
                        "check the disk or the network; the previous checkpoint is untouched",
                    )
                )

    def log(self, save: Save, event: str, **facts: object) -> None:
        """One line per save event, save_id first."""
        fields = {
            "event": event,
            "rank": save.spec.rank,
            "step": save.spec.step,
            "path": f"{save.folder.path}/{save.spec.file_name}",
            **facts,
        }
        text = " ".join(f"{key}={value!r}" for key, value in fields.items())
        _log.log(
            logging.INFO if event != "failed" else logging.ERROR, "%s %s", save.spec.save_id, text
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
