"""One rank's save, from Open to Committed or Failed: the state, the journal, the slots.

Lives on the event loop; blocking work goes to the pools. `service` feeds it messages and sends
what it emits; `pipeline` moves its bytes; `commit` publishes; `recovery` rebuilds it from its
journal after a crash. Speaks no gRPC and knows no format.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright_writer import commit
from shardwright_writer.journal import Journal, Phase, WindowState
from shardwright_writer.opening import (
    Opening,
    check_target,
    choose_tag,
    discard,
    lay_out,
    open_files,
    own_tag,
    read_back,
)
from shardwright_writer.pipeline import Pipeline
from shardwright_writer.publication import Written, prepare_publication
from shardwright_writer.refusal import Reason, Refusal, bug
from shardwright_writer.session import TERMINAL, Event, State, step
from shardwright_writer.spec import Acked, Captured, Committed, Emission, SaveSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from numpy.typing import NDArray

    from shardwright_writer.clients import Client
    from shardwright_writer.formats.base import Plan, ShardLayout
    from shardwright_writer.host import SaveHost
    from shardwright_writer.storage.base import WritableFile
    from shardwright_writer.storage.posix import PosixFolder
    from shardwright_writer.windows import WindowTable

_SYNC_BYTES_MAX = 64 << 20
_STOP_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_S = 0.5


class Save:
    """The moving part. All methods run on the event loop unless they say otherwise."""

    def __init__(
        self,
        spec: SaveSpec,
        client: Client,
        folder: PosixFolder,
        plan: Plan,
        layout: ShardLayout,
        host: SaveHost,
    ) -> None:
        self.spec = spec
        self.client = client
        self.folder = folder
        self.plan = plan
        self.layout = layout
        self.state = State.OPENED
        self.bytes_total = int(plan.nbytes.sum())
        self.bytes_received = 0
        self.stage = "receiving"
        self.result: Committed | Refusal | None = None
        self.outbox: Callable[[Emission], None] | None = None
        self.opened_s = time.monotonic()
        self.moved_s = self.opened_s
        self.window_bytes = client.lease.window_bytes
        self.journal: Journal | None = None
        self.pipeline: Pipeline | None = None
        self.table: WindowTable | None = None
        self.opening: Opening | None = None
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._files: list[WritableFile] = []
        self._data_durable = False
        self._publishing = False
        self.path_key: tuple[int, int, str] = (0, 0, "")
        self._drained = asyncio.Event()
        self._building: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        client.saves += 1

    # --- from OPENED to RECEIVING ---------------------------------------------------------

    async def receive_skeleton(
        self, plan_bytes: bytes, skeleton: bytes, claimed: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Everything but tensor bytes is here: lay out the files and make the journal.

        claimed: (file, window, CRC) that a writer which left no journal had acknowledged; its
        temporary files are reopened and those windows read back. A failure ends the save.
        """
        if self._building is None:
            self._building = self._spawn(self._build(plan_bytes, skeleton, claimed))
        # The stream that asked may break meanwhile; the work belongs to the save.
        await asyncio.shield(self._building)

    async def _build(
        self, plan_bytes: bytes, skeleton: bytes, claimed: Sequence[tuple[int, int, int]]
    ) -> None:
        folder, spec, pool = self.folder, self.spec, self._host.admin_pool
        run = self._loop.run_in_executor
        live = self._host.live_ids()
        for name in await run(pool, check_target, folder, spec, self.bytes_total, live):
            self._host.log(self, "swept", name=name)
        tag = await run(pool, choose_tag, folder, spec, self.plan, self.layout)
        if not self._host.is_alone(self):
            # An earlier save of this path is still to publish: its shards must not be ours.
            tag = own_tag(spec, self.layout)
        opening = await run(
            pool, lay_out, spec, self.plan, self.layout, skeleton, self.window_bytes, tag
        )
        opening = await run(pool, lambda: open_files(folder, spec, opening, reopen=bool(claimed)))
        if self.state in TERMINAL:
            self._files = opening.files
            await run(pool, self._remove_temporaries)
            return
        meta = {
            **spec.meta(),
            "client_id": self.client.client_id,
            "file_count": len(opening.files),
            "tag": tag,
            "window_bytes": self.window_bytes,
            "folder_path": folder.path,
        }
        table = opening.table
        journal = Journal.create(meta, plan_bytes, skeleton, len(table), table.piece_count)
        journal.inodes[:] = [file.inode for file in opening.files]
        self.go(opening, journal)
        self._host.fds.store(f"target/{spec.save_id}", folder.fd)
        self._host.fds.store(f"journal/{spec.save_id}", journal.fd)
        self.state = step(self.state, Event.SKELETON_COMPLETE)
        self._require_pipeline().start()
        if claimed:
            proved = await run(pool, read_back, opening, self.window_bytes, claimed)
            for row, values in proved:
                journal.piece_crcs[table.pieces(row)] = values
                journal.states[row] = WindowState.DURABLE
                self.restore(row)

    def go(self, opening: Opening, journal: Journal) -> None:
        """Start the pipeline over files that are open, new or taken over."""
        self.opening, self.journal, self._files = opening, journal, opening.files
        self.table = opening.table
        sync_bytes = max(self.window_bytes, self.client.lease.lease_bytes // 8)
        self.pipeline = Pipeline(
            list(zip(opening.save_plan.files, opening.images, opening.files, strict=True)),
            self.window_bytes,
            len(self.plan.names),
            self,
            self._host.io_pool,
            min(sync_bytes, _SYNC_BYTES_MAX),
        )

    def restore(self, row: int) -> None:
        """A window that is durable already: only its CRCs go through the pipeline."""
        journal, table = self._require_journal()
        file, window = table.place(row)
        self.bytes_received += table.shard_bytes(row)
        self._require_pipeline().restore(file, window, journal.piece_crcs[table.pieces(row)].copy())

    # --- windows --------------------------------------------------------------------------

    def window_received(self, file: int, window: int, slot: int, generation: int) -> None:
        """A window is whole in a slot of the client's arena."""
        journal, table = self._require_journal()
        row = table.row(file, window)
        if self.state is not State.RECEIVING:
            raise Refusal(Reason.BAD_REQUEST, f"window after the save was {self.state.name}")
        if journal.states[row] != WindowState.EXPECTED:
            if journal.states[row] == WindowState.RECEIVED and journal.slots[row] != slot:
                raise Refusal(Reason.BAD_REQUEST, f"window {window} was sent twice, in two slots")
            return
        users = self.client.lease.users
        user = (self.spec.save_id, file, window)
        if users.get(slot, user) != user:
            raise Refusal(
                Reason.BAD_REQUEST,
                f"slot {slot} still belongs to window {users[slot][2]} of a save",
            )
        buffer = self.client.lease.slot(slot)
        users[slot] = user
        journal.slots[row] = slot
        journal.generations[row] = generation
        journal.states[row] = WindowState.RECEIVED
        self.moved_s = time.monotonic()
        self.bytes_received += table.shard_bytes(row)
        self._require_pipeline().submit(file, window, buffer)

    def finish(self) -> None:
        """The client has sent everything."""
        journal, _ = self._require_journal()
        if self.state is not State.RECEIVING:
            if self.state is State.CAPTURED:
                self._emit(Captured())
                return
            raise Refusal(Reason.BAD_REQUEST, f"Finish after the save was {self.state.name}")
        missing = np.flatnonzero(journal.states == WindowState.EXPECTED)
        if len(missing):
            raise Refusal(
                Reason.BAD_REQUEST,
                f"Finish with {len(missing)} windows of {len(journal.states)} missing",
            )
        # "Captured" promises that the journal outlives us: it must be with the supervisor.
        self._host.fds.flush(_FLUSH_TIMEOUT_S)
        journal.phase = Phase.CAPTURED
        self.state = step(self.state, Event.FINISH)
        self.stage = "writing"
        self._emit(Captured())
        self._host.log(self, "captured", seconds=round(time.monotonic() - self.opened_s, 3))
        self._commit_when_ready()

    def waits_for_storage(self) -> bool:
        """Tell whether windows are here whose bytes storage has not taken yet."""
        return any(user[0] == self.spec.save_id for user in self.client.lease.users.values())

    def flush(self) -> None:
        """Acknowledge what is written, though no batch is full: the client has no slot left."""
        if self.pipeline is not None:
            self.pipeline.flush()

    # --- pipeline events, on pool threads -------------------------------------------------

    def record_crcs(self, file: int, window: int, values: NDArray[np.uint32]) -> None:
        journal, table = self._require_journal()
        journal.piece_crcs[table.pieces(table.row(file, window))] = values

    def windows_durable(self, file: int, windows: list[tuple[int, int]]) -> None:
        journal, table = self._require_journal()  # before _end: data_durable comes after us
        for window, _ in windows:
            journal.states[table.row(file, window)] = WindowState.DURABLE
        self._loop.call_soon_threadsafe(self._release_slots, file, windows)

    def data_durable(self) -> None:
        self._loop.call_soon_threadsafe(self._on_data_durable)

    def failed(self, refusal: Refusal) -> None:
        self._loop.call_soon_threadsafe(self.fail, refusal)

    def drained(self) -> None:
        self._loop.call_soon_threadsafe(self._drained.set)

    # --- and back on the loop -------------------------------------------------------------

    def _release_slots(self, file: int, windows: list[tuple[int, int]]) -> None:
        self.moved_s = time.monotonic()
        if self.state is State.FAILED:
            return
        journal, table = self._require_journal()
        for window, _ in windows:
            self.client.lease.users.pop(int(journal.slots[table.row(file, window)]), None)
        self.client.slot_freed.set()
        self._emit(Acked([(file, window, crc) for window, crc in windows]))

    def _on_data_durable(self) -> None:
        self._data_durable = True
        self._commit_when_ready()

    def _commit_when_ready(self) -> None:
        if self._data_durable and self.state is State.CAPTURED:
            self.state = step(self.state, Event.DATA_DURABLE)
            self._spawn(self._publish(self._require_pipeline().crcs))

    def resume_commit(self, opening: Opening, crcs: NDArray[np.uint32]) -> None:
        """Go on with a save whose bytes an earlier server made durable."""
        self.opening, self.table = opening, opening.table
        self.bytes_received = self.bytes_total
        self.state = State.COMMITTING
        self._spawn(self._publish(crcs))

    async def _publish(self, crcs: NDArray[np.uint32]) -> None:
        journal, _ = self._require_journal()
        run = self._loop.run_in_executor
        self.stage = "waiting for an earlier save of this path"
        await self._host.turn(self)
        if self.state in TERMINAL:
            return
        self.stage = "committing"
        self._publishing = True  # from here on only the publication itself decides how it ends
        assert self.opening is not None
        inodes = [int(inode) for inode in journal.inodes]
        written = Written(self.spec, self.plan, self.layout, self.opening, inodes, crcs)
        publication = await run(self._host.admin_pool, prepare_publication, self.folder, written)
        journal.phase = Phase.PUBLISHING
        await run(self._host.admin_pool, commit.publish, self.folder, publication)
        journal.phase = Phase.COMMITTED
        await run(self._host.admin_pool, self._tidy_up, publication.superseded)
        files = self.opening.save_plan.files
        self._complete([file.name for file in publication.files], sum(file.size for file in files))
        self._end()

    def _tidy_up(self, superseded: list[str]) -> None:
        try:
            for name in superseded:
                self.folder.remove(name)
        except Refusal as refusal:
            # The checkpoint is durable; what could not be removed is tried again by the next one.
            self._host.log(self, "leftover", message=str(refusal))

    def _complete(self, names: list[str], size: int) -> None:
        """The checkpoint is visible and durable: say so."""
        self.state = step(self.state, Event.PUBLISHED)
        self.result = Committed(size, names, time.monotonic() - self.opened_s)
        self._emit(self.result)
        self._host.log(
            self,
            "committed",
            bytes=size,
            seconds=round(self.result.seconds, 3),
            gb_per_s=round(size / 1e9 / max(self.result.seconds, 1e-9), 2),
        )

    # --- the other end --------------------------------------------------------------------

    def fail(self, refusal: Refusal) -> None:
        """End the save without a checkpoint. The first reason stays."""
        if self.state in TERMINAL or self._publishing:
            return
        self.state = step(self.state, Event.FAIL)
        self.result = refusal
        self._host.log(self, "failed", reason=refusal.reason.name, message=refusal.message)
        self._spawn(self._abort(refusal))

    async def _abort(self, refusal: Refusal) -> None:
        if self.pipeline is None:
            self._drained.set()
        else:
            await self._loop.run_in_executor(
                self._host.admin_pool, self.pipeline.stop, _STOP_TIMEOUT_S
            )
        # Nothing fills the slots any more; a stuck write only reads, into a file that is given up.
        users = self.client.lease.users
        for slot in [slot for slot, user in users.items() if user[0] == self.spec.save_id]:
            del users[slot]
        self.client.slot_freed.set()
        self._emit(refusal)
        await self._drained.wait()
        await self._loop.run_in_executor(self._host.admin_pool, self._remove_temporaries)
        self._end()

    def _remove_temporaries(self) -> None:
        try:
            discard(self.folder, self.spec, self._files)
        except Refusal as refusal:
            self._host.log(self, "leftover", message=str(refusal))

    def _end(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
        self.pipeline = None
        if self.journal is not None:
            self._host.fds.drop(f"journal/{self.spec.save_id}")
            self._host.fds.drop(f"target/{self.spec.save_id}")
            self.journal.close()
            self.journal = None
        self.folder.close()
        self._host.ended(self)

    # --- helpers --------------------------------------------------------------------------

    def _emit(self, emission: Emission) -> None:
        if self.outbox is not None:
            self.outbox(emission)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._publishing = False
        if isinstance(error, Refusal):
            self.fail(error)
        elif isinstance(error, Exception):
            self._host.log(self, "bug", message=repr(error))
            self.fail(bug(error))

    def _require_journal(self) -> tuple[Journal, WindowTable]:
        if self.journal is None or self.table is None:
            raise Refusal(Reason.BAD_REQUEST, "windows before the skeleton")
        return self.journal, self.table

    def _require_pipeline(self) -> Pipeline:
        assert self.pipeline is not None
        return self.pipeline
