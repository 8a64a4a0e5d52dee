"""One save's bytes on their way to disk: checksum, fill, write, sync; many windows at once.

Driven by `save` (windows in, durable windows out); runs on the io pool's threads. Windows are
checksummed in any order and *finished* in file order: when window k is finished, the CRCs of all
earlier windows are known, so every CRC hole in it can be filled and it is written exactly once.
Publishes nothing and answers nobody: those are commit's and service's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardwright_proto.limits import BLOCK_BYTES
from shardwright_writer.arena import anonymous_buffer
from shardwright_writer.crc import fold_crcs, piece_crcs, window_crc
from shardwright_writer.refusal import Refusal, bug

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from shardwright_writer.formats.base import FilePlan
    from shardwright_writer.formats.image import FileImage, Pieces
    from shardwright_writer.storage.base import WritableFile

_SIDE_BUFFER_BYTES = 4 << 20


class PipelineEvents(Protocol):
    """What the pipeline tells its save. Called on pool threads, one at a time per kind."""

    def record_crcs(self, file: int, window: int, values: NDArray[np.uint32]) -> None:
        """Journal the piece CRCs of a window, before it is written."""

    def windows_durable(self, file: int, windows: list[tuple[int, int]]) -> None:
        """(window, CRC) pairs survive a power cut and their journal record is still to be made."""

    def data_durable(self) -> None:
        """Every byte of every file is durable and every file has its final size."""

    def failed(self, refusal: Refusal) -> None:
        """The save cannot go on. Called once; tasks under way may still be running."""

    def drained(self) -> None:
        """After `stop` or a failure: no task touches memory or files any more."""


@dataclass(slots=True)
class _File:
    index: int
    plan: FilePlan
    image: FileImage
    file: WritableFile
    order: list[int]  # windows that hold shard bytes
    next: int = 0  # how many of order are finished
    checked: dict[int, tuple[Pieces, NDArray[np.uint32], memoryview | None]] = field(
        default_factory=dict
    )
    written: int = 0
    unsynced: list[tuple[int, int]] = field(default_factory=list)
    unsynced_bytes: int = 0
    syncing: bool = False
    complete: bool = False  # finished on disk; counted once no sync is under way any more
    counted: bool = False


class Pipeline:
    """The state of all files of one save. Thread-safe."""

    def __init__(
        self,
        files: Sequence[tuple[FilePlan, FileImage, WritableFile]],
        window_bytes: int,
        shard_count: int,
        events: PipelineEvents,
        pool: Executor,
        sync_bytes: int,
    ) -> None:
        self.crcs = np.zeros(shard_count, np.uint32)
        self.literal_crcs = [0] * len(files)
        self.bytes_durable = 0
        self._window_bytes = window_bytes
        self._sync_bytes = sync_bytes
        self._events = events
        self._pool = pool
        self._lock = threading.Lock()
        self._files = [
            _File(index, plan, image, file, image.shard_windows(window_bytes).tolist())
            for index, (plan, image, file) in enumerate(files)
        ]
        self._files_left = len(files)
        self._tasks = 0  # queued or running
        self._touching = 0  # running, and reading or filling window memory
        self._stopped = False
        self._idle = threading.Condition(self._lock)

    def start(self) -> None:
        """Write what holds no shard bytes at all: files of empty tensors."""
        for state in self._files:
            if not state.order:
                self._run(self._finish_file, state)

    def submit(self, file: int, window: int, buffer: memoryview) -> None:
        """A window's shard bytes are in buffer (a whole slot) and stay until it is durable."""
        self._run(self._checksum, self._files[file], window, buffer)

    def restore(self, file: int, window: int, values: NDArray[np.uint32]) -> None:
        """A window that an earlier server made durable: only its CRCs count."""
        state = self._files[file]
        pieces = state.image.pieces(*self._range(state, window))
        with self._lock:
            state.checked[window] = (pieces, values, None)
            self.bytes_durable += int(pieces.nbytes.sum())
        self._run(self._advance, state)

    def flush(self) -> None:
        """Sync what is written though no batch is full: somebody waits for a slot."""
        for state in self._files:
            with self._lock:
                due = bool(state.unsynced) and not state.syncing and not state.complete
                state.syncing |= due
            if due:
                self._run(self._sync, state)

    def stop(self, timeout_s: float) -> bool:
        """Let no task touch window memory any more; tell whether that was reached in time."""
        with self._idle:
            self._stopped = True
            reached = self._idle.wait_for(lambda: self._touching == 0, timeout_s)
            drained = self._tasks == 0
        if drained:
            self._events.drained()
        return reached

    # --- stages, on pool threads ----------------------------------------------------------

    def _checksum(self, state: _File, window: int, buffer: memoryview) -> None:
        start, stop = self._range(state, window)
        with _Touch(self) as allowed:
            if not allowed:
                return
            pieces = state.image.pieces(start, stop)
            values = piece_crcs(buffer, pieces)
        self._events.record_crcs(state.index, window, values)
        with self._lock:
            state.checked[window] = (pieces, values, buffer)
        self._advance(state)

    def _advance(self, state: _File) -> None:
        """Fold what is next in file order and write it; the first on this very thread."""
        ready: list[tuple[int, NDArray[np.uint32], memoryview]] = []
        restored = 0
        with self._lock:
            while state.next < len(state.order) and state.order[state.next] in state.checked:
                window = state.order[state.next]
                pieces, values, buffer = state.checked.pop(window)
                fold_crcs(self.crcs, pieces, values)
                state.next += 1
                if buffer is None:
                    restored += 1
                else:
                    ready.append((window, values, buffer))
            state.written += restored
            finished = restored > 0 and state.written == len(state.order)
        for window, values, buffer in ready[1:]:
            self._run(self._write, state, window, values, buffer)
        if finished:
            self._finish_file(state)
        elif ready:
            self._write(state, *ready[0])

    def _write(
        self, state: _File, window: int, values: NDArray[np.uint32], buffer: memoryview
    ) -> None:
        start, stop = self._range(state, window)
        padded = buffer[: -(-(stop - start) // BLOCK_BYTES) * BLOCK_BYTES]
        with _Touch(self) as allowed:
            if not allowed:
                return
            state.image.fill(padded, start, self.crcs)
        # Not "touching": a stuck pwrite only reads, and only into a file that is given up.
        state.file.write_at(padded, start)
        with self._lock:
            state.unsynced.append((window, window_crc(values)))
            state.unsynced_bytes += stop - start
            state.written += 1
            finished = state.written == len(state.order)
            due = state.unsynced_bytes >= self._sync_bytes and not state.syncing and not finished
            state.syncing |= due
        if finished:
            self._finish_file(state)
        elif due:
            self._sync(state)

    def _sync(self, state: _File) -> None:
        while True:
            with self._lock:
                batch, size = self._take_unsynced(state)
            state.file.sync_data()
            self._acknowledge(state, batch, size)
            with self._lock:
                if state.unsynced_bytes < self._sync_bytes:
                    state.syncing = False
                    break
        self._count_complete(state)

    def _finish_file(self, state: _File) -> None:
        """All shard windows are written: write the others, cut the padding, make it durable."""
        size = state.plan.size
        owned = set(state.order)
        buffer = anonymous_buffer(min(self._window_bytes, _SIDE_BUFFER_BYTES))
        for window in range(-(-size // self._window_bytes)):
            if window not in owned:
                start, stop = self._range(state, window)
                for at in range(start, stop, len(buffer)):
                    count = min(len(buffer), -(-(stop - at) // BLOCK_BYTES) * BLOCK_BYTES)
                    state.image.fill(buffer[:count], at, self.crcs)
                    state.file.write_at(buffer[:count], at)
        state.file.finish(size)
        self.literal_crcs[state.index] = state.image.literal_crc(self.crcs)
        with self._lock:
            batch, count = self._take_unsynced(state)
            state.complete = True
        self._acknowledge(state, batch, count)
        self._count_complete(state)

    def _count_complete(self, state: _File) -> None:
        with self._lock:
            if not state.complete or state.syncing or state.counted:
                return
            state.counted = True
            self._files_left -= 1
            last = self._files_left == 0
        if last:
            self._events.data_durable()

    # --- bookkeeping ----------------------------------------------------------------------

    def _take_unsynced(self, state: _File) -> tuple[list[tuple[int, int]], int]:
        batch, size = state.unsynced, state.unsynced_bytes
        state.unsynced, state.unsynced_bytes = [], 0
        return batch, size

    def _acknowledge(self, state: _File, batch: list[tuple[int, int]], size: int) -> None:
        if batch:
            with self._lock:
                self.bytes_durable += size
            self._events.windows_durable(state.index, batch)

    def _range(self, state: _File, window: int) -> tuple[int, int]:
        start = window * self._window_bytes
        return start, min(start + self._window_bytes, state.plan.size)

    def _run(self, stage: Callable[..., None], state: _File, *arguments: object) -> None:
        with self._lock:
            if self._stopped:
                return
            self._tasks += 1
        self._pool.submit(self._guarded, stage, state, *arguments)

    def _guarded(self, stage: Callable[..., None], state: _File, *arguments: object) -> None:
        refusal: Refusal | None = None
        try:
            stage(state, *arguments)
        except Refusal as error:
            refusal = error
        except Exception as error:  # noqa: BLE001 -- a bug must end this save, not a pool thread
            refusal = bug(error)
        with self._lock:
            first = refusal is not None and not self._stopped
            self._stopped |= refusal is not None
            self._tasks -= 1
            drained = self._stopped and self._tasks == 0
        if first and refusal is not None:
            self._events.failed(refusal)
        if drained:
            self._events.drained()


class _Touch:
    """Counts a task that uses window memory; says no once the pipeline is stopped."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __enter__(self) -> bool:
        with self._pipeline._lock:
            if self._pipeline._stopped:
                self._allowed = False
            else:
                self._pipeline._touching += 1
                self._allowed = True
        return self._allowed

    def __exit__(self, *_: object) -> None:
        if self._allowed:
            with self._pipeline._idle:
                self._pipeline._touching -= 1
                self._pipeline._idle.notify_all()
