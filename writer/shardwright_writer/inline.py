"""The inline road's arrival: chunks go into slots of the writer's own arena, in order.

One per stream, driven by `service`. From the slot on an inline window is like any other: journaled,
and safe when the server dies. Checks the CRC of every chunk; never looks at what the bytes mean.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from shardwright_writer.crc import crc32
from shardwright_writer.refusal import Reason, Refusal, bug

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from shardwright_proto.inline import InlineBytes
    from shardwright_writer.clients import Client
    from shardwright_writer.save import Save

_CHUNKS_MAX = 4
"""Chunks received while an earlier one is checked and copied; then gRPC's flow control holds."""


class InlineRoad:
    """Takes chunks from the reader, and stores them on pool threads meanwhile."""

    def __init__(self, client: Client, pool: Executor) -> None:
        self._client = client
        self._pool = pool
        self._chunks: asyncio.Queue[tuple[Save, InlineBytes]] = asyncio.Queue(_CHUNKS_MAX)
        self._window: tuple[int, int, int] | None = None  # (file, window, slot) being filled
        self._save_id = ""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def put(self, save: Save, chunk: InlineBytes) -> None:
        """Hand over a chunk; waits while earlier ones are still on their way."""
        await self._chunks.put((save, chunk))

    async def settle(self) -> None:
        """Wait until every chunk that was put is in its slot, or has failed the save."""
        await self._chunks.join()

    def close(self) -> None:
        """The stream has ended: give back the slot of a window that was never completed."""
        self._task.cancel()
        self._drop_window()

    async def _run(self) -> None:
        while True:
            save, chunk = await self._chunks.get()
            try:
                if save.result is None:
                    await self._store(save, chunk)
            except Refusal as refusal:
                save.fail(refusal)
            except Exception as error:  # noqa: BLE001 -- a bug must end the save, not this task
                save.fail(bug(error))
            finally:
                self._chunks.task_done()

    async def _store(self, save: Save, chunk: InlineBytes) -> None:
        if self._window is None or self._window[:2] != (chunk.file, chunk.window):
            self._drop_window()
            self._save_id = save.spec.save_id
            self._window = (chunk.file, chunk.window, await self._take_slot(save, chunk))
        slot = self._window[2]
        memory = self._client.lease.slot(slot)
        await asyncio.get_running_loop().run_in_executor(self._pool, _check_and_copy, memory, chunk)
        if chunk.last:
            self._window = None
            save.window_received(chunk.file, chunk.window, slot, 0)

    async def _take_slot(self, save: Save, chunk: InlineBytes) -> int:
        """Wait for a free slot of the writer-side arena: this road's back-pressure."""
        lease = self._client.lease
        while True:
            ready = sum(segment.size for segment in lease.segments) // lease.window_bytes
            for slot in range(ready):
                if slot not in lease.users:
                    lease.users[slot] = (save.spec.save_id, chunk.file, chunk.window)
                    return slot
            save.flush()
            self._client.slot_freed.clear()
            await self._client.slot_freed.wait()
            if save.result is not None:
                raise Refusal(Reason.CANCELLED, "the save has ended")

    def _drop_window(self) -> None:
        if self._window is not None:
            file, window, slot = self._window
            users = self._client.lease.users
            # After a failed save the slot may be another's already.
            if users.get(slot) == (self._save_id, file, window):
                del users[slot]
                self._client.slot_freed.set()
            self._window = None


def _check_and_copy(memory: memoryview, chunk: InlineBytes) -> None:
    stop = chunk.offset + len(chunk.data)
    if stop > len(memory):
        raise Refusal(Reason.BAD_REQUEST, "inline chunk leaves its window")
    if crc32(chunk.data) != chunk.crc32:
        raise Refusal(
            Reason.CORRUPT,
            f"inline bytes of window {chunk.window} at {chunk.offset} do not match their CRC-32",
            "the memory or the transport between trainer and writer is broken",
        )
    # numpy lets go of the GIL for a large copy; a memoryview does not.
    np.frombuffer(memory, np.uint8)[chunk.offset : stop] = np.frombuffer(chunk.data, np.uint8)
